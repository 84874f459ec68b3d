"""The process group of a launch, which ends with it: the reaper that leads it, and the signals that stop a run.

The workers join the reaper's group, so that one signal of the kernel reaches all of them, stopped and hanging ones and
those forked by the user's dataset. The reaper sees the end of a pipe when the launcher is gone, for whatever reason. A
signal that stops a run ends its workers at once, and the user is told how to go on.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import WorkerDiedError
from pdtool.files import quoted
from pdtool.machines import Machines
from pdtool.processes import end_processes, readable_main, start_server_of_workers

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class StopSignal(KeyboardInterrupt):
    """Raised in the main thread when a signal stops a run, once its workers are killed."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


class Reaper:
    """The reaper of one launch. It runs when the constructor returns; otherwise that raises WorkerDiedError.

    Attributes:
        pid: id of its process and of the process group.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        start_server_of_workers()
        self._pipe, pipe_of_reaper = context.Pipe()
        arguments = (pipe_of_reaper, util.get_temp_dir())
        self._process = context.Process(target=_lead_group, args=arguments, name="reaper", daemon=True)
        try:
            with readable_main():
                self._process.start()
            pipe_of_reaper.close()
            self.pid: int = self._received_pid()
            self._pipe.send("started")
        except BaseException:  # a signal; the launcher goes on, and needs the folder that the reaper would remove
            if self._process.pid:  # otherwise it ends as its pipe is closed
                self._process.kill()
            self._pipe.close()
            raise

    def _received_pid(self) -> int:
        try:
            return int(self._pipe.recv())
        except EOFError as error:
            what = "the process that ends the workers if the launcher dies could not start"
            remedy = 'a script of your own must call pdtool.run under `if __name__ == "__main__":`; else try once more'
            raise WorkerDiedError(what, remedy) from error

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """End the group, and wait until the reaper is gone."""
        self.send(signal.SIGKILL)
        end_processes(self._process)
        self._pipe.close()


def join_group(reaper_pid: int) -> None:
    """Make this process, and all that it will start, end with the group; if the reaper is gone it ends here."""
    try:
        os.setpgid(0, reaper_pid)
    except OSError:
        os._exit(WorkerDiedError.exit_code)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # `stty tostop` would stop a process that writes from the background


def _lead_group(launcher: Connection, temporary_folder: str) -> None:
    """The process of the reaper.

    Args:
        launcher: pipe whose other end closes when the launcher ends.
        temporary_folder: the folder of the launcher's multiprocessing, which removes it unless it is killed.
    """
    os.setpgrp()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    is_started = False
    with suppress(EOFError, OSError):  # this is the sign of the launcher's end, or of a start that was interrupted
        launcher.send(os.getpid())
        is_started = bool(launcher.recv())
        launcher.recv()
    if is_started:
        shutil.rmtree(temporary_folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


@contextmanager
def handling_signals() -> Iterator[Callable[[Reaper], None]]:
    """Handle signals while workers are started and run.

    Yields:
        A function to call with the reaper once it runs.

    Ignored signals stay ignored: `nohup` ignores SIGHUP, shells ignore SIGINT for jobs that a script starts with `&`.

    Raises:
        StopSignal: from wherever the main thread is, once a signal has come and the workers are killed.
    """

    reapers: list[Reaper] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for reaper in reapers:
            reaper.send(signal.SIGKILL)
        raise StopSignal(signal.Signals(number))

    def suspend(number: int, frame: FrameType | None) -> None:
        """Pass on Ctrl-Z: the terminal sends it to the launcher's process group only, which the workers are not in."""
        for reaper in reapers:
            reaper.send(signal.SIGTSTP)
        signal.raise_signal(signal.SIGSTOP)
        for reaper in reapers:
            reaper.send(signal.SIGCONT)  # when the shell has sent it here

    is_main = threading.current_thread() is threading.main_thread()
    handlers = {**dict.fromkeys(_STOPPING, stop), signal.SIGTSTP: suspend} if is_main else {}
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield reapers.append
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def stop_name(number: signal.Signals) -> str:
    """Return the user's name for a signal that stops a run."""
    return "Ctrl-C" if number == signal.SIGINT else number.name


def stop_message(number: signal.Signals, out: Path, machines: Machines | None = None) -> str:
    """Return a line that says which signal stopped the run, and how to go on."""
    run_dir = RunDir(out)
    done, command, state = run_dir.checkpoints(), f"`{run_dir.resume_command(machines)}`", run_dir.state()
    if state and max(done, default=0) >= state.epochs:
        return f"stopped by {stop_name(number)} after all epochs; `pdtool export {quoted(out)}` writes the weights"
    if not done:
        return f"stopped by {stop_name(number)} before the first checkpoint; start it again with {command}"
    return f"stopped by {stop_name(number)}; continue from the last checkpoint (epoch {max(done)}) with {command}"


def end_by_signal(number: signal.Signals) -> None:
    """End this process by the signal, or do what the program that called `launch` does on it."""
    if signal.getsignal(number) is signal.SIG_DFL:
        atexit._run_exitfuncs()  # such an end would skip these: multiprocessing removes its semaphores and its folder
    signal.raise_signal(number)
