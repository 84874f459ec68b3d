"""Resident memory of this process as Linux reports it; on other systems it is unknown.

Pages of files are not counted: the code of libraries becomes resident when it is first used.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_STATUS_FIELDS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")
_MALLOC_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"}
_KEEP_OPTIONS = {-1: 2**31 - 1, -2: 2**24, -4: 0}  # never trim, grow in steps of 16 MB, allocate nothing by mmap


def resident_bytes() -> int | None:
    """Return the bytes that are resident now; None where the system does not say."""
    status = _status_bytes()
    return status["RssAnon"] + status["RssShmem"] if status else None


def peak_resident_bytes() -> int | None:
    """Return the most bytes that were resident since `reset_peak`; None where the system does not say."""
    status = _status_bytes()
    return status["VmHWM"] - status["RssFile"] if status else None


def reset_peak() -> None:
    """Forget the peak so far."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5", encoding="ascii")  # proc(5): resets the high water mark


def trim_heap() -> None:
    """Let glibc return freed memory to the system; until then it counts as resident."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep all freed memory for the next minibatch, which needs as much again.

    By default glibc returns large tensors to the kernel and gets them back as zeroed pages, with one page fault each:
    five to ten per cent of a training step. Nothing is changed where the environment sets GLIBC_TUNABLES or options of
    mallopt(3): glibc read them when this process, or its fork server, began.
    """
    if not os.environ.keys() & {*_MALLOC_VARIABLES, "GLIBC_TUNABLES"}:
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            for option, value in _KEEP_OPTIONS.items():
                libc.mallopt(option, value)


def _status_bytes() -> dict[str, int]:
    """The fields of /proc/self/status in bytes; empty when one of them is missing."""
    with suppress(OSError):
        lines = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
        fields = {
            words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words and words[0][:-1] in _STATUS_FIELDS
        }
        return fields if len(fields) == len(_STATUS_FIELDS) else {}
    return {}
