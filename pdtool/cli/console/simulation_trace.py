"""A simulation as a Chrome trace, with the same tracks and names as the trace of a run."""

from __future__ import annotations

from typing import Any

from pdtool.artifacts.chrome_trace import TraceEvent, chrome_trace
from pdtool.partition.simulator.simulation import Simulation


def simulation_trace(result: Simulation) -> dict[str, Any]:
    """Return what chrome://tracing and Perfetto open, as pdtool.artifacts.chrome_trace describes it."""
    workers: list[list[TraceEvent]] = [[] for _ in result.shares]
    for e in result.events:
        workers[e.slot].append(TraceEvent(e.lane, e.name, e.kind, e.start_s, e.length_s, e.size_bytes))
    names = (f"worker {share.worker}, stage {share.stage}" for share in result.shares)
    return chrome_trace(dict(zip(names, workers, strict=True)))
