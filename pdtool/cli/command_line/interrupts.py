"""Ctrl-C that comes while Python destroys an object, where an exception is printed and forgotten.

That is not rare while torch is imported: the command went on, and the user had to press Ctrl-C again.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

_LATER_S = 0.05  # when the object is gone


def keep_interrupts() -> None:
    """Let a signal whose exception was forgotten come again a moment later."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        number = _signal_of(unraisable.exc_value)
        if number is None:
            before(unraisable)
            return
        timer = threading.Timer(_LATER_S, _send_to_main_thread, (number,))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def _send_to_main_thread(number: int) -> None:
    """Send a signal to the thread that handles it, also where it waits."""
    if main := threading.main_thread().ident:
        signal.pthread_kill(main, number)


def _signal_of(error: BaseException | None) -> int | None:
    """Return the signal that an exception stands for, torch's `SignalException` too; None for any other."""
    if isinstance(error, KeyboardInterrupt):
        return int(signal.SIGINT)
    number = getattr(error, "sigval", None)
    return int(number) if isinstance(number, signal.Signals) else None
