"""A worker executes its actions, epoch by epoch (1F1B as in PipeDream, SOSP'19, figure 8).

How minibatch i passes through stage s, at the replica that computes it. The numbers mark these steps in the code below
and in stage/stage_replica.py:

        stage s - 1                    stage s, this worker                        stage s + 1

    activations of i ────────▶ (1) receive the inputs
                               (2) forward, with the weight version that i reads
                               (3) send the outputs ──────────────────────────▶ activations of i
                                        ·
                                        ·  other minibatches, and updates
                                        ·
                               (4) receive the gradients of the outputs ◀────── gradients of i
                               (5) backward, with the same weight version
      gradients of i ◀──────── (6) send the gradients of the inputs
                                        ·
                                        ·  until the round is complete: the minibatches of an update
                                        ·
                               (7) average the gradients over the replicas of the stage
                               (8) update: the optimizer steps to a new weight version

Averaging (7) begins in the last backward of a round. Zero-bubble schedules split (5): the gradients of the inputs are
sent before those of the parameters are computed. The first stage loads in (1), the last one computes the loss in (2).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from pdtool.artifacts.chrome_trace import MESSAGE_TRACKS, chrome_trace
from pdtool.artifacts.metrics import MetricsLog, UpdateLine, ValidationLine, unix_time
from pdtool.artifacts.report import Report
from pdtool.artifacts.run_dir import CheckpointManifest, RunDir
from pdtool.errors import PdtoolError
from pdtool.files import write_atomically
from pdtool.host import usable_cores
from pdtool.runtime.config import RunConfig
from pdtool.runtime.groups import ProcessGroups, all_gather
from pdtool.runtime.loading.minibatches import DataPass, Minibatches, TrainingData
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.ranks import RankAssignment
from pdtool.runtime.stage.losses import MetricTotals, RoundLoss
from pdtool.runtime.stage.stage_replica import StageReplica
from pdtool.runtime.status import Status
from pdtool.runtime.worker import checkpoint
from pdtool.runtime.worker.run_report import Progress, WorkerMeasurements, assemble_report
from pdtool.schedule import ActionKind, WorkerActions, steady_minibatches


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a worker among the others.

    Attributes:
        device: where it computes.
        local_workers: number of workers on this machine.
    """

    assignment: RankAssignment
    device: torch.device
    local_workers: int
    groups: ProcessGroups
    meter: WorkerMeter

    @property
    def is_replica_0(self) -> bool:
        """Whether this worker writes the checkpoints and metrics of its stages."""
        return self.assignment.replica == 0


