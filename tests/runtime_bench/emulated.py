"""a. Against the limit: stages that sleep their time and send real tensors, and what the slowest allows.

The limit is the pace of the slowest stage: its forward and backward, over its replicas. `nominal` takes the times
asked for, `measured` those that the layers noted themselves (sleep ends late), in the same run. The schedule may
not reach the limit even where everything else costs nothing: `schedule` is its pace in a simulation without messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness

from pdtool.artifacts.report import Report
from pdtool.cluster import Cluster, Level
from pdtool.partition.simulator.job import Border, Job, Work
from pdtool.partition.simulator.simulate import simulate
from pdtool.run.launch import launch
from pdtool.run.spec import RunSpec
from pdtool.schedule import Kind, build
from runtime_bench.rows import Row, medians
from runtime_bench.toys import Emulated, notes

WIDTH = 1 << 16  # floats of a sample: a minibatch of 4 is 1 MB
WEIGHTS = 1 << 16  # 256 KB
FREE = 1e15  # bytes/s


@dataclass(frozen=True)
class Case:
    """Stages of equal pace.

    Attributes:
        pace_s: forward and backward of a stage, over its replicas; the backward is twice the forward.
    """

    replicas: tuple[int, ...]
    pace_s: float
    minibatches: int

    @property
    def name(self) -> str:
        """`straight 4`, `15-1`."""
        straight = set(self.replicas) == {1}
        return f"straight {len(self.replicas)}" if straight else "-".join(map(str, self.replicas))


CASES = (
    Case((1, 1), 0.03, 120), Case((1,) * 4, 0.03, 120), Case((1,) * 8, 0.06, 100), Case((3, 1), 0.03, 120),
    Case((2, 1, 1), 0.03, 120), Case((15, 1), 0.04, 180),
)  # fmt: skip
QUICK = (Case((1, 1), 0.02, 30), Case((3, 1), 0.02, 30))


def rows(folder: Path, repeats: int, quick: bool) -> Iterator[Row]:
    """Each case."""
    for case in QUICK if quick else CASES:
        found = [measure(case, folder / f"{case.name}-{i}".replace(" ", "-")) for i in range(repeats)]
        least = 0.93 if sum(case.replicas) >= 8 else 0.97
        detail = medians(found)
        nominal, measured = ([each.pop(name) for each in found] for name in ("nominal", "measured"))
        detail = {name: value for name, value in detail.items() if name not in ("nominal", "measured")}
        yield Row(part="a", case=case.name, figure="throughput / limit by measured sleep", values=measured,
                  least=least, detail=detail)  # fmt: skip
        yield Row(part="a", case=case.name, figure="throughput / limit by nominal sleep", values=nominal)


def measure(case: Case, folder: Path) -> dict[str, float]:
    """One run: the ratios, and of the slowest stage where a minibatch's time went, as shares of the pace."""
    seconds = [case.pace_s * r for r in case.replicas]
    emulated = Emulated(
        forward_s=[t / 3 for t in seconds], backward_s=[t * 2 / 3 for t in seconds], width=WIDTH, weights=WEIGHTS,
        minibatches=case.minibatches,
    )  # fmt: skip
    noted = folder / "notes"
    noted.mkdir(parents=True)
    spec = harness.job(folder, emulated.toy(noted), case.replicas, batch_size=emulated.batch_size, epochs=2,
                       device="cpu")  # fmt: skip
    report = launch(spec)
    taken = {s: sum(n.taken_s for n in each) / len(each) ** 2 for s, each in notes(noted).items()}
    pace, slowest = report.measured.bottleneck_s, max(taken, key=taken.__getitem__)
    allowed = max(schedule_pace(spec, seconds), case.pace_s)
    return {
        "nominal": case.pace_s / pace, "measured": taken[slowest] / pace, "pace_ms": pace * 1e3,
        "nominal_ms": case.pace_s * 1e3, "measured_ms": taken[slowest] * 1e3,
        "schedule": case.pace_s / allowed, "slowest": slowest, **shares(report, slowest, taken[slowest]),
    }  # fmt: skip


def shares(report: Report, stage: int, taken_s: float) -> dict[str, float]:
    """Of a stage's time in all (filling and draining too): computing, pdtool's own, and waits."""
    of = report.stages[stage]
    parts = {"own": of.busy_s - taken_s + of.rest_s, "wait": of.wait_s, "average": of.allreduce_s}
    return {name: seconds / of.time_s for name, seconds in parts.items()}


def schedule_pace(spec: RunSpec, seconds: Sequence[float]) -> float:
    """Seconds per minibatch of the action lists where messages take no time."""
    shape, count = spec.plan.shape(), 20 * max(spec.plan.shape().replicas) + 40
    job = Job(
        shape=shape, lists=build(spec.plan.schedule, shape, count), workers=range(sum(shape.replicas)),
        cluster=Cluster(levels=(Level(size=sum(shape.replicas), bandwidth_bytes_per_s=FREE),)),
        stages=[Work(seconds={**dict.fromkeys(Kind, 0.0), Kind.FORWARD: t / 3, Kind.BACKWARD: t * 2 / 3},
                     averaged_bytes=4) for t in seconds],
        borders=[Border(source=s, destination=s + 1, forward_bytes=4, backward_bytes=4)
                 for s in range(len(seconds) - 1)],
    )  # fmt: skip
    return simulate(job).pace_s
