"""The most memory that a worker holds while it trains."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

from pdtool import resident


class Memory:
    """What training needs: the stages themselves, and what this process holds beyond what it held when that began.

    On a GPU, tensors there. On a CPU, resident pages without those of files. Memory shared with other workers counts in
    each of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before: int | None = None

    def start(self, stages: Iterable[nn.Module]) -> None:
        """Training begins; of what is held by now parameters and buffers of these stages count, libraries do not."""
        gc.collect()
        resident.trim()  # what glibc keeps of the stages of others looks held
        held = {id(t): t.nbytes for stage in stages for t in (*stage.parameters(), *stage.buffers())}
        now = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else resident.now()
        self._before = None if now is None else now - sum(held.values())
        self.restart()

    def restart(self) -> None:
        """Forget peaks so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            resident.restart()

    @property
    def peak_bytes(self) -> int | None:
        """Since the last `restart`; None before `start`, and where the system does not say."""
        if self._before is None:
            return None
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else resident.peak()
        return None if peak is None else max(0, peak - self._before)
