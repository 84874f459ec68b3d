"""The job of a simulation, made from a placement: action lists, the time of each action, and the messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.profile import Node, Profile
from pdtool.errors import UsageError
from pdtool.planner.formulas import StageMemory, bucket_count
from pdtool.planner.placement import Placement
from pdtool.planner.stage_costs import StageEdge, StageLoad, stage_edges, stage_loads, tied_bytes
from pdtool.schedule import ActionKind, Actions, PipelineShape, ScheduleKind, steady_run, tied_update_lag

MAX_ACTIONS = 200_000  # forwards and backwards, about ten seconds
_NO_MEMORY = StageMemory(fixed_bytes=0, version_bytes=0, minibatch_bytes=0)


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """What one stage costs on one worker.

    Attributes:
        seconds: of each kind of action.
        memory: its parts.
        averaged_bytes: gradients that the replicas average in each round.
        buckets_ready: for each of their equal buckets, the share of the backward after which it is ready.
    """

    seconds: Mapping[ActionKind, float]
    memory: StageMemory = _NO_MEMORY
    averaged_bytes: int = 0
    buckets_ready: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, kw_only=True)
class TiedGroup:
    """Parameters that several stages hold: their gradients are summed over all replicas of these once a round.

    Attributes:
        lags: for each of the stages, rounds between a gradient and its step (schedule.tied_update_lag).
    """

    stages: tuple[int, ...]
    lags: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class SimulationJob:
    """What is simulated.

    Attributes:
        lists: of actions, one per worker, in the order of shape.stage_replicas().
        workers: their numbers in the cluster.
        stages: what each costs.
        batch_size: samples in a minibatch.
        fuller_rounds: lists of short rounds in which workers may hold more.
    """

    shape: PipelineShape
    lists: Sequence[Actions]
    workers: Sequence[int]
    cluster: Cluster
    stages: Sequence[StageWork]
    edges: Sequence[StageEdge]
    tied: Sequence[TiedGroup] = ()
    batch_size: int = 1
    fuller_rounds: Sequence[Sequence[Actions]] = ()

    @cached_property
    def stage_workers(self) -> list[list[int]]:
        """Of each stage, the positions of its workers' lists."""
        depth, first_stages = self.shape.pipeline_depth, [stage for stage, _ in self.shape.stage_replicas()]
        return [[w for w, s in enumerate(first_stages) if s == stage % depth] for stage in range(len(self.stages))]

    @classmethod
    def of(
        cls, placement: Placement, profile: Profile, cluster: Cluster, minibatches: int | None = None
    ) -> SimulationJob:
        """Return the job of a run of the placement.

        Args:
            minibatches: in one epoch; None: enough to fill the pipeline, reach steady state, and drain. What workers
                hold is then the most in an epoch of any length.

        Raises:
            UsageError: the schedule does not suit the placement, or there are too many minibatches to simulate.
        """
        execution, depth = placement.execution, placement.pipeline_depth
        sizes = tied_bytes(profile, placement.stages)
        shape = placement.shape(sizes)
        limit = max(MAX_ACTIONS // (2 * len(placement.stages)), steady_run(shape))
        if minibatches and minibatches > limit:
            what = f"--minibatches {minibatches} takes too long to simulate on {len(placement.stages)} stages"
            raise UsageError(what, f"pass at most {limit}")
        loads = stage_loads(profile, placement.stages)
        return cls(
            shape=shape,
            lists=execution.kind.build(shape, minibatches or steady_run(shape)),
            workers=[worker for numbers in placement.workers[:depth] for worker in numbers],
            cluster=cluster,
            stages=[
                _stage_work(profile, load, nodes, recompute)
                for load, nodes, recompute in zip(loads, placement.stages, placement.recompute, strict=True)
            ],
            edges=stage_edges(profile, placement.stages),
            tied=[
                TiedGroup(stages=stages, size_bytes=size, lags=_lags(execution.kind, shape, stages))
                for stages, size in sizes.items()
            ],
            batch_size=profile.batch_size,
            fuller_rounds=_fuller_rounds(execution.kind, shape) if minibatches is None else (),
        )


def _fuller_rounds(kind: ScheduleKind, shape: PipelineShape) -> list[Sequence[Actions]]:
    return [kind.build(shape, fuller) for fuller in kind.fuller_rounds(shape)] if kind.fuller_rounds else []


def _stage_work(profile: Profile, load: StageLoad, nodes: Collection[str], recompute: bool) -> StageWork:
    """Return the times of a stage. A profile has one time per backward. If there are parameters, assume that half of it
    is for their gradients, because both matrix products have the same size."""
    backward_s = load.backward_s + load.forward_s * recompute
    weights_s = sum(profile.by_name[name].backward_s / 2 for name in nodes if profile.by_name[name].parameter_bytes)
    memory = StageMemory.of(load, profile.optimizer_state_bytes, recompute)
    return StageWork(
        seconds={
            ActionKind.FORWARD: load.forward_s,
            ActionKind.BACKWARD: backward_s,
            ActionKind.BACKWARD_INPUT: backward_s - weights_s,
            ActionKind.BACKWARD_WEIGHT: weights_s,
            ActionKind.UPDATE: load.update_s,
        },
        memory=StageMemory(**{name: int(value) for name, value in vars(memory).items()}),
        averaged_bytes=load.parameter_bytes - load.tied_bytes,
        buckets_ready=_buckets_ready(
            [profile.by_name[name] for name in nodes],
            load.parameter_bytes - load.tied_bytes,
            load.forward_s * recompute,
        ),
    )


def _buckets_ready(nodes: Sequence[Node], averaged_bytes: int, recompute_s: float) -> tuple[float, ...]:
    """Return when each bucket of a stage's gradients is ready, as a share of its backward; the last layers come first.

    Args:
        nodes: in topological order.
        recompute_s: seconds of the forward that runs again before the backward.
    """
    buckets = bucket_count(averaged_bytes)
    total_bytes = sum(node.parameter_bytes for node in nodes)
    total_s = recompute_s + sum(node.backward_s for node in nodes)
    ready: list[float] = []
    done_s, done_bytes = recompute_s, 0
    for node in reversed(nodes):
        done_s, done_bytes = done_s + node.backward_s, done_bytes + node.parameter_bytes
        complete = int(buckets * done_bytes / total_bytes) if total_bytes else 0
        ready += [done_s / total_s if total_s else 1.0] * (complete - len(ready))
    return (*tuple([*ready, *([1.0] * buckets)][: buckets - 1]), 1.0)


def _lags(kind: ScheduleKind, shape: PipelineShape, stages: tuple[int, ...]) -> tuple[int, ...]:
    """Rounds between a gradient of a tied parameter and its step at each stage that holds it.

    With chunks, a worker continues with its other stages and steps before the stage's next action. We count that as one
    round later, which is slightly too fast, since nothing waits for the last step.
    """
    if kind.flushes:
        return (int(shape.chunks > 1),) * len(stages)
    return tuple(tied_update_lag(shape, stages, s) for s in stages)


def action_count(placement: Placement) -> int:
    """Return the forwards and backwards of a simulation, before its lists are built."""
    return 2 * steady_run(placement.shape()) * len(placement.stages)


def simulation_effort(placement: Placement) -> int:
    """Return the actions times workers, to which the time of a simulation is roughly proportional."""
    return action_count(placement) * placement.used_workers
