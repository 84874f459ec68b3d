"""How well the simulation predicts real computing: simulated beside measured time, on two workers with a core each."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from reproduction.results import Results

ZOO = Path(__file__).parents[2] / "pdtool" / "zoo"
WORKERS = 2
REPEATS = 3
EPOCH_S = 3.0  # of the two that are trained, of which the second is measured
STRATEGIES = ("straight", "data-parallel")
WANTED_MEDIAN = 0.10


@dataclass(frozen=True)
class Case:
    """A model of the zoo, with settings."""

    model: str
    batch_size: int
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its files."""
        return "-".join(["real", self.model, *(setting.replace("=", "") for setting in self.settings)])

    @property
    def source(self) -> str:
        """The model file."""
        return str(ZOO / f"{self.model}.py")


CASES = (
    Case("digits", 128, ("width=64",)),
    Case("vgg16", 64, ("size=mini",)),
    Case("transformer", 32),
    Case("lstm_lm", 32),
)
QUICK = CASES[:1]


def measure(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Profile, plan and run each model, one result each."""
    cases, strategies, repeats = (QUICK, STRATEGIES[:1], 1) if quick else (CASES, STRATEGIES, REPEATS)
    return [results.get(case.name, lambda case=case: _figures(results, case, strategies, repeats)) for case in cases]


def _figures(results: Results, case: Case, strategies: Sequence[str], repeats: int) -> dict[str, Any]:
    profile = f"profiles/{case.name}.json"
    settings = [option for setting in case.settings for option in ("--set", setting)]
    measured = ("--batch-size", str(case.batch_size), "--threads", "1", *settings, "-o", profile)
    results.pdtool("profile", case.source, *measured)
    cluster = _cluster(results)
    plans = {}
    for strategy in strategies:
        path = f"plans/{case.name}-{strategy}.yaml"
        results.pdtool("partition", profile, "--cluster", cluster, "--strategy", strategy, "-o", path)
        plans[strategy] = path
    reports: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in strategies}
    for repeat, strategy in product(range(repeats), strategies):  # interleaved, so that a slow moment meets all
        reports[strategy].append(_run(results, case, plans[strategy], f"{case.name}-{strategy}-{repeat}"))
    return {
        "model": case.model,
        "settings": case.settings,
        "batch_size": case.batch_size,
        "cores": os.cpu_count(),
        "plans": [_compared(strategy, _plan(results, plans[strategy]), reports[strategy]) for strategy in strategies],
    }


def _compared(strategy: str, plan: dict[str, Any], reports: list[dict[str, Any]]) -> dict[str, Any]:
    """A plan's predictions and what its runs took, in seconds per minibatch; of stages the median of the runs."""
    stages = zip(*([stage["busy_s"] for stage in report["stages"]] for report in reports), strict=True)
    return {
        "strategy": strategy,
        "config": "-".join(str(stage["replicas"]) for stage in plan["stages"]),
        "simulated_s": _simulated_s(plan),
        "measured_s": [report["measured"]["bottleneck_s"] for report in reports],
        "predicted_stages_s": plan["predicted"]["compute_s"],
        "measured_stages_s": [median(stage) for stage in stages],
    }


def _cluster(results: Results) -> str:
    """Measure what workers on this machine can send each other; once for all models."""
    path = "real-cluster.yaml"
    if not (results.work / path).exists():
        results.pdtool("probe", "--topology", str(WORKERS), "-o", path)
    return path


def _run(results: Results, case: Case, plan: str, name: str) -> dict[str, Any]:
    """Train for two epochs, of which the second is measured, and return the report."""
    folder = results.work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    steps = max(12, round(EPOCH_S / _simulated_s(_plan(results, plan))))
    asked = ("--epochs", "2", "--steps", str(steps), "--device", "cpu", "-o", str(folder))
    report: dict[str, Any] = json.loads(results.pdtool("run", plan, "--model", case.source, *asked, "--json"))
    return report


def _plan(results: Results, path: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((results.work / path).read_text(encoding="utf-8"))
    return content


def _simulated_s(plan: dict[str, Any]) -> float:
    seconds: float = plan["predicted"]["simulated_s"] or plan["predicted"]["bottleneck_s"]
    return seconds


def page(figures: list[dict[str, Any]]) -> Iterator[str]:
    """The section of the page."""
    rows = [(each, plan, median(plan["measured_s"])) for each in figures for plan in each["plans"]]
    errors = [measured_s / plan["simulated_s"] - 1 for _, plan, measured_s in rows]
    cores = figures[0]["cores"]
    yield "## Prediction: simulated beside real computing\n"
    yield (
        f"Models of the zoo were profiled on this machine with one thread, planned for {WORKERS} workers with the "
        f"bandwidth that `pdtool probe` measures between them, and trained by `pdtool run` on {cores} cores. "
        f"The ratio of measured to simulated time of {len(rows)} plans, each the median of "
        f"{len(rows[0][1]['measured_s'])} run(s), has a median error of {median(map(abs, errors)):.1%} "
        f"(wanted at most {WANTED_MEDIAN:.0%}), worst {max(errors, key=abs):+.1%}.\n"
    )
    if cores < WORKERS:
        yield f"{WORKERS} workers shared {cores} core(s). With one device each they would be faster.\n"
    yield "| model | minibatch | strategy | plan | simulated, ms | measured, ms | of the runs | error | computing |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (each, plan, measured_s), error in zip(rows, errors, strict=True):
        model = " ".join([each["model"], *each["settings"]])
        times = f"{plan['simulated_s'] * 1e3:.4g} | {measured_s * 1e3:.4g}"
        spread = f"{min(plan['measured_s']) * 1e3:.4g} to {max(plan['measured_s']) * 1e3:.4g}"
        asked = f"{model} | {each['batch_size']} | {plan['strategy']} | {plan['config']}"
        ratios = _ratios(plan["measured_stages_s"], plan["predicted_stages_s"])
        yield f"| {asked} | {times} | {spread} | {error:+.1%} | {ratios} |"
    yield ""
    totals = [sum(plan["measured_stages_s"]) / sum(plan["predicted_stages_s"]) - 1 for _, plan, _ in rows]
    yield (
        "Computing: each stage's own time without waits, measured over predicted. All stages of a plan together are "
        f"off by {median(map(abs, totals)):.1%} (median). A single stage may be off further, and the slowest decides. "
        "The profile times operators one by one, but a stage does not run them like that. With data parallelism, the "
        "rest are waits for averages. Here averages use time of the cores that compute. In the simulation they use "
        "only links.\n"
    )


def _ratios(measured_s: list[float], predicted_s: list[float]) -> str:
    return ", ".join(f"{a / b - 1:+.0%}" for a, b in zip(measured_s, predicted_s, strict=True))
