"""How well the simulation predicts: simulated beside emulated time of many plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from reproduction.results import Results

PCIE = "12GB/s"
WANTED_MEDIAN, WANTED_WORST = 0.03, 0.10


@dataclass(frozen=True)
class Case:
    """A plan: the best of a strategy for VGG-16 or ResNet-50, minibatches of 64 on V100."""

    topology: str
    bandwidth: str
    strategy: str
    model: str = "vgg16"


CASES = (
    Case("4", "10Gbit/s", "pipeline"),
    Case("4", "1Gbit/s", "pipeline"),
    Case("4", "10Gbit/s", "straight"),
    Case("4", "10Gbit/s", "gpipe"),
    Case("4", "10Gbit/s", "model-parallel"),
    Case("4", "10Gbit/s", "data-parallel"),
    Case("4", "1Gbit/s", "data-parallel"),
    Case("4", "10Gbit/s", "straight", "resnet50"),
    Case("4", "10Gbit/s", "pipeline", "resnet50"),
    Case("2x4", f"10Gbit/s,{PCIE}", "pipeline"),
    Case("2x4", f"10Gbit/s,{PCIE}", "data-parallel"),
    Case("2x4", f"10Gbit/s,{PCIE}", "hybrid"),
    Case("4x4", f"10Gbit/s,{PCIE}", "pipeline"),
    Case("4x4", f"5Gbit/s,{PCIE}", "pipeline"),
    Case("4x4", f"10Gbit/s,{PCIE}", "data-parallel"),
    Case("4x4", f"10Gbit/s,{PCIE}", "gpipe"),
)
QUICK = CASES[:1]


def measure(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Emulate every case, one result each."""
    return [results.get(_name(case), lambda case=case: _figures(results, case)) for case in (QUICK if quick else CASES)]


def _name(case: Case) -> str:
    speed = case.bandwidth.partition(",")[0].removesuffix("/s")
    return f"prediction-{case.model}-{case.topology}-{speed}-{case.strategy}"


def _figures(results: Results, case: Case) -> dict[str, Any]:
    profile = results.profile(case.model, "v100", 64)
    plan = results.plan(profile, case.topology, case.bandwidth, "--strategy", case.strategy, name=_name(case))
    emulation = results.emulation(plan)
    [emulated] = emulation["plans"]
    return {
        "model": case.model,
        "topology": case.topology,
        "bandwidth": case.bandwidth,
        "strategy": case.strategy,
        "config": emulated["config"],
        "simulated_s": emulated["simulated_s"],
        "emulated_s": emulated["bottleneck_s"],
        "scale": emulation["scale"],
        "slowdown": emulation["slowdown"],
    }


def page(figures: list[dict[str, Any]]) -> Iterator[str]:
    """The section of the page."""
    errors = [each["emulated_s"] / each["simulated_s"] - 1 for each in figures]
    sizes = sorted(map(abs, errors))
    yield "## Prediction: simulated beside emulated time\n"
    plans = "1 plan" if len(figures) == 1 else f"{len(figures)} plans"
    yield (
        f"{plans}, each the best of its strategy. The ratio of emulated to simulated time has a median error of "
        f"{median(sizes):.1%} (wanted at most {WANTED_MEDIAN:.0%}), worst {sizes[-1]:.1%} "
        f"(wanted at most {WANTED_WORST:.0%}).\n"
    )
    yield "| model | cluster | links | strategy | plan | simulated, ms | emulated, ms | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for each, error in zip(figures, errors, strict=True):
        times = f"{each['simulated_s'] * 1e3:.4g} | {each['emulated_s'] * 1e3:.4g} | {error:+.1%}"
        config = each["config"] if len(each["config"]) < 20 else f"{each['config'].count('-') + 1} stages"
        asked = f"{each['model']} | {each['topology']} | {each['bandwidth']} | {each['strategy']}"
        yield f"| {asked} | {config} | {times} |"
    yield ""
