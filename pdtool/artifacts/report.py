"""Report: what a run did, beside what its plan predicted."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pdtool.artifacts.envelope import Artifact, Bytes, Count, Label, Part, Seconds
from pdtool.artifacts.plan import Predicted


class StageReport(Part):
    """What one stage did, per minibatch of the whole pipeline and averaged over its replicas and the measured epochs.

    Attributes:
        busy_s: forward + backward + update.
        forward_s, backward_s, update_s: its parts.
        wait_s: blocked on other workers (activations, gradients, all-reduce).
        sent_bytes: to other workers.
        peak_versions: live weight versions at one replica, at most.
        peak_stashed: minibatches with a live autograd graph at one replica, at most.
    """

    replicas: Count
    busy_s: Seconds
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds
    wait_s: Seconds
    sent_bytes: Bytes
    peak_versions: int = Field(ge=0)
    peak_stashed: int = Field(ge=0)


class Measured(Part):
    """Of the whole pipeline, in steady state."""

    bottleneck_s: Seconds
    throughput_samples_per_s: Seconds


class Report(Artifact):
    """`runs/.../report.json`."""

    KIND: ClassVar[str] = "report"

    format: Literal["pdtool/report/1"] = "pdtool/report/1"
    plan: Label
    config: Label
    schedule: Label
    batch_size: Count
    epochs: int
    minibatches: int
    throughput_samples_per_s: Seconds
    target: Label | None = None
    target_reached: bool | None = None
    metrics: dict[str, float]
    predicted: Predicted | None
    measured: Measured
    stages: tuple[StageReport, ...]
