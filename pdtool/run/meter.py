"""Where a worker's time goes: busy and waiting per kind of action, and the events of the trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pdtool.schedule import Action, Kind

MOST_EVENTS = 20_000


@dataclass
class Totals:
    """Sums over the minibatches of this worker; seconds, bytes."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    wait_s: float = 0.0
    sent_bytes: int = 0


_FIELD = {kind: "backward_s" for kind in Kind} | {Kind.FORWARD: "forward_s", Kind.UPDATE: "update_s"}


@dataclass
class Meter:
    """Times actions; what an action waits for other workers is not its own time.

    On a GPU an action's end is that of its kernels: the meter synchronises, once per action.

    Attributes:
        totals: since the last `restart`.
        events: (name, kind, start, length) in seconds of the machine's clock, the first MOST_EVENTS.
    """

    device: torch.device
    totals: Totals = field(default_factory=Totals)
    events: list[tuple[str, str, float, float]] = field(default_factory=list)
    _waited: float = 0.0
    # perf_counter is exact but starts anywhere; the clock of day lets lanes of several machines stand under each other
    _offset: float = field(default_factory=lambda: time.time() - time.perf_counter())

    @contextmanager
    def doing(self, action: Action) -> Iterator[None]:
        """Time one action."""
        self._waited = 0.0
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        length = time.perf_counter() - start
        name = _FIELD[action.kind]
        setattr(self.totals, name, getattr(self.totals, name) + length - self._waited)
        self._event(str(action), action.kind.name.lower(), start, length)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for other workers."""
        start = time.perf_counter()
        yield
        length = time.perf_counter() - start
        self._waited += length
        self.totals.wait_s += length
        if length > 1e-4:
            self._event("wait", "wait", start, length)

    def sent(self, count: int) -> None:
        """Account for bytes sent to another worker."""
        self.totals.sent_bytes += count

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing of what is done meanwhile (validation)."""
        before = replace(self.totals)
        yield
        self.totals = before

    def restart(self) -> None:
        """Forget what was measured (warming up); the trace keeps it."""
        self.totals = Totals()

    def _event(self, name: str, kind: str, start: float, length: float) -> None:
        if len(self.events) < MOST_EVENTS:
            self.events.append((name, kind, start + self._offset, length))


def chrome_trace(lanes: dict[str, list[tuple[str, str, float, float]]]) -> dict[str, Any]:
    """Events of each worker as a trace that chrome://tracing and Perfetto show: one lane per worker, microseconds."""
    origin = min((start for events in lanes.values() for _, _, start, _ in events), default=0.0)
    out: list[dict[str, Any]] = []
    for lane, (name, events) in enumerate(lanes.items()):
        out.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": name}})
        for label, kind, start, length in events:
            out.append({
                "ph": "X", "name": label, "cat": kind, "pid": 0, "tid": lane,
                "ts": round((start - origin) * 1e6, 1), "dur": round(length * 1e6, 1),
            })  # fmt: skip
    return {"traceEvents": out, "displayTimeUnit": "ms"}
