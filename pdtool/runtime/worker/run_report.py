"""Report of a run, assembled from what each worker measured, and the timer of its epochs.

`EpochTimer` takes the time of epochs, and at the last stage the time from loss to loss in steady state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pdtool.artifacts.report import Measured, Report, StageReport
from pdtool.runtime.config import RunConfig
from pdtool.runtime.meter import Timestamp, TimeTotals
from pdtool.schedule import steady_minibatches


@dataclass(frozen=True, kw_only=True)
class EpochTimes:
    """The training time of some epochs.

    Attributes:
        minibatches, samples: numbers of those trained.
        train_s: seconds of training, pipeline fill and drain included.
        time_per_minibatch_s: seconds between the first and the last loss in steady state; 0 when not known.
    """

    minibatches: int
    samples: int
    train_s: float
    time_per_minibatch_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerMeasurements:
    """What one worker measured, over the epochs after the first (over the first when it is the only one).

    Attributes:
        stage: the worker's first stage.
        totals: where the time went.
        epochs: the time of these epochs, without validation and checkpoints, and what was trained in them.
        peak_memory_bytes: see PeakMemory.
    """

    stage: int
    totals: TimeTotals
    epochs: EpochTimes
    peak_versions: int
    peak_stashed: int
    peak_memory_bytes: int | None = None


def assemble_report(
    config: RunConfig,
    workers: Sequence[WorkerMeasurements],
    metrics: Mapping[str, float],
    undefined: Collection[str] = (),
    *,
    epochs: int,
    samples: int,
    minibatches_by_epoch: Sequence[int] = (),
    cores: int | None,
    local_workers: int,
    includes_compilation: bool = False,
) -> Report:
    """Return the report of a run.

    Args:
        metrics: of the last validation.
        undefined: metrics without a figure in it.
        epochs: epochs trained in all, those before a resume included.
        samples: of an epoch.
        minibatches_by_epoch: of each epoch, those before a resume included; 0 where that is unknown.
        cores: of this machine that its workers may use; None where GPUs compute.
        local_workers: on this machine.
        includes_compilation: whether the only epoch is the one that compiles.
    """
    plan = config.plan
    timed = workers[0].epochs
    train_s = max(worker.epochs.train_s for worker in workers)
    time_per_minibatch_s = max(worker.epochs.time_per_minibatch_s for worker in workers)  # those of the last stage know
    time_per_minibatch_s = time_per_minibatch_s or train_s / max(1, timed.minibatches)
    minibatches = -(-samples // plan.batch_size)
    return Report(
        plan=plan.name,
        config=plan.config,
        schedule=plan.schedule,
        batch_size=plan.batch_size,
        epochs=epochs,
        minibatches=minibatches,
        minibatches_by_epoch=tuple(minibatches_by_epoch),
        throughput_samples_per_s=timed.samples / train_s if train_s else 0.0,
        target=str(config.target) if config.target else None,
        target_reached=config.target.is_reached(metrics, undefined) if config.target else None,
        settings=dict(config.model.settings),
        metrics=dict(metrics),
        predicted=plan.predicted,
        measured=Measured(
            bottleneck_s=time_per_minibatch_s,
            is_steady=bool(steady_minibatches(minibatches, config.shape)),
            throughput_samples_per_s=plan.batch_size / time_per_minibatch_s if time_per_minibatch_s else 0.0,
        ),
        stages=tuple(_stage_report([w for w in workers if w.stage == s]) for s in range(plan.pipeline_depth)),
        cores=cores,
        local_workers=local_workers,
        includes_compilation=includes_compilation,
        digests=dict(config.bundle.digests),
    )


def _stage_report(replicas: Sequence[WorkerMeasurements]) -> StageReport:
    """Figures per minibatch of the whole pipeline, averaged over the replicas of a stage."""
    per_minibatch = 1 / max(1, replicas[0].epochs.minibatches)
    mean = {name: fmean(vars(replica.totals)[name] for replica in replicas) for name in vars(replicas[0].totals)}
    times = {name: value * per_minibatch for name, value in mean.items() if name.endswith("_s")}
    busy_s = times["forward_s"] + times["backward_s"] + times["update_s"]
    time_s = fmean(replica.epochs.train_s for replica in replicas) * per_minibatch
    peaks_bytes = [replica.peak_memory_bytes for replica in replicas if replica.peak_memory_bytes is not None]
    return StageReport(
        replicas=len(replicas),
        busy_s=busy_s,
        rest_s=max(0.0, time_s - busy_s - times["wait_s"] - times["allreduce_s"] - times["data_s"]),
        sent_bytes=round(mean["sent_bytes"] * per_minibatch),
        peak_versions=max(replica.peak_versions for replica in replicas),
        peak_stashed=max(replica.peak_stashed for replica in replicas),
        peak_memory_bytes=max(peaks_bytes, default=None),
        **times,
    )


class EpochTimer:
    """Takes the training time of the epochs since the last `restart`.

    Attributes:
        epochs, minibatches, samples: numbers of those trained.
        train_s: seconds of training, pipeline fill and drain included.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all epochs so far."""
        self.epochs = self.minibatches = self.samples = self._intervals = 0
        self.train_s = self._intervals_s = 0.0
        self._timed = range(0)
        self._first_loss: tuple[int, Timestamp] | None = None
        self._last_loss: tuple[int, Timestamp] | None = None

    def epoch_begins(self, timed: range) -> None:
        """Take note of the minibatches between whose losses the time is taken: those of the steady state."""
        self._timed = timed

    def loss_computed(self, minibatch: int, at: Timestamp) -> None:
        """Take note of when the device has computed the loss of a minibatch."""
        if minibatch not in self._timed:
            return
        self._first_loss = self._first_loss or (minibatch, at)
        self._last_loss = (minibatch, at)

    def epoch_ended(
        self, minibatches: int, samples: int, train_s: float, seconds_between: Callable[[Timestamp, Timestamp], float]
    ) -> None:
        """Add an epoch of training that took `train_s` seconds; the device has come to all of its timestamps."""
        self.epochs += 1
        self.minibatches += minibatches
        self.samples += samples
        self.train_s += train_s
        if self._first_loss and self._last_loss:
            self._intervals += self._last_loss[0] - self._first_loss[0]
            self._intervals_s += seconds_between(self._first_loss[1], self._last_loss[1])
        self._first_loss = self._last_loss = None

    @property
    def times(self) -> EpochTimes:
        """What was taken so far."""
        return EpochTimes(
            minibatches=self.minibatches,
            samples=self.samples,
            train_s=self.train_s,
            time_per_minibatch_s=self._intervals_s / self._intervals if self._intervals else 0.0,
        )
