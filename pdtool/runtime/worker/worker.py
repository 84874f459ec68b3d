"""A worker executes its list of actions, epoch by epoch (1F1B as in PipeDream, SOSP'19, figure 8).

The way of minibatch i through stage s, at the replica that computes it; the numbers stand in the code below:

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
                                        ·  until the round of minibatches is complete
                                        ·
                               (7) average the gradients over the replicas of the stage
                               (8) update: the optimizer steps to a new weight version

The averages of (7) begin during the last backward of a round. Zero-bubble divides (5): the gradients of the inputs are
sent before those of the parameters are computed. The first stage loads in (1), the last one computes the loss in (2).
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass

import torch

from pdtool import schedule
from pdtool.artifacts import run_dir
from pdtool.artifacts.chrome_trace import MESSAGE_TRACKS, TraceEvent, chrome_trace
from pdtool.artifacts.metrics import MetricsLog
from pdtool.artifacts.report import Report
from pdtool.artifacts.run_dir import CheckpointManifest, update_record
from pdtool.files import write_atomically
from pdtool.host import usable_cores
from pdtool.runtime.groups import all_gather
from pdtool.runtime.loading.minibatches import Minibatches
from pdtool.runtime.stage.losses import MetricTotals, RoundLoss
from pdtool.runtime.stage.stage_replica import StageReplica
from pdtool.runtime.worker import checkpoint
from pdtool.runtime.worker.run_report import EpochTimer, WorkerMeasurements, assemble_report
from pdtool.runtime.worker.start_worker import WorkerContext
from pdtool.schedule import Action, ActionKind


@dataclass(frozen=True)
class ActionList:
    """One worker's actions for a number of minibatches.

    Attributes:
        actions: in order, each with whether it is the last before an update of its stage.
        versions: stage -> minibatch -> number of updates in this epoch that come before its forward.
    """

    actions: list[tuple[Action, bool]]
    versions: dict[int, dict[int, int]]

    def forwards(self, stage: int) -> list[int]:
        """Return the minibatches whose inputs a stage receives, in order."""
        return [a.minibatch for a, _ in self.actions if a.stage == stage and a.kind is ActionKind.FORWARD]

    def backwards(self, stage: int) -> list[int]:
        """Return the minibatches whose gradients a stage receives and sends, in order."""
        return [a.minibatch for a, _ in self.actions if a.stage == stage and a.kind.sends_gradients]


class Worker:
    """Trains its stages, validates, and saves checkpoints, together with the other workers.

    Attributes:
        metrics: of the last validation.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._config, self._assignment = context, context.config, context.assignment
        self._stages, self._meter, self._status = context.stages, context.meter, context.status
        self.metrics: dict[str, float] = {}
        self._undefined: frozenset[str] = frozenset()  # metrics without a figure in it
        self._losses: list[float] = []  # of the validation after each epoch
        self._minibatches: list[int] = []  # of each epoch
        self._samples: list[int] = []  # likewise
        self._log: MetricsLog | None = None
        self._timer = EpochTimer()
        self._action_lists: dict[int, ActionList] = {}

    def train(self, epoch: int, minibatches: Minibatches) -> None:
        """Train one epoch; the pipeline is empty before and after."""
        action_list = self._action_list(len(minibatches))
        self._begin_phase("train", epoch, minibatches, action_list)
        steady = schedule.steady_minibatches(len(minibatches), self._context.shape)
        self._timer.epoch_begins(range(steady.start - 1, steady.stop) if steady else range(len(minibatches)))
        for action, ends_round in action_list.actions:
            i, replica = action.minibatch, self._stages[action.stage]
            self._status.set(f"{action} of epoch {epoch}")
            with self._meter.action(action):
                replica.take_due_tied_steps()
                sums_now = ends_round and replica.averager.sums_in_backward
                on_gradient = replica.averager.gradient_ready if sums_now else None
                match action.kind:
                    case ActionKind.FORWARD:
                        inputs, target = replica.io.receive_inputs(i)  # (1)
                        outputs = replica.stage.forward(i, inputs, target)  # (2)
                        replica.io.send_outputs(i, outputs)  # (3)
                        if replica is self._context.last_stage:
                            replica.losses.add(i, outputs[0])
                            self._timer.loss_computed(i, self._meter.timestamps.record())
                    case ActionKind.BACKWARD:
                        output_gradients = replica.io.receive_gradients(i)  # (4)
                        weight = minibatches.weight(i)
                        gradients = replica.stage.backward(i, output_gradients, weight, on_gradient)  # (5), begins (7)
                        replica.io.send_gradients(i, gradients)  # (6)
                    case ActionKind.BACKWARD_INPUT:
                        output_gradients = replica.io.receive_gradients(i)  # (4)
                        replica.io.send_gradients(i, replica.stage.backward_input(i, output_gradients))  # (5), (6)
                    case ActionKind.BACKWARD_WEIGHT:
                        replica.stage.backward_weight(i, minibatches.weight(i), on_gradient)  # (5), begins (7)
                    case ActionKind.UPDATE:
                        self._log_loss(epoch, replica, replica.end_round(epoch))  # (7)
                        self._context.updates.update(replica)  # (8)
                if action.kind.completes_backward:
                    replica.backward_done(i, minibatches.weight(i))
        for stage, replica in self._stages.items():
            self._log_loss(epoch, replica, replica.end_epoch(len(action_list.forwards(stage))))
        self._meter.synchronize()

    def validate(self, epoch: int, max_samples: int | None = None) -> dict[str, float]:
        """Compute loss and metrics with the current weights, in evaluation mode.

        Args:
            max_samples: validate with the first samples only.

        Returns:
            The figures over all samples, on every worker.

        Raises:
            PdtoolError: one of them is not a number.
        """
        samples = self._context.splits["valid"].samples or 0
        minibatches = Minibatches(range(samples)[:max_samples], self._config.plan.batch_size)
        action_list = self._forward_list(len(minibatches))
        self._begin_phase("valid", epoch, minibatches, action_list)
        totals = MetricTotals(self._context.file)
        with torch.no_grad():
            for action, _ in action_list.actions:
                self._status.set(f"{action} of the validation after epoch {epoch}")
                replica = self._stages[action.stage]
                inputs, target = replica.io.receive_inputs(action.minibatch)  # (1)
                outputs = replica.stage.evaluate(action.minibatch, inputs)  # (2)
                replica.io.send_outputs(action.minibatch, outputs)  # (3)
                if replica is self._context.last_stage:
                    loss = replica.stage.loss(outputs[0], target)
                    totals.add(loss, outputs[0], target, minibatches.samples(action.minibatch))
        for replica in self._stages.values():
            replica.io.end_phase()
        where = f"the validation after epoch {epoch}"
        figures = totals.summarize(self._context.groups.world, where)
        self._undefined = totals.undefined
        if self._undefined and self._log:
            sys.stderr.write(f"warning: {where} gives no {', '.join(sorted(self._undefined))}: the count is 0\n")
        return figures

    def run(self) -> Report:
        """Train the epochs that are left, each followed by a validation and a checkpoint; return the report."""
        try:
            return self._run()
        finally:
            if self._log:
                self._log.close()

    def _run(self) -> Report:
        config, size = self._config, self._config.plan.batch_size
        resumed = done = self._resume()
        if self._context.last_stage and self._context.is_replica_0:
            self._log = MetricsLog(config.out, epochs_done=done)
            self._record_updates()
        count = self._context.epoch_samples
        if config.target and not done:  # fail now, not after an epoch, if the model does not report the metric
            config.target.is_reached(self.validate(0, size), self._undefined)
        self._meter.restart()
        modules = [replica.stage.module for replica in self._stages.values()]
        self._meter.memory.start(modules, self._context.received_device_bytes)
        while done < config.epochs and not self._is_target_reached():
            if done == resumed + 1:  # the first epoch was for warming up
                self._timer.restart()
                self._meter.restart()
            done += 1
            minibatches = Minibatches(self._context.sample_order(done, sum(self._samples)), size)
            start_s = time.perf_counter()
            if self._log:
                self._log.epoch_begins()
            self.train(done, minibatches)
            train_s = time.perf_counter() - start_s
            self._meter.memory.epoch_ended()
            self._timer.epoch_ended(len(minibatches), count, train_s, self._meter.timestamps.seconds_between)
            self._minibatches.append(len(minibatches))
            self._samples.append(count)
            with self._meter.paused():
                self.metrics = self.validate(done)
            self._epoch_done()
            self._save(done)
        return self._report(done, count, includes_compilation=config.compiled and done == resumed + 1)

    def _record_updates(self) -> None:
        """Let run.json tell how many updates and samples an epoch has, for whoever shows how far the run is."""
        samples, last = self._context.epoch_samples, max(self._stages)
        actions = self._action_list(-(-samples // self._config.plan.batch_size)).actions
        updates = sum(action.kind is ActionKind.UPDATE and action.stage == last for action, _ in actions)
        update_record(self._config.out, updates=updates, samples=samples)

    def _action_list(self, minibatches: int) -> ActionList:
        """This worker's actions for a number of minibatches; built once for each number."""
        if minibatches not in self._action_lists:
            shape = self._context.shape
            lists = self._config.plan.kind.build(shape, minibatches)
            number = list(shape.stage_replicas()).index((self._assignment.stage, self._assignment.replica))
            following = [*lists[number][1:], None]
            actions = [
                (action, after is not None and (after.stage, after.kind) == (action.stage, ActionKind.UPDATE))
                for action, after in zip(lists[number], following, strict=True)
            ]
            versions: dict[int, dict[int, int]] = {stage: {} for stage in self._stages}
            for (stage, i), version in shape.weights.forward_versions(lists)[number].items():
                versions[stage][i] = version
            self._action_lists[minibatches] = ActionList(actions, versions)
        return self._action_lists[minibatches]

    def _forward_list(self, minibatches: int) -> ActionList:
        """The forwards alone, which all see the newest weights."""
        actions = self._action_list(minibatches).actions
        return ActionList([(a, False) for a, _ in actions if a.kind is ActionKind.FORWARD], {})

    def _begin_phase(self, split: str, epoch: int, minibatches: Minibatches, action_list: ActionList) -> None:
        data = self._context.data_pass(split, epoch, minibatches)
        for stage, replica in self._stages.items():
            replica.set_mode(training=split == "train")
            replica.stage.weights.begin_phase(action_list.versions.get(stage, {}))
            replica.stage.seeds.begin_phase(self._config.seed, split, epoch)
            source = self._context.source if stage == 0 else None
            replica.io.begin_phase(data, source, action_list.forwards(stage), action_list.backwards(stage))

    def _log_loss(self, epoch: int, replica: StageReplica, loss: RoundLoss | None) -> None:
        if self._log and loss and replica is self._context.last_stage:
            samples = loss.weight * self._config.plan.batch_size
            self._log.add_update(
                epoch=epoch, step=loss.step, loss=loss.total / loss.weight, lr=loss.lr, samples=samples
            )

    def _is_target_reached(self) -> bool:
        target = self._config.target
        return bool(target and self.metrics and target.is_reached(self.metrics, self._undefined))

    def _resume(self) -> int:
        """Take over the checkpoint to resume from; returns the number of epochs that it was trained for."""
        if self._config.resume is None:
            return 0
        folder = run_dir.latest(self._config.resume)
        manifest = run_dir.read_manifest(folder)
        self.metrics = dict(manifest.metrics)
        self._losses = [*manifest.validation_losses] or [self.metrics.get("loss", 0.0)] * manifest.epoch
        self._minibatches = [*manifest.minibatches] or [0] * manifest.epoch
        self._samples = [*manifest.samples] or [self._context.epoch_samples] * manifest.epoch
        self._context.load(folder, self._losses)
        if self._assignment.rank == 0:
            self._warn_of_length(manifest)
        return manifest.epoch

    def _warn_of_length(self, manifest: CheckpointManifest) -> None:
        """Say that epochs, or a learning-rate schedule that knows its length, go on as ones of another length."""
        now = math.ceil(self._context.epoch_samples / self._config.plan.batch_size)
        before = next(reversed(manifest.minibatches), 0) or now
        if before != now:
            sys.stderr.write(
                f"warning: epochs had {before} minibatches, and go on with {now}: other --steps, another training set, "
                "or minibatches of another size\n"
            )
        if self._context.file.scheduler_takes_total:
            by_epoch = self._context.file.training.scheduler_step == "epoch"
            self._warn_of_schedule(manifest, "" if by_epoch or before == now else f", of {before} minibatches each")

    def _warn_of_schedule(self, manifest: CheckpointManifest, other_length: str) -> None:
        """Say that a schedule goes on as one of another length.

        Args:
            other_length: of the epochs until now, where the schedule is stepped by updates and their number changes.
        """
        before, now = manifest.epochs or self._config.epochs, self._config.epochs
        if before != now or other_length:
            sys.stderr.write(
                f"warning: the learning-rate schedule was one of {before} epochs{other_length}, and goes on as one of "
                f"{now}, {manifest.epoch} of them over: train with the same --epochs and --steps for the same learning "
                "rates\n"
            )

    def _epoch_done(self) -> None:
        """Step learning-rate schedules of epochs."""
        self._losses.append(self.metrics["loss"])
        for replica in self._stages.values():
            replica.epoch_done(self.metrics["loss"])

    def _save(self, epoch: int) -> None:
        if self._log:  # first: should the run end in between, the epoch is trained again and its lines are dropped
            step = self._context.last_stage.optimizer.updates if self._context.last_stage else 0
            self._log.add_validation(epoch, step, self.metrics)
        self._status.set(f"the checkpoint of epoch {epoch}")
        manifest = CheckpointManifest(
            epoch=epoch,
            epochs=self._config.epochs,
            seed=self._config.seed,
            metrics=self.metrics,
            validation_losses=tuple(self._losses),
            minibatches=tuple(self._minibatches),
            samples=tuple(self._samples),
            tied={name: first for name, first in self._context.canonical.items() if name != first},
            files={},
        )
        checkpoint.save(self._config.out, manifest, self._context.states(), self._context.groups.world)

    def _report(self, epochs: int, samples: int, *, includes_compilation: bool) -> Report:
        """Gather the measurements of all workers; rank 0 writes report.json and trace.json."""
        measured = (str(self._assignment), self._measurements(), self._meter.events, usable_cores())
        workers = all_gather(
            measured,
            tuple[str, WorkerMeasurements, list[TraceEvent], frozenset[int]],
            self._context.groups.world,
            "the measurements",
        )
        measurements = [measurements for _, measurements, _, _ in workers]
        cores = frozenset().union(*(cores for *_, cores in workers[: self._context.local_workers]))
        is_on_gpu = self._context.device.type == "cuda"
        report = assemble_report(
            self._config,
            measurements,
            self.metrics,
            self._undefined,
            epochs=epochs,
            samples=samples,
            minibatches_by_epoch=self._minibatches,
            cores=None if is_on_gpu else len(cores),
            local_workers=self._context.local_workers,
            includes_compilation=includes_compilation,
        )
        if self._assignment.rank == 0:
            events_of = {name: events for name, _, events, _ in workers}
            trace = chrome_trace(events_of, host_tracks=MESSAGE_TRACKS if is_on_gpu else ())
            write_atomically(self._config.out / "trace.json", json.dumps(trace))
            report.save(self._config.out / "report.json")
        return report

    def _measurements(self) -> WorkerMeasurements:
        stages = [replica.stage for replica in self._stages.values()]
        return WorkerMeasurements(
            stage=self._assignment.stage,
            totals=self._meter.totals,
            epochs=self._timer.times,
            peak_versions=max(stage.weights.peak_versions for stage in stages),
            peak_stashed=max(stage.peak_stashed for stage in stages),
            peak_memory_bytes=self._meter.memory.peak_bytes,
        )
