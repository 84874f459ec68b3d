"""The most memory that a worker holds while it trains."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

from pdtool import host as process_memory


class PeakMemory:
    """What training needs: the stages themselves, and what this process holds beyond what it held when training began.

    On a GPU tensors are counted, on a CPU resident pages without those of files. Memory that is shared with other
    workers counts in each of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._before_bytes: int | None = None
        self._file_bytes = 0  # the most that was seen since the last `restart`

    def start(self, stages: Iterable[nn.Module], received_bytes: int = 0) -> None:
        """Begin to measure; of what is held by now, parameters and buffers of `stages` count and libraries do not.

        Args:
            received_bytes: memory of a GPU that is set aside for messages, which counts, too.
        """
        gc.collect()
        process_memory.trim_heap()  # what glibc keeps of the stages of others looks held
        stage_bytes = {id(t): t.nbytes for stage in stages for t in (*stage.parameters(), *stage.buffers())}
        now = torch.cuda.memory_allocated(self._device) if self._is_cuda else process_memory.resident_bytes()
        self._before_bytes = None if now is None else now - sum(stage_bytes.values()) - received_bytes
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            process_memory.reset_peak()
            self._file_bytes = process_memory.file_bytes()

    def epoch_ended(self) -> None:
        """See how many pages of files are resident, before the system may take them back."""
        if not self._is_cuda:
            self._file_bytes = max(self._file_bytes, process_memory.file_bytes())

    @property
    def peak_bytes(self) -> int | None:
        """The peak since the last `restart`; None before `start`, and where the system does not say."""
        if self._before_bytes is None:
            return None
        peak = (
            torch.cuda.max_memory_allocated(self._device)
            if self._is_cuda
            else process_memory.peak_resident_bytes(self._file_bytes)
        )
        return None if peak is None else max(0, peak - self._before_bytes)
