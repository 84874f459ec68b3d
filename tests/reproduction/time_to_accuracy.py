"""The claim itself: how long the planned pipeline and its rivals, DDP and one worker, train to the same accuracy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from pdtool.artifacts.metrics import MetricsLine, UpdateLine, ValidationLine, following_metrics
from pdtool.artifacts.run_dir import RunDir
from reproduction.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
MODEL = str(HERE.parents[1] / "pdtool" / "zoo" / "mnist.py")
WORKERS, BANDWIDTH = 2, "100Mbit/s"
BATCH_SIZE = 128  # samples in an update, of both
TARGET, SEEDS = 0.975, (0, 1, 2)
ON_THE_WAY = (0.9, 0.95, 0.96, 0.97)  # accuracies below the target
EPOCHS = 30
QUICK_TARGET, QUICK_SEEDS, QUICK_EPOCH = 0.5, (0,), ("--minibatches", "12")
WANTED = 3.0
PICTURE = ("time-to-accuracy.svg", "Accuracy over seconds: the pipeline reaches the target first")


def measure(results: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Train both ways with each seed, one result each."""
    seeds, target, epoch = (QUICK_SEEDS, QUICK_TARGET, QUICK_EPOCH) if quick else (SEEDS, TARGET, ())
    return [
        results.get(f"time-to-accuracy-{seed}", lambda seed=seed: _figures(results, seed, target, epoch))
        for seed in seeds
    ]


