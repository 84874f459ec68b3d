"""Marks on a worker's way, that are read as times later."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Mark = Any  # what a clock's `mark` gives
_FAR_S = 10.0


class Clock(Protocol):
    """Gives marks and reads them, in seconds of time.perf_counter; marks are read in the order they were made in."""

    def mark(self) -> Mark:
        """Now."""

    def ready(self, mark: Mark) -> bool:
        """Whether the mark can be read."""

    def seconds(self, mark: Mark) -> float:
        """When it was."""

    def finish(self) -> None:
        """Wait until all marks can be read."""


class HostClock:
    """A mark is a time."""

    mark = staticmethod(time.perf_counter)

    def ready(self, mark: Mark) -> bool:
        """At once."""
        return True

    def seconds(self, mark: float) -> float:
        """The mark itself."""
        return mark

    def finish(self) -> None:
        """Nothing is pending."""


class DeviceClock:
    """A mark is an event on the current stream: it happens when the kernels started before it are done.

    So what lies between two marks is the time of the kernels started between them; and a wait is as long as the device
    had nothing to do because of it, however long the worker itself waited while kernels were still at work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._origin = self.mark()
        self.finish()
        self._origin_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """When the stream comes to this point."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ready(self, mark: torch.cuda.Event) -> bool:
        """Whether the stream has."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, mark: torch.cuda.Event) -> float:
        """The origin moves along with the marks: an event says how far it is from another in single precision."""
        past = float(self._origin.elapsed_time(mark)) / 1e3
        if past > _FAR_S:
            self._origin, self._origin_s, past = mark, self._origin_s + past, 0.0
        return self._origin_s + past

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


def clock_of(device: torch.device) -> Clock:
    """For what is computed there."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
