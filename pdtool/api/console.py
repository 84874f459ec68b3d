"""Messages of the API's functions while they work, and the listener that shows them.

By default notes are lines on stderr, and nothing shows progress. The command line installs its terminal, with bars and
a line for each epoch, and so does `pdtool.run(...)` in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pdtool.errors import printable

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import Artifact
    from pdtool.artifacts.metrics import MetricsLine

OnProgress = Callable[[int, int], None]  # called with (done, total)
OnStep = Callable[[str], None]  # called with the current step
OnEvent = Callable[["MetricsLine"], None]  # called with each line of metrics.jsonl, soon after it is written


class Listener:
    """Receives notes and progress. This class writes the notes to stderr; a subclass may show more."""

    def note(self, text: str) -> None:
        """Print a line; if nobody reads it any more, the work goes on."""
        with suppress(OSError):
            sys.stderr.write(f"{printable(text)}\n")

    def show(self, artifact: Artifact, folder: Path | None) -> None:
        """Print an artifact on stdout.

        Args:
            folder: its folder; None: unknown.
        """
        sys.stdout.write(artifact.dump())

    def progress(self, label: str) -> AbstractContextManager[OnProgress]:
        """Show how much is done, in this context."""
        return nullcontext(lambda done, total: None)

    def status(self, label: str) -> AbstractContextManager[OnStep]:
        """Show the current step, in this context."""
        return nullcontext(lambda step: None)

    def training(self, out: Path, epochs: int, log_every: int | None) -> AbstractContextManager[OnEvent]:
        """Show how a training goes on, from the lines of its metrics.jsonl.

        Args:
            out: the run's folder.
            epochs: total epochs of the run.
            log_every: updates between two lines; None: the listener decides.
        """
        return nullcontext(lambda event: None)


class _Muted(Listener):
    def note(self, text: str) -> None:
        pass


_installed = Listener()  # one per process, as stderr


def install(listener: Listener) -> None:
    """Send all messages of the API's functions to `listener` from now on."""
    global _installed
    _installed = listener


@contextmanager
def muted() -> Iterator[None]:
    """Say nothing in this context."""
    listener = _installed
    install(_Muted())
    try:
        yield
    finally:
        install(listener)


def note(text: str) -> None:
    """Print a line for the user."""
    _installed.note(text)


def show(artifact: Artifact, folder: Path | None) -> None:
    """Print an artifact on stdout, for people.

    Args:
        folder: where it stands; None: unknown.
    """
    _installed.show(artifact, folder)


def progress(label: str) -> AbstractContextManager[OnProgress]:
    """Show how much is done, in this context."""
    return _installed.progress(label)


def status(label: str) -> AbstractContextManager[OnStep]:
    """Show the current step, in this context."""
    return _installed.status(label)


def training_progress(out: Path, epochs: int, log_every: int | None) -> AbstractContextManager[OnEvent]:
    """Show the progress of the training in the folder `out`, in this context."""
    return _installed.training(out, epochs, log_every)
