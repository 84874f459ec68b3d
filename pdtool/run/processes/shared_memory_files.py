"""Files in /dev/shm that outlive their processes, unless somebody unlinks them.

Named semaphores of multiprocessing, which torch elastic makes: its resource tracker unlinks them, unless it is killed
with the launcher, as by a signal to the whole process group. So they are named after the launcher, and the next one
unlinks those of launchers that are gone.

Counters of torch, for memory of a GPU that is shared: torch unlinks them in destructors, which no worker lives to see.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"sem\.pdtool-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-\w+")


def name_semaphores_after_this_process() -> None:
    """Let the semaphores that this process will make have names that say whose they are."""
    configuration = getattr(multiprocessing.current_process(), "_config", None)
    with suppress(OSError):  # without /proc the names are as usual
        if configuration:
            configuration["semprefix"] = f"/pdtool-{_pid_namespace()}-{os.getpid()}-{_start_ticks(os.getpid())}"


def remove_stale_semaphores() -> None:
    """Unlink the semaphores of launchers that are gone."""
    for path in _FOLDER.glob("sem.pdtool-*"):
        with suppress(OSError):
            if _is_stale(path.name):
                path.unlink()


def remove_counters(pid: int) -> None:
    """Unlink the counters of shared tensors of a process that ends or is gone, of this container."""
    for path in _FOLDER.glob(f"torch_{pid}_*"):
        with suppress(OSError):
            path.unlink()


def _is_stale(name: str) -> bool:
    owner = _NAME.fullmatch(name)
    if owner is None or owner["namespace"] != _pid_namespace():  # in another container a pid is another process
        return False
    try:
        return _start_ticks(int(owner["pid"])) != owner["start"]
    except OSError:
        return True


def _pid_namespace() -> str:
    """The number in `pid:[4026531836]`."""
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _start_ticks(pid: int) -> str:
    """When a process started, which tells it from a later one with its pid; raises OSError when there is none."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
