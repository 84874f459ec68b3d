"""The error of a worker that ran out of memory: what it needed, and what its machine has."""

from __future__ import annotations

import errno
import re

import torch

from pdtool import host
from pdtool.artifacts.plan import Plan
from pdtool.errors import WorkerDiedError, describe_error
from pdtool.runtime.ranks import RankAssignment
from pdtool.units import format_bytes

# Messages of allocators: CUDA's, torch's for CPU tensors, C++'s and cuBLAS's. The last one is of CUDA's for a part of a
# GPU, where it cannot ask NVML who else uses the memory.
_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "alloc_failed",
    "nvml_success",
)
_PLACE = re.compile(r"^\[enforce fail at [^]]*\] err == 0\. ")  # in torch's sources
_REMEDY = (
    "partition with a smaller --memory, to get more stages or recomputation. Or profile with a smaller --batch-size, "
    "or put fewer workers on this machine"
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or one that it was raised from, is a failed allocation."""
    while error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, RuntimeError) and any(text in describe_error(error).lower() for text in _TEXTS):
            return True
        error = error.__cause__
    return False


def out_of_memory_error(
    error: BaseException, plan: Plan, assignment: RankAssignment, device: torch.device
) -> WorkerDiedError:
    """Return the error of a worker whose allocation failed with `error`."""
    cause = error
    while cause.__cause__ and is_out_of_memory(cause.__cause__):
        cause = cause.__cause__
    reason = _PLACE.sub("", str(cause) or type(cause).__name__).partition("\n")[0][:300]
    return WorkerDiedError(f"out of memory ({reason}){memory_sentence(plan, assignment, device)}", _REMEDY)


def killed_for_memory_error(what: str, plan: Plan, assignment: RankAssignment) -> WorkerDiedError:
    """Return the error of a worker that the kernel killed, or seems to have killed, because memory ran out."""
    return WorkerDiedError(f"{what}{memory_sentence(plan, assignment, torch.device('cpu'))}", _REMEDY)


def memory_sentence(plan: Plan, assignment: RankAssignment, device: torch.device) -> str:
    """Return `; the plan predicts 1.2 GB for stage 1, and this machine has 16 GB, of which 3 GB are free`."""
    limits = [*_gpu_limits(device), *host.memory_limits()]
    there_is = ", ".join(
        f"{limit.name} has {format_bytes(limit.total_bytes)}, of which {format_bytes(limit.free_bytes)} are free now"
        for limit in limits
    )
    stage = assignment.stage
    needed = f"predicts {format_bytes(plan.predicted.memory_bytes[stage])}" if plan.predicted else "has no prediction"
    return f"; the plan {needed} for stage {stage}" + (f", and {there_is}" if there_is else "")


def _gpu_limits(device: torch.device) -> list[host.MemoryLimit]:
    if device.type != "cuda":
        return []
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the device itself has failed
        return []
    return [host.MemoryLimit(str(device), total_bytes, free_bytes)]
