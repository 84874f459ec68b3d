"""Assemble the report from what each worker measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pdtool.artifacts.report import Measured, Report, StageReport
from pdtool.run.config import RunConfig
from pdtool.run.measure.timings import TimeTotals


@dataclass(frozen=True, kw_only=True)
class WorkerMeasurements:
    """What one worker measured, over the epochs after the first (over the first when it is the only one).

    Attributes:
        stage: the worker's first stage.
        minibatches, samples: those that went through the whole pipeline in these epochs.
        train_s: seconds of these epochs, with pipeline fill and drain and without validation and checkpoints.
        time_per_minibatch_s: at the last stage, seconds per minibatch between the first and the last loss of an epoch;
            0 elsewhere.
        peak_memory_bytes: see PeakMemory.
    """

    stage: int
    totals: TimeTotals
    minibatches: int
    samples: int
    train_s: float
    time_per_minibatch_s: float
    peak_versions: int
    peak_stashed: int
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        epochs: epochs trained in all, those before a resume included.
        minibatches: of an epoch.
        metrics: of the last validation.
        target_reached: None without a target.
    """

    epochs: int
    minibatches: int
    metrics: Mapping[str, float]
    target_reached: bool | None


def assemble_report(config: RunConfig, workers: Sequence[WorkerMeasurements], outcome: RunOutcome) -> Report:
    """Return the report of a run."""
    plan = config.plan
    train_s = max(worker.train_s for worker in workers)
    time_per_minibatch_s = max(worker.time_per_minibatch_s for worker in workers)
    time_per_minibatch_s = time_per_minibatch_s or train_s / max(1, workers[0].minibatches)
    return Report(
        plan=plan.name,
        config=plan.config,
        schedule=plan.schedule,
        batch_size=plan.batch_size,
        epochs=outcome.epochs,
        minibatches=outcome.minibatches,
        throughput_samples_per_s=workers[0].samples / train_s if train_s else 0.0,
        target=str(config.target) if config.target else None,
        target_reached=outcome.target_reached,
        metrics=dict(outcome.metrics),
        predicted=plan.predicted,
        measured=Measured(
            bottleneck_s=time_per_minibatch_s,
            throughput_samples_per_s=plan.batch_size / time_per_minibatch_s if time_per_minibatch_s else 0.0,
        ),
        stages=tuple(_stage_report([w for w in workers if w.stage == s]) for s in range(plan.pipeline_depth)),
        digests=dict(config.bundle.digests),
    )


def _stage_report(replicas: Sequence[WorkerMeasurements]) -> StageReport:
    """Figures per minibatch of the whole pipeline, averaged over the replicas of a stage."""
    per_minibatch = 1 / max(1, replicas[0].minibatches)
    forward_s, backward_s, update_s, wait_s, allreduce_s, send_s = (
        fmean(getattr(replica.totals, name) for replica in replicas) * per_minibatch
        for name in ("forward_s", "backward_s", "update_s", "wait_s", "allreduce_s", "send_s")
    )
    busy_s = forward_s + backward_s + update_s
    time_s = fmean(replica.train_s for replica in replicas) * per_minibatch
    peaks_bytes = [replica.peak_memory_bytes for replica in replicas if replica.peak_memory_bytes is not None]
    return StageReport(
        replicas=len(replicas),
        busy_s=busy_s,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        wait_s=wait_s,
        allreduce_s=allreduce_s,
        rest_s=max(0.0, time_s - busy_s - wait_s - allreduce_s),
        send_s=send_s,
        sent_bytes=round(fmean(replica.totals.sent_bytes for replica in replicas) * per_minibatch),
        peak_versions=max(replica.peak_versions for replica in replicas),
        peak_stashed=max(replica.peak_stashed for replica in replicas),
        peak_memory_bytes=max(peaks_bytes, default=None),
    )
