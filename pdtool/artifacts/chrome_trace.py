"""`trace.json`: what each worker did when, for chrome://tracing and Perfetto, of runs and of simulations.

`chrome_trace` writes events in the Chrome trace format, and `read_trace` reads them back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdtool.errors import PdtoolError
from pdtool.files import read_text
from pdtool.schedule import Action

MESSAGE_TRACKS = ("all-reduce", "send", "receive")
TRACKS = ("compute", *MESSAGE_TRACKS)


class TraceEvent(NamedTuple):
    """An event that takes time on a worker.

    Attributes:
        track: one of TRACKS.
        name, kind: `2F0` and `forward`, `wait` and `wait`, `data` and `data`, `for 2F0` and `send` (the action
            that takes the message), `gradients` and `all-reduce`.
        start_s: on a clock that all workers share.
    """

    track: str
    name: str
    kind: str
    start_s: float
    length_s: float
    size_bytes: int = 0


class WorkerTrace(NamedTuple):
    """A worker's events; `stage` is the first of its stages."""

    worker: int
    stage: int
    events: Sequence[TraceEvent]


def chrome_trace(workers: Mapping[str, Iterable[TraceEvent]], host_tracks: Collection[str] = ()) -> dict[str, Any]:
    """Write events in the Chrome trace format: one process per worker, its tracks as threads.

    Times are microseconds from the first event of all. Overlapping events of a track go to rows of their own.

    Args:
        workers: name of each worker -> its events.
        host_tracks: tracks of host events, if others are of a GPU; their names say so.
    """
    events_of = {name: list(events) for name, events in workers.items()}
    origin = min((event.start_s for events in events_of.values() for event in events), default=0.0)
    trace: list[dict[str, Any]] = []
    for pid, (name, events) in enumerate(events_of.items()):
        trace.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for number, track in enumerate(TRACKS):
            for row, row_events in enumerate(_rows(event for event in events if event.track == track)):
                tid = number * 1000 + row
                label = f"{track} (host)" if track in host_tracks else track
                label += f" {row + 1}" if row else ""
                trace.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}})
                trace += [_slice(event, pid, tid, origin) for event in row_events]
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _slice(event: TraceEvent, pid: int, tid: int, origin: float) -> dict[str, Any]:
    start, length = round((event.start_s - origin) * 1e6, 3), round(event.length_s * 1e6, 3)
    entry = {"ph": "X", "name": event.name, "cat": event.kind, "pid": pid, "tid": tid, "ts": start, "dur": length}
    return {**entry, "args": {"bytes": event.size_bytes}} if event.size_bytes else entry


def _rows(events: Iterable[TraceEvent]) -> list[list[TraceEvent]]:
    """Distribute the events over as few rows as possible, without overlap within a row."""
    rows: list[list[TraceEvent]] = []
    for event in sorted(events, key=lambda e: (e.start_s, e.start_s + e.length_s)):
        free = next((row for row in rows if row[-1].start_s + row[-1].length_s <= event.start_s + 1e-12), None)
        if free is None:
            rows.append([event])
        else:
            free.append(event)
    return rows


def read_trace(path: Path) -> list[WorkerTrace]:
    """Read a run's Chrome trace, its workers by rank; [] if it is missing or damaged."""
    try:
        return _workers(json.loads(read_text(path))["traceEvents"])
    except (PdtoolError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return []


def _workers(entries: list[dict[str, Any]]) -> list[WorkerTrace]:
    tracks: dict[tuple[int, int], str] = {}
    events: dict[int, list[TraceEvent]] = {}
    for entry in entries:
        pid = entry["pid"]
        if entry["name"] == "process_name":
            events[pid] = []
        elif entry["name"] == "thread_name":
            tracks[pid, entry["tid"]] = str(entry["args"]["name"]).split(" ")[0]
        elif entry["ph"] == "X":
            start_s, length_s = float(entry["ts"]) / 1e6, float(entry["dur"]) / 1e6
            event = TraceEvent(tracks[pid, entry["tid"]], str(entry["name"]), str(entry["cat"]), start_s, length_s)
            events[pid].append(event)
    return [WorkerTrace(rank, _stage(own), own) for rank, own in enumerate(events.values())]


def _stage(events: Iterable[TraceEvent]) -> int:
    return min((Action.parse(event.name).stage for event in events if event.kind == "forward"), default=0)
