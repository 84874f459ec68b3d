"""One worker at work: executes its action list, epoch by epoch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pdtool import schedule
from pdtool.artifacts.chrome_trace import chrome_trace
from pdtool.artifacts.envelope import write_atomically
from pdtool.artifacts.report import Report
from pdtool.errors import PdtoolError
from pdtool.run import checkpoint
from pdtool.run.data import Minibatches, sample_order, seed_torch
from pdtool.run.log import Log
from pdtool.run.pace import Pace
from pdtool.run.part import Part
from pdtool.run.peers import gather
from pdtool.run.report import Share, assemble
from pdtool.run.setup import Setup
from pdtool.run.spec import seed_of
from pdtool.schedule import Action, ActionKind


class Worker:
    """A replica of a stage, or of several, at work.

    Attributes:
        metrics: of the last validation.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.spec, self.place = setup, setup.spec, setup.place
        self.parts, self.meter = setup.parts, setup.meter
        self.metrics: dict[str, float] = {}
        self.log: Log | None = None
        self.pace = Pace()

    def train(self, epoch: int, minibatches: Minibatches) -> None:
        """Execute this worker's action list: 1F1B as in PipeDream, figure 8. The pipeline is empty before and after."""
        actions, reads = self._actions(len(minibatches))
        self._open("train", epoch, minibatches, actions, reads)
        for action, after in zip(actions, [*actions[1:], None], strict=True):
            i, part = action.minibatch, self.parts[action.stage]
            self.setup.status.at(f"{action} of epoch {epoch}")
            with self.meter.doing(action):
                part.catch_up()
                match action.kind:
                    case ActionKind.FORWARD:
                        inputs, target = part.border.inputs(i)
                        self._seed(epoch, action)
                        outputs = part.stage.forward(i, inputs, target)
                        part.border.send_outputs(i, outputs)
                        if part is self.setup.last:
                            part.losses[i] = outputs[0].detach()
                            self.pace.note(i)
                    case ActionKind.BACKWARD:
                        gradients = part.stage.backward(
                            i, part.border.gradients(i), minibatches.weight(i), _final(part, after)
                        )
                        part.border.send_gradients(i, gradients)
                    case ActionKind.BACKWARD_INPUT:
                        part.border.send_gradients(i, part.stage.backward_input(i, part.border.gradients(i)))
                    case ActionKind.BACKWARD_WEIGHT:
                        part.stage.backward_weight(i, minibatches.weight(i), _final(part, after))
                    case ActionKind.UPDATE:
                        self._log_update(epoch, part, part.update(epoch))
                if action.kind.completes_backward:
                    part.count(i, minibatches.weight(i))
        for part in self.parts.values():
            part.settle(len(minibatches))
        self.meter.settle()

    def validate(self, epoch: int, most: int | None = None) -> dict[str, float]:
        """Forward only, with the current weights, in evaluation mode; every worker gets the means of all samples, or of
        the first `most`."""
        split = self.setup.splits["valid"]
        minibatches = Minibatches(range(split.samples)[:most], self.spec.plan.batch_size)
        actions = [action for action in self._actions(len(minibatches))[0] if action.kind is ActionKind.FORWARD]
        self._open("valid", epoch, minibatches, actions, {})
        sums: dict[str, tuple[float, float]] = {}
        for part in self.parts.values():
            part.stage.module.eval()
        with torch.no_grad():
            for action in actions:
                self.setup.status.at(f"{action} of the validation after epoch {epoch}")
                part = self.parts[action.stage]
                inputs, target = part.border.inputs(action.minibatch)
                outputs = part.stage.evaluate(inputs)
                part.border.send_outputs(action.minibatch, outputs)
                if part is self.setup.last:
                    self._add_metrics(sums, outputs[0], target, minibatches.samples(action.minibatch))
        for part in self.parts.values():
            part.border.close()
            part.stage.module.train()
        means = self._means(sums)
        for name, value in means.items():
            if not math.isfinite(value):
                raise PdtoolError(
                    f"the validation after epoch {epoch} gives {name} {value}", "try a lower learning rate"
                )
        return means

    def run(self) -> Report:
        """All epochs that are left, then the report; each epoch ends with a validation and a checkpoint."""
        done = self._resume()
        if self.setup.last and self.setup.leads:
            self.log = Log(self.spec.out, done=done)
        samples = self.setup.splits["train"].samples
        size = self.spec.plan.batch_size
        count = min(samples, self.spec.steps * size) if self.spec.steps else samples
        if self.spec.target and not done:  # a metric that there is not is better missed now than after an epoch
            self.spec.target.reached(self.validate(0, size))
        reached = self._reached() if done else None
        self.meter.restart()
        self.meter.memory.start(part.stage.module for part in self.parts.values())
        for epoch in range(done + 1, done + 1 if reached else self.spec.epochs + 1):
            minibatches = Minibatches(sample_order(self.spec.seed, epoch, samples)[:count], size)
            start = time.perf_counter()
            self.train(epoch, minibatches)
            self.pace.add(len(minibatches), count, time.perf_counter() - start)
            with self.meter.paused():
                self.metrics = self.validate(epoch)
            self._save(epoch)
            done = epoch
            reached = self._reached()
            if reached:
                break
            if epoch < self.spec.epochs and self.pace.epochs == 1:  # the first epoch was for warming up
                self.pace.restart()
                self.meter.restart()
        return self._report(done, -(-count // size), reached)

    def _actions(self, minibatches: int) -> tuple[list[Action], schedule.ForwardVersions]:
        """This worker's list, the one of its stages and replica, and which weights its forwards read."""
        lists = schedule.build(self.spec.plan.schedule, self.setup.shape, minibatches)
        mine = list(self.setup.shape.stage_replicas()).index((self.place.stage, self.place.replica))
        return lists[mine], schedule.forward_versions(lists, self.setup.shape.weights)[mine]

    def _open(
        self,
        split: str,
        epoch: int,
        minibatches: Minibatches,
        actions: Sequence[Action],
        reads: schedule.ForwardVersions,
    ) -> None:
        loaders = {0: self.setup.loaders.get(split)}
        for s, part in self.parts.items():
            own = [action for action in actions if action.stage == s]
            part.stage.weights.open({i: version for (stage, i), version in reads.items() if stage == s})
            part.border.open(
                self.setup.splits[split],
                loaders.get(s),
                minibatches,
                (self.spec.seed, split, epoch),
                [a.minibatch for a in own if a.kind is ActionKind.FORWARD],
                [a.minibatch for a in own if a.kind.sends_gradients],
            )

    def _seed(self, epoch: int, action: Action) -> None:
        """Fix the random numbers (dropout) of one forward: resuming and other workers make no difference."""
        seed_torch(seed_of(self.spec.seed, epoch, action.stage, action.minibatch), self.setup.device)

    def _log_update(self, epoch: int, part: Part, loss: float) -> None:
        if self.log and part is self.setup.last:
            self.log.write({"split": "train", "epoch": epoch, "step": part.updater.updates, "loss": loss})

    def _add_metrics(self, sums: dict[str, tuple[float, float]], output: Any, target: Any, samples: int) -> None:
        found = {"loss": (float(self.setup.file.loss(output, target)) * samples, float(samples))}
        found |= self.setup.file.metrics(output, target)
        for name, (total, count) in found.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)

    def _means(self, sums: dict[str, tuple[float, float]]) -> dict[str, float]:
        """Over the workers of the last stage, in order, so that everyone computes the same numbers."""
        gathered = gather(sums, self.setup.groups.world, "the validation metrics")
        names = dict.fromkeys(name for part in gathered for name in part)
        totals = {n: [sum(part[n][k] for part in gathered if n in part) for k in (0, 1)] for n in names}
        return {name: total / count if count else 0.0 for name, (total, count) in totals.items()}

    def _reached(self) -> bool | None:
        """Whether the last validation reached the target; None without one."""
        return self.spec.target.reached(self.metrics) if self.spec.target else None

    def _resume(self) -> int:
        """Take over the checkpoint to resume from; returns the epochs done."""
        if self.spec.resume is None:
            return 0
        folder = checkpoint.latest(self.spec.resume)
        known = checkpoint.facts(folder)
        self.setup.load(folder)
        self.metrics = {name: float(value) for name, value in known["metrics"].items()}
        return int(known["epoch"])

    def _save(self, epoch: int) -> None:
        if self.log:  # first: should the run end in between, the epoch is done again and its lines are dropped
            steps = self.setup.last.updater.updates if self.setup.last else 0
            self.log.write({"split": "valid", "epoch": epoch, "step": steps} | self.metrics)
        self.setup.status.at(f"the checkpoint of epoch {epoch}")
        facts = {"seed": self.spec.seed, "metrics": self.metrics}
        checkpoint.save(self.spec.out, epoch, self.setup.state(), facts, self.setup.groups.world)

    def _report(self, epochs: int, minibatches: int, reached: bool | None) -> Report:
        """Gather everyone's measurements; rank 0 writes report.json and trace.json."""
        pace = self.pace
        share = Share(
            stage=self.place.stage,
            totals=self.meter.totals,
            minibatches=pace.minibatches,
            samples=pace.samples,
            train_s=pace.train_s,
            pace_s=pace.pace_s,
            peak_versions=max(part.stage.weights.peak_versions for part in self.parts.values()),
            peak_stashed=max(part.stage.peak_stashed for part in self.parts.values()),
            peak_memory_bytes=self.meter.memory.peak_bytes,
        )
        gathered = gather((str(self.place), share, self.meter.events), self.setup.groups.world, "measurements")
        report = assemble(
            self.spec,
            [share for _, share, _ in gathered],
            epochs=epochs,
            minibatches=minibatches,
            metrics=self.metrics,
            reached=reached,
        )
        if self.place.rank == 0:
            trace = chrome_trace({name: events for name, _, events in gathered})
            write_atomically(self.spec.out / "trace.json", json.dumps(trace))
            report.save(self.spec.out / "report.json")
        if self.log:
            self.log.close()
        return report


def _final(part: Part, after: Action | None) -> Callable[[nn.Parameter], None] | None:
    """In the last backward of a round, gradients go to the other replicas as they come."""
    ends = after is not None and after.kind is ActionKind.UPDATE
    return part.replicas.final if ends and part.replicas.group else None
