"""Measurement of a worker: timestamps at both ends of each action, and of each wait in it.

    2B0  |-- wait --|---------- compute, send ----------|
         start                                         end

`WorkerMeter` records timestamps while the worker trains, and reads them later into `Timings`, which sums them up and
keeps the events of the trace. So an action costs the meter a microsecond or two, and on a GPU the meter never waits for
the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.runtime.memory import PeakMemory
from pdtool.runtime.status import ANY_PEER, Status
from pdtool.schedule import Action, ActionKind

MAX_EVENTS = 5_000  # events of actions and waits, and as many of messages: the first ones
MIN_DRAWN_S = 50e-6  # a shorter wait does not split its action
MAX_UNREAD = 1_000  # actions and waits whose timestamps are kept before they are read
_MAX_DISTANCE_S = 10.0  # distance of an event from the origin; beyond it the origin moves
_NVTX_VARIABLE = "PDTOOL_NVTX"
_FIELD = {kind: f"{kind.name.lower().partition('_')[0]}_s" for kind in ActionKind}  # both backwards: backward_s
_is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

Timestamp = Any  # what `record` returns
WaitTotal = Literal["wait_s", "allreduce_s", "data_s"]  # the total that a wait is added to
_Wait = tuple[Timestamp, Timestamp, WaitTotal]  # start, end, and the total that it is added to
_Span = tuple[str, str, str, float, float, int]  # track, name, kind, start and end in seconds, bytes


class WorkerMeter:
    """Measures one worker: the times of its actions and waits, its messages, and its peak of memory.

    An action's time does not include its waits for other workers.

    If a torch profiler is active in the worker (the user's model.py may start one), it sees each action as a range
    `stage 2 forward 0`. So does Nsight Systems, on a GPU with PDTOOL_NVTX=1 in the environment. Otherwise no range is
    made, because it would cost ten microseconds.

    Attributes:
        memory: the most that the worker holds; the worker starts it.
        epochs: the times of the epochs since the last `restart`.
        timestamps: timestamps of the device.
        waiting: context that times a wait for messages of other stages; a nested wait is part of the outer one.
        averaging: context that times a wait for gradients of other replicas, or of tied stages.
        loading: context that times the loading of a minibatch, or a wait for its loader worker.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory, self.epochs = PeakMemory(device), EpochTimes()
        self._timings, self.timestamps = Timings(), timestamps_of(device)
        self._is_on_host = device.type == "cpu"
        self._uses_nvtx = not self._is_on_host and os.environ.get(_NVTX_VARIABLE, "0") != "0"
        self._unread: list[tuple[Action | None, Timestamp, Timestamp, Sequence[_Wait]]] = []
        self._action_context = _ActionContext(self)
        self.waiting, self.averaging = _WaitContext(self, "wait_s"), _WaitContext(self, "allreduce_s")
        self.loading = _WaitContext(self, "data_s", is_for_peers=False)
        self._action: Action | None = None
        self._waits: list[_Wait] = []
        self._timed = range(0)
        self._first_loss: tuple[int, Timestamp] | None = None  # minibatch of `_timed`, and when it was computed
        self._last_loss: tuple[int, Timestamp] | None = None

    def epoch_begins(self, timed: range) -> None:
        """Begin an epoch; the time between the losses of the `timed` minibatches is that of the steady state."""
        self._timed, self._first_loss, self._last_loss = timed, None, None

    def loss_computed(self, minibatch: int) -> None:
        """Take the time when the device has computed the loss of a minibatch."""
        if minibatch in self._timed:
            self._last_loss = (minibatch, self.timestamps.record())
            self._first_loss = self._first_loss or self._last_loss

    def epoch_ended(self, minibatches: int, samples: int, train_s: float) -> None:
        """Add an epoch of training that took `train_s` seconds; the device has finished it."""
        self.memory.epoch_ended()
        self.epochs.minibatches += minibatches
        self.epochs.samples += samples
        self.epochs.train_s += train_s
        if self._first_loss and self._last_loss:
            (first, start), (last, end) = self._first_loss, self._last_loss
            self.epochs.intervals += last - first
            self.epochs.intervals_s += self.timestamps.seconds(end) - self.timestamps.seconds(start)

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Return the context that times one action."""
        self._action = action
        return self._action_context

    def waiting_for(self, peer: int) -> AbstractContextManager[None]:
        """Return the context `waiting`, for a message of one rank, which the status names."""
        self.waiting.peer = peer
        return self.waiting

    def message_sent(self, consumer: str, minibatch: int, start_s: float, sent_bytes: int) -> None:
        """Add a message from when it is handed over, at `start_s` of time.perf_counter, until now.

        Args:
            consumer: the action that takes it, without its minibatch: `2F`.
        """
        end_s, totals = perf_counter(), self._timings.totals
        if self._is_on_host:  # else sending runs beside the kernels, and actions are timed by their kernels
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
        """Count nothing in this context (validation)."""
        self.synchronize()
        timings, self._timings = self._timings, Timings()
        yield
        self._unread.clear()
        self._timings = timings

    def restart(self) -> None:
        """Forget the measurements so far (setup, warm-up); the trace keeps them."""
        self.synchronize()
        self._timings.totals, self.epochs = TimeTotals(), EpochTimes()
        self.memory.restart()

    def synchronize(self) -> None:
        """Wait until the device is done, and read all timestamps, at the end of an epoch."""
        self.timestamps.synchronize()
        self._read()

    @property
    def totals(self) -> TimeTotals:
        """The totals since the last `restart`."""
        self.synchronize()
        return self._timings.totals

    @property
    def events(self) -> list[TraceEvent]:
        """This worker's part of the trace."""
        self.synchronize()
        return self._timings.events()

    def _keep(self, action: Action | None, start: Timestamp, end: Timestamp, waits: Sequence[_Wait]) -> None:
        """Keep the timestamps of an action, or, without one, of a wait between two actions."""
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


class _ActionContext:
    """The context of an action. It is entered for each action, so it is not a generator."""

    def __init__(self, meter: WorkerMeter) -> None:
        self._meter, self._record = meter, meter.timestamps.record
        self._range: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        action, uses_nvtx = self._meter._action, self._meter._uses_nvtx
        if action and (uses_nvtx or _is_profiling()):
            name = f"stage {action.stage} {action.kind.name.lower()} {action.minibatch}"
            self._range = torch.cuda.nvtx.range(name) if uses_nvtx else record_function(name)
            self._range.__enter__()
        self._start = self._record()

    def __exit__(self, *error: object) -> None:
        meter = self._meter
        meter._keep(meter._action, self._start, self._record(), meter._waits)
        meter._action, meter._waits = None, []
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None


class _WaitContext:
    """The context of a wait. This worker's status shows waits for other workers; a nested wait is part of the outer
    one."""

    def __init__(self, meter: WorkerMeter, total: WaitTotal, *, is_for_peers: bool = True) -> None:
        self._meter, self._record, self._total = meter, meter.timestamps.record, total
        self._is_for_peers = is_for_peers
        self._depth = 0
        self.peer = ANY_PEER  # of the next wait

    def __enter__(self) -> None:
        if not self._depth:
            self._start = self._record()
            if self._is_for_peers:
                Status.of_this_process.wait_begins(self.peer)
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.peer = ANY_PEER
            if self._is_for_peers and error[0] is None:
                Status.of_this_process.wait_ends()
            wait = (self._start, self._record(), self._total)
            if self._meter._action:
                self._meter._waits.append(wait)
            else:
                self._meter._keep(None, wait[0], wait[1], (wait,))


@dataclass
class EpochTimes:
    """The training time of some epochs.

    Attributes:
        minibatches, samples: numbers of those trained.
        train_s: seconds of training, pipeline fill and drain included.
        intervals, intervals_s: number and total seconds of the intervals between two losses in steady state.
    """

    minibatches: int = 0
    samples: int = 0
    train_s: float = 0.0
    intervals: int = 0
    intervals_s: float = 0.0

    @property
    def time_per_minibatch_s(self) -> float:
        """Seconds from one loss to the next in steady state; 0 when not known."""
        return self.intervals_s / self.intervals if self.intervals else 0.0


@dataclass
class TimeTotals:
    """Sums over the minibatches of this worker.

    Attributes:
        forward_s, backward_s, update_s: seconds in actions, without their waits; zero-bubble's two backwards are one.
        wait_s: seconds of waiting for messages of other stages, and at the end of an epoch for its own to be sent.
        allreduce_s: seconds of waiting for gradients of other workers, and at the end of an epoch for their buffers.
        data_s: seconds of loading minibatches, or of waiting for loader workers, at the first stage.
        send_s: seconds of handing over messages, a part of the times of actions; 0 on a GPU.
        sent_bytes: bytes sent to other workers.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    wait_s: float = 0.0
    allreduce_s: float = 0.0
    data_s: float = 0.0
    send_s: float = 0.0
    sent_bytes: int = 0


@dataclass
class Timings:
    """Totals and events of one worker; times are in seconds of time.perf_counter."""

    totals: TimeTotals = field(default_factory=TimeTotals)
    _actions: list[tuple[Action | str, float, float]] = field(default_factory=list)  # or name of a wait; start and end
    _messages: list[_Span] = field(default_factory=list)

    def add_action(
        self, action: Action | None, start_s: float, end_s: float, waits: Sequence[tuple[float, float, WaitTotal]]
    ) -> None:
        """Add an action, or with None a wait between two actions.

        Args:
            waits: the waits in the action: start, end, and their total.
        """
        compute_s, drawn_from_s, totals = end_s - start_s, start_s, vars(self.totals)
        for wait_start_s, wait_end_s, total in waits:
            wait_s = wait_end_s - wait_start_s
            compute_s -= wait_s
            totals[total] += wait_s
            if wait_s > MIN_DRAWN_S:  # it divides the action
                if wait_start_s - drawn_from_s > MIN_DRAWN_S:
                    self._draw(action, drawn_from_s, wait_start_s)
                self._draw("data" if total == "data_s" else "wait", wait_start_s, wait_end_s)
                drawn_from_s = wait_end_s
        if action:
            totals[_FIELD[action.kind]] += compute_s
            self._draw(action, drawn_from_s, end_s)

    def add_message(self, track: str, name: str, start_s: float, end_s: float, size_bytes: int) -> None:
        """Add a message to one of the trace's tracks: `send`, `receive` or `all-reduce`."""
        if len(self._messages) < MAX_EVENTS:
            self._messages.append((track, name, track, start_s, end_s, size_bytes))

    def _draw(self, action: Action | str | None, start_s: float, end_s: float) -> None:
        """Draw a part of an action, or a wait by its name."""
        if action and len(self._actions) < MAX_EVENTS:
            self._actions.append((action, start_s, end_s))

    def events(self) -> list[TraceEvent]:
        """Return the events in seconds of time.time.

        This makes the tracks of several machines comparable: perf_counter is finer but may start anywhere.
        """
        offset_s = time.time() - time.perf_counter()
        actions = [("compute", str(drawn), _kind(drawn), start_s, end_s, 0) for drawn, start_s, end_s in self._actions]
        return [  # round before subtracting, so that adjacent events stay adjacent
            TraceEvent(track, name, kind, start_s + offset_s, (end_s + offset_s) - (start_s + offset_s), size)
            for track, name, kind, start_s, end_s, size in (*actions, *self._messages)
        ]


def _kind(drawn: Action | str) -> str:
    """The kind of an event: `forward` for a part of an action, `wait` or `data` for a wait of this name."""
    return drawn.kind.name.lower() if isinstance(drawn, Action) else drawn


def timestamps_of(device: torch.device) -> HostTimestamps | CudaTimestamps:
    """Return the source of timestamps for computation on `device`."""
    return CudaTimestamps(device) if device.type == "cuda" else HostTimestamps()


class HostTimestamps:
    """Timestamps of the CPU: each is a time."""

    record = staticmethod(time.perf_counter)
    seconds = float  # the timestamp itself

    def is_ready(self, timestamp: Timestamp) -> bool:
        """Whether the timestamp can be read: always."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing: no timestamp is pending."""


class CudaTimestamps:
    """Timestamps of a GPU: each is an event on the current stream, which happens when the kernels before it are done.

    So the time between two timestamps is that of the kernels started between them. A wait counts only while the device
    is idle because of it, not while the worker waits and kernels still run.
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
        """Whether the stream has reached the event."""
        return bool(timestamp.query())  # type: ignore[no-untyped-call]

    def seconds(self, timestamp: torch.cuda.Event) -> float:
        """Read a timestamp, in seconds of time.perf_counter.

        The origin moves along with the timestamps, because events give their distance in single precision.
        """
        distance_s = float(self._origin.elapsed_time(timestamp)) / 1e3
        if distance_s > _MAX_DISTANCE_S:
            self._origin, self._origin_s, distance_s = timestamp, self._origin_s + distance_s, 0.0
        return self._origin_s + distance_s

    def synchronize(self) -> None:
        """Wait for the device, so that all timestamps can be read."""
        torch.cuda.synchronize(self.device)
