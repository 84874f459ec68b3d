"""Links that several stages of a plan share: what only a whole plan shows, and the search takes to cost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdtool.partition.cost.formulas import CostModel, Fractions, fractions_by_class
from pdtool.partition.cost.plan_cost import Candidate, Evaluator
from pdtool.partition.placement import Placement
from pdtool.partition.stage_loads import StageLoad, stage_edges, stage_loads, tied_bytes


def lower_bound_s(evaluator: Evaluator, candidate: Candidate) -> float:
    """Seconds per minibatch that no simulation of the plan beats: of its slowest stage, and of its busiest link.

    Of the formulas only what they are sure of: they cannot see which replicas meet at a border, who holds a tied
    parameter, which stages do not depend on the one before, and which have less to do when the pipeline fills.
    """
    placement = candidate.placement
    loads = stage_loads(evaluator.profile, placement.stages)
    stages_s = (
        (load.forward_s + load.backward_s) / replicas if load.tied_bytes else stage_s
        for load, replicas, stage_s in zip(loads, placement.replicas, candidate.cost.stage_s, strict=True)
    )
    links_s = link_times_s(evaluator, placement, loads)
    return max(*stages_s, *(float(times_s.max()) for times_s in links_s))


def link_times_s(evaluator: Evaluator, placement: Placement, loads: Sequence[StageLoad]) -> list[NDArray[np.float64]]:
    """For each level, [members] seconds per minibatch of each member's link, in its busier direction.

    Each member has one link, each way, for all that its workers send to or take from other members: tensors straight
    from the stage that makes them to each stage that takes them, gradients back, and of each ring that passes through
    it 2 (n-1)/n of the bytes, once a round.
    """
    model = evaluator.model_of(placement.workers, placement.execution)
    workers, profile = placement.workers, evaluator.profile
    edges = stage_edges(profile, placement.stages)
    sides = [_exchanging_replicas(model, workers[edge.source], workers[edge.destination]) for edge in edges]
    fractions = [fractions_by_class(model.cluster, numbers, 1) for numbers in workers]
    rings = _rings(model, placement, loads, tied_bytes(profile, placement.stages))
    times_s = []
    for depth, level in enumerate(model.cluster.levels):
        sent_bytes = np.zeros((2, fractions[0][depth].shape[-1]))  # out of each member, into it
        for edge, (source, destination) in zip(edges, sides, strict=True):
            a, b = source[depth], destination[depth]
            forward, backward = (np.stack([x * (1 - y), y * (1 - x)]).mean(axis=1) for x, y in ((a, b), (b, a)))
            sent_bytes += forward * edge.forward_bytes + backward * edge.backward_bytes
        for stages, size_bytes, interval in rings:
            is_crossed = np.any([fractions[s][depth] for s in stages], axis=(0, 1))
            n = sum(len(workers[s]) for s in stages)
            sent_bytes += is_crossed * (is_crossed.sum() > 1) * 2 * (n - 1) / n * size_bytes / interval
        times_s.append(sent_bytes.max(axis=0) / level.bandwidth_bytes_per_s)
    return times_s


def _rings(
    model: CostModel, placement: Placement, loads: Sequence[StageLoad], tied: dict[tuple[int, ...], int]
) -> list[tuple[Sequence[int], int, int]]:
    """(stages, bytes, minibatches in a round) of what is averaged: by the replicas of a stage what it alone holds, by
    those of several what they all hold; then they all update after the same number of minibatches."""
    intervals = [model.update_interval(replicas) for replicas in placement.replicas_per_copy]
    for stages in tied if model.is_asynchronous else ():
        for s in stages:
            intervals[s] = math.lcm(*(placement.replicas[t] for t in stages))
    own = [((s,), load.parameter_bytes - load.tied_bytes, intervals[s]) for s, load in enumerate(loads)]
    return [*own, *((stages, size_bytes, intervals[stages[0]]) for stages, size_bytes in tied.items())]


def _exchanging_replicas(
    model: CostModel, source: Sequence[int], destination: Sequence[int]
) -> tuple[Fractions, Fractions]:
    """Fractions on members of the replicas of two stages, by class of those that exchange minibatches.

    Minibatch i is at replica i mod r of both: replicas of n and m meet where their numbers are alike modulo the
    greatest common divisor, all of them equally often.
    """
    classes = math.gcd(len(source), len(destination))
    return fractions_by_class(model.cluster, source, classes), fractions_by_class(model.cluster, destination, classes)
