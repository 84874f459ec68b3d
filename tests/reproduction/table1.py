"""Table 1 of the paper, row by row: its configuration and gain beside pdtool's, simulated and emulated."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from reproduction.paper import CLUSTERS, TABLE_1, Row, profile
from reproduction.results import Results

QUICK = [row for row in TABLE_1 if (row.model, row.topology) == ("ResNet-50", "4x4")]
_SWEEP = "bandwidth=0.01..100Gbit/s"


def measure(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Plan, simulate and emulate every row, one result each."""
    rows = QUICK if quick else TABLE_1
    return [results.get(f"table1-{_name(row)}", lambda row=row: _figures(results, row)) for row in rows]


def _name(row: Row) -> str:
    return f"{row.model}-{row.servers}x{row.devices}".replace(" ", "-").lower()


def _figures(results: Results, row: Row) -> dict[str, Any]:
    made = profile(results, row.model, CLUSTERS[row.cluster].device)
    ours = results.plan(made, row.topology, row.bandwidth, name=f"{_name(row)}-ours")
    paper = results.plan(made, row.topology, row.bandwidth, *row.strategy, name=f"{_name(row)}-paper")
    emulation = results.emulation(ours, against="data-parallel")
    simulated = json.loads(results.pdtool("simulate", paper, "--sweep", _SWEEP, "--against", "", "--json"))
    of_paper = emulation if _stages(results, paper) == _stages(results, ours) else results.emulation(paper)
    return {
        "ours": _plan(results, ours) | {"emulated_s": emulation["plans"][0]["bottleneck_s"]},
        "paper": _plan(results, paper) | {"emulated_s": of_paper["plans"][0]["bottleneck_s"]},
        "data_parallel_emulated_s": emulation["plans"][-1]["bottleneck_s"],
        "sweep": simulated["sweep"],
    }


def _stages(results: Results, path: str) -> Any:
    return yaml.safe_load((results.work / path).read_text(encoding="utf-8"))["stages"]


def _plan(results: Results, path: str) -> dict[str, Any]:
    plan = yaml.safe_load((results.work / path).read_text(encoding="utf-8"))
    predicted = plan["predicted"]
    return {
        "config": "-".join(str(stage["replicas"]) for stage in plan["stages"]),
        "simulated_s": predicted["simulated_s"] or predicted["bottleneck_s"],
        "data_parallel_s": predicted["data_parallel_s"],
        "memory_bytes": max(predicted["memory_bytes"]),
        "bytes_per_sample": predicted["traffic_bytes"] / plan["batch_size"],
        "compute_s": max(predicted["compute_s"]),
        "allreduce_s": max(predicted["allreduce_s"]),
        "transfer_s": max(predicted["transfer_s"], default=0.0),
    }


def page(figures: list[dict[str, Any]]) -> Iterator[str]:
    """The section of the page."""
    rows = QUICK if len(figures) == len(QUICK) else TABLE_1
    yield "## Table 1: gain over data parallelism\n"
    yield (
        "All figures are for the clusters' nominal bandwidths. A: servers of 4 V100, 10 Gbit/s between them. B: "
        "servers of 8 V100 with NVLink, 25 Gbit/s. C: servers of one Titan X, 40 Gbit/s. *Same gain at*: the bandwidth "
        "between servers at which the paper's configuration would have the paper's gain, or none if there is "
        "no single such bandwidth between 0.01 and 100 Gbit/s (on one server: between its GPUs). "
        "[table1-differences.md](table1-differences.md) explains why GNMT-8 and AlexNet differ on the paper's own "
        "profiles.\n"
    )
    yield "| model | servers | paper | gain | simulated | emulated | same gain at | pdtool | simulated | emulated |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row, each in zip(rows, figures, strict=True):
        paper, ours = ([each[who]["config"], *_gains(each, who)] for who in ("paper", "ours"))
        name = f"{row.model} | {row.servers}x{row.devices} ({row.cluster}) | {_short(paper[0])} | {row.gain:g}"
        same = _bandwidth_of_gain(each["sweep"], row.gain)
        yield f"| {name} | {paper[1]} | {paper[2]} | {same} | {_short(ours[0])} | {ours[1]} | {ours[2]} |"
    yield ""
    yield "Both plans term by term, in milliseconds per minibatch by the formulas, and their other figures:\n"
    yield "| model | servers | plan | compute | averages | border | simulated | emulated | memory, GB | MB per sample |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row, each in zip(rows, figures, strict=True):
        for who in ("paper", "ours"):
            plan = each[who]
            names = ("compute_s", "allreduce_s", "transfer_s", "simulated_s", "emulated_s")
            times = " | ".join(f"{plan[name] * 1e3:.3g}" for name in names)
            sizes = f"{plan['memory_bytes'] / 1e9:.3g} | {plan['bytes_per_sample'] / 1e6:.3g}"
            label = f"{_short(plan['config'])} ({'paper' if who == 'paper' else 'pdtool'})"
            yield f"| {row.model} | {row.servers}x{row.devices} | {label} | {times} | {sizes} |"
    yield ""
    yield from _differences(rows, figures)


def _differences(rows: Sequence[Row], figures: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What holds up each plan where pdtool's is not the paper's."""
    differing = [
        pair for pair in zip(rows, figures, strict=True) if pair[1]["ours"]["config"] != pair[1]["paper"]["config"]
    ]
    if differing:
        yield "Where pdtool's plan differs: the bottleneck of each plan, in milliseconds by the formulas.\n"
    for row, each in differing:
        paper, ours = (_held_up(each[who]) for who in ("paper", "ours"))
        name = f"{row.model} on {row.servers}x{row.devices}"
        parallel = f"data parallelism takes {each['ours']['data_parallel_s'] * 1e3:.3g}"
        yield f"- {name}: the paper's {paper}; pdtool's {ours}; {parallel}"
    yield ""


_TERMS = {"compute_s": "computing", "allreduce_s": "averaging", "transfer_s": "sending"}


def _held_up(plan: dict[str, Any]) -> str:
    """Return `15-1 by computing (26.9)`, with the largest term of a plan."""
    largest = max(_TERMS, key=lambda term: plan[term])
    return f"{_short(plan['config'])} by {_TERMS[largest]} ({plan[largest] * 1e3:.3g})"


def _gains(figures: dict[str, Any], who: str) -> tuple[str, str]:
    plan = figures[who]
    simulated = plan["data_parallel_s"] / plan["simulated_s"]
    return f"{simulated:.2f}", f"{figures['data_parallel_emulated_s'] / plan['emulated_s']:.2f}"


def _short(config: str) -> str:
    return f"{config.count('-') + 1} stages" if config.count("-") > 3 else config


def _bandwidth_of_gain(sweep: list[dict[str, float]], gain: float) -> str:
    """Where the curve of the gain passes a value, interpolated where both scales are logarithmic."""
    for a, b in itertools.pairwise(sweep):
        low, high = (math.log(point["gain"] / gain) for point in (a, b))
        if low * high <= 0 and low != high:
            rates = [math.log(point["bandwidth_bytes_per_s"]) for point in (a, b)]
            rate = math.exp(rates[0] + (rates[1] - rates[0]) * low / (low - high))
            return f"{rate * 8 / 1e9:.2g} Gbit/s"
    return "none"
