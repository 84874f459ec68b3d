"""A simulation as a trace that chrome://tracing and Perfetto open, named as the trace of a run is (run/meter.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdtool.partition.simulator.simulation import Event, Simulation

LANES = ("compute", "all-reduce", "send", "receive")


def chrome_trace(found: Simulation) -> dict[str, Any]:
    """One process per worker, its lanes as threads; microseconds. Messages that overlap stand in rows of their own."""
    out: list[dict[str, Any]] = []
    for slot, share in enumerate(found.shares):
        name = f"worker {share.worker}, stage {share.stage}"
        out.append({"ph": "M", "name": "process_name", "pid": slot, "args": {"name": name}})
    lanes: dict[tuple[int, str], list[Event]] = {}
    for event in found.events:
        lanes.setdefault((event.slot, event.lane), []).append(event)
    for (slot, lane), events in sorted(lanes.items()):
        for number, row in enumerate(rows(events)):
            tid = LANES.index(lane) * 1000 + number
            name = f"{lane} {number + 1}" if number else lane
            out.append({"ph": "M", "name": "thread_name", "pid": slot, "tid": tid, "args": {"name": name}})
            out += [{
                "ph": "X", "name": e.name, "cat": e.kind, "pid": slot, "tid": tid, "ts": round(e.start_s * 1e6, 3),
                "dur": round(e.length_s * 1e6, 3), **({"args": {"bytes": e.size_bytes}} if e.size_bytes else {}),
            } for e in row]  # fmt: skip
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def rows(events: Iterable[Event]) -> list[list[Event]]:
    """As few rows as hold the events side by side."""
    made: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start_s, e.start_s + e.length_s)):
        free = next((row for row in made if row[-1].start_s + row[-1].length_s <= event.start_s + 1e-12), None)
        if free is None:
            made.append([event])
        else:
            free.append(event)
    return made
