"""d. Overhead: what pdtool itself takes for an action, with stages that do nothing and tensors of a few bytes.

An action is a forward, a backward or an update. `own` is the CPU time of a worker from one forward to the next, less
that of the same layer, loss and optimizer in a plain loop, over three: waiting costs none, and neither does being
displaced by other workers. `on the clock` is the whole pipeline's time per minibatch, over three: with more workers
than cores it grows with their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import harness

from pdtool.runtime.launch.launcher import launch
from runtime_bench.rows import Row, medians
from runtime_bench.toys import Emulated, alone, notes

ACTIONS = 3
MOST_US = 100.0


def rows(folder: Path, repeats: int, quick: bool) -> Iterator[Row]:
    """By number of stages."""
    for stages in (2,) if quick else (2, 4, 8):
        found = [measure(stages, 60 if quick else 500, folder / f"{stages}-{i}") for i in range(repeats)]
        detail = medians(found)
        own, clock = ([each[name] for each in found] for name in ("own", "clock"))
        yield Row(
            part="d",
            case=f"straight {stages}",
            figure="us of CPU per action, own (mean of workers)",
            values=own,
            most=MOST_US,
            detail={n: v for n, v in detail.items() if n not in ("own", "clock")},
        )
        yield Row(part="d", case=f"straight {stages}", figure="us on the clock per minibatch / 3", values=clock)


def measure(stages: int, minibatches: int, folder: Path) -> dict[str, float]:
    """One run, and one plain loop right after it; microseconds per action."""
    idle = [0.0] * stages
    emulated = Emulated(forward_s=idle, backward_s=idle, width=4, weights=4, batch_size=1, minibatches=minibatches)
    noted = folder / "notes"
    noted.mkdir(parents=True)
    spec = harness.job(folder, emulated.toy(noted), batch_size=1, epochs=2, device="cpu")
    report = launch(spec)
    per_minibatch = {s: each[0].cpu_per_minibatch_s for s, each in notes(noted).items()}
    plain = alone(folder, 0, 4, 1, minibatches)
    us = {s: (value - plain.cpu_s) / ACTIONS * 1e6 for s, value in per_minibatch.items()}
    busy = fmean(of.busy_s + of.rest_s for of in report.stages)
    return {
        "own": fmean(us.values()),
        "clock": report.measured.bottleneck_s / ACTIONS * 1e6,
        "first": us[0],
        "last": us[stages - 1],
        "most": max(us.values()),
        "clock_busy": (busy - plain.wall_s) / ACTIONS * 1e6,
        "alone": plain.cpu_s / ACTIONS * 1e6,
    }
