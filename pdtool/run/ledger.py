"""What a worker's time went to, summed up, and the events of its trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.schedule import Action, ActionKind

MOST_EVENTS = 5_000  # of actions and waits, and as many of messages: the first ones
SHORT_S = 50e-6  # what takes less is not drawn, or drawn with what it stands in


@dataclass
class Totals:
    """Sums over the minibatches of this worker; seconds, bytes.

    Attributes:
        forward_s, backward_s, update_s: in actions, without their waits. Zero-bubble's two backwards are one.
        wait_s: for messages from other stages, on their way or not made yet; and at the end of an epoch to them.
        allreduce_s: for gradients of other workers; and at the end of an epoch for their buffers.
        send_s: handing over messages, a part of the times of actions.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    wait_s: float = 0.0
    allreduce_s: float = 0.0
    send_s: float = 0.0
    sent_bytes: int = 0


_FIELD = {
    ActionKind.FORWARD: "forward_s",
    ActionKind.BACKWARD: "backward_s",
    ActionKind.BACKWARD_INPUT: "backward_s",
    ActionKind.BACKWARD_WEIGHT: "backward_s",
    ActionKind.UPDATE: "update_s",
}
State = tuple[Totals, int, int]


@dataclass
class Ledger:
    """Totals and events of one worker; times are of time.perf_counter."""

    totals: Totals = field(default_factory=Totals)
    _done: list[tuple[Action | None, float, float]] = field(default_factory=list)  # None: a wait
    _messages: list[tuple[str, str, float, float, int]] = field(default_factory=list)

    def note(self, action: Action | None, start: float, end: float, waits: Sequence[tuple[float, float, bool]]) -> None:
        """An action from start to end, with the waits in it, and whether they were for an average; or only a wait."""
        totals = self.totals
        own = end - start
        for a, b, averaging in waits:
            own -= b - a
            if averaging:
                totals.allreduce_s += b - a
            else:
                totals.wait_s += b - a
            if b - a > SHORT_S:  # it cuts the action into parts
                if a - start > SHORT_S:
                    self._draw(action, start, a)
                self._draw(None, a, b)
                start = b
        if action:
            name = _FIELD[action.kind]
            setattr(totals, name, getattr(totals, name) + own)
            self._draw(action, start, end)

    def message(self, lane: str, name: str, start: float, end: float, size_bytes: int) -> None:
        """A message, see Meter.message."""
        if lane == "send":
            self.totals.send_s += end - start
        if len(self._messages) < MOST_EVENTS:
            self._messages.append((lane, name, start, end, size_bytes))

    def _draw(self, action: Action | None, start: float, end: float) -> None:
        if len(self._done) < MOST_EVENTS:
            self._done.append((action, start, end))

    def state(self) -> State:
        """What `back_to` takes."""
        return replace(self.totals), len(self._done), len(self._messages)

    def back_to(self, state: State) -> None:
        """Forget what came after."""
        self.totals, done, messages = state
        del self._done[done:], self._messages[messages:]

    def events(self) -> list[TraceEvent]:
        """On the clock of day, so that the lanes of several machines stand under each other: perf_counter is finer but
        may start anywhere."""
        offset = time.time() - time.perf_counter()
        found = [
            ("compute", str(action), action.kind.name.lower(), start, end, 0)
            if action
            else ("compute", "wait", "wait", start, end, 0)
            for action, start, end in self._done
        ]
        found += [(lane, name, lane, start, end, size) for lane, name, start, end, size in self._messages]
        return [  # rounded before they are subtracted: events that touch still do
            TraceEvent(lane, name, kind, start + offset, (end + offset) - (start + offset), size)
            for lane, name, kind, start, end, size in found
        ]
