"""Train a task in one process as a method's workers would: by the replays of tests/reference, validated after an epoch.

The replays share no code with pdtool's runs, and are several times cheaper; learning_runs.py compares both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from reference import delay_corrections, replay
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from pdtool.artifacts.artifact import ModelRef
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.random_numbers import derive_seed
from pdtool.options.target import Target
from pdtool.runtime.loading.minibatches import sample_order
from reproduction.learning_tasks import Method, Task

_VALIDATION_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task to be learned.

    Attributes:
        stage_of: stage of each module that has parameters; empty: all in one.
        in_flight: minibatches in flight at each stage; empty: PipeDream's numbers.
        rate_factor: of the learning rate that the task has.
    """

    task: Task
    method: Method
    seed: int
    stage_of: dict[str, int] = field(default_factory=dict)
    in_flight: tuple[int, ...] = ()
    rate_factor: float = 1.0


def train(case: Case) -> dict[str, Any]:
    """Train until the target is reached, at most the task's epochs.

    Returns:
        `epochs` and `updates` until then (None where it was not reached), `curve` (the metric after each epoch),
        `losses` (mean of each epoch) and `diverged`.
    """
    return Training(case).run()


@dataclass
class Training:
    """The training of one case.

    Attributes:
        losses: of each epoch, each minibatch's mean and its number of samples.
        metrics: of the validation after each epoch.
    """

    case: Case
    losses: list[list[tuple[float, int]]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        task = self.case.task
        self._file = ModelFile.load(ModelRef(source=str(task.source), settings=task.keyword_settings), trusted=True)
        self._model = self._file.build(self.case.seed)
        self._size = task.batch_size // self.case.method.microbatches
        self._target = Target.parse(task.target)
        replicas = self.case.method.microbatches if self.case.method.strategy == "data-parallel" else 1
        self._statistics = ReplicaStatistics(self._model, replicas)
        self._model.register_forward_pre_hook(_unpacked)
        for path, module in self._model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_pre_hook(lambda *_, path=path: self._seed(path))

    def run(self) -> dict[str, Any]:
        """Train; see `train`."""
        try:
            self._replay()
            diverged = False
        except FloatingPointError:
            diverged = True
        reached = len(self.metrics) if self.metrics and self._target.is_reached(self.metrics[-1]) else None
        per_epoch = math.ceil(len(self.losses[0]) / self.case.method.microbatches)
        return {
            "epochs": reached,
            "updates": reached and reached * per_epoch,
            "curve": [metrics[self.case.task.metric] for metrics in self.metrics],
            "losses": [sum(loss * n for loss, n in epoch) / sum(n for _, n in epoch) for epoch in self.losses],
            "diverged": diverged,
        }

    def _replay(self) -> None:
        method, stages = self.case.method, 1 + max(self.case.stage_of.values(), default=0)
        if method.correction:
            stage = {name: self._stage(name) for name, _ in self._model.named_parameters()}
            arguments = (self._epochs(), self._loss, self._optimizer, method.correction, None)
            delay_corrections.straight(self._model, stage, *arguments)
            return
        usual = range(stages, 0, -1) if self.case.stage_of else [method.in_flight]
        every = [method.microbatches] * stages
        pipeline = replay.Pipeline([1] * stages, self.case.in_flight or usual, every, method.weights)
        replay.asynchronous(self._model, self._stage, self._epochs(), self._loss, self._optimizer, pipeline)

    def _stage(self, parameter: str) -> int:
        return self.case.stage_of.get(parameter.rpartition(".")[0], 0)

    def _epochs(self) -> Iterator[list[tuple[Any, Tensor]]]:
        """Yield the minibatches of one epoch after another, and validate in between."""
        inputs, target = _split(self.case.task, "train")
        for epoch in range(1, self.case.task.max_epochs + 1):
            order = torch.tensor(list(sample_order(self.case.seed, epoch, len(target))))
            self.losses.append([])
            yield [(tree_map(lambda t, rows=rows: t[rows], inputs), target[rows]) for rows in order.split(self._size)]
            self._statistics.average()
            self.metrics.append(self._validate())
            if self._target.is_reached(self.metrics[-1]):
                return

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        value = self._file.loss(output, target)
        self.losses[-1].append((value.item(), len(target)))
        if not math.isfinite(value.item()):
            raise FloatingPointError(f"the loss is {value.item()}")
        return value

    def _optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        unused = ("unused", nn.Parameter(torch.zeros(())))  # for a stage without parameters
        optimizer = self._file.optimizer(list(named_parameters) or [unused])
        for group in optimizer.param_groups:
            group["lr"] *= self.case.rate_factor
        return optimizer

    def _seed(self, path: str) -> None:
        """Seed a random operator as every plan does: by epoch, minibatch and name."""
        epoch, minibatch = len(self.losses), len(self.losses[-1])
        torch.default_generator.manual_seed(derive_seed(self.case.seed, "train", epoch, minibatch, path))

    def _validate(self) -> dict[str, float]:
        inputs, target = _split(self.case.task, "valid")
        totals: dict[str, tuple[Any, float]] = {}
        self._model.eval()
        with torch.no_grad():
            for rows in torch.arange(len(target)).split(_VALIDATION_SIZE):
                output = self._model(tree_map(lambda t, rows=rows: t[rows], inputs))
                for name, (value, count) in self._file.metrics(output, target[rows]).items():
                    total, samples = totals.get(name, (0.0, 0.0))
                    totals[name] = (total + value, samples + count)
        self._model.train()
        return self._file.summarize_metrics(totals)


class ReplicaStatistics:
    """Running statistics as data-parallel replicas keep them, each of its own minibatches; averaged after an epoch.

    Args:
        model: computes the minibatches of all replicas, which take turns.
    """

    def __init__(self, model: nn.Module, replicas: int) -> None:
        self._buffers = dict(model.named_buffers())
        self._of_replica = [self._copy() for _ in range(replicas)]
        self._model, self._minibatches = model, 0
        if replicas > 1:
            model.register_forward_pre_hook(lambda *_: self._begin())
            model.register_forward_hook(lambda *_: self._end())

    def average(self) -> None:
        """Let all replicas have the mean, weighted by the minibatches that each saw."""
        counts = [len(range(r, self._minibatches, len(self._of_replica))) for r in range(len(self._of_replica))]
        if len(counts) > 1:
            for name, buffer in self._buffers.items():
                if buffer.is_floating_point():
                    pairs = zip(counts, self._of_replica, strict=True)
                    buffer.copy_(sum(n * own[name] for n, own in pairs) / sum(counts))
            self._of_replica = [self._copy() for _ in counts]
            self._minibatches = 0

    def _copy(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def _begin(self) -> None:
        if self._model.training:
            for name, value in self._of_replica[self._minibatches % len(self._of_replica)].items():
                self._buffers[name].copy_(value)

    def _end(self) -> None:
        if self._model.training:
            self._of_replica[self._minibatches % len(self._of_replica)] = self._copy()
            self._minibatches += 1


def _unpacked(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let a model of several inputs, which the replays give it as one, have them one by one."""
    [inputs] = arguments
    return inputs if isinstance(inputs, tuple) else arguments


@cache
def _split(task: Task, split: str) -> tuple[Any, Tensor]:
    """Return all inputs and targets of a split of the data, [samples, ...] each; read once in a process."""
    file = ModelFile.load(ModelRef(source=str(task.source), settings=task.keyword_settings), trusted=True)
    data = file.dataset(split)
    inputs, target = default_collate([data[i] for i in range(len(data))])
    return tuple(inputs) if isinstance(inputs, list) else inputs, target
