"""e. Loading: samples that take 5 ms each, loaded ahead by as many loader workers as pdtool says suffice.

The stages sleep, so that loader workers have cores. The figures are whole epochs over those of the same stages with
samples that take no time, loaded in the training process: the wait for the first minibatch of each epoch counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import harness

from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.loading.loading_cost import LoadingCost
from runtime_bench.rows import Row, medians
from runtime_bench.toys import Emulated

SAMPLE_S, BATCH_SIZE = 5e-3, 16
STAGE_S = (0.06, 0.03)  # forward and backward of each stage, beside the 80 ms that loading takes
EPOCH_S = 6.0
WANTED = 0.95
SLEEPING = f"""
class Sleeping(TensorDataset):
    def __getitem__(self, i):
        time.sleep({SAMPLE_S})
        return super().__getitem__(i)
"""


def rows(folder: Path, repeats: int, quick: bool) -> Iterator[Row]:
    """By pace of the slowest stage."""
    for stage_s in STAGE_S[:1] if quick else STAGE_S:
        minibatches = 20 if quick else round(EPOCH_S / stage_s)
        found = [measure(stage_s, minibatches, folder / f"{stage_s}-{i}") for i in range(repeats)]
        ahead, in_process = ([each.pop(name) for each in found] for name in ("ahead", "in_process"))
        case, detail = f"{stage_s * 1e3:g} ms, 80 ms to load", medians(found)
        figure = "throughput / with samples that take no time"
        yield Row(part="e", case=case, figure=figure, values=ahead, least=WANTED, detail=detail)
        yield Row(part="e", case=case, figure="the same without loader workers", values=in_process)


def measure(stage_s: float, minibatches: int, folder: Path) -> dict[str, float]:
    """One run of each kind."""
    workers = LoadingCost(SAMPLE_S * BATCH_SIZE, stage_s).workers
    free = throughput(stage_s, minibatches, folder / "free", sleeps=False, workers=0)
    return {
        "ahead": throughput(stage_s, minibatches, folder / "ahead", sleeps=True, workers=workers) / free,
        "in_process": throughput(stage_s, minibatches // 4, folder / "in_process", sleeps=True, workers=0) / free,
        "loader workers": workers,
    }


def throughput(stage_s: float, minibatches: int, folder: Path, *, sleeps: bool, workers: int) -> float:
    """Samples/s of the second epoch, in two stages of `stage_s` each."""
    noted = folder / "notes"
    noted.mkdir(parents=True)
    emulated = Emulated(
        forward_s=[stage_s / 3] * 2,
        backward_s=[stage_s * 2 / 3] * 2,
        width=64,
        weights=64,
        batch_size=BATCH_SIZE,
        minibatches=minibatches,
    )
    toy = emulated.toy(noted)
    if sleeps:
        before, rest = toy.model.replace("return TensorDataset(", "return Sleeping(").split("def dataset")
        toy = replace(toy, model=f"{before}{SLEEPING}\ndef dataset{rest}")
    spec = harness.job(folder, toy, batch_size=BATCH_SIZE, epochs=2, device="cpu", loader_workers=workers)
    return launch(spec).throughput_samples_per_s
