"""Where a worker's time went, summed up, and the events of its trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.schedule import Action, ActionKind

MAX_EVENTS = 5_000  # of actions and waits, and as many of messages: the first ones
MIN_DRAWN_S = 50e-6  # a shorter wait does not divide the action that it is in


@dataclass
class TimeTotals:
    """Sums over the minibatches of this worker.

    Attributes:
        forward_s, backward_s, update_s: seconds in actions, without their waits; zero-bubble's two backwards are one.
        wait_s: seconds of waiting for messages of other stages, and at the end of an epoch to be rid of one's own.
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


WaitTotal = Literal["wait_s", "allreduce_s", "data_s"]  # the total that a wait is added to
_Span = tuple[str, str, str, float, float, int]  # track, name, kind, start and end in seconds, bytes
_FIELD = {
    ActionKind.FORWARD: "forward_s",
    ActionKind.BACKWARD: "backward_s",
    ActionKind.BACKWARD_INPUT: "backward_s",
    ActionKind.BACKWARD_WEIGHT: "backward_s",
    ActionKind.UPDATE: "update_s",
}


@dataclass
class Timings:
    """Totals and events of one worker; times are in seconds of time.perf_counter."""

    totals: TimeTotals = field(default_factory=TimeTotals)
    _actions: list[_Span] = field(default_factory=list)
    _messages: list[_Span] = field(default_factory=list)

    def add_action(
        self, action: Action | None, start_s: float, end_s: float, waits: Sequence[tuple[float, float, WaitTotal]]
    ) -> None:
        """Add an action, or with None a wait between two actions.

        Args:
            waits: those in the action: start, end, and their total.
        """
        compute_s, drawn_from_s = end_s - start_s, start_s
        for wait_start_s, wait_end_s, total in waits:
            wait_s = wait_end_s - wait_start_s
            compute_s -= wait_s
            self._add(total, wait_s)
            if wait_s > MIN_DRAWN_S:  # it divides the action
                if wait_start_s - drawn_from_s > MIN_DRAWN_S:
                    self._draw(action, drawn_from_s, wait_start_s)
                self._draw("data" if total == "data_s" else "wait", wait_start_s, wait_end_s)
                drawn_from_s = wait_end_s
        if action:
            self._add(_FIELD[action.kind], compute_s)
            self._draw(action, drawn_from_s, end_s)

    def add_message(self, track: str, name: str, start_s: float, end_s: float, size_bytes: int) -> None:
        """Add a message to one of the trace's tracks: `send`, `receive` or `all-reduce`."""
        if len(self._messages) < MAX_EVENTS:
            self._messages.append((track, name, track, start_s, end_s, size_bytes))

    def _add(self, total: str, seconds: float) -> None:
        setattr(self.totals, total, getattr(self.totals, total) + seconds)

    def _draw(self, action: Action | str | None, start_s: float, end_s: float) -> None:
        """Draw a part of an action, or a wait by its name."""
        if action and len(self._actions) < MAX_EVENTS:
            kind = action.kind.name.lower() if isinstance(action, Action) else action
            self._actions.append(("compute", str(action), kind, start_s, end_s, 0))

    def events(self) -> list[TraceEvent]:
        """Return the events in seconds of time.time.

        So the tracks of several machines are comparable: perf_counter is finer but may start anywhere.
        """
        offset_s = time.time() - time.perf_counter()
        return [  # rounded before they are subtracted: events that touch still do
            TraceEvent(track, name, kind, start_s + offset_s, (end_s + offset_s) - (start_s + offset_s), size)
            for track, name, kind, start_s, end_s, size in (*self._actions, *self._messages)
        ]
