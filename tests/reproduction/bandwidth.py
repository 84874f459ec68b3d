"""Gain over data parallelism against the bandwidth between servers: where a pipeline pays, and where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from reproduction.paper import CLUSTERS, MODELS, profile
from reproduction.results import Results

PICTURE = ("gain-against-bandwidth.svg", "The gain of each model, on both clusters, falls to 1 as links get faster")
RATES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # Gbit/s
TOPOLOGIES = {"4x4": "A", "2x8": "B"}
EMULATED = {("VGG-16", "4x4"): (2, 10), ("ResNet-50", "4x4"): (1,), ("GNMT-8", "2x8"): (2, 20)}
QUICK = {("VGG-16", "4x4"): (1, 10, 100)}


def measure(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Plan every model at every bandwidth, and emulate some; one result for each model and cluster."""
    cases = QUICK if quick else {(model, topology): RATES for model in MODELS for topology in TOPOLOGIES}
    return [
        results.get(
            f"bandwidth-{model}-{topology}".replace(" ", "-").lower(),
            lambda model=model, topology=topology, rates=rates: {
                "model": model,
                "topology": topology,
                "points": [_point(results, model, topology, rate, emulated=not quick) for rate in rates],
            },
        )
        for (model, topology), rates in cases.items()
    ]


def _point(results: Results, model: str, topology: str, rate: float, *, emulated: bool) -> dict[str, Any]:
    cluster = CLUSTERS[TOPOLOGIES[topology]]
    name = f"bandwidth-{model}-{topology}-{rate:g}Gbit".replace(" ", "-").lower()
    path = results.plan(profile(results, model, "v100"), topology, f"{rate:g}Gbit/s,{cluster.within}", name=name)
    plan = yaml.safe_load((results.work / path).read_text(encoding="utf-8"))
    point = {
        "rate": rate,
        "config": "-".join(str(stage["replicas"]) for stage in plan["stages"]),
        "gain": plan["predicted"]["gain_over_data_parallel"],
    }
    if emulated and rate in EMULATED.get((model, topology), ()):
        plans = results.emulation(path, against="data-parallel")["plans"]
        point["emulated_gain"] = plans[-1]["bottleneck_s"] / plans[0]["bottleneck_s"]
    return point


def page(figures: list[dict[str, Any]]) -> Iterator[str]:
    """The section of the page."""
    yield "## Gain against bandwidth\n"
    yield (
        "Each point is planned anew for its bandwidth between servers; where the plan is data parallelism the gain is "
        "1. Where a plan has 4 workers on 4x4, or 8 on 2x8, one server trains alone: links are too slow to be used. "
        "Inside servers: PCI Express (12 GB/s) on 4x4, NVLink (20 GB/s) on 2x8. In brackets: emulated.\n"
    )
    rates = [point["rate"] for point in figures[0]["points"]]
    yield f"| model | cluster | {' | '.join(f'{rate:g} Gbit/s' for rate in rates)} |"
    yield "|---|---|" + "---|" * len(rates)
    for each in figures:
        yield f"| {each['model']} | {each['topology']} | {' | '.join(map(_cell, each['points']))} |"
    yield ""


def _cell(point: dict[str, Any]) -> str:
    config = point["config"] if point["config"].count("-") < 4 else f"{point['config'].count('-') + 1} stages"
    emulated = f" ({point['emulated_gain']:.2f})" if "emulated_gain" in point else ""
    return f"{point['gain']:.2f}{emulated} {config}"


def plot(figures: list[dict[str, Any]], path: str) -> None:
    """Draw the curves, an axis for each cluster, and the emulated points."""
    from matplotlib.figure import Figure

    topologies = list(dict.fromkeys(each["topology"] for each in figures))
    picture = Figure(figsize=(5 * len(topologies), 4), layout="constrained")
    for topology, axes in zip(topologies, picture.subplots(1, len(topologies), squeeze=False)[0], strict=True):
        for each in figures:
            if each["topology"] == topology:
                points = each["points"]
                [line] = axes.plot([p["rate"] for p in points], [p["gain"] for p in points], label=each["model"])
                emulated = [p for p in points if "emulated_gain" in p]
                rates, gains = [p["rate"] for p in emulated], [p["emulated_gain"] for p in emulated]
                axes.plot(rates, gains, "o", color=line.get_color())
        axes.set(xscale="log", yscale="log", title=topology, xlabel="Gbit/s between servers", ylabel="gain over DP")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    picture.savefig(path, metadata={"Date": None})
