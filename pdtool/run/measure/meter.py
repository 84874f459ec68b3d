"""What a worker does when: timestamps at both ends of each action, and of each wait in it.

    2B0  |-- wait --|---------- compute, send ----------|
         start                                         end

Timestamps are read later, into the Timings: while training, an action costs the meter a microsecond or two, and on a
GPU the device is never waited for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.run.measure.peak_memory import PeakMemory
from pdtool.run.measure.timestamps import Timestamp, timestamps_of
from pdtool.run.measure.timings import TimeTotals, Timings, WaitTotal
from pdtool.run.processes.status import wait_begins, wait_ends
from pdtool.schedule import Action

MAX_UNREAD = 1_000  # actions and waits whose timestamps are kept before they are read
_NVTX_VARIABLE = "PDTOOL_NVTX"
_Wait = tuple[Timestamp, Timestamp, WaitTotal]  # start, end, and the total that it is added to
_is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class WorkerMeter:
    """Measures one worker: the times of its actions and waits, its messages, and its peak of memory.

    What an action waits for other workers is not its own time.

    A torch profiler that is active in the worker (the user's model.py may start one) sees each action as a range
    `stage 2 forward 0`; so does Nsight Systems, on a GPU with PDTOOL_NVTX=1 in the environment. Otherwise no range is
    made: it would cost ten microseconds.

    Attributes:
        memory: the most that the worker holds; the worker starts it.
        timestamps: of the device.
        waiting: context that times a wait for messages of other stages; one within another is part of it.
        averaging: context that times a wait for gradients of other replicas, or of tied stages.
        loading: context that times the loading of a minibatch, or a wait for the loader worker that does.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = PeakMemory(device)
        self._timings, self.timestamps = Timings(), timestamps_of(device)
        self._is_on_host = device.type == "cpu"
        self._uses_nvtx = not self._is_on_host and os.environ.get(_NVTX_VARIABLE, "0") != "0"
        self._unread: list[tuple[Action | None, Timestamp, Timestamp, Sequence[_Wait]]] = []
        self._action_context = _ActionContext(self)
        self.waiting, self.averaging = _WaitContext(self, "wait_s"), _WaitContext(self, "allreduce_s")
        self.loading = _WaitContext(self, "data_s", is_for_peers=False)
        self._action: Action | None = None
        self._waits: list[_Wait] = []

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Return the context that times one action."""
        self._action = action
        return self._action_context

    def message_sent(self, consumer: str, minibatch: int, start_s: float, sent_bytes: int) -> None:
        """Add a message from when it is handed over, at `start_s` of time.perf_counter, until now.

        Args:
            consumer: the action that takes it, without its minibatch: `2F`.
        """
        end_s, totals = perf_counter(), self._timings.totals
        if self._is_on_host:  # else it is beside the kernels, whose times the actions are
            totals.send_s += end_s - start_s
        totals.sent_bytes += sent_bytes
        self._timings.add_message("send", f"for {consumer}{minibatch}", start_s, end_s, sent_bytes)

    def message_received(self, consumer: str, minibatch: int, start_s: float, tensors: Sequence[Tensor]) -> None:
        """Add a message from when it is asked for, at `start_s` of time.perf_counter, until now.

        Args:
            consumer: the action that takes it, without its minibatch: `2F`.
            tensors: of any shapes.
        """
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        self._timings.add_message("receive", f"for {consumer}{minibatch}", start_s, perf_counter(), size_bytes)

    def all_reduce_ended(self, start_s: float, size_bytes: int) -> None:
        """Add an average of gradients, from the start of its first bucket until now."""
        self._timings.add_message("all-reduce", "gradients", start_s, perf_counter(), size_bytes)

    def count_sent(self, sent_bytes: int) -> None:
        """Count bytes sent for an average."""
        self._timings.totals.sent_bytes += sent_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing of what is done meanwhile (validation)."""
        self.synchronize()
        timings, self._timings = self._timings, Timings()
        yield
        self._unread.clear()
        self._timings = timings

    def restart(self) -> None:
        """Forget what was measured (setting up, warming up); the trace keeps it."""
        self.synchronize()
        self._timings.totals = TimeTotals()
        self.memory.restart()

    def synchronize(self) -> None:
        """Wait until the device has done what was started, and read all timestamps: at the end of an epoch."""
        self.timestamps.synchronize()
        self._read()

    @property
    def totals(self) -> TimeTotals:
        """The totals since the last `restart`."""
        self.synchronize()
        return self._timings.totals

    @property
    def events(self) -> list[TraceEvent]:
        """What the trace shows of this worker."""
        self.synchronize()
        return self._timings.events()

    def _keep(self, action: Action | None, start: Timestamp, end: Timestamp, waits: Sequence[_Wait]) -> None:
        """Keep the timestamps of an action; without one, of a wait between two."""
        self._unread.append((action, start, end, waits))
        if len(self._unread) >= MAX_UNREAD:
            self._read()

    def _read(self) -> None:
        """Read timestamps, as far as the device has come."""
        seconds, read = self.timestamps.seconds, 0
        for action, start, end, waits in self._unread:
            if not self.timestamps.is_ready(end):
                break
            read += 1
            start_s, waits_s = seconds(start), [(seconds(a), seconds(b), total) for a, b, total in waits]
            self._timings.add_action(action, start_s, seconds(end), waits_s)
        del self._unread[:read]

    def _profiler_range(self, action: Action) -> AbstractContextManager[Any]:
        """What a profiler sees of an action."""
        name = f"stage {action.stage} {action.kind.name.lower()} {action.minibatch}"
        return torch.cuda.nvtx.range(name) if self._uses_nvtx else record_function(name)


class _ActionContext:
    """Around an action. It is entered for each of them, so it is no generator."""

    def __init__(self, meter: WorkerMeter) -> None:
        self._meter, self._record = meter, meter.timestamps.record
        self._range: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        meter = self._meter
        if meter._action and (_is_profiling() or meter._uses_nvtx):
            self._range = meter._profiler_range(meter._action)
            self._range.__enter__()
        self._start = self._record()

    def __exit__(self, *error: object) -> None:
        meter = self._meter
        end, action, waits = self._record(), meter._action, meter._waits
        meter._action = None
        if waits:
            meter._waits = []
        meter._keep(action, self._start, end, waits or ())
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None


class _WaitContext:
    """Around a wait, one for other workers is shown by this worker's status; one within another is part of it."""

    def __init__(self, meter: WorkerMeter, total: WaitTotal, *, is_for_peers: bool = True) -> None:
        self._meter, self._record, self._total = meter, meter.timestamps.record, total
        self._is_for_peers = is_for_peers
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            self._start = self._record()
            if self._is_for_peers:
                wait_begins()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            if self._is_for_peers and error[0] is None:
                wait_ends()
            wait = (self._start, self._record(), self._total)
            if self._meter._action:
                self._meter._waits.append(wait)
            else:
                self._meter._keep(None, wait[0], wait[1], (wait,))
