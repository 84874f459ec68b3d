"""The artifact Emulation: how plans ran on a pretend cluster, beside what was predicted."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pdtool.artifacts.cluster_file import ClusterSpec
from pdtool.artifacts.envelope import Artifact, FrozenModel
from pdtool.artifacts.fields import Count, Figure, FigureBytes, Label, Title

Factor = Annotated[float, Field(ge=1, le=1e9, allow_inf_nan=False)]


class EmulatedPlan(FrozenModel):
    """One plan, in steady state; times and bytes are those of the cluster, not of its pretended copy.

    Attributes:
        name: `this plan`, or which rival it is.
        minibatches: that were measured.
        bottleneck_s: seconds per minibatch.
        simulated_s: seconds per minibatch in a simulation.
        sent_bytes: by all workers together for one minibatch.
    """

    name: Label
    config: Label
    schedule: Label
    minibatches: Count
    bottleneck_s: Figure
    throughput_samples_per_s: Figure
    simulated_s: Figure
    sent_bytes: FigureBytes

    @property
    def error(self) -> float:
        """By which fraction the emulated time is longer than the simulated one."""
        return self.bottleneck_s / self.simulated_s - 1 if self.simulated_s else 0.0


class Emulation(Artifact):
    """`runs/NAME/emulation.json`.

    Attributes:
        plan: name of the plan.
        compute: `sleep`: workers slept the times of the profile; `real`: they trained the model.
        scale: bytes and bandwidths were divided by it.
        slowdown: times were multiplied by it, and bandwidths divided once more.
        cores: of the machine.
        plans: the plan, then its rivals.
    """

    KIND: ClassVar[str] = "emulation"
    MAKER: ClassVar[str] = "pdtool emulate"

    format: Literal["pdtool/emulation/1"] = "pdtool/emulation/1"
    plan: Title
    batch_size: Count
    cluster: ClusterSpec
    compute: Literal["sleep", "real"]
    scale: Factor
    slowdown: Factor
    cores: Count
    plans: Annotated[tuple[EmulatedPlan, ...], Field(min_length=1)]
