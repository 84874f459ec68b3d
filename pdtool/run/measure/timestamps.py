"""Timestamps that are recorded while a worker computes, and later read as seconds, in the order of their recording."""

from __future__ import annotations

import time
from typing import Any

import torch

Timestamp = Any  # what `record` returns
_MAX_DISTANCE_S = 10.0


class HostTimestamps:
    """Timestamps of the CPU: each is a time."""

    record = staticmethod(time.perf_counter)

    def is_ready(self, timestamp: Timestamp) -> bool:
        """Whether the timestamp can be read: always."""
        return True

    def seconds(self, timestamp: float) -> float:
        """Return the timestamp itself, in seconds of time.perf_counter."""
        return timestamp

    def seconds_between(self, start: float, end: float) -> float:
        """Return the seconds from one timestamp to a later one."""
        return end - start

    def synchronize(self) -> None:
        """Wait for nothing: no timestamp is pending."""


class CudaTimestamps:
    """Timestamps of a GPU: each is an event on the current stream, which happens when the kernels before it are done.

    So what lies between two timestamps is the time of the kernels started between them; and a wait is as long as the
    device had nothing to do because of it, however long the worker itself waited while kernels were still at work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._origin = self.record()
        self.synchronize()
        self._origin_s = time.perf_counter()

    def record(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_ready(self, timestamp: torch.cuda.Event) -> bool:
        """Whether the stream has come to the event."""
        return bool(timestamp.query())  # type: ignore[no-untyped-call]

    def seconds(self, timestamp: torch.cuda.Event) -> float:
        """Read a timestamp, in seconds of time.perf_counter.

        The origin moves along with the timestamps: an event says how far it is from another in single precision.
        """
        distance_s = float(self._origin.elapsed_time(timestamp)) / 1e3
        if distance_s > _MAX_DISTANCE_S:
            self._origin, self._origin_s, distance_s = timestamp, self._origin_s + distance_s, 0.0
        return self._origin_s + distance_s

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds from one timestamp to a later one, to which the stream has come."""
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device, so that all timestamps can be read."""
        torch.cuda.synchronize(self.device)


def timestamps_of(device: torch.device) -> HostTimestamps | CudaTimestamps:
    """Return the source of timestamps for what is computed on `device`."""
    return CudaTimestamps(device) if device.type == "cuda" else HostTimestamps()
