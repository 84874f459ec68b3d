"""Schedules and weight policies that no formulas cover: their plans are made from others, and simulated.

The formulas cover 1F1B with stashing, 1F1B with flush and GPipe, and only those are searched. A plan for 2BW or ZB-H1
has the stages of a plan that was searched for; an interleaved plan has even pieces of the model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.partition.placement import ExecutionConfig, Placement
from pdtool.partition.search.cuts import unbroken_groups
from pdtool.partition.search.search import SearchOptions
from pdtool.schedule import default_shape

MICROBATCHES_PER_STAGE = 4  # in one update of GPipe: its paper's advice (NeurIPS'19, section 2.3)
SEARCHED_FOR = {"2bw": "1f1b", "zb-h1": "1f1b-flush"}  # the schedule whose search gives the stages


def interleaved_placement(profile: Profile, cluster: Cluster, options: SearchOptions) -> Placement:
    """Place several stages on each worker, all of about the same time, in the order of the model's operators.

    Raises:
        NoPlanError: there are fewer operators than stages.
        UsageError: an operator is pinned elsewhere, or there are fewer workers than asked for.
    """
    workers = options.workers or cluster.workers
    if workers > cluster.workers:
        raise UsageError(f"--workers {workers}: the cluster has {cluster.workers}", "give no more than that")
    stages = even_pieces(profile, workers * options.chunks)
    execution = ExecutionConfig.of_schedule("interleaved", options.microbatches, options.chunks)
    numbers = [(s % workers,) for s in range(len(stages))]
    return _with_default_in_flight(stages, numbers, execution, [False] * len(stages))


def under_schedule(placement: Placement, profile: Profile, schedule: str, chunks: int) -> Placement:
    """Return the placement under another schedule, with the minibatches in flight that this is defined for.

    A flush comes after four microbatches for each stage where the placement has none (GPipe, NeurIPS'19, section 2.3:
    then the bubble is small).

    Args:
        chunks: stages on each worker of `interleaved`, for which the model is cut anew (see `even_pieces`).

    Raises:
        UsageError: the schedule does not go with the placement.
    """
    before = placement.execution
    if before.chunks > 1:
        raise UsageError(
            f"schedule {schedule} with {before.chunks} stages on each worker",
            "simulate a plan that was partitioned for one on each",
        )
    depth = len(placement.stages)
    microbatches = before.microbatches if before.microbatches > 1 else MICROBATCHES_PER_STAGE * depth
    if schedule == "interleaved":
        stages = even_pieces(profile, depth * chunks)
        execution = ExecutionConfig.of_schedule(schedule, microbatches, chunks)
        workers = [placement.workers[s % depth] for s in range(len(stages))]
        return _with_default_in_flight(stages, workers, execution, placement.recompute * chunks)
    shape = default_shape(schedule, placement.replicas, microbatches)
    execution = ExecutionConfig.of_schedule(schedule, microbatches)
    return replace(placement, in_flight=shape.in_flight, execution=execution)


def even_pieces(profile: Profile, count: int) -> list[list[str]]:
    """Divide the operators, in the order in which they compute, into `count` pieces of about the same time.

    Raises:
        NoPlanError: there are fewer operators than pieces.
        UsageError: one is pinned to another piece.
    """
    inputs = [node.name for node in profile.nodes if node.op == "input"]
    blocks = profile.graph.contracted([*unbroken_groups(profile), *([inputs] if inputs else [])])
    if len(blocks) < count:
        raise NoPlanError(f"the model has {len(blocks)} operators, too few for {count} chunks", "take fewer stages")
    seconds = [sum(_compute_s(profile, name) for name in block) for block in blocks]
    cumulative = [0.0, *accumulate(seconds)]
    cuts = [0]
    for piece in range(1, count):
        even = bisect_left(cumulative, cumulative[-1] * piece / count)
        cuts.append(min(max(even, cuts[-1] + 1), len(blocks) - count + piece))
    pieces = [
        [name for block in blocks[begin:end] for name in block]
        for begin, end in zip(cuts, [*cuts[1:], len(blocks)], strict=True)
    ]
    for name, stage in profile.pin.items():
        if name not in pieces[stage % count]:
            where = f"chunk {stage % count} of {count} even ones"
            raise UsageError(f"{name} is pinned to stage {stage} but not in {where}", "take another schedule")
    return pieces


def _with_default_in_flight(
    stages: Sequence[Sequence[str]],
    workers: Sequence[tuple[int, ...]],
    execution: ExecutionConfig,
    recompute: Sequence[bool],
) -> Placement:
    replicas = [len(numbers) for numbers in workers[: len(stages) // execution.chunks]]
    shape = default_shape(execution.schedule, replicas, execution.microbatches, execution.chunks)
    return Placement(
        stages=tuple(map(tuple, stages)),
        workers=tuple(workers),
        in_flight=shape.in_flight * execution.chunks,
        recompute=tuple(recompute),
        execution=execution,
    )


def _compute_s(profile: Profile, name: str) -> float:
    return profile.by_name[name].forward_s + profile.by_name[name].backward_s
