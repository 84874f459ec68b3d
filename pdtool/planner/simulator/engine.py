"""The simulation: action lists on a clock, who waits for what, and how long a minibatch takes in steady state.

As in the runtime, sends never hold up computing. A message goes straight from the stage that makes a tensor to each
stage that takes it, as soon as that stage has asked for it. A stage asks in the order of its list, for one minibatch
more than it has in flight (see pdtool.runtime.messages). A round's gradients leave in buckets during its last backward.
All replicas of a stage start a bucket together, and the update waits for all buckets (see
pdtool.runtime.stage.averaging).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import partial
from itertools import chain

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.profile import Profile
from pdtool.errors import ScheduleError
from pdtool.planner.placement import Placement
from pdtool.planner.simulator.job import SimulationJob, simulation_effort
from pdtool.planner.simulator.network import EventQueue, Link, Network
from pdtool.planner.simulator.result import NullRecorder, Recorder, SimulationResult, WorkerMemory, WorkerUsage
from pdtool.planner.simulator.traffic import GradientAllReduces, MessageDelivery
from pdtool.schedule import Action, ActionKind, grid, steady_minibatches

_MAX_ACTIONS_TIMES_WORKERS = 300_000  # about half a second
PATIENT = 7.0  # times as many for a single plan: some seconds


def simulate(job: SimulationJob) -> SimulationResult:
    """Execute the lists to their end.

    Complexity: a few events per action and message; each takes time in proportion to the messages that share a link.

    Raises:
        ScheduleError: a worker waits forever; the text holds the grid with its action marked.
    """
    recorder = Recorder(job)
    simulation = _Simulation(job, recorder)
    workers, completion = simulation.workers, simulation.run()
    end_s = max(worker.free_s for worker in workers)
    usages = (
        worker.usage(end_s, memory, sent_bytes)
        for worker, memory, sent_bytes in zip(workers, recorder.memory, recorder.sent_bytes, strict=True)
    )
    minibatches = len(completion.done_s)
    return SimulationResult(
        minibatches=minibatches,
        steady=len(completion.steady),
        batch_size=job.batch_size,
        makespan_s=end_s,
        time_per_minibatch_s=completion.time_per_minibatch_s if completion.steady else end_s / minibatches,
        fill_s=max(worker.begun_s for worker in workers),
        drain_s=end_s - min(worker.free_s for worker in workers),
        workers=tuple(usages),
        events=tuple(map(tuple, recorder.events)),
    )


def simulated_time_s(job: SimulationJob, limit_s: float = math.inf) -> float:
    """Return the seconds per minibatch that `simulate` finds, but faster: record nothing, and stop after the steady
    state.

    Args:
        limit_s: above this time, return infinity.
    """
    simulation = _Simulation(job, NullRecorder(), limit_s)
    if simulation.completion.least_s > limit_s:
        return math.inf
    time_s = simulation.run().time_per_minibatch_s
    return time_s if time_s <= limit_s else math.inf


def steady_state_s(
    placement: Placement, profile: Profile, cluster: Cluster, limit_s: float = math.inf, *, patience: float = 1.0
) -> float | None:
    """Return the seconds per minibatch in steady state, infinite above the limit; None where the simulation would take
    too long, or the placement cannot be executed.

    Args:
        patience: factor on the usual time limit of the simulation.
    """
    if is_too_large(placement, patience):
        return None
    try:
        return simulated_time_s(SimulationJob.of(placement, profile, cluster), limit_s)
    except ScheduleError:
        return None


def is_too_large(placement: Placement, patience: float = 1.0) -> bool:
    """Whether a simulation would take too long."""
    return simulation_effort(placement) > _MAX_ACTIONS_TIMES_WORKERS * patience


class _Simulation:
    """Executes the lists of a job to their end, or with a limit until the answer is known."""

    def __init__(self, job: SimulationJob, recorder: NullRecorder, limit_s: float | None = None) -> None:
        self.job, self.recorder, self.clock = job, recorder, EventQueue()
        network = Network(job.cluster, self.clock)
        self.allreduces = GradientAllReduces(job, network, recorder, self._resume)
        self.messages = MessageDelivery(job, network, recorder, self._resume)
        self.completion = _Completion(job, self.clock, self._least_s(), limit_s)
        self.workers = [_SimulatedWorker(w, stage, self) for w, (stage, _) in enumerate(job.shape.stage_replicas())]

    def run(self) -> _Completion:
        """Run all workers; return when minibatches were done."""
        for worker in self.workers:
            worker.resume()
        self.clock.run()
        for w, worker in enumerate(self.workers):
            if not worker.has_finished and not self.completion.is_known:
                text = grid(self.job.lists, mark=(w, worker.position))
                raise ScheduleError(f"worker {w} waits forever in {self.job.lists[w][worker.position]}\n{text}")
        return self.completion

    def _least_s(self) -> float:
        """Seconds per minibatch of the busiest worker: its actions, and the last bucket of gradients, which exists only
        after the last backward of a round and delays the update. With tied parameters, whose steps come later, averages
        may fall behind for hundreds of minibatches before a worker waits, so the busiest link counts, too."""
        shape, busy_s = self.job.shape, [0.0] * self.job.shape.pipeline_depth
        for s, work in enumerate(self.job.stages):
            round_s = work.seconds[ActionKind.UPDATE] + self.allreduces.bucket_s(s)
            pass_s = work.seconds[ActionKind.FORWARD] + work.seconds[ActionKind.BACKWARD]
            busy_s[s % shape.pipeline_depth] += pass_s / shape.replicas[s] + round_s / shape.update_every[s]
        return max(*busy_s, self._busiest_link_s() if self.job.tied else 0.0)

    def _busiest_link_s(self) -> float:
        busy_s: defaultdict[Link, float] = defaultdict(float)
        for links, sent_bytes in chain(self.allreduces.per_minibatch(), self.messages.per_minibatch()):
            for link, messages in links.items():
                busy_s[link] += messages * sent_bytes / link.bandwidth
        return max(busy_s.values(), default=0.0)

    def _resume(self, w: int) -> None:
        self.workers[w].resume()


class _Completion:
    """When each minibatch was done at all stages.

    Args:
        least_s: seconds per minibatch of the busiest worker or link. Workers that fell behind while the pipeline filled
            may catch up for the whole simulation, so minibatches may finish faster than this.
        limit_s: stop as soon as the time per minibatch is known or known to be above it; None: go on to the end.

    Attributes:
        done_s: when each was done, in order.
        steady: which of them are in steady state.
        is_known: whether the simulation was stopped because the answer is known.
    """

    def __init__(self, job: SimulationJob, clock: EventQueue, least_s: float, limit_s: float | None) -> None:
        self.clock, self.least_s, self.limit_s, self.is_known = clock, least_s, limit_s, False
        self.done_s: list[float] = []
        self._missing = Counter(a.minibatch for actions in job.lists for a in actions if a.kind.completes_backward)
        self.steady = steady_minibatches(len(self._missing), job.shape)

    def stage_done(self, minibatch: int) -> None:
        """One stage is done with a minibatch."""
        self._missing[minibatch] -= 1
        if self._missing[minibatch]:
            return
        self.done_s.append(self.clock.now)
        steady_done = len(self.done_s) - self.steady.start
        if self.limit_s is not None and self.steady and steady_done >= 0:
            elapsed_s = self.clock.now - self.done_s[self.steady.start - 1]
            self.is_known = steady_done >= len(self.steady) or elapsed_s > self.limit_s * len(self.steady)
            if self.is_known:
                self.clock.stop()

    @property
    def time_per_minibatch_s(self) -> float:
        """Seconds per minibatch in steady state, or until the last backward if no minibatch is steady; infinite if the
        simulation was stopped early."""
        done_s, steady = self.done_s, self.steady
        if self.is_known and len(done_s) < steady.stop:
            return math.inf
        if not steady:
            return done_s[-1] / len(done_s)
        return max(self.least_s, (done_s[steady[-1]] - done_s[steady[0] - 1]) / len(steady))


class _SimulatedWorker:
    """One worker on its way through its list."""

    def __init__(self, w: int, stage: int, simulation: _Simulation) -> None:
        self.w, self.stage, self.simulation = w, stage, simulation
        self.actions, self.clock = simulation.job.lists[w], simulation.clock
        self.position, self.is_running = 0, False
        self.busy_s = self.communication_s = 0.0
        self.begun_s, self.free_s = math.inf, 0.0

    @property
    def has_finished(self) -> bool:
        return self.position == len(self.actions)

    def resume(self) -> None:
        """Begin the next action if the worker is free and the action's inputs are there."""
        if self.is_running or self.has_finished:
            return
        action = self.actions[self.position]
        if action.kind is ActionKind.UPDATE:
            made_s = self.simulation.allreduces.ready(action.stage, action.minibatch, self.w)
        else:
            made_s = self.simulation.messages.ready(action)
        if made_s is not None:
            self._begin(action, made_s)

    def _begin(self, action: Action, made_s: float) -> None:
        """Start an action whose last input was made at `made_s`, and has been under way since."""
        now, length_s = self.clock.now, self.simulation.job.stages[action.stage].seconds[action.kind]
        if self.position and now > self.free_s:
            self.simulation.recorder.wait(self.w, self.free_s, now - self.free_s)
        self.simulation.recorder.action(self.w, action, now, length_s)
        self.is_running, self.begun_s = True, min(self.begun_s, now)
        self.communication_s += now - max(self.free_s, made_s)
        self.busy_s += length_s
        self.simulation.messages.take(self.w, action)
        self._offer_gradients(action, length_s)
        self.clock.at(now + length_s, partial(self._end, action))

    def _end(self, action: Action) -> None:
        self.is_running, self.free_s = False, self.clock.now
        self.position += 1
        if action.kind.completes_backward:
            self.simulation.completion.stage_done(action.minibatch)
        self.simulation.messages.send_results(self.w, action)
        self.resume()

    def _offer_gradients(self, action: Action, length_s: float) -> None:
        """In the last backward of a round, gradients appear bucket by bucket, the last layers' first."""
        following = next(iter(self.actions[self.position + 1 : self.position + 2]), None)
        if following and action.ends_round(following):
            allreduces = self.simulation.allreduces
            for n, share in enumerate(self.simulation.job.stages[action.stage].buckets_ready[:-1], start=1):
                offer = partial(allreduces.offer, action.stage, following.minibatch, self.w, n)
                self.clock.at(self.clock.now + length_s * share, offer)

    def usage(self, makespan_s: float, memory: WorkerMemory, sent_bytes: float) -> WorkerUsage:
        """Return how the time was spent."""
        return WorkerUsage(
            stage=self.stage,
            worker=self.simulation.job.workers[self.w],
            busy_s=self.busy_s,
            communication_s=self.communication_s,
            idle_s=max(0.0, makespan_s - self.busy_s - self.communication_s),
            peak_stashed=memory.stash.peak,
            versions=memory.peak_versions,
            delay=memory.stash.delay,
            memory_bytes=int(memory.peak_bytes),
            sent_bytes=round(sent_bytes),
        )
