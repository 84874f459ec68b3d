"""The result of a simulation: how each worker spent its time, and how long a minibatch takes in steady state.

While a simulation runs, `Recorder` keeps the events of its trace, the bytes sent and the memory of each worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.planner.simulator.job import SimulationJob
from pdtool.planner.simulator.network import Flow
from pdtool.schedule import Action, ActionKind, Actions, ForwardVersions, StashTracker

Consumer = tuple[int, bool, int]  # stage, whether the message is a gradient, minibatch


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The result of a simulation.

    Attributes:
        steady: minibatches in steady state, between the filling of the pipeline and its draining.
        time_per_minibatch_s: seconds per minibatch in steady state; over all minibatches if there is none.
        fill_s: until all workers have begun.
        drain_s: from when the first worker has finished.
        events: of each worker.
    """

    minibatches: int
    steady: int
    batch_size: int
    makespan_s: float
    time_per_minibatch_s: float
    fill_s: float
    drain_s: float
    workers: tuple[WorkerUsage, ...]
    events: tuple[tuple[TraceEvent, ...], ...] = field(repr=False)  # thousands

    @property
    def throughput_samples_per_s(self) -> float:
        """Samples per second in steady state; 0 if nothing takes time."""
        return self.batch_size / self.time_per_minibatch_s if self.time_per_minibatch_s else 0.0

    @property
    def named_events(self) -> dict[str, tuple[TraceEvent, ...]]:
        """Name of each worker -> its events, for artifacts.chrome_trace."""
        names = (f"worker {usage.worker}, stage {usage.stage}" for usage in self.workers)
        return dict(zip(names, self.events, strict=True))

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by all workers together, for one minibatch."""
        return sum(usage.sent_bytes for usage in self.workers) / self.minibatches


@dataclass(frozen=True, kw_only=True)
class WorkerUsage:
    """How one worker spent the time of the simulation, and the most that it held.

    Attributes:
        busy_s: computing.
        communication_s: waiting for a message on its way, or for an all-reduce.
        idle_s: waiting for another worker to compute, or finished.
        peak_stashed: minibatches; `delay`: updates between a minibatch's forward and backward; `versions`: of weights.
    """

    stage: int
    worker: int
    busy_s: float
    communication_s: float
    idle_s: float
    peak_stashed: int
    versions: int
    delay: int
    memory_bytes: int
    sent_bytes: int


class NullRecorder:
    """A recorder that keeps nothing, for simulations that only give the time per minibatch.

    Workers are given by the positions of their lists.
    """

    def action(self, worker: int, action: Action, start_s: float, length_s: float) -> None:
        """A worker begins an action."""

    def wait(self, worker: int, start_s: float, length_s: float) -> None:
        """A worker had to wait."""

    def message(self, sender: int, receiver: int, consumer: Consumer, flow: Flow, latency_s: float) -> None:
        """A tensor has left, and arrives after the latency."""

    def averaged(self, worker: int, flow: Flow) -> None:
        """A worker's part of a ring all-reduce has left."""


class Recorder(NullRecorder):
    """The events of each worker, what each sent, and what it holds."""

    def __init__(self, job: SimulationJob) -> None:
        self.events: list[list[TraceEvent]] = [[] for _ in job.lists]
        self.sent_bytes = [0.0] * len(job.lists)
        self.memory = worker_memories(job, job.lists)
        for lists in job.fuller_rounds:
            for memory, fuller, actions in zip(self.memory, worker_memories(job, lists), lists, strict=True):
                for action in actions:
                    fuller.apply(action)
                memory.peak_bytes = max(memory.peak_bytes, fuller.peak_bytes)
                memory.stash.peak = max(memory.stash.peak, fuller.stash.peak)

    def action(self, worker: int, action: Action, start_s: float, length_s: float) -> None:
        kind = action.kind.name.lower()
        self.events[worker].append(TraceEvent("compute", str(action), kind, start_s, length_s))
        self.memory[worker].apply(action)

    def wait(self, worker: int, start_s: float, length_s: float) -> None:
        self.events[worker].append(TraceEvent("compute", "wait", "wait", start_s, length_s))

    def message(self, sender: int, receiver: int, consumer: Consumer, flow: Flow, latency_s: float) -> None:
        stage, is_gradient, minibatch = consumer
        name = f"for {stage}{'B' if is_gradient else 'F'}{minibatch}"
        self._add_flow(sender, "send", name, flow, 0.0)
        self._add_flow(receiver, "receive", name, flow, latency_s)
        self.sent_bytes[sender] += flow.size_bytes

    def averaged(self, worker: int, flow: Flow) -> None:
        self._add_flow(worker, "all-reduce", "gradients", flow, 0.0)
        self.sent_bytes[worker] += flow.size_bytes

    def _add_flow(self, worker: int, track: str, name: str, flow: Flow, latency_s: float) -> None:
        length_s = flow.ended_s - flow.started_s
        event = TraceEvent(track, name, track, flow.started_s + latency_s, length_s, round(flow.size_bytes))
        self.events[worker].append(event)


def worker_memories(job: SimulationJob, lists: Sequence[Actions]) -> list[WorkerMemory]:
    """Return what each worker holds before its first action, for these lists of the job."""
    versions = job.shape.weights.forward_versions(lists, job.shape.replicas, job.shape.update_every)
    return [WorkerMemory(job, s, own) for (s, _), own in zip(job.shape.stage_replicas(), versions, strict=True)]


class WorkerMemory:
    """What one worker holds, and the most of it so far.

    Args:
        stage: the first of its stages.
        versions: the weight version that each of its forwards reads.

    Attributes:
        peak_bytes, peak_versions: the most at once.
    """

    def __init__(self, job: SimulationJob, stage: int, versions: ForwardVersions) -> None:
        self.stages = job.shape.stages_on_same_workers(stage)
        self.parts = {s: job.stages[s].memory for s in self.stages}
        self.stash = StashTracker(versions, stashing=job.shape.weights.stashes)
        self.peak_bytes = self.peak_versions = 0
        self._in_flight = dict.fromkeys(self.stages, 0)

    def apply(self, action: Action) -> None:
        """Account for an action. Free a minibatch's memory when its last action begins, since nothing else begins
        before that ends."""
        self.stash.apply(action)
        if action.kind.completes_backward:
            self._in_flight[action.stage] -= 1
        elif action.kind in (ActionKind.FORWARD, ActionKind.UPDATE):  # only these hold more than before
            self._in_flight[action.stage] += action.kind is ActionKind.FORWARD
            versions = {s: self.stash.versions(s) for s in self.stages}
            held_bytes = sum(part.peak_bytes(versions[s], self._in_flight[s]) for s, part in self.parts.items())
            self.peak_bytes = max(self.peak_bytes, held_bytes)
            self.peak_versions = max(self.peak_versions, *versions.values())
