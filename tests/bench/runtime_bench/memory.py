"""c. Memory: the peak of each worker beside the plan's prediction for its stage.

The plan predicts weights in all versions, gradients, optimizer state, what is kept for backwards and what is needed
while computing. Comparable is the report's peak_memory_bytes: resident memory at the peak of training, without pages of
files, beyond what the process held before it had the model. For this measurement glibc gives large tensors back as soon
as they are freed, so that what is resident is what is alive; as users run it, it keeps them for the next minibatch,
which is faster and takes `kept` times the prediction. `whole_MB` is the peak of the process, torch and all, as
seen from outside at any time, setting up and validation included.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pdtool.artifacts.plan import Plan
from pdtool.runtime.status import read_status
from runtime_bench.road import Job, make
from runtime_bench.rows import Row

MARGIN = 0.10
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}  # see pdtool/host.py
WAYS: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {},
    "2bw": {"schedule": "2bw"},
    "1f1b-flush 4": {"schedule": "1f1b-flush", "microbatches": 4},
    "gpipe 4": {"schedule": "gpipe", "microbatches": 4},
}
MODELS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # several hundred MB at each stage
    "cnn": (256, {}),
    "mlp": (32, {}),
    "gpt": (64, {"width": 256}),
}


def rows(folder: Path, repeats: int, quick: bool) -> Iterator[Row]:
    """Each model, schedule and stage."""
    for name, (batch_size, settings) in list(MODELS.items())[: 1 if quick else None]:
        job = make(folder / name, name, batch_size // 8 if quick else batch_size, settings=settings)
        for way, changes in list(WAYS.items())[: 1 if quick else None]:
            plan = job.variant(**changes)
            kept, _ = measure(job, f"{way}-kept".replace(" ", "-"), plan)  # first: no fork server has AT_ONCE yet
            found = [measure(job, f"{way}-{i}".replace(" ", "-"), plan, AT_ONCE) for i in range(repeats)]
            assert plan.predicted
            for s, predicted in enumerate(plan.predicted.memory_bytes):
                peaks, whole = ([each[s] for each in kind] for kind in zip(*found, strict=True))
                yield Row(
                    part="c",
                    case=f"{name}, {way}",
                    figure=f"stage {s}: peak / predicted",
                    least=1 - MARGIN,
                    most=1 + MARGIN,
                    values=[peak / predicted for peak in peaks],
                    detail={
                        "kept": kept[s] / predicted,
                        "predicted_MB": predicted / 1e6,
                        "peak_MB": max(peaks) / 1e6,
                        "whole_MB": max(whole) / 1e6,
                    },
                )


def measure(
    job: Job, name: str, plan: Plan, environment: Mapping[str, str] | None = None
) -> tuple[list[int], list[int]]:
    """Bytes per stage: the report's, and those seen from outside."""
    with _watching(job.folder / "runs" / name, len(plan.stages)) as seen, patch.dict(os.environ, environment or {}):
        report = job.run(name, plan, 8)
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
