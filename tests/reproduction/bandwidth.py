"""Gain over data parallelism against the bandwidth between servers: where a pipeline is faster, and where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import yaml

from reproduction.paper import CLUSTERS, MODELS, profile
from reproduction.results import SIDE_BY_SIDE, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = ("gain-against-bandwidth.svg", "The gain of each model, on both clusters, falls to 1 as links get faster")
RATES = (0.1, 0.3, 1, 3, 10, 30, 100)  # Gbit/s
TOPOLOGIES = {"4x4": "A", "2x8": "B"}
EMULATED = {("VGG-16", "4x4"): (3, 10), ("ResNet-50", "4x4"): (1,), ("GNMT-8", "2x8"): (3, 10)}
QUICK = {("VGG-16", "4x4"): (1, 10, 100)}


def measure(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Plan every model at every bandwidth, and emulate some."""
    curves = plan(results, quick=quick)
    for curve in [] if quick else curves:
        for point in curve["points"]:
            if point["rate"] in EMULATED.get((curve["model"], curve["topology"]), ()):
                point["emulated_gain"] = _emulated_gain(results, curve["model"], curve["topology"], point["rate"])
    return curves


def plan(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Plan every model at every bandwidth, one result for each model and cluster; models side by side."""
    cases = QUICK if quick else {(model, topology): RATES for model in MODELS for topology in TOPOLOGIES}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        of_models = threads.map(
            lambda model: [_curve(results, *case, rates) for case, rates in cases.items() if case[0] == model],
            dict.fromkeys(model for model, _ in cases),
        )
        return [curve for curves in of_models for curve in curves]


def _curve(results: Results, model: str, topology: str, rates: Sequence[float]) -> dict[str, Any]:
    points: list[dict[str, Any]] = results.get(
        f"bandwidth-{model}-{topology}".replace(" ", "-").lower(),
        lambda: [_point(results, model, topology, rate) for rate in rates],
    )
    return {"model": model, "topology": topology, "points": points}


def _point(results: Results, model: str, topology: str, rate: float) -> dict[str, Any]:
    planned = yaml.safe_load((results.work / _plan(results, model, topology, rate)).read_text(encoding="utf-8"))
    return {
        "rate": rate,
        "config": "-".join(str(stage["replicas"]) for stage in planned["stages"]),
        "gain": planned["predicted"]["gain_over_data_parallel"],
    }


def _plan(results: Results, model: str, topology: str, rate: float) -> str:
    """Return the path of the plan for a bandwidth between servers."""
    cluster = CLUSTERS[TOPOLOGIES[topology]]
    made = profile(results, model, cluster.device)
    return results.plan(made, topology, f"{rate:g}Gbit/s,{cluster.within}", name=_name(model, topology, rate))


def _name(model: str, topology: str, rate: float) -> str:
    return f"bandwidth-{model}-{topology}-{rate:g}Gbit".replace(" ", "-").lower()


def _emulated_gain(results: Results, model: str, topology: str, rate: float) -> float:
    def measure() -> float:
        plans = results.emulation(_plan(results, model, topology, rate), against="data-parallel")["plans"]
        gain: float = plans[-1]["bottleneck_s"] / plans[0]["bottleneck_s"]
        return gain

    gain: float = results.get(f"{_name(model, topology, rate)}-emulated", measure)
    return gain


def page(figures: list[dict[str, Any]]) -> Iterator[str]:
    """The section of the page."""
    yield "## Gain against bandwidth\n"
    yield (
        "Each point has its own plan for its bandwidth between servers. The gain is over data parallelism on all 16 "
        "workers. It is 1 if that is the plan. A plan may leave workers idle. If links are very slow, one server "
        "trains alone (4 workers on 4x4, 8 on 2x8), and the gain comes from not using the network. "
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


def plot(figures: list[dict[str, Any]]) -> Figure:
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
    return picture
