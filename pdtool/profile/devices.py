"""Find the device that `--device` names: in the table beside this file, or in a YAML file of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pdtool.artifacts.device import Devices, DeviceSpec
from pdtool.errors import UsageError

TABLE = Path(__file__).with_name("devices.yaml")


def find_device(name: str) -> DeviceSpec:
    """Return the device of that name in the table, or the one in the file `name`, a path that ends in .yaml or .yml.

    Raises:
        UsageError: not in the table, which is listed, or the file holds several.
        ArtifactError: the file cannot be read, or a field of it is wrong.
    """
    if not name.endswith((".yaml", ".yml")):
        known = Devices.load(TABLE).devices
        if name not in known:
            remedy = f"measure on cpu or cuda, estimate for {', '.join(known)}, or name a YAML file of your own"
            raise UsageError(f"device {name!r} is not known", remedy)
        return known[name]
    devices = Devices.load(name, may_be_pipe=True).devices
    if len(devices) > 1:
        raise UsageError(f"{name} holds {len(devices)} devices ({', '.join(devices)})", "keep one device in a file")
    return next(iter(devices.values()))


def default_device() -> Literal["cpu", "cuda"]:
    """Return the device that `run` trains on unless told otherwise: cuda where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
