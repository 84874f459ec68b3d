"""The host of this process: its usable cores, its parent and children, its memory and the limits on it.

Linux reports all of this. In a sandbox that does not, the memory is unknown. Pages of files do not count as memory,
because the code of libraries becomes resident at its first use.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from pdtool.errors import UsageError, WorkerDiedError

_PR_SET_PDEATHSIG = 1  # prctl(2)
_STATUS, _STATM, _CLEAR_REFS = (Path("/proc/self") / name for name in ("status", "statm", "clear_refs"))
_STATUS_FIELDS = ("VmHWM", "RssAnon", "RssFile", "RssShmem")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of v2, of v1
_UNLIMITED_BYTES = 2**60  # v1 writes a number beyond this for no limit
_TUNABLES = "GLIBC_TUNABLES"
_MALLOC_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"}
_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = 1, -1, -2, -3, -4  # of mallopt(3)
# Never trim, grow in steps of 16 MB, allocate nothing by mmap, and join freed memory with its free neighbours at once.
_KEEPING = {_M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 2**24, _M_MMAP_MAX: 0, _M_MXFAST: 0}
# Allocate each block of 64 kB or more by mmap, which returns it when it is freed.
_RETURNING = {_M_TRIM_THRESHOLD: 2**17, _M_MMAP_THRESHOLD: 2**16, _M_MMAP_MAX: 2**16}
# The thresholds that glibc itself reaches in a process that frees large blocks, and its other defaults.
_DEFAULTS = {_M_TRIM_THRESHOLD: 2**26, _M_TOP_PAD: 2**17, _M_MMAP_THRESHOLD: 2**25, _M_MMAP_MAX: 2**16, _M_MXFAST: 2**7}


def usable_cores() -> frozenset[int]:
    """Return the numbers of the CPU cores that this process may use, within limits of `taskset` or SLURM."""
    return frozenset(os.sched_getaffinity(0))


def end_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends.

    Args:
        parent: process id of the parent, if it may have ended already; None: the present parent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent not in (None, os.getppid()):  # it ended before that
        os._exit(WorkerDiedError.exit_code)


def check_may_start_processes() -> None:
    """Raise UsageError in a process that multiprocessing forbids to have children."""
    if multiprocessing.current_process().daemon:
        what = "this process cannot start workers because it is daemonic, like a worker of multiprocessing.Pool"
        raise UsageError(what, "train in the main process, or in a worker of concurrent.futures.ProcessPoolExecutor")


def process_start_s() -> float:
    """Return when this process started, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def joining_freed_memory() -> AbstractContextManager[None]:
    """In processes started in this context, make glibc join freed memory with its free neighbours at once.

    Tensors are aligned, so up to glibc 2.37 a freed tensor's memory fits the next tensor of its size only together with
    the small pieces on both sides. glibc's thread caches would keep these pieces apart.
    """
    return nullcontext() if _has_malloc_options() else _environment_variable(_TUNABLES, "glibc.malloc.tcache_count=0")


def safe_path() -> AbstractContextManager[None]:
    """Keep the current folder off sys.path in Python processes started in this context.

    multiprocessing starts them with `python -c`, which would run a file signal.py there. They get this process's
    sys.path later. Their environment has PYTHONSAFEPATH: remove it before running the user's code, which may also start
    Python.
    """
    return _environment_variable("PYTHONSAFEPATH", "1")


@contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable in this context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def resident_bytes() -> int | None:
    """Return the bytes that are resident now; None if unknown."""
    status = _status_bytes()
    return status["RssAnon"] + status["RssShmem"] if status else None


def heap_bytes() -> int:
    """Return the resident bytes that belong to no file and no other process, in a few microseconds; 0 if unknown."""
    with suppress(OSError, ValueError):
        _, resident, shared, *_ = map(int, _STATM.read_bytes().split())
        return (resident - shared) * mmap.PAGESIZE
    return 0


def file_bytes() -> int:
    """Return the bytes of files that are resident now, such as code of libraries; 0 if unknown."""
    return _status_bytes().get("RssFile", 0)


