"""What a worker does when: marks at both ends of each action, and of each wait in it.

    2B0  |-- wait --|---------- compute, send ----------|
         begin                                         end

Marks are read later, into the ledger: while training, an action costs the meter a microsecond or two, and on a GPU the
device is never waited for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.run.clock import Mark, clock_of
from pdtool.run.ledger import Ledger, Totals
from pdtool.run.memory import Memory
from pdtool.schedule import Action

MOST_MARKED = 1_000  # actions and waits, before their marks are read
NVTX = "PDTOOL_NVTX"
_Wait = tuple[Mark, Mark, bool]  # and whether it was for an average
_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class Meter:
    """Times actions; what an action waits for other workers is not its own time.

    A torch profiler that is active in the worker (the user's model.py may start one) sees each action as a range
    `stage 2 forward 0`; so does Nsight Systems, on a GPU with PDTOOL_NVTX=1 in the environment. Otherwise no range is
    made: it would cost ten microseconds.

    Attributes:
        memory: the most that the worker holds; it is started by whom the meter belongs to.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = Memory(device)
        self._ledger, self._clock = Ledger(), clock_of(device)
        self._nvtx = device.type == "cuda" and os.environ.get(NVTX, "0") != "0"
        self._marked: list[tuple[Action | None, Mark, Mark, Sequence[_Wait]]] = []
        self._doing, self._waiting, self._averaging = _Doing(self), _Waiting(self, False), _Waiting(self, True)
        self._action: Action | None = None
        self._waits: list[_Wait] = []

    def doing(self, action: Action) -> AbstractContextManager[None]:
        """Time one action."""
        self._action = action
        return self._doing

    def waiting(self) -> AbstractContextManager[None]:
        """Time a wait for messages of other stages; a wait within a wait is part of it."""
        return self._waiting

    def averaging(self) -> AbstractContextManager[None]:
        """Time a wait for gradients of other replicas, or of other stages with the same parameter."""
        return self._averaging

    def sent(self, count: int) -> None:
        """Account for bytes sent to another worker."""
        self._ledger.totals.sent_bytes += count

    def message(self, lane: str, name: str, start_s: float, end_s: float, size_bytes: int) -> None:
        """Draw a message as this worker sees it; times are of time.perf_counter.

        Args:
            lane: `send`: from when it is handed over until the worker goes on. `receive`: from when it is asked for
                until it is there. `all-reduce`: from the start of the first bucket to the end of the last.
            name: as a simulation has it: `for 2F0`, `for 1B0` or `gradients`.
        """
        self._ledger.message(lane, name, start_s, end_s, size_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing of what is done meanwhile (validation)."""
        self.settle()
        before = self._ledger.state()
        yield
        self._marked.clear()
        self._ledger.back_to(before)

    def restart(self) -> None:
        """Forget what was measured (setting up, warming up); the trace keeps it."""
        self.settle()
        self._ledger.totals = Totals()
        self.memory.restart()

    def settle(self) -> None:
        """Wait for the device to have done what was started, and read all marks: at the end of an epoch."""
        self._clock.finish()
        self._read()

    @property
    def totals(self) -> Totals:
        """Since the last `restart`."""
        self.settle()
        return self._ledger.totals

    @property
    def events(self) -> list[TraceEvent]:
        """What the trace shows of this worker."""
        self.settle()
        return self._ledger.events()

    def _keep(self, action: Action | None, start: Mark, end: Mark, waits: Sequence[_Wait]) -> None:
        """The marks of an action; without one, of a wait between two."""
        self._marked.append((action, start, end, waits))
        if len(self._marked) >= MOST_MARKED:
            self._read()

    def _read(self) -> None:
        """Read marks, as far as the device has come."""
        seconds, read = self._clock.seconds, 0
        for action, start, end, waits in self._marked:
            if not self._clock.ready(end):
                break
            read += 1
            begun, waited = seconds(start), [(seconds(a), seconds(b), averaging) for a, b, averaging in waits]
            self._ledger.note(action, begun, seconds(end), waited)
        del self._marked[:read]

    def _range(self, action: Action) -> AbstractContextManager[Any]:
        """What a profiler sees of an action."""
        name = f"stage {action.stage} {action.kind.name.lower()} {action.minibatch}"
        return torch.cuda.nvtx.range(name) if self._nvtx else record_function(name)


class _Doing:
    """Around an action: entered for each of them, so it is no generator."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.mark = meter, meter._clock.mark
        self.range: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        meter = self.meter
        if meter._action and (_profiling() or meter._nvtx):
            self.range = meter._range(meter._action)
            self.range.__enter__()
        self.start = self.mark()

    def __exit__(self, *error: object) -> None:
        meter = self.meter
        end, action, waits = self.mark(), meter._action, meter._waits
        meter._action = None
        if waits:
            meter._waits = []
        meter._keep(action, self.start, end, waits or ())
        if self.range:
            self.range.__exit__(None, None, None)
            self.range = None


class _Waiting:
    """Around a wait."""

    def __init__(self, meter: Meter, averaging: bool) -> None:
        self.meter, self.mark, self.averaging, self.depth = meter, meter._clock.mark, averaging, 0

    def __enter__(self) -> None:
        if not self.depth:
            self.start = self.mark()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if not self.depth:
            wait = (self.start, self.mark(), self.averaging)
            if self.meter._action:
                self.meter._waits.append(wait)
            else:
                self.meter._keep(None, wait[0], wait[1], (wait,))
