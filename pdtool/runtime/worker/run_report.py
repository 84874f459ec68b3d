"""Report of a run, assembled from each worker's measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.artifacts.report import Measured, Report, StageReport
from pdtool.runtime.config import RunConfig
from pdtool.runtime.meter import EpochTimes, TimeTotals
from pdtool.schedule import steady_minibatches


@dataclass
class Progress:
    """How far a run is, including the run that it resumes.

    Attributes:
        minibatches, samples, validation_losses: for each trained epoch; 0 minibatches if an older pdtool, which did not
            record them, trained it.
        metrics: metrics of the last validation.
        undefined: metrics without a figure in it.
    """

    minibatches: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    undefined: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class WorkerMeasurements:
    """One worker's measurements over the epochs after the first (over the first if it is the only one).

    Attributes:
        name: the worker's name in the trace.
        stage: the worker's first stage.
        totals: where the time went.
        epochs: the time of these epochs, without validation and checkpoints, and what was trained in them.
        peak_memory_bytes, peak_reserved_bytes: see PeakMemory.
        cores: cores that the worker may use; none if a GPU computes.
        loader_workers: number of its loader workers.
    """

    name: str
    stage: int
    totals: TimeTotals
    epochs: EpochTimes
    peak_versions: int
    peak_stashed: int
    events: list[TraceEvent]
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    cores: frozenset[int] = frozenset()
    loader_workers: int = 0


def assemble_report(
    config: RunConfig,
    workers: Sequence[WorkerMeasurements],
    progress: Progress,
    *,
    minibatches: int,
    local_workers: int,
    resumed_after: int = 0,
) -> Report:
    """Return the report of a run.

    Args:
        minibatches: minibatches of an epoch.
        local_workers: number of workers on this machine, the first of `workers`.
        resumed_after: epochs of the run that it resumes.
    """
    plan = config.plan
    timed = workers[0].epochs
    train_s = max(worker.epochs.train_s for worker in workers)
    throughput_samples_per_s = timed.samples / train_s if train_s else 0.0
    steady_s = max(worker.epochs.time_per_minibatch_s for worker in workers)  # the last stage knows it
    return Report(
        plan=plan.name,
        config=plan.config,
        schedule=plan.schedule,
        weights=plan.weights,
        batch_size=plan.batch_size,
        epochs=len(progress.minibatches),
        minibatches=minibatches,
        minibatches_by_epoch=tuple(progress.minibatches),
        resumed_after=resumed_after,
        throughput_samples_per_s=throughput_samples_per_s,
        target=str(config.target) if config.target else None,
        target_reached=config.target.is_reached(progress.metrics, progress.undefined) if config.target else None,
        settings=dict(config.model.settings),
        metrics=dict(progress.metrics),
        predicted=plan.predicted,
        measured=Measured(
            bottleneck_s=steady_s or train_s / max(1, timed.minibatches),
            is_steady=bool(steady_minibatches(minibatches, config.shape)),
            throughput_samples_per_s=plan.batch_size / steady_s if steady_s else throughput_samples_per_s,
        ),
        stages=tuple(_stage_report([w for w in workers if w.stage == s]) for s in range(plan.pipeline_depth)),
        cores=len(frozenset().union(*(worker.cores for worker in workers[:local_workers]))) or None,
        local_workers=local_workers,
        loader_workers=max(worker.loader_workers for worker in workers),
        includes_compilation=config.compiled and len(progress.minibatches) == resumed_after + 1,
        digests=dict(config.bundle.digests),
    )


def _stage_report(replicas: Sequence[WorkerMeasurements]) -> StageReport:
    """Figures per minibatch of the whole pipeline, averaged over the replicas of a stage."""
    per_minibatch = 1 / max(1, replicas[0].epochs.minibatches)
    mean = {name: fmean(vars(replica.totals)[name] for replica in replicas) for name in vars(replicas[0].totals)}
    times = {name: value * per_minibatch for name, value in mean.items() if name.endswith("_s")}
    busy_s = times["forward_s"] + times["backward_s"] + times["update_s"]
    time_s = fmean(replica.epochs.train_s for replica in replicas) * per_minibatch
    return StageReport(
        replicas=len(replicas),
        busy_s=busy_s,
        rest_s=max(0.0, time_s - busy_s - times["wait_s"] - times["allreduce_s"] - times["data_s"]),
        sent_bytes=round(mean["sent_bytes"] * per_minibatch),
        peak_versions=max(replica.peak_versions for replica in replicas),
        peak_stashed=max(replica.peak_stashed for replica in replicas),
        peak_memory_bytes=_most(replica.peak_memory_bytes for replica in replicas),
        peak_reserved_bytes=_most(replica.peak_reserved_bytes for replica in replicas),
        **times,
    )


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
