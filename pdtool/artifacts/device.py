"""Devices: the device of a profile's times, and the data sheets for estimated profiles.

`find_device` finds the data sheet that `--device` names, in the table beside this file or in a user's YAML file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from pdtool.artifacts.artifact import FrozenModel, YamlArtifact
from pdtool.artifacts.fields import Bytes, Label, PositiveBytes, Rate, Seconds
from pdtool.errors import FieldError, UsageError, suggestion

Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
OperatorKind = Literal["conv", "matmul", "rnn", "norm", "embedding", "elementwise", "update"]
RESERVED_BYTES = 2**30  # assumed, not measured: half for a CUDA context, the rest for NCCL communicators
CPU_THREADS = re.compile(r", ([1-9][0-9]*) threads?$")  # at the end of the name of a CPU: `AMD EPYC, 2 threads`
TABLE = Path(__file__).with_name("devices.yaml")


class Device(FrozenModel):
    """The device that the times are for, and whether they were measured on it or estimated.

    Attributes:
        memory_bytes: total memory; for a CPU its machine's, which workers share. None: not recorded.
    """

    name: Label
    kind: Literal["measured", "estimated"]
    memory_bytes: PositiveBytes | None = None


class DeviceSpec(FrozenModel):
    """One device.

    Attributes:
        name: its maker's name for it.
        peak_flops_per_s: peak rate of matrix products by precision, without sparsity; fp32 is required, and replaces
            missing ones.
        bandwidth_bytes_per_s: bandwidth of its memory.
        memory_bytes: size of its memory.
        reserved_bytes: memory not available to tensors: CUDA's context and kernels, communicators, workspaces.
        launch_s: seconds that each kernel launch adds.
        factors: measured over estimated seconds by kind of operator; 1 for a missing kind.
        source: title and address of the data sheet.
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
    MAKER: ClassVar[str] = "pdtool devices v100 --json"
    SEALED: ClassVar[bool] = False

    devices: Annotated[
        dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")], DeviceSpec], Field(min_length=1)
    ]

    def check(self) -> None:
        for name, device in self.devices.items():
            if "fp32" not in device.peak_flops_per_s:
                raise FieldError(f"devices.{name}.peak_flops_per_s", "needs at least fp32")


def find_device(name: str) -> DeviceSpec:
    """Return the device of that name in the table, or the one in the file `name`, a path that ends in .yaml or .yml.

    Raises:
        UsageError: it is not in the table, which the error lists, or the file holds several.
        ArtifactError: the file cannot be read, or a field is wrong.
    """
    if not name.endswith((".yaml", ".yml")):
        known = Devices.load(TABLE).devices
        if name not in known:
            near = suggestion(name, [*known, "cpu", "cuda"])
            remedy = f"measure on cpu or cuda, estimate for {', '.join(known)}, or name your own YAML file"
            raise UsageError(f"device {name!r} is not known", f"{near} {remedy}".lstrip())
        return known[name]
    devices = Devices.load(name, may_be_pipe=True).devices
    if len(devices) > 1:
        raise UsageError(f"{name} holds {len(devices)} devices ({', '.join(devices)})", "keep one device in a file")
    return next(iter(devices.values()))
