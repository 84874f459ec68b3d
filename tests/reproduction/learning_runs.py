"""Whether the replays are right: the same trainings by `pdtool run`, loss by loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

from reproduction.learning_tasks import METHODS, TASKS, plan_of, stage_of_modules
from reproduction.results import Results

CLOSE = 1e-4  # relative difference of losses


def compare(results: Results, task: str, method: str) -> dict[str, Any]:
    """Train a task with the first seed by replay and by `pdtool run`, for as many epochs; return how they differ."""
    return results.get(f"learning-run-{task}-{method}", lambda: _compared(results, task, method))


def _compared(results: Results, name: str, method_name: str) -> dict[str, Any]:
    from reproduction.learning_replay import Case, Training

    task, method = TASKS[name], METHODS[method_name]
    plan = plan_of(results, name, method)
    replayed = Training(Case(task=task, method=method, seed=0, stage_of=stage_of_modules(results, name, method)))
    figures = replayed.run()
    folder = results.work / "runs" / f"learning-{name}-{method_name}"
    shutil.rmtree(folder, ignore_errors=True)
    epochs = ("--epochs", str(max(1, len(figures["curve"]))))
    results.pdtool("run", plan, "--model", str(task.source), *epochs, *method.options, "-o", str(folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    curve = [(line | line["metrics"])[task.metric] for line in lines if line["split"] == "valid"]
    pairs = list(zip(losses, _update_losses(replayed.losses, method.microbatches), strict=True))
    differences = [abs(ran - expected) / abs(expected) for ran, expected in pairs]
    return {
        "task": name,
        "method": method_name,
        "updates": len(pairs),
        "equal": sum(ran == expected for ran, expected in pairs),
        "close": next((i for i, difference in enumerate(differences) if difference > CLOSE), len(pairs)),
        "curve": curve,
        "replayed_curve": figures["curve"],
    }


def _update_losses(epochs: list[list[tuple[float, int]]], microbatches: int) -> Iterator[float]:
    """Yield the mean loss of the samples of each update."""
    for epoch in epochs:
        for first in range(0, len(epoch), microbatches):
            part = epoch[first : first + microbatches]
            yield sum(loss * samples for loss, samples in part) / sum(samples for _, samples in part)


def comparison_lines(compared: list[dict[str, Any]]) -> Iterator[str]:
    """Say how many losses were compared, how many were the same, and what came of those that were not."""
    task = TASKS[compared[0]["task"]]
    equal = [each for each in compared if each["equal"] == each["updates"]]
    yield (
        "All figures above come from replays in one process. We also trained the first seed of "
        f"{compared[0]['task']} with `pdtool run` on real workers, in {len(compared)} ways. In {len(equal)} of them "
        "every loss, one per update, equals the replay's to the last bit. In the others, sums are rounded in another "
        "order, and training amplifies the difference.\n"
    )
    yield f"| method | losses | the same | within {CLOSE:.0e} until update | {task.metric} at the end, run | replay |"
    yield "|---|---|---|---|---|---|"
    for each in compared:
        ends = " | ".join(f"{each[name][-1]:.4f}" for name in ("curve", "replayed_curve"))
        counts = " | ".join(str(each[name]) for name in ("updates", "equal", "close"))
        yield f"| {METHODS[each['method']].label} | {counts} | {ends} |"
    yield ""
