"""Signals that stop a run: they end its workers at once, and the user is told how to go on."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from pdtool.artifacts import run_dir
from pdtool.run.processes.reaper import Reaper

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def handling_signals() -> Iterator[Callable[[Reaper], None]]:
    """Handle signals while workers are started and run, in place of torch elastic, which waits half a minute for a
    stopped worker.

    Yields:
        A function to be called with the reaper, once it is there.

    A signal that was ignored stays so: `nohup` ignores SIGHUP, shells SIGINT for what a script starts with `&`.

    Raises:
        SignalException: from wherever the main thread is, once a signal has come and the workers are killed.
    """

    reapers: list[Reaper] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for reaper in reapers:
            reaper.kill()
        raise SignalException(f"stopped by {signal.Signals(number).name}", signal.Signals(number))

    def suspend(number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the terminal sends it to the process group of the launcher, which is not that of the workers."""
        for reaper in reapers:
            reaper.send(signal.SIGTSTP)
        signal.raise_signal(signal.SIGSTOP)
        for reaper in reapers:
            reaper.send(signal.SIGCONT)  # when the shell has sent it here

    if threading.current_thread() is not threading.main_thread():
        yield reapers.append
        return
    handlers = {**dict.fromkeys(_STOPPING, stop), signal.SIGTSTP: suspend}
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
    """Return what a user calls a signal that stops a run."""
    return "Ctrl-C" if number == signal.SIGINT else number.name


def stop_message(number: signal.Signals, out: Path) -> str:
    """Return a line that says what has stopped the run of a folder, and how to go on."""
    what = stop_name(number)
    epochs = run_dir.complete_checkpoints(out)
    if not epochs:
        return f"stopped by {what} before the first checkpoint; start it again"
    return f"stopped by {what}; go on from the last checkpoint (epoch {max(epochs)}) with --resume {out}"


def end_by_signal(number: signal.Signals) -> None:
    """Let this process end by the signal, or do what the program that has called `launch` does on it."""
    if signal.getsignal(number) is signal.SIG_DFL:
        atexit._run_exitfuncs()  # which such an end would skip: multiprocessing removes its semaphores and its folder
    signal.raise_signal(number)
