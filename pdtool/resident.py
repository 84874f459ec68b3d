"""Resident memory of this process, as Linux says; elsewhere nothing is known.

Pages of files are left out: the code of libraries becomes resident as it is first used.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_OPTIONS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_MMAP_MAX_": -4}
_KEEP = {-1: 2**31 - 1, -2: 2**24, -4: 0}  # no trimming, growth in steps of 16 MB, nothing by mmap
_NAMES = ("VmHWM", "RssAnon", "RssFile", "RssShmem")


def now() -> int | None:
    """Bytes that are held."""
    known = _status()
    return known["RssAnon"] + known["RssShmem"] if known else None


def peak() -> int | None:
    """The most since `restart`."""
    known = _status()
    return known["VmHWM"] - known["RssFile"] if known else None


def restart() -> None:
    """Forget the peak so far."""
    with suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")  # proc(5): resets the high water mark


def trim() -> None:
    """Let glibc give back what was freed: otherwise it looks held."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep() -> None:
    """Let glibc keep all that is freed, for the next minibatch, which needs as much again.

    By default it gives large tensors back to the kernel and gets them as zeroed pages, one page fault each: five to ten
    per cent of a training step. What is in the environment, as mallopt(3) has it, goes before.
    """
    given = {option: int(os.environ[name]) for name, option in _OPTIONS.items() if os.environ.get(name, "").isdigit()}
    if "GLIBC_TUNABLES" not in os.environ:
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            for option, value in (given or _KEEP).items():
                libc.mallopt(option, value)


def _status() -> dict[str, int]:
    with suppress(OSError):
        lines = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
        found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words and words[0][:-1] in _NAMES}
        return found if len(found) == len(_NAMES) else {}
    return {}
