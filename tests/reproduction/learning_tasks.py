"""What is learned, and in which ways: the tasks and the training methods that are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from reproduction.results import Results

WORKERS = 4
_PLANNING = Lock()  # one plan at a time: others may want the same
_ZOO = Path(__file__).parents[2] / "pdtool" / "zoo"
_MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its data, with what is to be reached.

    Attributes:
        words: what is learned, for a table.
        source: model.py.
        settings: of --set.
        batch_size: samples in an update, a multiple of WORKERS.
        target: of --target.
        max_epochs: when a run is given up.
        has_batch_norm: whether data-parallel replicas differ, each with running statistics of its own.
    """

    words: str
    source: Path
    settings: tuple[str, ...] = ()
    batch_size: int = 32
    target: str
    max_epochs: int
    has_batch_norm: bool = False

    @property
    def keyword_settings(self) -> dict[str, str | int]:
        """The settings as model() takes them."""
        pairs = (setting.split("=") for setting in self.settings)
        return {name: int(value) if value.isdigit() else value for name, value in pairs}

    @property
    def metric(self) -> str:
        """Name of the metric that the target is for."""
        return self.target.rstrip("0123456789.").rstrip("<>=")


TASKS = {
    "digits": Task(
        words="scikit-learn's digits, a residual network of 6 convolutions with batch norm",
        source=_ZOO / "digits.py",
        settings=("width=16",),
        target="accuracy>=0.98",
        max_epochs=12,
        has_batch_norm=True,
    ),
    "mnist": Task(
        words="MNIST-5k at half its size, a small VGG",
        source=_MODELS / "small_vgg.py",
        target="accuracy>=0.95",
        max_epochs=12,
    ),
    "text": Task(
        words="60,000 characters of the King James Bible, 3 LSTMs",
        source=_MODELS / "bible_characters.py",
        batch_size=64,
        target="perplexity<=7",
        max_epochs=12,
    ),
    "translation": Task(
        words="number words, English to German (generated), GNMT with 4 LSTMs",
        source=_MODELS / "number_words.py",
        target="exact>=0.9",
        max_epochs=12,
    ),
    "captions": Task(
        words="captions of moving digits (generated), S2VT",
        source=_MODELS / "moving_digits.py",
        target="exact>=0.5",
        max_epochs=16,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train with several workers, or with one process.

    Attributes:
        label: in tables.
        strategy: of `pdtool partition`.
        workers: of the plan.
        microbatches: parts of an update's samples that go through the model one by one, or on different replicas.
        weights: the policy of weight versions, as the replay knows it.
        in_flight: minibatches in flight where there is one stage, or where an update waits for all of its samples.
        correction: of `pdtool run`.
        run_options: the others of `pdtool run`.
    """

    label: str
    strategy: str = "straight"
    workers: int = WORKERS
    microbatches: int = 1
    weights: str = "stash"
    in_flight: int = 1
    correction: str = ""
    run_options: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """All options of `pdtool run`."""
        return (*self.run_options, *(("--correction", self.correction) if self.correction else ()))

    @property
    def waits(self) -> bool:
        """Whether all samples of an update are computed with the newest weights."""
        return self.in_flight == 1 and (self.strategy != "straight" or "1f1b-flush" in self.run_options)


METHODS = {
    "one-process": Method(label="one process", strategy="data-parallel", workers=1),
    "data-parallel": Method(label="data parallelism", strategy="data-parallel", microbatches=WORKERS),
    "stash": Method(label="1F1B with weight stashing"),
    "vertical-sync": Method(
        label="1F1B with vertical sync", weights="vertical-sync", run_options=("--weights", "vertical-sync")
    ),
    "2bw": Method(label="2BW", microbatches=WORKERS, weights="2bw", run_options=("--schedule", "2bw")),
    "flush": Method(
        label="1F1B with flush",
        microbatches=WORKERS,
        run_options=("--schedule", "1f1b-flush", "--microbatches", str(WORKERS)),
    ),
    "no-stashing": Method(label="1F1B without stashing", weights="none", run_options=("--weights", "none")),
    "async-data-parallel": Method(
        label="asynchronous data parallelism", strategy="async-data-parallel", in_flight=WORKERS
    ),
    "lr-discount": Method(label="stashing, lr-discount", correction="lr-discount"),
    "weight-prediction": Method(label="stashing, weight-prediction", correction="weight-prediction"),
    "nesterov": Method(label="stashing, nesterov", correction="nesterov"),
}
ONE_UPDATE_LATE = Method(label="one update late", strategy="async-data-parallel", workers=2, in_flight=2)
CORRECTIONS = tuple(name for name, method in METHODS.items() if method.correction)


def replayed_as(task: Task, method: str) -> str:
    """Return the method that trains a task to the same weights, but for rounding, with the least work.

    Vertical sync and asynchronous data parallelism apply each gradient WORKERS - 1 updates late, whatever the stage.
    Without batch norm it makes no difference in how many parts an update's samples go through the model.
    """
    if method == "async-data-parallel":
        return "vertical-sync"
    if task.has_batch_norm:
        return method
    return {"data-parallel": "one-process", "flush": "one-process", "2bw": "one-update-late"}.get(method, method)


def in_flight_of_stages(first: int, stages: int) -> tuple[int, ...]:
    """Return the minibatches in flight at each stage of a straight pipeline, evenly fewer down to 1 at the last.

    With as many as stages these are PipeDream's numbers; the planner takes more, in this proportion, to hide messages.
    """
    return (*(math.ceil(first * (stages - s) / stages) for s in range(stages - 1)), 1)


def plan_of(results: Results, name: str, method: Method, workers: int = 0) -> str:
    """Return the path of the plan that a method trains a task with, made unless it is there.

    Costs are estimated, so that the cuts are the same on every machine, and links are so fast that no stage has more
    minibatches in flight than PipeDream's number.

    Args:
        name: of the task.
        workers: other than the method's.
    """
    task, workers = TASKS[name], workers or method.workers
    batch_size = task.batch_size // method.microbatches
    profile = f"profiles/learning-{name}-{batch_size}.json"
    if not (results.work / profile).exists():
        settings = [option for setting in task.settings for option in ("--set", setting)]
        asked = ("--device", "v100", "--batch-size", str(batch_size), *settings)
        results.pdtool("profile", str(task.source), *asked, "-o", profile)
    plan_name = f"learning-{name}-{batch_size}-{method.strategy}-{workers}"
    return results.plan(profile, str(workers), "1000GB/s", "--strategy", method.strategy, name=plan_name)


def stage_of_modules(results: Results, name: str, method: Method, workers: int = 0) -> dict[str, int]:
    """Return the stage of each module that has parameters, by its path; {} where it makes no difference.

    Args:
        name, method, workers: see `plan_of`.
    """
    if method.strategy != "straight" or method.waits:
        return {}
    with _PLANNING:
        plan = Plan.load(results.work / plan_of(results, name, method, workers))
    profile = Profile.load(results.work / plan.profile)
    modules = {node.name: node.module for node in profile.nodes if node.parameter_bytes}
    stages = enumerate(plan.stage_nodes(profile))
    return {modules[node]: s for s, nodes in stages for node in nodes if node in modules}
