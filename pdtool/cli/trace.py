"""A simulation as a trace: the same lanes and names as the trace of a run."""

from __future__ import annotations

from typing import Any

from pdtool.artifacts.trace import TraceEvent
from pdtool.artifacts.trace import chrome_trace as written
from pdtool.partition.simulator.simulation import Simulation


def chrome_trace(found: Simulation) -> dict[str, Any]:
    """What chrome://tracing and Perfetto open, see pdtool.artifacts.trace."""
    workers: list[list[TraceEvent]] = [[] for _ in found.shares]
    for e in found.events:
        workers[e.slot].append(TraceEvent(e.lane, e.name, e.kind, e.start_s, e.length_s, e.size_bytes))
    names = (f"worker {share.worker}, stage {share.stage}" for share in found.shares)
    return written(dict(zip(names, workers, strict=True)))