def _figures(results: Results, seed: int, target: float, epoch: tuple[str, ...]) -> dict[str, Any]:
    path = _plan(results, "time-to-accuracy", BATCH_SIZE)
    planned = yaml.safe_load((results.work / path).read_text(encoding="utf-8"))
    asked = ("--epochs", str(EPOCHS), "--seed", str(seed), *epoch)
    rival = _plan(results, "time-to-accuracy-ddp", BATCH_SIZE // WORKERS, "--strategy", "data-parallel")
    predicted = yaml.safe_load((results.work / rival).read_text(encoding="utf-8"))["predicted"]
    return {
        "seed": seed,
        "target": target,
        "config": "-".join(str(stage["replicas"]) for stage in planned["stages"]),
        "one_worker_s": json.loads((results.work / planned["profile"]).read_text(encoding="utf-8"))["step_s"],
        "simulated_s": planned["predicted"]["simulated_s"],
        "ddp_simulated_s": WORKERS * (predicted["simulated_s"] or predicted["bottleneck_s"]),
        "pipeline": train_pipeline(results, path, MODEL, *asked, "--target", f"accuracy>={target}"),
        "ddp": train_ddp(results, BATCH_SIZE, MODEL, *asked, "--target", str(target)),
        "alone": train_ddp(results, BATCH_SIZE, MODEL, *asked, "--target", str(target), workers=1),
    }


def _plan(results: Results, name: str, batch_size: int, *options: str) -> str:
    """Return the path of a plan of MODEL for the workers and links of this section, profiled on this machine."""
    profile = f"profiles/{name}.json"
    if not (results.work / profile).exists():
        results.pdtool("profile", MODEL, "--batch-size", str(batch_size), "--threads", "1", "-o", profile)
    return results.plan(profile, str(WORKERS), BANDWIDTH, *options, name=name)


def train_pipeline(results: Results, plan: str, model: str, *options: str) -> dict[str, Any]:
    """Train a plan on the pretend cluster, by `pdtool emulate`."""
    folder = results.work / "runs" / "time-to-accuracy"
    shutil.rmtree(folder, ignore_errors=True)
    command = ("emulate", plan, "--model", model, "--compute", "real", "--against", "", "-o", str(folder))
    return _followed(folder / "this-plan", lambda: results.pdtool(*command, *options))


def train_ddp(results: Results, batch_size: int, model: str, *options: str, workers: int = WORKERS) -> dict[str, Any]:
    """Train a model by ddp.py on the same pretend cluster; one worker alone sends nothing."""
    folder = results.work / "runs" / "time-to-accuracy-ddp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cluster = (str(HERE / "on_pretend_cluster.py"), str(workers), BANDWIDTH)
    script = (str(HERE / "ddp.py"), model, "--batch-size", str(batch_size), "-o", str(folder))
    return _followed(folder, lambda: subprocess.run([sys.executable, *cluster, *script, *options], check=True))


def _followed(folder: Path, train: Callable[[], object]) -> dict[str, Any]:
    """Train, and take the time at each line of metrics.jsonl: seconds since the first update."""
    lines: list[tuple[float, MetricsLine]] = []
    with following_metrics(RunDir(folder).metrics_file, lambda line: lines.append((time.monotonic(), line)), after=0):
        train()
    start_s = lines[0][0]
    validations = [(at_s - start_s, line) for at_s, line in lines if isinstance(line, ValidationLine)]
    return {
        "epochs": len(validations),
        "seconds": validations[-1][0],
        "time_per_update_s": time_per_update_s(lines),
        "curve": [(at_s, line.metrics["accuracy"]) for at_s, line in validations],
    }


def time_per_update_s(lines: list[tuple[float, MetricsLine]]) -> float:
    """Seconds from update to update within an epoch, over all epochs."""
    updates = [(at_s, line.epoch) for at_s, line in lines if isinstance(line, UpdateLine)]
    epochs = [[at_s for at_s, _ in group] for _, group in groupby(updates, key=lambda update: update[1])]
    return sum(epoch[-1] - epoch[0] for epoch in epochs) / sum(len(epoch) - 1 for epoch in epochs)


def page(figures: list[dict[str, Any]]) -> Iterator[str]:
    """The section of the page."""
    first = figures[0]
    sooner = _times_as_long(figures, first["target"])
    kept = "held" if min(sooner) >= WANTED else "not held"
    yield "## Time to accuracy\n"
    yield (
        f"A small VGG with a large classifier (`pdtool/zoo/mnist.py`) learns MNIST's digits on {WORKERS} workers of "
        f"one thread with links of {BANDWIDTH}. The target is {first['target'] * 100:g}% of the digits that it was not "
        f"trained on. Pipeline: the plan of `pdtool partition` ({first['config']}), trained by "
        "`pdtool emulate --compute real`. DDP: an ordinary loop with torch's DistributedDataParallel "
        "(`tests/reproduction/ddp.py`) on the same emulated cluster. One worker: that loop on one worker, which needs "
        f"no network. Each method averages {BATCH_SIZE} samples per update in the same order, from the same initial "
        "weights. Seconds count from the first update and include validations. pdtool also saves a checkpoint after "
        "each epoch.\n"
    )
    yield (
        "| seed | pipeline: epochs | seconds | ms/update | DDP: epochs | seconds | ms/update | times as long "
        "| one worker: epochs | seconds | ms/update | times as long |"
    )
    yield "|---" * 12 + "|"
    alone = _times_as_long(figures, first["target"], "alone")
    for each, *ratios in zip(figures, sooner, alone, strict=True):
        own, ddp, one = (
            f"{way['epochs']} | {way['seconds']:.1f} | {way['time_per_update_s'] * 1e3:.4g}"
            for way in (each["pipeline"], each["ddp"], each["alone"])
        )
        yield f"| {each['seed']} | {own} | {ddp} | {ratios[0]:.1f} | {one} | {ratios[1]:.1f} |"
    yield ""
    yield (
        f"DDP takes {median(sooner):.1f} times as long as the pipeline (median of {len(figures)} seed(s); worst "
        f"{min(sooner):.1f}): the goal of {WANTED:g} is {kept}. One worker takes {median(alone):.1f} times as "
        f"long as the pipeline with two (worst {min(alone):.1f}). In the simulation, an update takes "
        f"{first['simulated_s'] * 1e3:.4g} ms in the pipeline and {first['ddp_simulated_s'] * 1e3:.4g} ms with data "
        f"parallelism. One worker takes {first['one_worker_s'] * 1e3:.4g} ms.\n"
    )
    if on_the_way := [accuracy for accuracy in ON_THE_WAY if accuracy < first["target"]]:
        yield (
            "The same for lower accuracies. The pipeline's gradients are stale. This costs it most in the first "
            "epochs, when weights change most:\n"
        )
        seeds = " | ".join(f"seed {each['seed']}" for each in figures)
        yield f"| times as long: DDP, one worker | {seeds} |"
        yield "|---" * (1 + len(figures)) + "|"
        for accuracy in on_the_way:
            pairs = zip(*(_times_as_long(figures, accuracy, rival) for rival in ("ddp", "alone")), strict=True)
            yield f"| {accuracy:.0%} | {' | '.join(f'{ddp:.1f}, {alone:.1f}' for ddp, alone in pairs)} |"
        yield ""


def _times_as_long(figures: list[dict[str, Any]], accuracy: float, rival: str = "ddp") -> list[float]:
    """Seconds of a rival over those of the pipeline until a validation reaches an accuracy, by seed."""
    return [
        _seconds_to(each[rival]["curve"], accuracy) / _seconds_to(each["pipeline"]["curve"], accuracy)
        for each in figures
    ]


def _seconds_to(curve: list[tuple[float, float]], accuracy: float) -> float:
    return next(at_s for at_s, reached in curve if reached >= accuracy)


def plot(figures: list[dict[str, Any]]) -> Figure:
    """Draw the accuracy over seconds, a line for each seed, and the target."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4), layout="constrained")
    axes = picture.subplots()
    ways = (
        ("pipeline", "pipeline on two workers", "tab:blue"),
        ("alone", "one worker", "tab:gray"),
        ("ddp", "DistributedDataParallel on two workers", "tab:orange"),
    )
    for way, label, color in ways:
        for each in figures:
            seconds, accuracies = zip(*each[way]["curve"], strict=True)
            axes.plot(seconds, accuracies, "o-", markersize=3, color=color, label=label if each is figures[0] else None)
    axes.axhline(figures[0]["target"], color="gray", linestyle=":")
    axes.set(xlabel="seconds of training", ylabel="accuracy", title=f"MNIST, links of {BANDWIDTH}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    return picture
