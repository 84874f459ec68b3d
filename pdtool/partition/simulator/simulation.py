"""What a simulation found, and how it is summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from pdtool.partition.simulator.links import Flow
from pdtool.schedule import Shape


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that takes time on a worker.

    Attributes:
        slot: position of the worker's list.
        lane: `compute`, `send`, `receive` or `all-reduce`.
        name, kind: as in a run's trace: `2F0` and `forward`, `wait` and `wait`.
    """

    slot: int
    lane: str
    name: str
    kind: str
    start_s: float
    length_s: float
    size_bytes: int = 0


@dataclass
class Record:
    """Events so far, and what each worker sent."""

    workers: InitVar[int]
    events: list[Event] = field(default_factory=list)
    sent_bytes: list[float] = field(init=False)

    def __post_init__(self, workers: int) -> None:
        self.sent_bytes = [0.0] * workers

    def action(self, slot: int, name: str, kind: str, start_s: float, length_s: float) -> None:
        """Something that a worker did, or waited for."""
        self.events.append(Event(slot=slot, lane="compute", name=name, kind=kind, start_s=start_s, length_s=length_s))

    def message(self, slot: int, lane: str, name: str, flow: Flow, *, late_s: float = 0.0, sent: bool = False) -> None:
        """A message that has just gone, seen from one of its ends; `late_s` after it was sent."""
        self.events.append(
            Event(slot=slot, lane=lane, name=name, kind=lane, start_s=flow.started_s + late_s,
                  length_s=flow.ended_s - flow.started_s, size_bytes=round(flow.size_bytes))
        )  # fmt: skip
        self.sent_bytes[slot] += flow.size_bytes * sent


@dataclass(frozen=True, kw_only=True)
class Share:
    """How one worker spent its time, which is all the time there was, and the most that it held.

    Attributes:
        busy_s: computing.
        communication_s: waiting for something that was on its way to it, an all-reduce included.
        idle_s: waiting for something that was not made yet, or for nothing.
        span_s: from its first action to its last.
        peak_stashed: minibatches; `delay`: updates between forward and backward of one, `versions` of the weights.
    """

    stage: int
    worker: int
    busy_s: float
    communication_s: float
    idle_s: float
    span_s: float
    peak_stashed: int
    versions: int
    delay: int
    memory_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of it.

    Attributes:
        pace_s: seconds per minibatch in steady state, between the filling of the pipeline and its draining.
        fill_s: until all workers have begun.
        drain_s: from when the first worker has nothing left to do.
    """

    minibatches: int
    batch_size: int
    makespan_s: float
    pace_s: float
    fill_s: float
    drain_s: float
    shares: tuple[Share, ...]
    events: tuple[Event, ...]

    @property
    def throughput_samples_per_s(self) -> float:
        """In steady state."""
        return self.batch_size / self.pace_s if self.pace_s else math.inf

    @property
    def sent_bytes(self) -> float:
        """By all workers together, for one minibatch."""
        return sum(share.sent_bytes for share in self.shares) / self.minibatches


def filling(shape: Shape) -> int:
    """Minibatches that are begun before the pipeline is in steady state."""
    in_flight = (w * r for w, r in zip(shape.in_flight, shape.replicas, strict=False))
    return max(*in_flight, *shape.update_every)


def period(shape: Shape) -> int:
    """Minibatches after which a schedule repeats itself."""
    common = math.lcm(*shape.update_every)
    return common if common <= 512 else max(shape.update_every)


def pace(done_s: Sequence[float], shape: Shape) -> float:
    """Seconds per minibatch over as many whole periods as there are between filling and draining; without any, over
    all minibatches.

    Args:
        done_s: when each minibatch was done, in order.
    """
    first = filling(shape) - 1
    steps = (len(done_s) - filling(shape) - 1 - first) // period(shape) * period(shape)
    return (done_s[first + steps] - done_s[first]) / steps if steps > 0 else done_s[-1] / len(done_s)
