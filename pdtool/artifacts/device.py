"""The artifact Devices: the data sheets of devices that a profile can be estimated for."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from pdtool.artifacts.envelope import FrozenModel, YamlArtifact
from pdtool.artifacts.fields import Bytes, Label, PositiveBytes, Rate, Seconds
from pdtool.errors import FieldError

Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
RESERVED_BYTES = 2**30  # stated, not measured: a context of CUDA has half of it, communicators of NCCL the rest
OperatorKind = Literal["conv", "matmul", "rnn", "norm", "embedding", "elementwise", "update"]


class DeviceSpec(FrozenModel):
    """One device.

    Attributes:
        name: as its maker calls it.
        peak_flops_per_s: of matrix products by precision, without sparsity; fp32 is needed, and stands in for what is
            missing.
        bandwidth_bytes_per_s: bandwidth of its memory.
        memory_bytes: size of its memory.
        reserved_bytes: of that, what no tensor gets: CUDA's context and kernels, communicators, workspaces.
        launch_s: seconds that the launch of each kernel adds.
        factors: measured over estimated seconds by kind of operator; 1 for a kind that is missing.
        source: title and address of the data sheet that the figures come from.
    """

    name: Annotated[Label, Field(max_length=200)]
    peak_flops_per_s: dict[Precision, Rate]
    bandwidth_bytes_per_s: Rate
    memory_bytes: PositiveBytes
    reserved_bytes: Bytes = RESERVED_BYTES
    launch_s: Seconds
    factors: dict[OperatorKind, Factor] = Field(default_factory=dict)
    source: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]+$", max_length=500)]


class Devices(YamlArtifact):
    """A table of devices by the name that `--device` takes; a user's own file holds one."""

    KIND: ClassVar[str] = "device"
    MAKER: ClassVar[str] = "pdtool schema device"
    SEALED: ClassVar[bool] = False

    format: Literal["pdtool/device/1"] = "pdtool/device/1"
    devices: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")], DeviceSpec]

    def check(self) -> None:
        if not self.devices:
            raise FieldError("devices", "holds no device")
        for name, device in self.devices.items():
            if "fp32" not in device.peak_flops_per_s:
                raise FieldError(f"devices.{name}.peak_flops_per_s", "needs at least fp32")
