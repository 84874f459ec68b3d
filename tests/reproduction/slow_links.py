"""VGG-16 over slow and fast links: the planned pipeline beside data parallelism, both emulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reproduction.prediction import PCIE
from reproduction.results import Results


@dataclass(frozen=True)
class Case:
    """A cluster of V100 for VGG-16, minibatches of 64.

    Attributes:
        rival: strategy of the plan that the chosen one is compared with.
        wanted: throughput of the chosen plan over that of its rival, at least.
    """

    topology: str
    bandwidth: str
    rival: str
    wanted: float


CASES = (
    Case("4", "1Gbit/s", "data-parallel", 5.0),
    Case("4x4", f"5Gbit/s,{PCIE}", "data-parallel", 3.5),
    Case("4", "25Gbit/s", "pipeline", 1.0),
)
QUICK = CASES[-1:]


def measure(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Plan freely, and emulate that plan and its rival; one result for each cluster."""
    return [results.get(_name(case), lambda case=case: _figures(results, case)) for case in (QUICK if quick else CASES)]


def _name(case: Case) -> str:
    return f"slow-links-{case.topology}-{case.bandwidth.partition(',')[0].removesuffix('/s')}"


def _figures(results: Results, case: Case) -> dict[str, Any]:
    profile = results.profile("vgg16", "v100", 64)
    plan = results.plan(profile, case.topology, case.bandwidth, name=_name(case))
    own, rival = results.emulation(plan, against=case.rival)["plans"]
    return {"topology": case.topology, "bandwidth": case.bandwidth, "own": own, "rival": rival, "wanted": case.wanted}


def page(figures: list[dict[str, Any]]) -> Iterator[str]:
    """The section of the page."""
    yield "## VGG-16 over slow and fast links\n"
    yield (
        "The plan that `pdtool partition` chooses, compared with data parallelism. If the plan is data parallelism, it "
        "is compared with the best pipeline. Both are emulated. Times are milliseconds per minibatch of 64 on V100.\n"
    )
    yield "| cluster | links | chosen plan | ms | rival | ms | throughput over the rival's | wanted |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in figures:
        own, rival = each["own"], each["rival"]
        plans = " | ".join(f"{plan['config']} | {plan['bottleneck_s'] * 1e3:.4g}" for plan in (own, rival))
        gain = rival["bottleneck_s"] / own["bottleneck_s"]
        yield f"| {each['topology']} | {each['bandwidth']} | {plans} | {gain:.2f} | {each['wanted']:g} |"
    yield ""
