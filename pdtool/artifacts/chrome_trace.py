"""`trace.json`: what workers did when, for chrome://tracing and Perfetto; a run's and a simulation's look alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

TRACKS = ("compute", "all-reduce", "send", "receive")


class TraceEvent(NamedTuple):
    """Something that takes time on a worker.

    Attributes:
        track: one of TRACKS.
        name, kind: `2F0` and `forward`, `wait` and `wait`, `for 2F0` and `send` (the action that takes the message),
            `gradients` and `all-reduce`.
        start_s: on a clock that all workers share.
    """

    track: str
    name: str
    kind: str
    start_s: float
    length_s: float
    size_bytes: int = 0


def chrome_trace(workers: Mapping[str, Iterable[TraceEvent]]) -> dict[str, Any]:
    """One process per worker, its tracks as threads; microseconds from the first event of all. Events of a track that
    overlap stand in rows of their own."""
    listed = {name: list(events) for name, events in workers.items()}
    origin = min((event.start_s for events in listed.values() for event in events), default=0.0)
    out: list[dict[str, Any]] = []
    for pid, (name, events) in enumerate(listed.items()):
        out.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for number, track in enumerate(TRACKS):
            for row, side_by_side in enumerate(rows(event for event in events if event.track == track)):
                tid = number * 1000 + row
                label = f"{track} {row + 1}" if row else track
                out.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}})
                out += [_slice(event, pid, tid, origin) for event in side_by_side]
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _slice(event: TraceEvent, pid: int, tid: int, origin: float) -> dict[str, Any]:
    start, length = round((event.start_s - origin) * 1e6, 3), round(event.length_s * 1e6, 3)
    made = {"ph": "X", "name": event.name, "cat": event.kind, "pid": pid, "tid": tid, "ts": start, "dur": length}
    return {**made, "args": {"bytes": event.size_bytes}} if event.size_bytes else made


def rows(events: Iterable[TraceEvent]) -> list[list[TraceEvent]]:
    """As few rows as hold the events side by side."""
    made: list[list[TraceEvent]] = []
    for event in sorted(events, key=lambda e: (e.start_s, e.start_s + e.length_s)):
        free = next((row for row in made if row[-1].start_s + row[-1].length_s <= event.start_s + 1e-12), None)
        if free is None:
            made.append([event])
        else:
            free.append(event)
    return made
