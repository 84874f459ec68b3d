"""The process that calls pdtool: the functions of the API leave it as they found it.

`undoing_user_changes` of the frontend undoes the changes that the user's files make while they are loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

from pdtool.errors import UsageError

_calling = threading.RLock()


@contextmanager
def unchanged_caller() -> Iterator[None]:
    """Restore the random generators, the environment, and multiprocessing at the end.

    Its fork server and resource tracker end if they were not running before, unless the program has started processes
    meanwhile.

    Raises:
        UsageError: another thread is in such a function: both would change the state of one process.
    """
    if not _calling.acquire(blocking=False):
        raise UsageError("another thread of this program is calling pdtool", "call it from one thread at a time")
    try:
        with ExitStack() as undo:
            for restore in (_random_state(), _environment(), _multiprocessing()):
                undo.callback(restore)
            yield
    finally:
        _calling.release()


def _random_state() -> Callable[[], None]:
    python, before = random.getstate(), {name: sys.modules.get(name) for name in ("numpy", "torch")}
    numpy: Any = before["numpy"]
    torch: Any = before["torch"]
    of_numpy, of_torch = numpy and numpy.random.get_state(), torch and torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if torch and torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(of_numpy)
        elif loaded := sys.modules.get("numpy"):  # as if it had just been loaded
            loaded.random.seed()
        if torch:
            torch.set_rng_state(of_torch)
        elif loaded := sys.modules.get("torch"):
            loaded.seed()
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)

    return restore


def _environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

    return restore


def _multiprocessing() -> Callable[[], None]:
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    method, preloaded = multiprocessing.get_start_method(allow_none=True), server._preload_modules
    had_server, had_tracker = server._forkserver_pid is not None, tracker._fd is not None
    children = {child.pid for child in multiprocessing.active_children()}

    def restore() -> None:
        server._preload_modules = preloaded
        multiprocessing.set_start_method(method, force=True)
        if {child.pid for child in multiprocessing.active_children()} - children:
            return
        with suppress(OSError):  # of one that has died
            if not had_server:
                server._stop()
        with suppress(OSError):  # ends when nobody holds its pipe, but the fork server does
            if not had_tracker:
                tracker._stop()

    return restore
