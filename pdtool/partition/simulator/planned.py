"""A plan as a job for the simulator: what its profile says that each action and each message takes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.partition.cost import Load
from pdtool.partition.evaluate import loads
from pdtool.partition.simulator.job import Border, Job, Tied, Work
from pdtool.partition.simulator.simulation import filling, period
from pdtool.schedule import ActionKind, PipelineShape, build, default_shape, is_asynchronous, tied_update_lag

LEAST_STEADY = 32  # minibatches in steady state
MOST_ACTIONS = 200_000  # forwards and backwards, about ten seconds


def planned_job(
    plan: Plan, profile: Profile, *, schedule: str | None = None, minibatches: int | None = None, chunks: int = 2
) -> Job:
    """The job that a run of the plan is.

    Args:
        schedule: another one than the plan's, with the minibatches in flight that it is defined for. A flush then
            comes after four microbatches for each stage (GPipe, NeurIPS'19, section 2.3: then the bubble is small).
        minibatches: of one epoch; None: enough to fill the pipeline, see it in steady state, and drain it.
        chunks: stages on each worker of `interleaved`, for which the model is cut anew (see `pieces`).

    Raises:
        UsageError: the schedule does not go with the plan, or there are more minibatches than can be simulated.
    """
    name = schedule or plan.schedule
    stages: Sequence[Collection[str]] = plan.stage_nodes(profile)
    recompute = [stage.recompute for stage in plan.stages]
    if plan.chunks > 1 and name != plan.schedule:
        raise UsageError(
            f"schedule {name} with {plan.chunks} stages on each worker",
            "simulate a plan that was partitioned for one on each",
        )
    if name == "interleaved" != plan.schedule:
        stages, recompute = pieces(profile, len(stages) * chunks), recompute * chunks
    sizes = tied_bytes(profile, stages)
    if name == plan.schedule:
        shape = plan.shape(tuple(sizes))
    else:
        replicas = [stage.replicas for stage in plan.stages]
        microbatches = plan.microbatches if plan.microbatches > 1 else 4 * len(replicas)
        shape = default_shape(name, replicas, microbatches, chunks if name == "interleaved" else 1)
    most = max(MOST_ACTIONS // (2 * len(stages)), enough(shape))
    if minibatches and minibatches > most:
        raise UsageError(f"--minibatches {minibatches} of {len(stages)} stages take too long", f"give at most {most}")
    return Job(
        shape=shape,
        lists=build(name, shape, minibatches or enough(shape)),
        workers=[worker for stage in plan.stages[: plan.pipeline_depth] for worker in stage.workers],
        cluster=plan.cluster.cluster(),
        stages=[
            _work(profile, load, nodes, again=again)
            for load, nodes, again in zip(loads(profile, stages), stages, recompute, strict=True)
        ],
        borders=borders(profile, stages),
        tied=[Tied(stages=group, size_bytes=size, lags=_lags(name, shape, group)) for group, size in sizes.items()],
        batch_size=plan.batch_size,
    )


def _lags(schedule: str, shape: PipelineShape, group: tuple[int, ...]) -> tuple[int, ...]:
    """Rounds between a gradient of a tied parameter and its step at each holder (run/tied.py).

    With chunks a worker goes on with its other stages and takes the step before the stage's next action. As if that
    were a round later: a little too good, since nothing waits for the last one.
    """
    if is_asynchronous(schedule):
        return tuple(tied_update_lag(shape, group, s) for s in group)
    return (int(shape.chunks > 1),) * len(group)


def enough(shape: PipelineShape) -> int:
    """Minibatches to fill the pipeline, to see its steady state for a whole number of periods, and to drain it."""
    steady = max(LEAST_STEADY, period(shape))
    return 2 * filling(shape) + math.ceil(steady / period(shape)) * period(shape)


def pieces(profile: Profile, count: int) -> list[list[str]]:
    """The operators, in the order in which they compute, in `count` pieces of about the same time.

    Raises:
        NoPlanError: there are fewer operators than pieces.
        UsageError: one is pinned to another piece.
    """
    inputs = [node.name for node in profile.nodes if node.op == "input"]
    blocks = profile.graph.contracted([*profile.together, *([inputs] if inputs else [])])
    if len(blocks) < count:
        raise NoPlanError(f"the model has {len(blocks)} operators, too few for {count} chunks", "take fewer stages")
    seconds = [sum(_computing_s(profile, name) for name in block) for block in blocks]
    upto = [0.0, *accumulate(seconds)]
    cuts = [0]
    for piece in range(1, count):
        even = bisect_left(upto, upto[-1] * piece / count)
        cuts.append(min(max(even, cuts[-1] + 1), len(blocks) - count + piece))
    made = [
        [name for block in blocks[a:b] for name in block] for a, b in zip(cuts, [*cuts[1:], len(blocks)], strict=True)
    ]
    for name, stage in profile.pin.items():
        if name not in made[stage % count]:
            where = f"chunk {stage % count} of {count} even ones"
            raise UsageError(f"{name} is pinned to stage {stage} but not in {where}", "take another schedule")
    return made


def _computing_s(profile: Profile, name: str) -> float:
    return profile.by_name[name].forward_s + profile.by_name[name].backward_s


def _work(profile: Profile, load: Load, nodes: Collection[str], *, again: bool) -> Work:
    """What a stage takes. A profile has one time for a backward: where there are parameters half of it is taken to be
    for their gradients, since the two matrix products are of the same size. Memory is that of cost.Rules.memory_bytes.

    Args:
        again: the forward runs again before the backward.
    """
    backward = load.backward_s + load.forward_s * again
    weights = sum(profile.by_name[name].backward_s / 2 for name in nodes if profile.by_name[name].parameter_bytes)
    seconds = dict(zip(ActionKind, (load.forward_s, backward, backward - weights, weights, load.update_s), strict=True))
    fixed = math.ceil(load.parameter_bytes * (1 + profile.optimizer_state_bytes)) + load.working_bytes
    return Work(
        seconds=seconds,
        weight_bytes=load.parameter_bytes,
        kept_bytes=load.received_bytes + (0 if again else load.stash_bytes),
        fixed_bytes=fixed + (load.stash_bytes if again else 0),
        averaged_bytes=load.parameter_bytes - load.tied_bytes,
    )


def borders(profile: Profile, stages: Sequence[Collection[str]]) -> list[Border]:
    """What goes straight from the stage of each node to every other that takes it; inputs come from the first."""
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    sent: dict[tuple[int, int], list[str]] = {}
    for name, takers in profile.graph.consumers.items():
        for s in sorted({stage_of[taker] for taker in takers} - {stage_of[name]}):
            sent.setdefault((stage_of[name], s), []).append(name)
    made = []
    for (source, destination), names in sorted(sent.items()):
        nodes = [profile.by_name[name] for name in names]
        made.append(
            Border(
                source=source,
                destination=destination,
                forward_bytes=sum(node.output_bytes for node in nodes),
                backward_bytes=sum(node.gradient_bytes for node in nodes),
                returns=any(node.gradient_bytes or not node.output_bytes for node in nodes),
            )
        )
    return made


def tied_bytes(profile: Profile, stages: Sequence[Collection[str]]) -> dict[tuple[int, ...], int]:
    """Bytes of tied parameters by the stages that hold them, where there are several."""
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    sizes: dict[tuple[int, ...], int] = {}
    for shared in profile.shared:
        holders = tuple(sorted({stage_of[name] for name in shared.nodes}))
        if len(holders) > 1:
            sizes[holders] = sizes.get(holders, 0) + shared.bytes
    return sizes