def peak_resident_bytes(peak_file_bytes: int = 0) -> int | None:
    """Return the most bytes that were resident since `reset_peak`; None if unknown.

    Args:
        peak_file_bytes: the most of `file_bytes` since then, to subtract from the system's peak. The present number
            would be too small, because the system takes back pages of files when memory is short.
    """
    status = _status_bytes()
    if not status:
        return None
    peak_bytes = status["VmHWM"] - max(peak_file_bytes, status["RssFile"])
    return max(peak_bytes, status["RssAnon"] + status["RssShmem"])


def reset_peak() -> None:
    """Forget the peak so far."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5", encoding="ascii")  # proc(5): resets the high water mark


def trim_heap() -> None:
    """Make glibc return freed memory to the system; until then it counts as resident."""
    ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Make glibc keep all freed memory for the next minibatch, which needs as much again.

    By default glibc returns large tensors to the kernel and gets them back as zeroed pages, with a page fault for each:
    five to forty per cent of a training step.
    """
    _set_malloc_options(_KEEPING)


def return_freed_memory() -> None:
    """Return all freed memory to the system, and from now on each freed large tensor."""
    _set_malloc_options(_RETURNING)
    trim_heap()


@contextmanager
def freed_memory(treat: Callable[[], None]) -> Iterator[None]:
    """In this context, treat freed memory as a worker does; return it at the end.

    Args:
        treat: `keep_freed_memory`, or `return_freed_memory`, so that resident memory is memory in use.
    """
    treat()
    try:
        yield
    finally:
        _set_malloc_options(_DEFAULTS)
        trim_heap()


def _set_malloc_options(options: Mapping[int, int]) -> None:
    """Set options of mallopt(3), unless the environment has some, which glibc read when this process began."""
    if not _has_malloc_options():
        for option, value in options.items():
            ctypes.CDLL(None).mallopt(option, value)


def _has_malloc_options() -> bool:
    return bool(os.environ.keys() & {*_MALLOC_VARIABLES, _TUNABLES})


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of this process.

    Attributes:
        name: `this machine` or `the control group`.
        free_bytes: bytes of `total_bytes` that are still available.
    """

    name: str
    total_bytes: int
    free_bytes: int


def memory_limits() -> list[MemoryLimit]:
    """Return the known limits on the memory of this process, without unlimited ones."""
    limits = []
    with suppress(OSError, KeyError):
        machine = _kilobyte_fields(_PROC / "meminfo")
        limits.append(MemoryLimit("this machine", machine["MemTotal"], machine["MemAvailable"]))
    return limits + sorted(_cgroup_limits(), key=lambda limit: limit.free_bytes)[:1]


def machine_bytes() -> int | None:
    """Return the memory of all processes here together: the machine's or the control group's; None if unknown."""
    return min((limit.total_bytes for limit in memory_limits()), default=None)


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed since its start because memory ran out; None if unknown."""
    with suppress(OSError, ValueError, KeyError):
        counters = dict(line.split() for line in (_PROC / "vmstat").read_text(encoding="ascii").splitlines())
        return int(counters["oom_kill"])
    return None


def _cgroup_limits() -> Iterator[MemoryLimit]:
    """The limits of this process's control group and of those that contain it."""
    with suppress(OSError, ValueError):
        for line in (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = _CGROUPS / controllers
                folder = root / path.lstrip("/")
                for group in (folder, *folder.parents):
                    if group.is_relative_to(root):
                        yield from _cgroup_limit(group)


def _cgroup_limit(folder: Path) -> Iterator[MemoryLimit]:
    for limit_file, usage_file in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # `max` means no limit
            total_bytes = int((folder / limit_file).read_text(encoding="ascii"))
            used_bytes = int((folder / usage_file).read_text(encoding="ascii"))
            if total_bytes < _UNLIMITED_BYTES:
                yield MemoryLimit("the control group", total_bytes, max(0, total_bytes - used_bytes))


def _kilobyte_fields(path: Path) -> dict[str, int]:
    """The fields `VmSize: 1234 kB` of a file of /proc, in bytes."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}


def _status_bytes() -> dict[str, int]:
    """The fields of /proc/self/status in bytes; empty if a needed one is missing."""
    with suppress(OSError):
        fields = _kilobyte_fields(_STATUS)
        return fields if fields.keys() >= set(_STATUS_FIELDS) else {}
    return {}
