"""A process that ends the workers of a launch, and all that they have started, when the launch is over.

It leads a process group that the workers join, so that one signal of the kernel reaches all of it: what is stopped,
what hangs, and what the user's data set has forked. It sees that the launcher is gone by the end of a pipe, however
that has happened.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection

from pdtool.errors import WorkerDiedError

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


class Reaper:
    """The reaper of one launch; it is there when the constructor returns, which raises WorkerDiedError if it is not.

    Attributes:
        pid: of its process, and number of the process group.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        _start_fork_server()
        self._pipe, pipe_of_reaper = context.Pipe()
        arguments = (pipe_of_reaper, util.get_temp_dir())
        self._process = context.Process(target=_lead_group, args=arguments, name="reaper", daemon=True)
        self._process.start()
        pipe_of_reaper.close()
        try:
            self.pid: int = self._pipe.recv()
        except EOFError as error:
            what = "the process that ends the workers died as it started"
            remedy = 'start it again; a script of your own has to call pdtool.run under `if __name__ == "__main__":`'
            raise WorkerDiedError(what, remedy) from error

    def kill(self) -> None:
        """End the group at once."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """End the group, and wait until the reaper is gone."""
        self.kill()
        self._process.join()
        self._pipe.close()


def _start_fork_server() -> None:
    """Start it with SIGINT ignored: Ctrl-C reaches it while it imports, and the reaper ends what comes from it."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        forkserver.ensure_running()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)


def join_group(reaper_pid: int) -> None:
    """Let this process, and what it will start, end with the group; without its reaper it ends here."""
    try:
        os.setpgid(0, reaper_pid)
    except OSError:
        os._exit(WorkerDiedError.exit_code)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # `stty tostop` would stop what writes from the background


def _lead_group(launcher: Connection, temporary_folder: str) -> None:
    """The process of the reaper.

    Args:
        launcher: pipe whose other end closes when the launcher ends.
        temporary_folder: of the launcher's multiprocessing, which removes it unless it is killed.
    """
    os.setpgrp()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # that is how the launcher's end is seen
        launcher.send(os.getpid())
        launcher.recv()
    shutil.rmtree(temporary_folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
