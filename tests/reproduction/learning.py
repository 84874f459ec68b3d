"""Learning: epochs to a target, for PipeDream's weight policies, their corrections and what they are compared with.

The paper's statistical efficiency (section 5.2). One result for each task, method and seed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

from reproduction.learning_runs import compare, comparison_lines
from reproduction.learning_tasks import (
    CORRECTIONS,
    METHODS,
    ONE_UPDATE_LATE,
    TASKS,
    WORKERS,
    in_flight_of_stages,
    replayed_as,
    stage_of_modules,
)
from reproduction.results import SIDE_BY_SIDE, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = ("learning-curves.svg", "The target metric of each task after each epoch, for all methods")
SEEDS = (0, 1, 2)
RATE_FACTORS = (0.5, 2.0)  # of a task's learning rate, for one process
COMPARED_TASK = "digits"  # that is also trained by pdtool run
QUICK_METHODS = ("one-process", "stash", "no-stashing")
_GROUPS = (
    ("one-process", "data-parallel", "stash", "vertical-sync", "no-stashing", "async-data-parallel"),
    ("one-process", "stash", *CORRECTIONS, "2bw", "flush"),
)
_COLORS = dict(zip(METHODS, [*(f"C{i}" for i in range(10)), "black"], strict=True))

Figures = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """One training: its name among the results, and what is trained.

    Attributes:
        rate_factor: of the task's learning rate.
        stages: of a method that has several.
        in_flight: minibatches in flight at the first stage; 0: as many as stages.
    """

    task: str
    method: str
    seed: int
    rate_factor: float = 1.0
    stages: int = WORKERS
    in_flight: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        rate = "" if self.rate_factor == 1.0 else f"-rate-{self.rate_factor:g}"
        stages = "" if self.stages == WORKERS else f"-{self.stages}-stages"
        in_flight = f"-{self.in_flight}-in-flight" if self.in_flight not in (0, self.stages) else ""
        return f"learning-{self.task}-{self.method}-{self.seed}{rate}{stages}{in_flight}"

    @property
    def original(self) -> Measurement:
        """The one with the same outcome that is trained; this one, if there is none in the table."""
        method = replayed_as(TASKS[self.task], self.method)
        return replace(self, method=method) if method in METHODS else self


def measure(results: Results, *, quick: bool) -> Figures:
    """Train everything, first with the first seed; two trainings at a time, each on one core."""
    tasks, methods, seeds = (["digits"], QUICK_METHODS, SEEDS[:1]) if quick else (list(TASKS), list(METHODS), SEEDS)
    first, *others = ([Measurement(task, method, seed) for task in tasks for method in methods] for seed in seeds)
    rates = [Measurement(task, "one-process", 0, factor) for factor in RATE_FACTORS for task in tasks if not quick]
    with one_thread():
        trained = train_all(results, [*first, *rates])
        compared = [] if quick else [compare(results, COMPARED_TASK, method) for method in METHODS]
        trained += train_all(results, [each for seed in others for each in seed])
    return {"trained": trained, "compared": compared}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let processes that are started compute with one thread each."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


def train_all(results: Results, measurements: list[Measurement]) -> list[Figures]:
    """Return the figures of each training, in order; those that others are copied from are trained first."""
    ordered = sorted(dict.fromkeys(measurements), key=lambda each: each.original != each)
    spawned = ProcessPoolExecutor(SIDE_BY_SIDE, mp_context=get_context("spawn"))  # they keep what they have read
    with spawned as processes, ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        trained = dict(zip(ordered, threads.map(partial(_trained, results, processes), ordered), strict=True))
    return [trained[each] for each in measurements]


def _trained(results: Results, processes: ProcessPoolExecutor, wanted: Measurement) -> Figures:
    about = {"task": wanted.task, "method": wanted.method, "seed": wanted.seed, "rate_factor": wanted.rate_factor}
    figures: Figures = results.get(wanted.name, lambda: _computed(results, processes, wanted) | about)
    return figures


def _computed(results: Results, processes: ProcessPoolExecutor, wanted: Measurement) -> Figures:
    from reproduction.learning_replay import Case, train

    if wanted.original != wanted:
        return _trained(results, processes, wanted.original)
    task = TASKS[wanted.task]
    method = METHODS.get(replayed_as(task, wanted.method), ONE_UPDATE_LATE)
    case = Case(
        task=task,
        method=method,
        seed=wanted.seed,
        stage_of=stage_of_modules(results, wanted.task, method, wanted.stages),
        in_flight=in_flight_of_stages(wanted.in_flight, wanted.stages) if wanted.in_flight else (),
        rate_factor=wanted.rate_factor,
    )
    return processes.submit(train, case).result()


def page(figures: Figures) -> Iterator[str]:
    """The section of the page."""
    trained = figures["trained"]
    usual = [each for each in trained if each["rate_factor"] == 1.0]
    tasks, methods, seeds = (list(dict.fromkeys(each[key] for each in usual)) for key in ("task", "method", "seed"))
    yield "## Learning: epochs to a target\n"
    yield (
        "Epochs (and updates) until a validation reaches the target: the median of "
        f"{len(seeds)} seed(s), and the range. There are {WORKERS} workers, and pipelines have {WORKERS} stages. An "
        "update averages the same number of samples for every method: data parallelism, flush and 2BW take a quarter "
        "of them in each minibatch. A training that did not reach the target ended after the given epochs.\n"
    )
    for name in tasks:
        task = TASKS[name]
        yield f"- *{name}*: {task.words}; {task.batch_size} samples in an update; target {task.target}"
    yield ""
    yield f"| method | {' | '.join(tasks)} |"
    yield "|---|" + "---|" * len(tasks)
    for method in methods:
        cells = (_cell(task, _runs(usual, task, method)) for task in tasks)
        yield f"| {METHODS[method].label} | {' | '.join(cells)} |"
    for factor in sorted({each["rate_factor"] for each in trained} - {1.0}):
        others = [each for each in trained if each["rate_factor"] == factor]
        cells = (_cell(task, _runs(others, task, "one-process")) for task in tasks)
        yield f"| one process, {factor:g} × the learning rate (first seed) | {' | '.join(cells)} |"
    yield ""
    yield (
        "We chose the learning rate of a task once, with one process alone, before we trained the other methods. The "
        "last rows show one process with other learning rates. All other hyper-parameters are also the same for all "
        "methods.\n"
    )
    yield (
        "Methods that compute the same weights, except for rounding, share one training. Asynchronous data parallelism "
        f"is vertical sync: both apply each gradient {WORKERS - 1} updates late. In the tasks without batch norm, data "
        "parallelism and 1F1B with a flush equal one process, and 2BW was trained undivided, each gradient one update "
        "late.\n"
    )
    yield from (_verdict(task, usual) for task in tasks if "stash" in methods)
    yield ""
    if figures["compared"]:
        yield from comparison_lines(figures["compared"])


def _runs(trained: list[Figures], task: str, method: str) -> list[Figures]:
    return [each for each in trained if (each["task"], each["method"]) == (task, method)]


def _epochs(runs: list[Figures]) -> list[float]:
    """Epochs to the target, ascending; infinite where it was not reached."""
    return sorted(math.inf if run["epochs"] is None else run["epochs"] for run in runs)


def _cell(task: str, runs: list[Figures]) -> str:
    epochs = _epochs(runs)
    if not epochs:
        return ""
    middle = median_low(epochs)
    if middle == math.inf:
        diverged = sum(run["diverged"] for run in runs)
        reached = f" ({len(epochs) - epochs.count(math.inf)} of {len(epochs)} did)" if epochs[0] < math.inf else ""
        return f"not in {TASKS[task].max_epochs}{reached}" + (f", {diverged} diverged" if diverged else "")
    updates = next(run["updates"] for run in runs if run["epochs"] == middle)
    last = "never" if epochs[-1] == math.inf else f"{epochs[-1]:g}"
    spread = f", {epochs[0]:g} to {last}" if len(set(epochs)) > 1 else ""
    return f"{middle:g} ({updates}){spread}"


def _verdict(task: str, trained: list[Figures]) -> str:
    """Say whether stashing is within one epoch of one process, and if it is not, which correction is."""
    medians = {name: median_low(_epochs(runs)) for name in METHODS if (runs := _runs(trained, task, name))}
    limit = medians["one-process"] + 1
    if limit == math.inf:
        return f"- *{task}*: one process did not reach the target in {TASKS[task].max_epochs} epochs"
    if medians["stash"] <= limit:
        return f"- *{task}*: weight stashing is within one epoch of one process"
    corrected = {name: medians[name] for name in CORRECTIONS if name in medians}
    gap = f"- *{task}*: weight stashing is **not** within one epoch of one process"
    if closing := [name for name, epochs in corrected.items() if epochs <= limit]:
        return f"{gap}; with {' or '.join(closing)} it is"
    best = min(corrected, key=lambda name: corrected[name], default="")
    if corrected.get(best, math.inf) == math.inf:
        return f"{gap}; no correction closes the gap"
    return f"{gap}; no correction closes the gap, {best} comes nearest with {corrected[best]:g} epochs"


def plot(figures: Figures) -> Figure:
    """Draw the curves, a column for each task: the median over the seeds, and the spread."""
    from matplotlib.figure import Figure

    usual = [each for each in figures["trained"] if each["rate_factor"] == 1.0]
    tasks = list(dict.fromkeys(each["task"] for each in usual))
    picture = Figure(figsize=(4 * len(tasks), 7), layout="constrained")
    rows = picture.subplots(len(_GROUPS), len(tasks), squeeze=False)
    for row, group in zip(rows, _GROUPS, strict=True):
        for task, axes in zip(tasks, row, strict=True):
            for method in group:
                if curves := [run["curve"] for run in _runs(usual, task, method) if run["curve"]]:
                    _draw(axes, curves, method)
            axes.axhline(float(TASKS[task].target.partition("=")[2]), color="gray", linestyle=":")
            axes.set(title=task, xlabel="epoch", ylabel=TASKS[task].metric)
            axes.set_yscale("log" if TASKS[task].metric == "perplexity" else "linear")
            axes.grid(visible=True, alpha=0.3)
        row[0].legend(fontsize="small")
    return picture


def _draw(axes: Any, curves: list[list[float]], method: str) -> None:
    """A training that has reached the target stays where it ended; dashes show what others may lie below."""
    length = max(map(len, curves))
    epochs = list(zip(*(curve + curve[-1:] * (length - len(curve)) for curve in curves), strict=True))
    numbers, color = range(1, length + 1), _COLORS[method]
    style = "--" if method in ("data-parallel", "flush", "async-data-parallel") else "-"
    axes.plot(numbers, [median(values) for values in epochs], style, label=METHODS[method].label, color=color)
    axes.fill_between(numbers, [min(v) for v in epochs], [max(v) for v in epochs], alpha=0.15, color=color)
