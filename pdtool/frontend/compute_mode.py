"""How a model computes: on which device, in which precision, and through torch.compile or not.

`--precision bf16` means torch.autocast in forward and loss, in a measured profile as in a run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from pdtool.errors import PdtoolError, UsageError, describe_error

RunPrecision = Literal["fp32", "bf16"]
_COMPILERS = ("torch._dynamo.", "torch._inductor.")  # modules of the errors of torch.compile
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_NO_COMPILER = "No working C++ compiler"


def computing_in(precision: RunPrecision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a forward and the loss compute.

    Args:
        precision: fp32 leaves the dtypes to the model; bf16 computes in bf16 where that is safe. Weights and messages
            between stages keep their dtypes.
    """
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def check_autocast(precision: RunPrecision, autocast_off: Sequence[str]) -> None:
    """Check that a model can be computed in a precision.

    Args:
        autocast_off: lines where the model switches autocast off; operators and stages would not.

    Raises:
        UsageError: it cannot.
    """
    if precision == "bf16" and autocast_off:
        what = f"--precision bf16: the model switches autocast off at {autocast_off[0]}, but stages do not"
        remedy = (
            'leave the option out, or put that part into a module of its own and name it in HINTS = {"opaque": [...]}'
        )
        raise UsageError(what, remedy)


def default_device() -> Literal["cpu", "cuda"]:
    """Return the device that `run` trains on unless told otherwise: cuda where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Check that this machine has a device to train on; raises UsageError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda: torch finds no CUDA device here", "leave out --device to train on the CPU")


def compiled(module: Callable[..., Any]) -> Callable[..., Any]:
    """Put a module through torch.compile. Its cache holds code that will run, so the folder must be private to the
    user.

    Raises:
        UsageError: the folder is not private.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable itself when torch._dynamo is imported, to a folder that any user can make before
    if os.environ.get(_CACHE_VARIABLE, "") in ("", os.path.abspath(default_cache_dir())):
        os.environ[_CACHE_VARIABLE] = str(_private_cache())
    return torch.compile(module)


def _private_cache() -> Path:
    """Return the user's folder for compiled code, made where it is missing; raises UsageError."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache")) / "pdtool"
    remedy = f"set {_CACHE_VARIABLE} to a folder of your own"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder, folder / "torchinductor"):
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise UsageError(f"{path}, torch.compile's cache, is not private to you", f"remove it, or {remedy}")
    except OSError as error:
        raise UsageError(f"cannot make {folder} for torch.compile ({error.strerror})", remedy) from error
    return folder / "torchinductor"


def is_compiler_error(error: Exception) -> bool:
    """Whether torch.compile itself failed, and not the code that it was compiling."""
    return type(error).__module__.startswith(_COMPILERS)


def compiler_reason(error: Exception) -> str:
    """Return why torch.compile failed, on one line and without its advice for developers of torch."""
    return " ".join(describe_error(error).partition("\n\nSet TORCHDYNAMO")[0].split())


def compiler_error(error: Exception) -> PdtoolError:
    """Return the error of a worker whose stage torch.compile could not compile."""
    reason, remedy = compiler_reason(error), "leave --compile out"
    if _NO_COMPILER in reason:
        remedy = f"install a C++ compiler (g++, or set $CXX), or {remedy}"
    return PdtoolError(f"torch.compile failed: {reason}", remedy)
