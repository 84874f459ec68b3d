"""The most memory that a worker holds while it trains."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Memory:
    """What this process holds beyond what it held when this was made: before the model was loaded.

    On a GPU, tensors there. On a CPU, resident pages without those of files: the code of libraries becomes resident as
    it is first used, and belongs to no stage. Memory shared with other workers counts in each of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = self._now()

    def restart(self) -> None:
        """Forget peaks so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):
                _CLEAR.write_text("5", encoding="ascii")  # proc(5): resets the high water mark

    @property
    def peak_bytes(self) -> int | None:
        """Since the last `restart`; None where the system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - (self._before or 0)
        known = _resident()
        if not known or self._before is None:
            return None
        return max(0, known["VmHWM"] - known["RssFile"] - self._before)

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
