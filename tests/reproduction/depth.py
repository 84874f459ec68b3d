"""Depth: what more stages, and more minibatches in flight, give and cost (the paper's section 5.5).

Throughput and memory are those of straight plans at paper size, simulated; epochs are those of a small task, replayed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from statistics import median_low
from typing import TYPE_CHECKING, Any

import yaml

from reproduction.learning import SEEDS, Figures, Measurement, one_thread, train_all
from reproduction.learning_tasks import TASKS, WORKERS, in_flight_of_stages
from reproduction.paper import profile
from reproduction.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = ("depth.svg", "Throughput, memory and epochs against the number of stages, and of minibatches in flight")
MODELS = ("VGG-16", "GNMT-8")
COUNTS = {"stages": tuple(range(1, 9)), "in_flight": (1, 2, 3, 4, 6, 8, 12)}  # the latter at the first stage
TASK = "digits"
_BANDWIDTH = "10Gbit/s"
_QUICK_COUNTS = {"stages": (1, 4), "in_flight": (4, 8)}


def measure(results: Results, *, quick: bool) -> Figures:
    """Simulate and train at every depth, one result each."""
    models, counts, seeds = (MODELS[:1], _QUICK_COUNTS, SEEDS[:1]) if quick else (MODELS, COUNTS, SEEDS)
    cases = [(kind, count, seed) for seed in seeds for kind in counts for count in counts[kind]]
    with one_thread():
        trained = dict(zip(cases, train_all(results, [_training(*case) for case in cases]), strict=True))
    return {
        kind: {
            "counts": several,
            "points": {model: [_point(results, kind, model, count) for count in several] for model in models},
            "epochs": [[trained[kind, count, seed]["epochs"] for seed in seeds] for count in several],
        }
        for kind, several in counts.items()
    }


def _training(kind: str, count: int, seed: int) -> Measurement:
    """The task with so many stages, or with so many minibatches in flight in the usual number of stages."""
    if count == 1:  # each minibatch meets the newest weights
        return Measurement(TASK, "one-process", seed)
    if kind == "stages":
        return Measurement(TASK, "stash", seed, stages=count)
    return Measurement(TASK, "stash", seed, in_flight=0 if count == WORKERS else count)


def _point(results: Results, kind: str, model: str, count: int) -> dict[str, Any]:
    simulated = {"stages": _of_stages, "in_flight": _of_in_flight}[kind]
    name = f"depth-{model}-{count}-{kind}".lower().replace("_", "-")
    figures: dict[str, Any] = results.get(name, lambda: simulated(results, model, count))
    return figures


def _of_stages(results: Results, model: str, stages: int) -> dict[str, Any]:
    predicted, in_flight = _plan(results, model, stages)[1:]
    return {
        "throughput": predicted["throughput_samples_per_s"],
        "memory_bytes": max(predicted["memory_bytes"]),
        "in_flight": in_flight,
    }


def _of_in_flight(results: Results, model: str, in_flight: int) -> dict[str, Any]:
    """Edit the plan, as a user may, and simulate it."""
    path, _, planned = _plan(results, model, WORKERS)
    plan = yaml.safe_load((results.work / path).read_text(encoding="utf-8"))
    for stage, count in zip(plan["stages"], in_flight_of_stages(in_flight, WORKERS), strict=True):
        stage["in_flight"] = count
    edited = path.replace(".yaml", f"-in-flight-{in_flight}.yaml")
    (results.work / edited).write_text(yaml.safe_dump(plan, sort_keys=False, explicit_end=True), encoding="utf-8")
    simulated = json.loads(results.pdtool("simulate", edited, "--against", "", "--json"))
    return {
        "throughput": simulated["throughput_samples_per_s"],
        "memory_bytes": max(worker["memory_bytes"] for worker in simulated["workers"]),
        "in_flight": planned,
    }


def _plan(results: Results, model: str, stages: int) -> tuple[str, dict[str, Any], int]:
    """Return the path of a straight plan, what it predicts, and its minibatches in flight."""
    strategy = ("--strategy", "straight" if stages > 1 else "data-parallel", "--memory", "none")
    name = f"depth-{model.lower()}-{stages}"
    path = results.plan(profile(results, model, "v100"), str(stages), _BANDWIDTH, *strategy, name=name)
    plan = yaml.safe_load((results.work / path).read_text(encoding="utf-8"))
    return path, plan["predicted"], plan["stages"][0]["in_flight"]


def page(figures: Figures) -> Iterator[str]:
    """The section of the page."""
    models = figures["in_flight"]["points"]
    yield "## Depth: stages, and minibatches in flight\n"
    yield (
        f"Straight pipelines of {' and '.join(models)} on V100 with {_BANDWIDTH} between them and no memory limit: "
        "simulated throughput with the planner's minibatches in flight, and the memory of the fullest worker. Epochs: "
        f"the median over the seeds until {TASK} ({TASKS[TASK].target}) is learned with weight stashing and the same "
        "number of stages. These runs have as many minibatches in flight as stages, which is fewer than for the "
        "throughput. So you cannot combine the two into a time to accuracy.\n"
    )
    yield from _table("stages", figures["stages"])
    planned = " and ".join(f"{points[0]['in_flight']} for {model}" for model, points in models.items())
    yield (
        f"With {WORKERS} stages, by minibatches in flight at the first stage. Later stages have evenly fewer, and the "
        f"last one has one. PipeDream's number is {WORKERS}. The planner takes {planned}, to hide messages. With one, "
        "stages take turns.\n"
    )
    yield from _table("in flight", figures["in_flight"])


def _table(title: str, figures: Figures) -> Iterator[str]:
    columns = " | ".join(f"{model}, samples/s | memory, GB" for model in figures["points"])
    yield f"| {title} | {columns} | epochs |"
    yield "|---|" + "---|---|" * len(figures["points"]) + "---|"
    for i, (count, epochs) in enumerate(zip(figures["counts"], figures["epochs"], strict=True)):
        points = [points[i] for points in figures["points"].values()]
        cells = " | ".join(f"{point['throughput']:.4g} | {point['memory_bytes'] / 1e9:.3g}" for point in points)
        yield f"| {count} | {cells} | {_median(epochs)} |"
    yield ""


def _median(epochs: list[int | None]) -> str:
    middle = median_low(sorted(math.inf if reached is None else reached for reached in epochs))
    return f"not in {TASKS[TASK].max_epochs}" if middle == math.inf else f"{middle:g}"


def plot(figures: Figures) -> Figure:
    """Draw throughput and memory of each model, and epochs, for both tables."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(12, 7), layout="constrained")
    most = TASKS[TASK].max_epochs
    quantities = (("throughput", 1.0, "samples/s"), ("memory_bytes", 1e-9, "memory of the fullest worker, GB"))
    for row, (kind, side) in zip(picture.subplots(2, 3), figures.items(), strict=True):
        for axes, (name, factor, label) in zip(row, quantities, strict=False):
            for model, points in side["points"].items():
                axes.plot(side["counts"], [point[name] * factor for point in points], "o-", label=model)
            axes.set(ylabel=label, ylim=(0, None))
            axes.legend()
        for count, epochs in zip(side["counts"], side["epochs"], strict=True):
            for reached in epochs:
                row[2].plot(count, reached or most, "o" if reached else "x", color="C0" if reached else "C3")
        row[2].set(ylabel=f"epochs of each seed ({TASK}; x: not in {most})", ylim=(0, None))
        for axes in row:
            axes.set_xlabel("stages" if kind == "stages" else f"minibatches in flight, {WORKERS} stages")
            axes.grid(visible=True, alpha=0.3)
    return picture
