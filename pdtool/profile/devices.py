"""Find the device that `--device` names: in the table beside this file, or in a YAML file of the user's."""

from __future__ import annotations

from typing import Literal


def default_device() -> Literal["cpu", "cuda"]:
    """Return the device that `run` trains on unless told otherwise: cuda where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
