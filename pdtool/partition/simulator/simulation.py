"""What a simulation found, and how it is summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdtool.partition.simulator.job import Job
from pdtool.partition.simulator.links import Flow
from pdtool.schedule import Action, ActionKind, ForwardVersions, PipelineShape, StashTracker, forward_versions


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


class Unrecorded:
    """Of all that is told to a record nothing is kept: for who asks for the pace only."""

    def action(self, slot: int, action: Action, start_s: float, length_s: float) -> None:
        """An action that a worker begins."""

    def wait(self, slot: int, start_s: float, length_s: float) -> None:
        """A worker that had to wait."""

    def message(self, sender: int, receiver: int, taker: tuple[int, bool, int], flow: Flow, late_s: float) -> None:
        """A tensor that has just gone, `late_s` before it is there; for which action: stage, backward?, minibatch."""

    def averaged(self, slot: int, flow: Flow) -> None:
        """A worker's part of a ring all-reduce that has just gone."""


class Record(Unrecorded):
    """Events so far, what each worker sent, and what it holds."""

    def __init__(self, job: Job) -> None:
        slots = list(job.shape.stage_replicas())
        self.events: list[Event] = []
        self.sent_bytes = [0.0] * len(slots)
        self.rooms = [
            Room(job, stage, seen)
            for (stage, _), seen in zip(slots, forward_versions(job.lists, job.shape.weights), strict=True)
        ]

    def action(self, slot: int, action: Action, start_s: float, length_s: float) -> None:
        kind = action.kind.name.lower()
        self.events.append(
            Event(slot=slot, lane="compute", name=str(action), kind=kind, start_s=start_s, length_s=length_s)
        )
        self.rooms[slot].take(action)

    def wait(self, slot: int, start_s: float, length_s: float) -> None:
        self.events.append(
            Event(slot=slot, lane="compute", name="wait", kind="wait", start_s=start_s, length_s=length_s)
        )

    def message(self, sender: int, receiver: int, taker: tuple[int, bool, int], flow: Flow, late_s: float) -> None:
        stage, gradients, minibatch = taker
        name = f"for {stage}{'B' if gradients else 'F'}{minibatch}"
        self._moved(sender, "send", name, flow, 0.0)
        self._moved(receiver, "receive", name, flow, late_s)
        self.sent_bytes[sender] += flow.size_bytes

    def averaged(self, slot: int, flow: Flow) -> None:
        self._moved(slot, "all-reduce", "gradients", flow, 0.0)
        self.sent_bytes[slot] += flow.size_bytes

    def _moved(self, slot: int, lane: str, name: str, flow: Flow, late_s: float) -> None:
        self.events.append(
            Event(
                slot=slot,
                lane=lane,
                name=name,
                kind=lane,
                start_s=flow.started_s + late_s,
                length_s=flow.ended_s - flow.started_s,
                size_bytes=round(flow.size_bytes),
            )
        )


class Room:
    """What one worker holds, and the most of it so far.

    Args:
        stage: its first.
        seen: the versions of the weights that it reads.
    """

    def __init__(self, job: Job, stage: int, seen: ForwardVersions) -> None:
        self.stages = job.shape.stages_on_same_workers(stage)
        self.work = job.stages
        self.held = StashTracker(seen, stashing=job.shape.weights != "none")
        self.fixed_bytes = sum(job.stages[s].fixed_bytes for s in self.stages)
        self.memory_bytes = self.kept_bytes = self.versions = 0

    def take(self, action: Action) -> None:
        """What was kept of a minibatch is free when its last action begins: nothing else begins before that ends."""
        self.held.apply(action)
        kept = self.work[action.stage].kept_bytes
        if action.kind.completes_backward:
            self.kept_bytes -= kept
        elif action.kind in (ActionKind.FORWARD, ActionKind.UPDATE):  # only these hold more than before
            self.kept_bytes += kept * (action.kind is ActionKind.FORWARD)
            versions = [self.held.versions(s) for s in self.stages]
            weights = sum(self.work[s].weight_bytes * n for s, n in zip(self.stages, versions, strict=True))
            self.memory_bytes = max(self.memory_bytes, self.fixed_bytes + weights + self.kept_bytes)
            self.versions = max(self.versions, *versions)


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
        steady: minibatches in steady state, between the filling of the pipeline and its draining.
        pace_s: seconds per minibatch of those; of all where there are none.
        fill_s: until all workers have begun.
        drain_s: from when the first worker has nothing left to do.
    """

    minibatches: int
    steady: int
    batch_size: int
    makespan_s: float
    pace_s: float
    fill_s: float
    drain_s: float
    shares: tuple[Share, ...]
    events: tuple[Event, ...]

    @property
    def throughput_samples_per_s(self) -> float:
        """At that pace."""
        return self.batch_size / self.pace_s if self.pace_s else math.inf

    @property
    def sent_bytes(self) -> float:
        """By all workers together, for one minibatch."""
        return sum(share.sent_bytes for share in self.shares) / self.minibatches


def filling(shape: PipelineShape) -> int:
    """Minibatches that are begun before the pipeline is in steady state."""
    in_flight = (w * r for w, r in zip(shape.in_flight, shape.replicas, strict=False))
    return max(*in_flight, *shape.update_every)


def period(shape: PipelineShape) -> int:
    """Minibatches after which a schedule repeats itself."""
    common = math.lcm(*shape.update_every)
    return common if common <= 512 else max(shape.update_every)


def steady(minibatches: int, shape: PipelineShape) -> range:
    """As many minibatches, in the order in which they are done, as there are in whole periods between filling and
    draining; there may be none."""
    first = filling(shape)
    return range(first, first + (minibatches - 2 * first) // period(shape) * period(shape))


def pace(done_s: Sequence[float], watched: range) -> float:
    """Seconds per minibatch over those that are watched; over all of them where these are none.

    Args:
        done_s: when each minibatch was done, in order.
    """
    steps = len(watched)
    return (done_s[watched[-1]] - done_s[watched[0] - 1]) / steps if steps else done_s[-1] / len(done_s)
