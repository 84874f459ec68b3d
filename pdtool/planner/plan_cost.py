"""The cost of a whole plan: its time per minibatch, its memory and its traffic.

`Evaluator` applies the formulas to each stage and border of any plan, found by the search or written by hand. The
formulas assume that shared links are wide enough. Only a whole plan shows what a shared link carries: `link_times_s`
adds it up. No simulation of the plan beats `lower_bound_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan, PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.planner.formulas import COST_MODELS, CostModel, bucket_count, fractions_by_class, members_of
from pdtool.planner.placement import Placement
from pdtool.planner.stage_costs import StageLoad, stage_edges, stage_loads, tied_bytes
from pdtool.schedule import ExecutionConfig
from pdtool.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan costs; times are seconds per minibatch, one per stage or per border; memory is on one worker.

    Attributes:
        stage_s: computing and averaging together.
        round_trip_s: time from a forward to the end of its backward, divided by the minibatches in flight meanwhile; ()
            if each update flushes, and without pipelining.
        memory_bytes: what a worker needs.
        searched_memory_bytes: the search's estimate of that, never less. The search does not know who shares a
            parameter: if their replicas differ, they update less often and keep fewer weight versions.
        traffic_bytes: sent by all workers together for one minibatch.
        flush_factor: factor for the fill and drain of a flushing schedule.
        is_pipelined: whether stages compute at the same time; otherwise they take turns.
    """

    compute_s: tuple[float, ...]
    allreduce_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    stage_s: tuple[float, ...] = ()
    round_trip_s: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...]
    searched_memory_bytes: tuple[int, ...]
    traffic_bytes: int
    flush_factor: float = 1.0
    is_pipelined: bool = True

    @property
    def time_per_minibatch_s(self) -> float:
        """Seconds per minibatch: computing and sending overlap, so the slowest counts. Without pipelining
        they add up."""
        if not self.is_pipelined:
            return sum(self.stage_s) + sum(self.transfer_s)
        return max(time_s for time_s, _ in self._resources()) * self.flush_factor

    @property
    def bottleneck(self) -> str:
        """`stage 1 compute 12.3 ms`; the first of those that tie."""
        if not self.is_pipelined:
            stages, messages = format_seconds(sum(self.stage_s)), format_seconds(sum(self.transfer_s))
            return f"stages take turns, {stages} in all, and wait {messages} for messages"
        time_s, name = max(self._resources(), key=lambda resource: resource[0])
        flush = f", times {self.flush_factor:.3g} to fill and drain" if self.flush_factor > 1 else ""
        return f"{name} {format_seconds(time_s)}{flush}"

    def _resources(self) -> list[tuple[float, str]]:
        """Seconds per minibatch and name of each resource that a minibatch occupies."""
        return [
            *((time_s, f"stage {s} compute") for s, time_s in enumerate(self.compute_s)),
            *((time_s, f"stage {s} all-reduce") for s, time_s in enumerate(self.allreduce_s)),
            *((time_s, f"border {s}|{s + 1} transfer") for s, time_s in enumerate(self.transfer_s)),
            *((time_s, f"stage {s} compute and all-reduce") for s, time_s in enumerate(self.stage_s)),
            *((time_s, f"minibatches in flight at stage {s}") for s, time_s in enumerate(self.round_trip_s)),
        ]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A placement and what it costs."""

    placement: Placement
    cost: PlanCost

    @property
    def time_per_minibatch_s(self) -> float:
        """Seconds per minibatch by the formulas."""
        return self.cost.time_per_minibatch_s


@dataclass(frozen=True)
class Evaluator:
    """Work out the cost of any plan of one profile on one cluster.

    It assumes that messages are hidden behind computing, averaging behind one backward, and that shared links are wide
    enough. Under these assumptions a search can be complete. The simulator does without them.

    Args:
        options: those of the plans; it reads whose formulas to use, `recompute` and `in_flight`.
    """

    profile: Profile
    cluster: Cluster
    options: PlanOptions = field(default_factory=PlanOptions)

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> Evaluator:
        """Return the evaluator for a plan's figures: its formulas, its wire format, and whether stages may
        recompute."""
        cost_model = plan.predicted.cost if plan.predicted else "ours"
        options = replace(plan.asked or PlanOptions(), cost_model=cost_model)
        return cls(profile.sent_as(plan.wire_dtype), plan.cluster, options)

    def model(self, cluster: Cluster, execution: ExecutionConfig, copy_members: Sequence[int]) -> CostModel:
        """Return the formulas for a pipeline whose copies each lie on `cluster`, see CostModel."""
        return COST_MODELS[self.options.cost_model](
            cluster=cluster,
            execution=execution,
            copy_members=tuple(copy_members),
            optimizer_state_ratio=self.profile.optimizer_state_bytes,
            may_recompute=self.options.recompute,
            first_in_flight=self.options.in_flight,
        )

    def model_of(self, workers: Sequence[Sequence[int]], execution: ExecutionConfig) -> CostModel:
        """Return the formulas for a pipeline on these workers of each stage."""
        return self.model(self.cluster, execution, members_of(self.cluster, workers[0][: execution.copies]))

    def place(
        self,
        stages: Sequence[Sequence[str]],
        workers: Sequence[Sequence[int]],
        execution: ExecutionConfig,
        *,
        in_flight: Sequence[int] | None = None,
        recompute: Sequence[bool] | None = None,
    ) -> Candidate:
        """Place stages on workers and return the placement with its cost.

        Args:
            stages: node names of each stage; convex and in order (Graph.stage_faults).
            workers: their numbers in the cluster, for each stage; as many as it has replicas in all copies.
            in_flight: minibatches in flight at each replica of each stage; None: what the schedule wants.
            recompute: for each stage; None: where memory demands it.
        """
        placed_stages = tuple(map(tuple, stages))
        model, loads = self.model_of(workers, execution), stage_loads(self.profile, placed_stages)
        replicas = [len(numbers) // execution.copies for numbers in workers]
        if in_flight is None and self.options.in_flight and execution.has_choice_in_flight:
            in_flight = execution.in_flight_from([*map(len, workers)], self.options.in_flight)
        elif in_flight is None:
            workers_from_here = np.cumsum(replicas[::-1])[::-1].tolist()
            in_flight = [int(model.in_flight(r, n)) for r, n in zip(replicas, workers_from_here, strict=True)]
        if recompute is None:
            held = zip(loads, replicas, in_flight, strict=True)
            recompute = [bool(model.fit(*args)[0]) for args in held]
        placement = Placement(
            stages=placed_stages,
            workers=tuple(map(tuple, workers)),
            in_flight=tuple(in_flight),
            recompute=tuple(recompute),
            execution=execution,
        )
        return Candidate(placement=placement, cost=self.cost(placement))

    def cost(self, placement: Placement) -> PlanCost:
        """Return the cost of a placement as it is."""
        model = self.model_of(placement.workers, placement.execution)
        loads, tied = stage_loads(self.profile, placement.stages), tied_bytes(self.profile, placement.stages)
        shape = placement.shape(tied)
        compute_s, allreduce_s, stage_s, passes_s = [], [], [], []
        memory_bytes, searched_memory_bytes = [], []
        for s, load in enumerate(loads):
            replicas, w, twice = placement.replicas_per_copy[s], placement.in_flight[s], placement.recompute[s]
            members = members_of(model.cluster, placement.workers[s])
            passes_s.append(load.forward_s * (1 + twice) + load.backward_s)
            compute_s.append(float(model.compute_s(load, replicas, twice)))
            allreduce_s.append(float(model.allreduce_s(load, replicas, members)))
            stage_s.append(float(model.stage_s(load, replicas, compute_s[s], allreduce_s[s])))
            memory_bytes.append(int(model.memory(load, twice).peak_bytes(shape.versions(s), w)))
            searched_memory_bytes.append(int(model.memory_bytes(load, replicas, w, twice)))
        remaining_s = np.cumsum(passes_s[::-1])[::-1].tolist()
        in_flight = [w * count for w, count in zip(placement.in_flight, placement.replicas, strict=True)]
        round_trip_s = tuple(time_s / w for time_s, w in zip(remaining_s, in_flight, strict=True))
        return PlanCost(
            compute_s=tuple(compute_s),
            allreduce_s=tuple(allreduce_s),
            transfer_s=tuple(_transfers_s(model, loads, placement)),
            stage_s=tuple(stage_s),
            round_trip_s=() if model.execution.kind.flushes or not model.execution.is_pipelined else round_trip_s,
            memory_bytes=tuple(memory_bytes),
            searched_memory_bytes=tuple(searched_memory_bytes),
            traffic_bytes=_traffic_bytes(loads, placement, tied),
            flush_factor=model.flush_factor(len(loads)),
            is_pipelined=model.execution.is_pipelined,
        )

    def with_in_flight(self, candidate: Candidate, in_flight: Sequence[int]) -> Candidate:
        """Return the same plan with other numbers of minibatches in flight."""
        placement = candidate.placement.with_in_flight(in_flight)
        return Candidate(placement=placement, cost=self.cost(placement))

    def data_parallel(self, workers: int, execution: ExecutionConfig) -> Candidate:
        """Return one stage on the first `workers` workers."""
        return self.place([self.profile.graph.names], [range(workers)], execution)

    def fits(self, candidate: Candidate) -> bool:
        """Whether the plan fits into each worker's memory, by the search's estimate."""
        return max(candidate.cost.searched_memory_bytes) <= (self.cluster.memory_bytes or math.inf)


def samples_per_update(placement: Placement, profile: Profile) -> int:
    """Return the samples whose gradients one update averages, at the stage with the most."""
    return profile.batch_size * max(placement.shape(tied_bytes(profile, placement.stages)).update_every)


def _transfers_s(model: CostModel, loads: Sequence[StageLoad], placement: Placement) -> list[float]:
    """Seconds per minibatch over each border; if copies lie unevenly, the slowest counts."""
    copies = placement.execution.copies
    fractions = [fractions_by_class(model.cluster, numbers, copies) for numbers in placement.workers]
    replicas = placement.replicas_per_copy
    transfers_s = []
    for s in range(1, len(loads)):
        both = replicas[s - 1], replicas[s]
        s_per_byte = model.border_s_per_byte(fractions[s - 1], fractions[s], both, s == 1)
        transfers_s.append(float(model.border_s(model.border_bytes(loads[s]), s_per_byte.max())))
    return transfers_s


def _traffic_bytes(loads: Sequence[StageLoad], placement: Placement, tied: Mapping[tuple[int, ...], int]) -> int:
    """Add up tensors, once to each stage that takes them, gradients back, and 2 (n-1) P per round of a ring of n."""
    rings = [
        2 * (sum(len(placement.workers[s]) for s in stages) - 1) * size_bytes / interval
        for stages, size_bytes, interval in _rings(placement, loads, tied)
    ]
    return math.ceil(float(sum(load.received_bytes + load.returned_bytes for load in loads)) + sum(rings))


def lower_bound_s(evaluator: Evaluator, candidate: Candidate) -> float:
    """Seconds per minibatch that no simulation of the plan beats: of its slowest stage, and of its busiest link.

    It uses only the certain part of the formulas. They cannot see which replicas meet at a border, who holds a tied
    parameter, which stages do not depend on the one before, or which have less to do while the pipeline fills. It adds
    the last bucket of gradients: it exists only after the last backward of a round, so nothing hides it.
    """
    placement, cost = candidate.placement, candidate.cost
    loads = stage_loads(evaluator.profile, placement.stages)
    is_uneven = placement.execution.update_every is not None
    stages_s = (
        (load.forward_s + load.backward_s) / replicas
        if load.tied_bytes or is_uneven
        else max(stage_s, compute_s + allreduce_s / bucket_count(load.parameter_bytes))
        for load, replicas, stage_s, compute_s, allreduce_s in zip(
            loads, placement.replicas, cost.stage_s, cost.compute_s, cost.allreduce_s, strict=True
        )
    )
    links_s = link_times_s(evaluator, placement, loads)
    return max(*stages_s, *(float(times_s.max()) for times_s in links_s))


def link_times_s(evaluator: Evaluator, placement: Placement, loads: Sequence[StageLoad]) -> list[NDArray[np.float64]]:
    """For each level, [members] seconds per minibatch of each member's link, in its busier direction.

    Each member has one link each way for all its workers' traffic with other members: tensors straight from the stage
    that makes them to each stage that takes them, gradients back, and for each ring through it 2 (n-1)/n of the bytes,
    once a round.
    """
    workers, profile, cluster = placement.workers, evaluator.profile, evaluator.cluster
    edges = stage_edges(profile, placement.stages)
    sides = []
    for edge in edges:
        # minibatch i is at replica i mod r of both stages, so replicas meet if their numbers are equal modulo the
        # greatest common divisor, all equally often
        both = workers[edge.source], workers[edge.destination]
        sides.append([fractions_by_class(cluster, numbers, math.gcd(*map(len, both))) for numbers in both])
    fractions = [fractions_by_class(cluster, numbers, 1) for numbers in workers]
    rings = _rings(placement, loads, tied_bytes(profile, placement.stages))
    times_s = []
    for depth, level in enumerate(cluster.levels):
        sent_bytes = np.zeros((2, fractions[0][depth].shape[-1]))  # out of each member, into it
        for edge, (source, destination) in zip(edges, sides, strict=True):
            a, b = source[depth], destination[depth]
            forward, backward = (np.stack([x * (1 - y), y * (1 - x)]).mean(axis=1) for x, y in ((a, b), (b, a)))
            sent_bytes += forward * edge.forward_bytes + backward * edge.backward_bytes
        for stages, size_bytes, interval in rings:
            is_crossed = np.any([fractions[s][depth] for s in stages], axis=(0, 1))
            n = sum(len(workers[s]) for s in stages)
            sent_bytes += is_crossed * (is_crossed.sum() > 1) * 2 * (n - 1) / n * size_bytes / interval
        times_s.append(level.time_s(sent_bytes.max(axis=0), 0))
    return times_s


def _rings(
    placement: Placement, loads: Sequence[StageLoad], tied: Mapping[tuple[int, ...], int]
) -> list[tuple[Sequence[int], int, int]]:
    """Return (stages, bytes, minibatches in a round) of each average: one for each stage's own parameters, and one for
    each group of stages that share some. Such a group updates after the same number of minibatches."""
    intervals = placement.shape(tied).update_every
    own = [((s,), load.parameter_bytes - load.tied_bytes, intervals[s]) for s, load in enumerate(loads)]
    return [*own, *((stages, size_bytes, intervals[stages[0]]) for stages, size_bytes in tied.items())]
