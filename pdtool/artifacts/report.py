"""The artifacts Report, a run's measurements beside its predictions, and Emulation, plans on a pretend cluster."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pdtool.artifacts.artifact import Artifact, FrozenModel
from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.fields import Bytes, Count, Figure, FigureBytes, Label, Number, Seconds, Title
from pdtool.artifacts.plan import Predicted
from pdtool.errors import ArtifactError, FieldError
from pdtool.files import quoted
from pdtool.units import counted

Factor = Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)]


class StageReport(FrozenModel):
    """Measurements of one stage, per minibatch of the whole pipeline, averaged over its replicas and the measured
    epochs.

    busy_s + wait_s + allreduce_s + data_s + rest_s is the whole time of a minibatch. A simulation distinguishes
    communication (a message is under way) from idle time (it is not computed yet). A worker cannot tell, so its waits
    include both.

    Attributes:
        busy_s: seconds of forward, backward and update without waiting, including handing over messages.
        forward_s, backward_s, update_s: the parts of busy_s, in seconds.
        wait_s: seconds blocked on messages from other stages, and at the end of an epoch on messages to them.
        allreduce_s: seconds blocked on gradients of other replicas, or of other stages with the same parameter.
        data_s: seconds of loading minibatches, or of waiting for loader workers, at the first stage.
        rest_s: seconds between actions.
        send_s: seconds of handing over messages, a part of busy_s; 0 on a GPU, which computes meanwhile.
        sent_bytes: bytes sent to other workers.
        peak_versions: most live weight versions at one replica.
        peak_stashed: most minibatches with a live autograd graph at one worker, with chunks in all its stages together.
        peak_memory_bytes: most bytes of one worker in training: its parameters and buffers, and all memory added since
            the first minibatch; tensors on a GPU, resident memory otherwise. None if unknown.
        peak_reserved_bytes: most bytes that torch's allocator held on a GPU for these tensors, with the gaps between
            them; None on a CPU.
    """

    replicas: Count
    busy_s: Seconds
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds
    wait_s: Seconds
    allreduce_s: Seconds = 0.0
    data_s: Seconds = 0.0
    rest_s: Seconds = 0.0
    send_s: Seconds = 0.0
    sent_bytes: Bytes
    peak_versions: Number
    peak_stashed: Number
    peak_memory_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None

    @property
    def time_s(self) -> float:
        """The whole time of a minibatch, in seconds."""
        return self.busy_s + self.wait_s + self.allreduce_s + self.data_s + self.rest_s


class Measured(FrozenModel):
    """Measurements of the whole pipeline, in steady state.

    Attributes:
        bottleneck_s: seconds per minibatch.
        is_steady: whether epochs were long enough for a steady state; otherwise it includes filling and draining.
    """

    bottleneck_s: Seconds
    is_steady: bool = True
    throughput_samples_per_s: Figure


class Report(Artifact):
    """`runs/.../report.json`.

    Attributes:
        minibatches: minibatches of the last epoch.
        minibatches_by_epoch: minibatches of each epoch, including those before a resume; 0 if an older pdtool trained
            it. Older reports have none.
        resumed_after: epochs of the run that it resumes, perhaps with another minibatch size. Only later ones are
            measured. Older reports have 0.
        weights: the weight policy; None: an older report, which lacks it.
        settings: settings for the functions of model.py.
        cores: cores of the first machine that its workers may use; None if GPUs computed.
        local_workers: workers that shared these cores.
        loader_workers: per replica of the first stage; None: an older report, which lacks them.
        includes_compilation: whether the measured time includes compilation by torch.compile.
    """

    KIND: ClassVar[str] = "report"
    MAKER: ClassVar[str] = "pdtool run"

    plan: Label
    config: Label
    schedule: Label
    weights: Label | None = None
    batch_size: Count
    epochs: Number
    minibatches: Number
    minibatches_by_epoch: tuple[Number, ...] = ()
    resumed_after: Number = 0
    throughput_samples_per_s: Figure
    target: Label | None = None
    target_reached: bool | None = None
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    metrics: dict[str, float]
    predicted: Predicted | None
    measured: Measured
    stages: tuple[StageReport, ...]
    cores: Count | None = None
    local_workers: Count | None = None
    loader_workers: Number | None = None
    includes_compilation: bool = False

    def check(self) -> None:
        if self.predicted and len(self.predicted.memory_bytes) < len(self.stages):
            fault = f"has {counted(len(self.predicted.memory_bytes), 'value')}, but there are {len(self.stages)} stages"
            raise FieldError("predicted.memory_bytes", fault)

    @property
    def epochs_by_length(self) -> list[tuple[int, int]]:
        """Numbers of consecutive epochs with equal minibatches, and these minibatches, since the run was resumed."""
        trained = self.minibatches_by_epoch[self.resumed_after :]
        if not trained:
            return [(self.epochs - self.resumed_after, self.minibatches)]
        return [(len(list(alike)), minibatches) for minibatches, alike in groupby(trained)]

    @property
    def is_crowded(self) -> bool:
        """Whether there were more computing workers than cores."""
        return self.cores is not None and self.local_workers is not None and self.local_workers > self.cores

    @classmethod
    def _rewritable(cls, path: Path | str, what: str, *, or_else: str = "", field: str = "") -> ArtifactError:
        if field == "format":  # of a newer pdtool
            return super()._rewritable(path, what, or_else=or_else, field=field)
        return ArtifactError(path, what, f"to show the run without it: `rm {quoted(path)}`", field=field)


class EmulatedPlan(FrozenModel):
    """One plan, in steady state; times and bytes are those of the cluster, not of its pretend copy.

    Attributes:
        name: `this plan`, or the rival's name.
        minibatches: minibatches of an epoch.
        bottleneck_s: seconds per minibatch.
        is_steady: whether epochs were long enough for a steady state; else filling and draining are included.
        simulated_s: seconds per minibatch in a simulation.
        sent_bytes: sent by all workers together for one minibatch.
        epochs: epochs in total, or until the target was reached.
        training_s: seconds of these epochs, without validation.
        target_reached: None if there is no target.
        scale, slowdown: for this plan's workers; None: those of the emulation.
    """

    name: Label
    config: Label
    schedule: Label
    workers: Count
    minibatches: Count
    bottleneck_s: Figure
    is_steady: bool = True
    throughput_samples_per_s: Figure
    simulated_s: Figure
    sent_bytes: FigureBytes
    epochs: Count
    training_s: Figure
    target_reached: bool | None = None
    scale: Factor | None = None
    slowdown: Factor | None = None

    @property
    def error(self) -> float:
        """By which fraction the emulated time is longer than the simulated one."""
        return self.bottleneck_s / self.simulated_s - 1 if self.simulated_s else 0.0


class Emulation(Artifact):
    """`runs/NAME/emulation.json`.

    Attributes:
        plan: name of the plan.
        compute: `sleep`: workers slept the times of the profile; `real`: they trained the model.
        scale: bytes and bandwidths were divided by it, for the first of the plans.
        slowdown: times were multiplied by it, and bandwidths divided once more, for the first of the plans.
        cores: cores of the machine.
        target: metric and value at which the training of each plan ended; None: no target.
        plans: the plan, then its rivals.
    """

    KIND: ClassVar[str] = "emulation"
    MAKER: ClassVar[str] = "pdtool emulate"

    plan: Title
    batch_size: Count
    cluster: Cluster
    compute: Literal["sleep", "real"]
    scale: Factor
    slowdown: Factor
    cores: Count
    target: Label | None = None
    plans: Annotated[tuple[EmulatedPlan, ...], Field(min_length=1)]

    def factors(self, plan: EmulatedPlan) -> tuple[float, float]:
        """Return the scale and the slowdown of one plan's emulation."""
        return plan.scale or self.scale, plan.slowdown or self.slowdown
