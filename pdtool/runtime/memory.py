"""Memory of a worker: what it does with freed memory, and its peak while it trains."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from time import perf_counter

import torch
from torch import nn

from pdtool import host
from pdtool.runtime.config import RunConfig
from pdtool.runtime.ranks import assign_ranks
from pdtool.units import format_bytes

_NEAR_LIMIT = 0.8  # the rest is for the next action
_LOOK_S = 0.01  # looking takes as long as a short action
_ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set


class PeakMemory:
    """The memory of training: the stages themselves, and all that this process has added since training began.

    On a GPU it counts tensors, on a CPU resident pages except those of files. The memory of messages, which two workers
    share, counts at the receiver.

    Attributes:
        received_bytes: GPU memory set aside for messages, which counts too.
        sent_bytes: returns the shared memory of messages that this worker has sent.
        limit_bytes: the plan's limit for the tensors of one worker; None: no limit.
        returns_freed: whether freed memory goes back to the system, because kept memory came near the limit.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self.received_bytes = 0
        self.sent_bytes: Callable[[], int] = int
        self.limit_bytes: int | None = None
        self.returns_freed = False
        self._next_look_s = 0.0
        self._before_bytes: int | None = None
        self._file_bytes = 0  # the most since the last `restart`

    def start(self, stages: Iterable[nn.Module]) -> None:
        """Begin to measure. Parameters and buffers of `stages` count, but the libraries loaded by now do not."""
        gc.collect()
        host.trim_heap()  # memory of other workers' stages that glibc keeps looks like memory in use
        stage_bytes = {id(t): t.nbytes for stage in stages for t in (*stage.parameters(), *stage.buffers())}
        now = torch.cuda.memory_allocated(self._device) if self._is_cuda else host.resident_bytes()
        self._before_bytes = None if now is None else now - sum(stage_bytes.values()) - self.received_bytes
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            host.reset_peak()
            self._file_bytes = host.file_bytes()

    def epoch_ended(self) -> None:
        """Count resident pages of files now, before the system may take them back."""
        if not self._is_cuda:
            self._file_bytes = max(self._file_bytes, host.file_bytes())

    def stay_within_limit(self) -> str:
        """After an action on a CPU, return freed memory to the system if kept memory comes near the limit.

        It checks only after some of the short actions.

        Returns:
            A note for the user the first time; "" otherwise.
        """
        if self.limit_bytes is None or self._before_bytes is None or self._is_cuda:
            return ""
        if perf_counter() < self._next_look_s:
            return ""
        self._next_look_s = perf_counter() + _LOOK_S
        if self.returns_freed:
            host.trim_heap()  # holes in the heap are still filled first
            return ""
        if host.heap_bytes() - self._before_bytes < _NEAR_LIMIT * self.limit_bytes:
            return ""
        self.returns_freed = True
        host.return_freed_memory()
        limit = format_bytes(self.limit_bytes)
        return f"returns freed memory from now on, which is slower: it came near the plan's limit of {limit}"

    @property
    def peak_bytes(self) -> int | None:
        """The peak since the last `restart`; None before `start`, and if the system does not report it."""
        if self._before_bytes is None:
            return None
        peak = (
            torch.cuda.max_memory_allocated(self._device)
            if self._is_cuda
            else host.peak_resident_bytes(self._file_bytes)
        )
        return None if peak is None else max(0, peak - self._before_bytes - self.sent_bytes())

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Most GPU memory that torch's allocator held for that, gaps between tensors included; None on a CPU."""
        if self._before_bytes is None or not self._is_cuda:
            return None
        return max(0, torch.cuda.max_memory_reserved(self._device) - self._before_bytes)


def expand_segments(device: torch.device) -> None:
    """Let the allocator's segments of GPU memory grow from now on, which leaves fewer gaps between tensors.

    Memory that another process maps is allocated before: for segments that grow torch needs pidfd_getfd, which
    containers without privileges refuse. This does nothing on a CPU, if PYTORCH_CUDA_ALLOC_CONF says otherwise or names
    another allocator, or if the driver does not support it, as for a part of a GPU.
    """
    given = next((os.environ[name] for name in _ALLOCATOR_OPTIONS if name in os.environ), "")
    if device.type != "cuda" or "expandable_segments" in given or "backend" in given:
        return
    set_options = torch._C._accelerator_setAllocatorSettings
    set_options(f"{given},expandable_segments:True".lstrip(","))
    try:
        new_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(new_stream):  # which has no free memory yet
            torch.empty(1 << 21, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()  # of that stream, and of segments that cannot grow
    except RuntimeError:
        set_options(f"{given},expandable_segments:False".lstrip(","))


def choose_heap(config: RunConfig, rank: int) -> None:
    """Keep freed memory for the next minibatch, unless the plan's limit leaves little room for it.

    Returning it is slower, so a note says so.
    """
    plan, assignments = config.plan, assign_ranks(config.plan)
    if rank >= len(assignments) or assignments[rank].stage not in plan.stages_with_little_room:
        host.keep_freed_memory()
        return
    host.return_freed_memory()
    limit, needed = plan.cluster.memory_bytes or 0, plan.memory_needed[assignments[rank].stage]
    what = f"the plan's limit is {format_bytes(limit)}, and it predicts {format_bytes(needed)}"
    sys.stderr.write(f"note: {assignments[rank]} returns freed memory at once, which is slower: {what}\n")
