"""Processes of workers: started one by one, listened to together, and ended together.

Those of `run` and `probe` come from a fork server that has torch imported; `emulate` spawns a process that has the
links, and forks its own from that. What a worker sends through its pipe, and how it ended, is all that is known of it
here.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

from pdtool.host import joining_freed_memory, safe_path

_GRACE_S = 0.5  # after a failure, because its root cause may still be on its way
_POLL_S = 0.2
_END_S = 10.0  # for processes that were killed
# What a run's workers import; torch._dynamo comes with the first optimizer and would take each of them half a second.
_OF_WORKERS = ("torch", "torch._dynamo", "pdtool.runtime.launch.worker_main", "pdtool.generator.generate")


class WorkerProcesses:
    """The workers started by this process. At the end of a `with` block all of them are gone.

    Args:
        method: how multiprocessing starts them: `forkserver`, `fork` or `spawn`.

    Attributes:
        processes, pipes: by rank.
        longest_pause_s: how long this process was stopped while it listened (Ctrl-Z, a paused container).
    """

    def __init__(self, method: str) -> None:
        self._context: Any = multiprocessing.get_context(method)
        self.processes: dict[int, BaseProcess] = {}
        self.pipes: dict[int, Connection] = {}
        self.longest_pause_s = 0.0

    def start(self, rank: int, target: Callable[..., object], *arguments: object) -> int:
        """Start a worker, which calls `target` with its end of a pipe and the arguments; return its process id."""
        self.pipes[rank], theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), name=f"worker {rank}")
        with theirs, readable_main():
            process.start()
        self.processes[rank] = process
        return int(process.pid)

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit codes of the workers that have ended, by rank; negative for a signal."""
        return {rank: code for rank, each in self.processes.items() if (code := each.exitcode) is not None}

    def listen(self, has_failed: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, Any]]:
        """Yield (rank, message) as messages come, until all workers have ended.

        After a failure, the others get a little time to report how they end.

        Args:
            has_failed: whether a worker that has not ended has failed.
        """
        sources: dict[Any, int] = {pipe: rank for rank, pipe in self.pipes.items()}
        sources |= {process.sentinel: rank for rank, process in self.processes.items()}
        until_s, is_over = math.inf, False
        while not is_over:
            is_over = len(self.exit_codes) == len(self.processes) or time.monotonic() > until_s
            begin_s = time.monotonic()
            ready = wait(list(sources), 0 if is_over else _POLL_S)  # the last time for messages already there
            self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - begin_s - _POLL_S)
            for source in ready:
                pipe = self.pipes[sources[source]]
                with suppress(EOFError, OSError):  # it may end in the middle of a message
                    while pipe.poll():
                        yield sources[source], pipe.recv()
                    if source is pipe:
                        continue
                del sources[source]  # the worker has ended, or has closed its pipe
            if until_s == math.inf and (any(self.exit_codes.values()) or has_failed()):
                until_s = time.monotonic() + _GRACE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        end_processes(*self.processes.values())
        for pipe in self.pipes.values():
            pipe.close()


def end_processes(*processes: BaseProcess) -> None:
    """Kill processes and wait for their ends.

    A process that hangs in the kernel (in a driver, or on a network file system) or whose fork server is stopped does
    not report its end. After a while it is forgotten, because Python would wait for it at its own end.
    """
    for process in processes:
        process.kill()
    until_s = time.monotonic() + _END_S
    for process in processes:
        process.join(max(0.0, until_s - time.monotonic()))
        if process.exitcode is None:
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


@contextmanager
def readable_main() -> Iterator[None]:
    """Let the processes that start in this context not read the main program if it is no file, as with `python -`."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or os.path.isfile(path):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


def start_fork_server(modules: Sequence[str]) -> None:
    """Start this process's fork server, unless it runs, and make it import these modules.

    It ignores SIGINT, because Ctrl-C reaches it while it imports. Its malloc has no thread caches, which would keep the
    memory of large tensors in pieces (`host.joining_freed_memory`).
    """
    multiprocessing.set_forkserver_preload(list(modules))
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        with safe_path(), joining_freed_memory():
            forkserver.ensure_running()
        _end_server_at_exit()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)


@cache
def _end_server_at_exit() -> None:
    """End the fork server with this process, after the processes that come from it.

    It would end by itself, but only when it has imported torch, and until then it keeps stdout and stderr open.
    """

    def end() -> None:
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    util.Finalize(None, end, exitpriority=-1)


def start_server_of_workers() -> None:
    """Start the fork server for the workers of a run.

    Call it early, because it imports torch at the same time as this process. If it cannot be started, the launcher, who
    tries again, says why.
    """
    with suppress(OSError, EOFError):
        start_fork_server(_OF_WORKERS)


def describe_exit(code: int) -> str:
    """Return how a process ended, as `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit status {code}"
    return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
