"""a. Against the limit: stages that sleep their time and send real tensors, and what the slowest allows.

The limit is the time of the slowest stage: its forward and backward, over its replicas. `nominal` takes the times
asked for, `measured` those that the layers noted themselves (sleep ends late), in the same run; `alone` is the slowest
stage in a plain loop without pdtool, loss and optimizer included. The schedule may not reach the limit even where all
else costs nothing: `schedule` is the share that it reaches in a simulation without messages.

The detail is of the stage with least time to spare, per minibatch in ms: what is its own besides the sleep (forward,
backward, update), its waits for messages and for averages, filling and draining included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness

from pdtool.artifacts.cluster import Cluster, Level
from pdtool.artifacts.report import Report
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob, StageWork
from pdtool.planner.stage_costs import StageEdge
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch.launcher import launch
from pdtool.schedule import SCHEDULES, ActionKind
from runtime_bench.rows import Row, medians
from runtime_bench.toys import Emulated, alone, notes

WIDTH = 1 << 16  # floats of a sample: a minibatch of 4 is 1 MB
WEIGHTS = 1 << 16  # 256 KB
FREE = 1e15  # bytes/s


@dataclass(frozen=True)
class Case:
    """Stages that take equally long.

    Attributes:
        time_per_minibatch_s: forward and backward of a stage, over its replicas; the backward takes twice as long.
        in_flight: where the usual numbers do not keep the pace, those that `pdtool partition` settles on.
        wanted: whether there is a target; without, to see what shorter minibatches cost.
    """

    replicas: tuple[int, ...]
    time_per_minibatch_s: float
    minibatches: int
    in_flight: tuple[int, ...] = ()
    wanted: bool = True

    @property
    def name(self) -> str:
        """`straight 4, 101 ms`, `15-1, 25 ms`."""
        straight = set(self.replicas) == {1}
        shape = f"straight {len(self.replicas)}" if straight else "-".join(map(str, self.replicas))
        return f"{shape}, {self.time_per_minibatch_s * 1e3:.0f} ms"


# Forward and backward of VGG-16 on all workers together, minibatches of 64 on V100:
# `pdtool profile pdtool/zoo/vgg16.py --device v100 --batch-size 64`, the total.
PROFILED_S = 0.405
CASES = (
    Case((1, 1), PROFILED_S / 2, 40),
    Case((1,) * 4, PROFILED_S / 4, 60),
    Case((1,) * 8, PROFILED_S / 8, 100),
    Case((3, 1), PROFILED_S / 4, 60),
    Case((2, 1, 1), PROFILED_S / 4, 60, (3, 2, 1)),
    Case((15, 1), PROFILED_S / 16, 180),
    Case((1, 1), 0.03, 120, wanted=False),
)
QUICK = (Case((1, 1), 0.02, 30), Case((3, 1), 0.02, 30))


def rows(folder: Path, repeats: int, quick: bool) -> Iterator[Row]:
    """Each case."""
    for case in QUICK if quick else CASES:
        found = [measure(case, folder / f"{case.name}-{i}".replace(",", "").replace(" ", "-")) for i in range(repeats)]
        least = (0.93 if sum(case.replicas) >= 8 else 0.97) if case.wanted else None
        measured, nominal, alone_ = ([each.pop(name) for each in found] for name in ("measured", "nominal", "alone"))
        yield Row(
            part="a",
            case=case.name,
            figure="throughput / limit by measured sleep",
            values=measured,
            least=least,
            detail=medians(found),
        )
        yield Row(part="a", case=case.name, figure="throughput / limit by nominal sleep", values=nominal)
        yield Row(part="a", case=case.name, figure="throughput / slowest stage alone in a loop", values=alone_)


def measure(case: Case, folder: Path) -> dict[str, float]:
    """One run: the ratios, and where a minibatch of the slowest stage spent its time, as shares of that time."""
    seconds = [case.time_per_minibatch_s * r for r in case.replicas]
    emulated = Emulated(
        forward_s=[t / 3 for t in seconds],
        backward_s=[t * 2 / 3 for t in seconds],
        width=WIDTH,
        weights=WEIGHTS,
        minibatches=case.minibatches,
    )
    noted = folder / "notes"
    noted.mkdir(parents=True)
    spec = harness.job(
        folder,
        emulated.toy(noted),
        case.replicas,
        batch_size=emulated.batch_size,
        epochs=2,
        device="cpu",
        in_flight=case.in_flight,
    )
    report = launch(spec)
    taken = {s: sum(n.taken_s for n in each) / len(each) ** 2 for s, each in notes(noted).items()}
    pace, slowest = report.measured.bottleneck_s, max(taken, key=taken.__getitem__)
    inputs = WIDTH if slowest else emulated.inputs
    loop = alone(folder, slowest, inputs, emulated.batch_size, 20).wall_s / case.replicas[slowest]
    return {
        "measured": taken[slowest] / pace,
        "nominal": case.time_per_minibatch_s / pace,
        "alone": loop / pace,
        "schedule": case.time_per_minibatch_s / max(schedule_pace(spec, seconds), case.time_per_minibatch_s),
        "pace": pace * 1e3,
        "sleep": taken[slowest] * 1e3,
        **where(report, taken),
    }


def where(report: Report, taken: Mapping[int, float]) -> dict[str, float]:
    """Milliseconds per minibatch of the stage that waits least."""
    s = min(taken, key=lambda s: report.stages[s].wait_s + report.stages[s].allreduce_s)
    of = report.stages[s]
    own = of.forward_s + of.backward_s - taken[s] + of.data_s + of.rest_s
    parts = {"own": own, "update": of.update_s, "wait": of.wait_s, "average": of.allreduce_s}
    return {"stage": s, **{name: seconds * 1e3 for name, seconds in parts.items()}}


def schedule_pace(spec: RunConfig, seconds: Sequence[float]) -> float:
    """Seconds per minibatch of the action lists where messages take no time."""
    shape, count = spec.plan.shape(), 20 * max(spec.plan.shape().replicas) + 40
    job = SimulationJob(
        shape=shape,
        lists=SCHEDULES[spec.plan.schedule].build(shape, count),
        workers=range(sum(shape.replicas)),
        cluster=Cluster(levels=(Level(size=sum(shape.replicas), bandwidth_bytes_per_s=FREE),)),
        stages=[
            StageWork(
                seconds={**dict.fromkeys(ActionKind, 0.0), ActionKind.FORWARD: t / 3, ActionKind.BACKWARD: t * 2 / 3},
                averaged_bytes=4,
            )
            for t in seconds
        ],
        edges=[
            StageEdge(source=s, destination=s + 1, forward_bytes=4, backward_bytes=4) for s in range(len(seconds) - 1)
        ],
    )
    return simulate(job).time_per_minibatch_s
