"""What `--precision bf16` means, in a measured profile as in a run: torch.autocast in forward and loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from pdtool.errors import UsageError

RunPrecision = Literal["fp32", "bf16"]


def computing_in(precision: RunPrecision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a forward and the loss compute.

    Args:
        precision: fp32 leaves the dtypes to the model; bf16 computes in bf16 where that is safe. Weights keep their
            dtypes, and so does what goes from one stage to another.
    """
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def check_autocast(precision: RunPrecision, autocast_off: Sequence[str]) -> None:
    """Check that a model can be computed in a precision.

    Args:
        autocast_off: the lines where the model switches autocast off, which neither operators nor stages do.

    Raises:
        UsageError: it cannot.
    """
    if precision == "bf16" and autocast_off:
        what = f"--precision bf16: the model switches autocast off at {autocast_off[0]}, which stages do not"
        remedy = 'leave it out; or put that part into a module of its own, and name it in HINTS = {"opaque": [...]}'
        raise UsageError(what, remedy)