class Worker:
    """Trains its stages, validates, and saves checkpoints, together with the other workers.

    Args:
        stages: its replicas of stages, by stage number.
        progress: progress of the run that it resumes, whose checkpoint the stages have loaded.
        tied: any further name of a tied parameter or buffer -> its first name in the model.

    Attributes:
        peak_stashed: most graphs of its stages that were ever alive together.
    """

    def __init__(
        self,
        config: RunConfig,
        place: Place,
        data: TrainingData,
        stages: Mapping[int, StageReplica],
        progress: Progress,
        tied: Mapping[str, str],
    ) -> None:
        self._config, self._place, self._data, self._tied = config, place, data, tied
        self.stages, self.progress = stages, progress
        self._shape = config.shape
        self._of_last_stage = stages.get(len(self._shape.replicas) - 1)  # None: this worker does not have that stage
        self._log: MetricsLog | None = None
        self.peak_stashed = 0

    def train(self, epoch: int, minibatches: Minibatches) -> None:
        """Train one epoch; the pipeline is empty before and after."""
        meter, status, stages = self._place.meter, Status.of_this_process, self.stages
        stashes = [replica.stage.stashed for replica in stages.values()]
        actions = self._actions(len(minibatches))
        self._begin_phase(self._data.data_pass("train", epoch, minibatches), actions)
        steady = steady_minibatches(len(minibatches), self._shape)
        # N intervals lie between N + 1 losses, so the time begins with the loss before the steady state
        meter.epoch_begins(range(steady.start - 1, steady.stop) if steady else range(0))
        for action, following in pairwise(chain(actions[self._position], [None])):
            assert action  # only the last `following` is None
            status.set(f"{action} of epoch {epoch}")
            with meter.action(action):
                replica = stages[action.stage]
                match action.kind:
                    case ActionKind.FORWARD:
                        replica.forward(action.minibatch)  # (1) to (3)
                        self.peak_stashed = max(self.peak_stashed, sum(map(len, stashes)))
                    case ActionKind.UPDATE:
                        self._log_loss(epoch, replica.update(epoch))  # (7), (8)
                    case kind:
                        replica.backward(action.minibatch, kind, ends_round=action.ends_round(following))  # (4) to (6)
            self._stay_within_limit()
        for replica in stages.values():
            self._log_loss(epoch, replica.end_phase())
        meter.synchronize()

    def validate(self, epoch: int, max_samples: int | None = None) -> dict[str, float]:
        """Compute loss and metrics with the current weights, in evaluation mode.

        Args:
            max_samples: validate with the first samples only.

        Returns:
            The figures over all samples, on every worker.

        Raises:
            PdtoolError: one of them is not a number.
        """
        samples = self._data.splits["valid"].samples or 0
        minibatches = Minibatches(range(samples)[:max_samples], self._config.plan.batch_size)
        actions = self._actions(len(minibatches))
        self._begin_phase(self._data.data_pass("valid", epoch, minibatches), actions)
        totals = MetricTotals(self._data.file)
        with torch.no_grad():
            for action in (each for each in actions[self._position] if each.kind is ActionKind.FORWARD):
                Status.of_this_process.set(f"{action} of the validation after epoch {epoch}")
                self.stages[action.stage].evaluate(action.minibatch, totals)  # (1) to (3)
                self._stay_within_limit()
        for replica in self.stages.values():
            replica.end_phase()
        where = f"the validation after epoch {epoch}"
        figures = totals.summarize(self._place.groups.world, where)
        undefined = self.progress.undefined = totals.undefined
        if undefined and self._log and not self._data.file.has("summarize_metrics"):  # which may do without
            named = ", ".join(sorted(undefined))
            sys.stderr.write(f"warning: {where} gives no {named}: metrics() returned a total count of 0\n")
        return figures

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        """Before training, restore at the end the buffers of the stages, and what the user's functions keep."""
        owners = [m._buffers for replica in self.stages.values() for m in replica.stage.module.modules()]
        values = [{name: (b, b.clone()) for name, b in owner.items() if b is not None} for owner in owners]
        with ExitStack() as opened:
            for replica in self.stages.values():
                opened.enter_context(replica.kept.restored())
            yield
        with torch.no_grad():
            for owner, before in zip(owners, values, strict=True):
                for name, (buffer, value) in before.items():
                    owner[name] = buffer.copy_(value)

    def run(self) -> Report:
        """Train the epochs that are left, each followed by a validation and a checkpoint; return the report."""
        if not self._of_last_stage or not self._place.is_replica_0:
            return self._run()
        path, done = RunDir(self._config.out).metrics_file, len(self.progress.samples)
        with closing(MetricsLog(path, epochs_done=done)) as self._log:
            self._record_updates()
            return self._run()

    def _run(self) -> Report:
        config, meter, progress = self._config, self._place.meter, self.progress
        resumed = done = len(progress.samples)
        if config.target and not done:  # if the model does not report the metric, fail now, not after an epoch
            with self._state_restored():
                figures = self.validate(0, config.plan.batch_size)
            config.target.is_reached(figures, progress.undefined)
            if self._log and (doubt := config.target.doubt(figures)):
                sys.stderr.write(f"warning: {doubt}\n")
        meter.restart()
        meter.memory.start(replica.stage.module for replica in self.stages.values())
        while done < config.epochs and not self._is_target_reached():
            if done == resumed + 1:  # the first epoch was for warming up
                meter.restart()
            done += 1
            self._train_epoch(done)
            self._save(done)
        return self._report(resumed)

    def _train_epoch(self, epoch: int) -> None:
        """Train an epoch, validate, and step learning-rate schedules of epochs."""
        meter, progress, samples = self._place.meter, self.progress, self._data.epoch_samples
        Status.of_this_process.set(f"the start of epoch {epoch}")  # of a sampler() that fails or does not return
        order = self._data.order_of_epoch(epoch, sum(progress.samples))
        minibatches = Minibatches(order, self._config.plan.batch_size)
        start_s = time.perf_counter()
        if self._log:
            self._log.epoch_begins()
        self.train(epoch, minibatches)
        meter.epoch_ended(len(minibatches), samples, time.perf_counter() - start_s)
        with meter.paused():
            progress.metrics = self.validate(epoch)
        progress.minibatches.append(len(minibatches))
        progress.samples.append(samples)
        progress.validation_losses.append(progress.metrics["loss"])
        for replica in self.stages.values():
            replica.epoch_done(progress.metrics["loss"])

    def _stay_within_limit(self) -> None:
        if news := self._place.meter.memory.stay_within_limit():
            sys.stderr.write(f"note: {self._place.assignment} {news}\n")

    def _record_updates(self) -> None:
        """Write the updates and samples of an epoch to run.json, to show how far the run is."""
        updates = math.ceil(self._data.epoch_minibatches / self._shape.update_every[max(self.stages)])
        before = self._of_last_stage.optimizer.updates if self._of_last_stage else 0
        samples = self._data.epoch_samples
        RunDir(self._config.out).update_state(updates=updates, samples=samples, updates_before=before)

    def _actions(self, minibatches: int) -> list[WorkerActions]:
        """The actions of all workers for a number of minibatches, made lazily."""
        return self._config.plan.kind.worker_actions(self._shape, minibatches)

    def _begin_phase(self, data: DataPass, actions: Sequence[WorkerActions]) -> None:
        """Begin an epoch of training, or a validation. In a validation, all forwards see the newest weights."""
        weights, count = self._shape.weights, len(data.minibatches)
        for stage, replica in self.stages.items():
            reads = None
            if data.split_name == "train" and not weights.reads_newest:
                versions = weights.reads(actions, self._position, self._shape.replicas, self._shape.update_every)
                reads = (version for (of_stage, _), version in versions if of_stage == stage)
            own = range(self._place.assignment.replica, count, self._shape.replicas[stage])
            replica.begin_phase(data, own, reads)

    @property
    def _position(self) -> int:
        """The position of this worker's list among those of the schedule."""
        assignment = self._place.assignment
        return list(self._shape.stage_replicas()).index((assignment.stage, assignment.replica))

    def _log_loss(self, epoch: int, loss: RoundLoss | None) -> None:
        if self._log and loss:
            samples = round(loss.weight * self._config.plan.batch_size)
            self._log.add(
                UpdateLine(
                    epoch=epoch,
                    step=loss.step,
                    samples=samples,
                    loss=loss.total / loss.weight,
                    time=unix_time(),
                    lr=loss.lr,
                    samples_per_s=self._log.rate(samples),
                )
            )

    def _is_target_reached(self) -> bool:
        target, progress = self._config.target, self.progress
        return bool(target and progress.metrics and target.is_reached(progress.metrics, progress.undefined))

    def _save(self, epoch: int) -> None:
        progress = self.progress
        # First the line: if the run ends in between, the epoch is trained again and its lines are dropped.
        if self._log and self._of_last_stage:
            step = self._of_last_stage.optimizer.updates
            metrics = {name: value for name, value in progress.metrics.items() if name != "loss"}
            loss = progress.metrics["loss"]
            self._log.add(ValidationLine(epoch=epoch, step=step, time=unix_time(), loss=loss, metrics=metrics))
        Status.of_this_process.set(f"the checkpoint of epoch {epoch}")
        manifest = CheckpointManifest(
            epoch=epoch,
            epochs=self._config.epochs,
            seed=self._config.seed,
            metrics=dict(progress.metrics),
            validation_losses=tuple(progress.validation_losses),
            minibatches=tuple(progress.minibatches),
            samples=tuple(progress.samples),
            tied=dict(self._tied),
            files={},
        )
        stages = self.stages if self._place.is_replica_0 else {}
        components = {stage: replica.saved_components for stage, replica in stages.items()}
        checkpoint.save(self._config.out, manifest, components, self._place.groups.world)

    def _report(self, resumed_after: int) -> Report:
        """Gather the measurements of all workers; rank 0 writes report.json and trace.json."""
        place, progress, is_on_gpu = self._place, self.progress, self._place.device.type == "cuda"
        stages, meter = [replica.stage for replica in self.stages.values()], place.meter
        measured = WorkerMeasurements(
            name=str(place.assignment),
            stage=place.assignment.stage,
            totals=meter.totals,
            epochs=meter.epochs,
            peak_versions=max(stage.weights.peak_versions for stage in stages),
            peak_stashed=self.peak_stashed,
            events=meter.events,
            peak_memory_bytes=meter.memory.peak_bytes,
            peak_reserved_bytes=meter.memory.peak_reserved_bytes,
            cores=frozenset() if is_on_gpu else usable_cores(),
            loader_workers=self._data.loader_workers,
        )
        workers = all_gather(measured, WorkerMeasurements, place.groups.world, "the measurements")
        report = assemble_report(
            self._config,
            workers,
            progress,
            minibatches=self._data.epoch_minibatches,
            local_workers=place.local_workers,
            resumed_after=resumed_after,
        )
        if place.assignment.rank == 0:
            events_of = {worker.name: worker.events for worker in workers}
            trace = chrome_trace(events_of, host_tracks=MESSAGE_TRACKS if is_on_gpu else ())
            run_dir = RunDir(self._config.out)
            try:
                write_atomically(run_dir.trace_file, json.dumps(trace))
            except PdtoolError as fault:  # the run is done without it
                sys.stderr.write(f"warning: {fault}\n")
            report.save(run_dir.report_file)
        return report
