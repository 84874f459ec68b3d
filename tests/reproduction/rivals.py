"""Against the others: the plan beside data, model and hybrid parallelism and GPipe, on four workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from reproduction.paper import profile
from reproduction.results import Results

STRATEGIES = {
    "data-parallel": "data parallelism",
    "model-parallel": "model parallelism",
    "gpipe": "GPipe",
    "hybrid": "hybrid parallelism",
}


@dataclass(frozen=True)
class Case:
    """A model of the paper on four servers with one device each.

    Attributes:
        emulated: the strategies that are emulated, in the order of STRATEGIES; all are simulated.
    """

    model: str
    bandwidth: str = "10Gbit/s"
    device: str = "v100"
    emulated: tuple[str, ...] = tuple(STRATEGIES)

    @property
    def name(self) -> str:
        """Of its files."""
        return f"rivals-{self.model}".replace(" ", "-").lower()


_TIMES = ("simulated_s", "emulated_s")
CASES = (
    Case("VGG-16"),
    # its hybrid stages exchange word numbers, which are less than a packet at the scale that the cores need
    Case("GNMT-8", emulated=("data-parallel", "model-parallel", "gpipe")),
    Case("S2VT", "40Gbit/s", "titanx", emulated=("data-parallel",)),
)
QUICK = (replace(CASES[0], emulated=()),)


def measure(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Simulate and emulate the plan and its rivals for each model, one result each."""
    return [results.get(case.name, lambda case=case: _figures(results, case)) for case in (QUICK if quick else CASES)]


def _figures(results: Results, case: Case) -> dict[str, Any]:
    plan = results.plan(profile(results, case.model, case.device), "4", case.bandwidth, name=case.name)
    simulated = json.loads(results.pdtool("simulate", plan, "--against", ",".join(STRATEGIES), "--json"))
    emulated = {run["name"]: run for run in results.emulation(plan, ",".join(case.emulated))["plans"]}
    for name in case.emulated:
        emulated.setdefault(name, emulated["this plan"])  # a rival that is the plan is not emulated again
    plans = []
    for name, each in zip(("this plan", *STRATEGIES), simulated["compared"], strict=True):
        run = emulated.get(name, {"bottleneck_s": None, "sent_bytes": each["sent_bytes"]})
        plans.append(
            {
                "name": name,
                "config": each["config"],
                "simulated_s": each["pace_s"],
                "emulated_s": run["bottleneck_s"],
                "samples_per_update": each["samples_per_update"],
                "memory_bytes": each["memory_bytes"],
                "bytes_per_sample": run["sent_bytes"] / simulated["batch_size"],
            }
        )
    return {
        "model": case.model,
        "bandwidth": case.bandwidth,
        "device": case.device,
        "batch_size": simulated["batch_size"],
        "plans": plans,
    }


def page(figures: list[dict[str, Any]]) -> Iterator[str]:
    """The section of the page."""
    yield "## Against the others, on four workers\n"
    yield (
        "Four servers with one device each. `pdtool partition` chooses the plan. The others are the best plans of "
        "their strategies. An update of GPipe averages as many samples as one of data parallelism. The others average "
        "no more than that. Bytes: sent by all workers, counted where the plan was emulated. Memory: of the worker "
        "that needs most, simulated.\n"
    )
    yield "| model | strategy | plan | samples/update | samples/s simulated | emulated | MB/sample | memory, GB |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in figures:
        model = f"{each['model']} ({each['device']}, {each['bandwidth']})"
        for plan in each["plans"]:
            speeds = (f"{each['batch_size'] / plan[name]:.4g}" if plan[name] else "" for name in _TIMES)
            sizes = f"{plan['bytes_per_sample'] / 1e6:.3g} | {plan['memory_bytes'] / 1e9:.3g}"
            label = STRATEGIES.get(plan["name"], "pdtool's plan")
            asked = f"{model} | {label} | {plan['config']} | {plan['samples_per_update']}"
            yield f"| {asked} | {' | '.join(speeds)} | {sizes} |"
    yield ""
    yield "The paper's claims, and the plan's figures divided by those of the others (times: emulated):\n"
    yield "| the paper | " + " | ".join(each["model"] for each in figures) + " |"
    yield "|---|" + "---|" * len(figures)
    for claim, cell in _CLAIMS.items():
        yield f"| {claim} | " + " | ".join(cell(each) for each in figures) + " |"
    yield ""


def _ratio(figures: dict[str, Any], strategy: str, field: str) -> float | None:
    """A figure of a rival over that of the plan; None where it was not measured."""
    own = figures["plans"][0][field]
    rival = next((plan[field] for plan in figures["plans"] if plan["name"] == strategy), None)
    return None if rival is None else rival / own


def _traffic(figures: dict[str, Any]) -> str:
    ratio = _ratio(figures, "data-parallel", "bytes_per_sample")
    return "not measured" if ratio is None else f"{1 - 1 / ratio:.0%} less"


def _memory(figures: dict[str, Any]) -> str:
    ratio = _ratio(figures, "data-parallel", "memory_bytes")
    return "not measured" if ratio is None else f"{1 / ratio:.2f} times as much"


def _gain(strategy: str, figures: dict[str, Any]) -> str:
    for field in reversed(_TIMES):
        ratio = _ratio(figures, strategy, field)
        if ratio is not None:
            return f"{ratio:.2f} ×" + " (simulated)" * (field != "emulated_s")
    return "not measured"


_CLAIMS = {
    "up to 85 % less traffic than data parallelism": _traffic,
    "memory on par with data parallelism": _memory,
    "2.6 to 15 × the throughput of model parallelism": lambda figures: _gain("model-parallel", figures),
    "up to 1.9 × that of hybrid parallelism": lambda figures: _gain("hybrid", figures),
    "more than GPipe's": lambda figures: _gain("gpipe", figures),
    "more than that of data parallelism": lambda figures: _gain("data-parallel", figures),
}
