"""Put the report together from what each worker measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pdtool.artifacts.report import Measured, Report, StageReport
from pdtool.run.ledger import Totals
from pdtool.run.spec import RunSpec


@dataclass(frozen=True)
class Share:
    """What one worker measured, over the epochs after the first (over the first when it is the only one).

    Attributes:
        minibatches, samples: that went through the whole pipeline in these epochs.
        train_s: their time, pipeline fill and drain included, validation and checkpoints not.
        pace_s: at a worker of the last stage, seconds per minibatch between the first and the last loss of an epoch.
        peak_memory_bytes: see Memory.
    """

    stage: int
    totals: Totals
    minibatches: int
    samples: int
    train_s: float
    pace_s: float
    peak_versions: int
    peak_stashed: int
    peak_memory_bytes: int | None = None


def assemble(
    spec: RunSpec,
    shares: Sequence[Share],
    *,
    epochs: int,
    minibatches: int,
    metrics: Mapping[str, float],
    reached: bool | None,
) -> Report:
    """The report of a run that did `epochs` epochs of `minibatches` each."""
    slowest = max(share.train_s for share in shares)
    pace = max(share.pace_s for share in shares) or slowest / max(1, shares[0].minibatches)
    return Report(
        plan=spec.plan.name,
        config=spec.plan.config,
        schedule=spec.plan.schedule,
        batch_size=spec.plan.batch_size,
        epochs=epochs,
        minibatches=minibatches,
        throughput_samples_per_s=shares[0].samples / slowest if slowest else 0.0,
        target=str(spec.target) if spec.target else None,
        target_reached=reached,
        metrics=dict(metrics),
        predicted=spec.plan.predicted,
        measured=Measured(bottleneck_s=pace, throughput_samples_per_s=spec.plan.batch_size / pace if pace else 0.0),
        stages=tuple(_stage([x for x in shares if x.stage == s]) for s in range(spec.plan.pipeline_depth)),
        digests=dict(spec.bundle.digests),
    )


def _stage(shares: Sequence[Share]) -> StageReport:
    """Per minibatch of the whole pipeline, averaged over the replicas."""
    each = 1 / max(1, shares[0].minibatches)
    forward, backward, update, wait, allreduce, send = (
        fmean(getattr(share.totals, name) for share in shares) * each
        for name in ("forward_s", "backward_s", "update_s", "wait_s", "allreduce_s", "send_s")
    )
    busy, time = forward + backward + update, fmean(share.train_s for share in shares) * each
    peaks = [share.peak_memory_bytes for share in shares if share.peak_memory_bytes is not None]
    return StageReport(
        replicas=len(shares),
        busy_s=busy,
        forward_s=forward,
        backward_s=backward,
        update_s=update,
        wait_s=wait,
        allreduce_s=allreduce,
        rest_s=max(0.0, time - busy - wait - allreduce),
        send_s=send,
        sent_bytes=round(fmean(share.totals.sent_bytes for share in shares) * each),
        peak_versions=max(share.peak_versions for share in shares),
        peak_stashed=max(share.peak_stashed for share in shares),
        peak_memory_bytes=max(peaks, default=None),
    )
