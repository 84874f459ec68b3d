"""The cost of a whole plan, found by the search or written by hand."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.partition.cost import Load, Rules, shares, units_of
from pdtool.partition.pipedream import PipeDreamRules
from pdtool.units import format_seconds

Cost = Literal["ours", "pipedream", "pipedream-free"]
COSTS: tuple[Cost, ...] = get_args(Cost)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a plan is run, whatever its stages.

    Attributes:
        schedule, microbatches, copies: see artifacts.plan.Plan.
        cost: whose formulas.
        may_recompute: whether stages may run their forward twice to save memory.
    """

    schedule: str = "1f1b"
    microbatches: int = 1
    copies: int = 1
    cost: Cost = "ours"
    may_recompute: bool = True

    def rules(self, profile: Profile, cluster: Cluster, everywhere: Sequence[int], spread: Sequence[int]) -> Rules:
        """The formulas for one copy on the workers of `cluster`; units of all its workers, and of the copies."""
        fields = {
            "cluster": cluster,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "copies": self.copies,
            "everywhere": tuple(everywhere),
            "spread": tuple(spread),
            "state_bytes": profile.optimizer_state_bytes,
            "may_recompute": self.may_recompute,
        }
        if self.cost == "ours":
            return Rules(**fields)  # type: ignore[arg-type]
        return PipeDreamRules(charged=self.cost == "pipedream", **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a plan costs; times are seconds per minibatch, one per stage or per border, memory is on one worker.

    Attributes:
        stage_s: computing and averaging together.
        waiting_s: pace that the minibatches in flight allow; () where each update flushes.
        bubble: factor for the fill and drain of a flushing schedule.
        traffic_bytes: sent by all workers together for one minibatch.
        in_flight, recompute: per stage, how it is run.
    """

    compute_s: tuple[float, ...]
    allreduce_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    stage_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    traffic_bytes: int
    bubble: float
    in_flight: tuple[int, ...]
    recompute: tuple[bool, ...]

    @property
    def bottleneck_s(self) -> float:
        """The pace of the pipeline: computing, averaging and sending overlap, so the slowest of all sets it."""
        return max(time for time, _ in self._parts()) * self.bubble

    @property
    def bottleneck(self) -> str:
        """`stage 1 compute 12.3 ms`; the first of those that tie."""
        time, words = max(self._parts(), key=lambda part: part[0])
        flush = f", times {self.bubble:.3g} to fill and drain" if self.bubble > 1 else ""
        return f"{words} {format_seconds(time)}{flush}"

    def _parts(self) -> list[tuple[float, str]]:
        return [
            *((time, f"stage {s} compute") for s, time in enumerate(self.compute_s)),
            *((time, f"stage {s} all-reduce") for s, time in enumerate(self.allreduce_s)),
            *((time, f"border {s}|{s + 1} transfer") for s, time in enumerate(self.transfer_s)),
            *((time, f"stage {s} compute and all-reduce") for s, time in enumerate(self.stage_s)),
            *((time, f"minibatches in flight at stage {s}") for s, time in enumerate(self.waiting_s)),
        ]


def loads(profile: Profile, stages: Sequence[Collection[str]]) -> list[Load]:
    """The load of each stage of a whole plan; `stages` hold node names."""
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    received, returned, tied = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    crossing = [0] * len(stages)
    for name, takers in profile.graph.consumers.items():
        home, node = stage_of[name], profile.by_name[name]
        elsewhere = {stage_of[taker] for taker in takers} - {home}
        for s in elsewhere:
            received[s] += node.output_bytes
            returned[s] += node.gradient_bytes
        for s in range(home + 1, max(elsewhere, default=home) + 1):
            crossing[s] += node.output_bytes * (node.op != "input")
    for shared in profile.shared:
        holders = {stage_of[name] for name in shared.nodes}
        for s in holders if len(holders) > 1 else ():
            tied[s] += shared.bytes
    made = [[profile.by_name[name] for name in nodes] for nodes in stages]
    return [
        Load(
            forward_s=sum(node.forward_s for node in nodes),
            backward_s=sum(node.backward_s for node in nodes),
            update_s=sum(node.update_s for node in nodes),
            parameter_bytes=profile.parameter_bytes({node.name for node in nodes}),
            tied_bytes=tied[s],
            stash_bytes=sum(node.stash_bytes for node in nodes),
            working_bytes=max((profile.working_bytes[node.name] for node in nodes), default=0),
            received_bytes=received[s],
            returned_bytes=returned[s],
            entering_bytes=crossing[s],
        )
        for s, nodes in enumerate(made)
    ]


def evaluate(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[Collection[str]],
    workers: Sequence[Sequence[int]],
    way: Way | None = None,
    *,
    flight: Sequence[int] | None = None,
    recompute: Sequence[bool] | None = None,
) -> Costs:
    """Cost of any plan, also one written by hand.

    Messages and rounds of replicas are taken to be hidden, and links that several stages share to be wide enough: the
    simulator knows better (settle.py), but this is what can be searched without missing a plan.

    Args:
        stages: node names of each stage; convex and in order (Graph.stage_faults).
        workers: their numbers in the cluster, for each stage; as many as it has replicas in all copies.
        flight: minibatches in flight at each replica of each stage; None: what the schedule wants.
        recompute: for each stage; None: where memory demands it.
    """
    way = way or Way()
    rules, work = rules_and_loads(profile, cluster, stages, workers, way)
    replicas = [len(numbers) // way.copies for numbers in workers]
    following = np.cumsum(replicas[::-1])[::-1].tolist()
    flying = (
        [int(rules.in_flight(r, n)) for r, n in zip(replicas, following, strict=True)] if flight is None else flight
    )
    again = recompute or [bool(rules.recomputes(load, w)) for load, w in zip(work, flying, strict=True)]
    passes = [load.forward_s * (1 + twice) + load.backward_s for load, twice in zip(work, again, strict=True)]
    remaining = np.cumsum(passes[::-1])[::-1].tolist()
    waiting = tuple(t / (w * len(numbers)) for t, w, numbers in zip(remaining, flying, workers, strict=True))
    compute = [float(rules.compute_s(*args)) for args in zip(work, replicas, again, strict=True)]
    units = [units_of(cluster, numbers) for numbers in workers]
    averaging = [float(rules.allreduce_s(*args)) for args in zip(work, replicas, units, strict=True)]
    return Costs(
        compute_s=tuple(compute),
        allreduce_s=tuple(averaging),
        transfer_s=tuple(_transfers(rules, work, workers)),
        stage_s=tuple(float(rules.stage_s(*args)) for args in zip(work, replicas, compute, averaging, strict=True)),
        waiting_s=waiting if way.schedule == "1f1b" else (),
        memory_bytes=tuple(int(rules.memory_bytes(*args)) for args in zip(work, flying, again, strict=True)),
        traffic_bytes=_traffic_bytes(rules, work, replicas),
        bubble=rules.bubble(len(stages)),
        in_flight=tuple(flying),
        recompute=tuple(again),
    )


def rules_and_loads(
    profile: Profile, cluster: Cluster, stages: Sequence[Collection[str]], workers: Sequence[Sequence[int]], way: Way
) -> tuple[Rules, list[Load]]:
    """The formulas for a plan, and what to put in."""
    everywhere = units_of(cluster, [worker for numbers in workers for worker in numbers])
    rules = way.rules(profile, cluster, everywhere, units_of(cluster, workers[0][: way.copies]))
    return rules, loads(profile, stages)


def shares_of(rules: Rules, workers: Sequence[Sequence[int]]) -> list[list[NDArray[np.float64]]]:
    """For each stage and level, [copies, members] share of the copy's replicas on each member."""
    held = np.zeros((len(workers), rules.copies, rules.cluster.workers))
    for s, numbers in enumerate(workers):
        for replica, worker in enumerate(numbers):
            held[s, replica % rules.copies, worker] = 1
    return [shares(rules.cluster, stage) for stage in held]


def _transfers(rules: Rules, work: Sequence[Load], workers: Sequence[Sequence[int]]) -> list[float]:
    """For each border; copies that lie unevenly count as the slowest of them."""
    parts = shares_of(rules, workers)
    sizes = [len(numbers) // rules.copies for numbers in workers]
    borders = ((parts[s - 1], parts[s], (sizes[s - 1], sizes[s], s == 1)) for s in range(1, len(work)))
    paces = [rules.border_pace(*border).max() for border in borders]
    return [float(rules.transfer_s(load, pace)) for load, pace in zip(work[1:], paces, strict=True)]


def _traffic_bytes(rules: Rules, work: Sequence[Load], replicas: Sequence[int]) -> int:
    """Tensors once to each stage that takes them, gradients back, and the rings: 2 (R-1) P in a round of k.

    The ring of a tied parameter has all replicas of its stages, n in all; 2 R for each stage is 2 bytes too many in 2n.
    """
    total = 0.0
    for load, r in zip(work, replicas, strict=True):
        members = r * rules.copies
        ring = 2 * (members - 1) * (load.parameter_bytes - load.tied_bytes) + 2 * members * load.tied_bytes
        total += load.received_bytes + load.returned_bytes + ring / rules.round_size(r)
    return math.ceil(total)
