"""c. Memory: the peak of each worker beside the plan's prediction for its stage.

The plan predicts weights in all versions, gradients, optimizer state, what is kept for backwards and what is needed
while computing. Comparable is the report's peak_memory_bytes: resident memory at the peak of training, without pages of
files, beyond what the process held before it had the model. The figure is that of a run as users start it, in which
glibc keeps freed memory for the next minibatch; `live` is that of a run in which glibc returns large tensors as soon as
they are freed, so that what is resident is what is in use. `whole_MB` is the peak of the process, torch and all, as
seen from outside at any time, setting up and validation included.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pdtool.artifacts.plan import Plan
from pdtool.runtime.status import read_status
from runtime_bench.road import Job, planned, profile
from runtime_bench.rows import Row

MARGIN = 0.10
STEPS = 8  # in each of two epochs
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # see pdtool/host.py
PIPELINE = ("--schedule", "1f1b")
WAYS: Mapping[str, tuple[str, ...]] = {
    "1-1": ("--replicas", "1-1", *PIPELINE),
    "1-1-1": ("--replicas", "1-1-1", *PIPELINE),
    "1-1 flush 4": ("--replicas", "1-1", "--schedule", "1f1b-flush", "--microbatches", "4"),
    "2": ("--replicas", "2", *PIPELINE),
    "1": ("--replicas", "1", *PIPELINE),
}
MODELS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # several hundred MB at each stage
    "mlp": (32, {}),
    "gpt": (16, {"layers": 8, "width": 512}),
    "resnet": (128, {}),
    "lstm": (64, {"width": 512}),
    "cnn": (256, {}),
}


def rows(folder: Path, repeats: int, quick: bool) -> Iterator[Row]:
    """Each model, schedule and stage."""
    for name in list(MODELS)[: 1 if quick else None]:
        yield from rows_of(folder, name, list(WAYS)[: 1 if quick else None], quick)


def rows_of(folder: Path, name: str, ways: Sequence[str], quick: bool = False) -> Iterator[Row]:
    """One model in some ways: each stage as users run it, with what it takes where freed memory is given back."""
    batch_size, settings = MODELS[name]
    profile(folder / name, name, batch_size // 8 if quick else batch_size, settings)
    for way in ways:
        label = way.replace(" ", "-")
        workers = str(sum(map(int, way.split()[0].split("-"))))
        options = ("--topology", workers, "--bandwidth", "16Gbit/s", "--memory", "none", *WAYS[way])
        job = planned(folder / name, name, f"plan-{label}", *options)
        peaks, whole = measure(job, f"{label}-kept", job.plan)
        live, _ = measure(job, f"{label}-live", job.plan, AT_ONCE)
        assert job.plan.predicted
        for s, predicted in enumerate(job.plan.predicted.memory_bytes):
            yield Row(
                part="c",
                case=f"{name}, {way}",
                figure=f"stage {s}: peak / predicted",
                least=1 - MARGIN,
                most=1 + MARGIN,
                values=[peaks[s] / predicted],
                detail={
                    "live": live[s] / predicted,
                    "predicted_MB": predicted / 1e6,
                    "peak_MB": peaks[s] / 1e6,
                    "whole_MB": whole[s] / 1e6,
                },
            )


def measure(
    job: Job, name: str, plan: Plan, environment: Mapping[str, str] | None = None
) -> tuple[list[int], list[int]]:
    """Bytes per stage: the report's, and those seen from outside."""
    forkserver._forkserver._stop()  # glibc reads its variables when a process begins
    with _watching(job.folder / "runs" / name, len(plan.stages)) as seen, patch.dict(os.environ, environment or {}):
        report = job.run(name, plan, STEPS)
    return [stage.peak_memory_bytes or 0 for stage in report.stages], seen.peaks


@dataclass
class _Seen:
    """Peaks of each rank so far, and whether to go on looking."""

    peaks: list[int]
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def _watching(out: Path, ranks: int) -> Iterator[_Seen]:
    """Look at the high-water marks of the workers until the run is over."""
    seen = _Seen([0] * ranks)

    def look() -> None:
        while not seen.over.wait(0.02):
            for rank in range(ranks):
                with suppress(OSError, IndexError, ValueError):
                    status = Path(f"/proc/{read_status(out, rank).pid}/status").read_text()
                    seen.peaks[rank] = max(seen.peaks[rank], 1024 * int(status.split("VmHWM:")[1].split()[0]))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        seen.over.set()
        thread.join()
