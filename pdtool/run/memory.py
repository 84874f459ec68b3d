"""The most memory that a worker holds while it trains."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Memory:
    """What training needs: the stages themselves, and what this process holds beyond what it held when that began.

    On a GPU, tensors there. On a CPU, resident pages without those of files: the code of libraries becomes resident as
    it is first used, and belongs to no stage. Memory shared with other workers counts in each of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before: int | None = None

    def start(self, stages: Iterable[nn.Module]) -> None:
        """Training begins; of what is held by now parameters and buffers of these stages count, libraries do not."""
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps memory of the stages of others, which looks held
        held = {id(t): t.nbytes for stage in stages for t in (*stage.parameters(), *stage.buffers())}
        now = self._now()
        self._before = None if now is None else now - sum(held.values())
        self.restart()

    def restart(self) -> None:
        """Forget peaks so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):
                _CLEAR.write_text("5", encoding="ascii")  # proc(5): resets the high water mark

    @property
    def peak_bytes(self) -> int | None:
        """Since the last `restart`; None before `start`, and where the system does not say."""
        if self._before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        known = _resident()
        return max(0, known["VmHWM"] - known["RssFile"] - self._before) if known else None

    def _now(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        known = _resident()
        return known["RssAnon"] + known["RssShmem"] if known else None


def _resident() -> dict[str, int]:
    """Bytes, as Linux says: resident without file pages, of files, shared, and the most in all; else nothing."""
    names = ("VmHWM", "RssAnon", "RssFile", "RssShmem")
    with suppress(OSError):
        lines = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
        found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words and words[0][:-1] in names}
        return found if len(found) == len(names) else {}
    return {}
