"""b. Real compute on two cores: two stages of one thread each, beside other ways to train the same model.

All at the same global minibatch of B samples, with the same optimizer. pdtool's `1f1b` has no flush: it updates after
each minibatch, which is B (that row counts), or as small as the others' microbatches. Its pace is that between losses;
of `1f1b-flush`, whole epochs with filling and draining.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pdtool.artifacts.report import Report
from runtime_bench.peers import SCHEDULES, Peer
from runtime_bench.road import Job, make
from runtime_bench.rows import Row, medians

MODELS: Mapping[str, tuple[int, Mapping[str, Any]]] = {"cnn": (64, {}), "gpt": (16, {}), "lstm": (16, {})}
MICROBATCHES = (4, 8)
LIMIT, OVER_TORCH, FLUSH = 0.92, 1.2, 1.0


def rows(folder: Path, repeats: int, quick: bool) -> Iterator[Row]:
    """Each model."""
    for name, (batch_size, settings) in MODELS.items():
        job = make(folder / name, name, batch_size, settings=settings)
        found = [measure(job, i, 2 if quick else 8, quick) for i in range(repeats)]
        yield from table(name, found)


def measure(job: Job, repeat: int, steps: int, quick: bool) -> dict[str, float]:
    """One round of all ways: samples/s by way, and the balance of the cut."""
    size, counts = job.plan.batch_size, MICROBATCHES[:1] if quick else MICROBATCHES
    assert job.plan.model
    fixed: dict[str, Any] = {
        "model": job.plan.model,
        "bundle": job.bundle,
        "bundle_dir": job.bundle_dir,
        "batch_size": size,
        "steps": steps,
    }
    ways = [(way, way, 1) for way in ("one", "two", "ddp")]
    ways += [(f"torch {way} {m}", way, m) for way in SCHEDULES for m in counts]
    found = {
        name: Peer(way=way, microbatches=m, **fixed).samples_per_s(job.folder / "peers" / f"{repeat}-{name}")
        for name, way, m in ways
    }
    report = job.run(f"{repeat}-1f1b", job.plan, 2 * steps)
    found |= {"pdtool 1f1b": report.measured.throughput_samples_per_s, "balance": balance(report)}
    for m in counts:
        small = job.variant(batch_size=size // m)
        report = job.run(f"{repeat}-1f1b-{m}", small, 2 * steps * m)
        found[f"pdtool 1f1b, B/{m}"] = report.measured.throughput_samples_per_s
        flush = job.variant(batch_size=size // m, schedule="1f1b-flush", microbatches=m)
        report = job.run(f"{repeat}-flush-{m}", flush, steps * m)
        found[f"pdtool 1f1b-flush {m}"] = report.throughput_samples_per_s
    return found


def balance(report: Report) -> float:
    """Mean over most of what the stages computed."""
    busy = [stage.busy_s for stage in report.stages]
    return fmean(busy) / max(busy)


def table(name: str, found: Sequence[Mapping[str, float]]) -> Iterator[Row]:
    """Each way over one process, then the ratios that are wanted."""
    middle = medians(found)
    for way in middle:
        if way not in ("one", "balance"):
            yield Row(
                part="b",
                case=name,
                figure=f"{way} / one process",
                values=[f[way] / f["one"] for f in found],
                detail={"samples/s": middle[way]},
            )
    torchs = [way for way in middle if way.startswith("torch ")]
    yield Row(
        part="b",
        case=name,
        figure="pdtool 1f1b / (two processes x balance)",
        least=LIMIT,
        values=[f["pdtool 1f1b"] / (f["two"] * f["balance"]) for f in found],
        detail={"balance": middle["balance"], "one process, samples/s": middle["one"]},
    )
    yield Row(
        part="b",
        case=name,
        figure="pdtool 1f1b / best of torch's pipelines",
        least=OVER_TORCH,
        values=[f["pdtool 1f1b"] / max(f[way] for way in torchs) for f in found],
    )
    for m in [m for m in MICROBATCHES if f"pdtool 1f1b-flush {m}" in middle]:
        yield Row(
            part="b",
            case=name,
            figure=f"pdtool 1f1b-flush {m} / better of torch's, {m}",
            least=FLUSH,
            values=[f[f"pdtool 1f1b-flush {m}"] / max(f[f"torch {way} {m}"] for way in SCHEDULES) for f in found],
        )
