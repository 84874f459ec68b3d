"""What a plan costs: every formula once, for one stage or for arrays of them.

Sources: PipeDream, SOSP'19, section 3.1 (T for a stage, 2 a/B for a border, the slowest of all is the pace), section
3.3 (weight versions); ring all-reduce: Patarasuk and Yuan, JPDC 2009 (each member sends 2 (n-1)/n of the bytes).
Where we depart from the paper, the function says so and why.

    r: replicas of a stage     k: minibatches between two of its updates     w: minibatches in flight at one replica
    units: members of each level that a set of workers lies on, outermost level first
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.units import format_seconds

Number = Any  # one number, or a numpy array of them
Units = Sequence[Number]  # one for each level


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one stage does for one minibatch and holds on one worker.

    Attributes:
        forward_backward_s, update_s: seconds on one worker.
        parameter_bytes: distinct parameters, tied ones included.
        tied_bytes: those that other stages hold too.
        stash_bytes: kept from forward to backward.
        received_bytes: tensors from all earlier stages, each once.
        returned_bytes: gradients sent back for them.
    """

    forward_backward_s: Number
    update_s: Number
    parameter_bytes: Number
    tied_bytes: Number
    stash_bytes: Number
    received_bytes: Number
    returned_bytes: Number


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the cost of a stage depends on besides the stage: cluster, schedule, optimizer, and all workers used."""

    cluster: Cluster
    schedule: str
    microbatches: int
    optimizer_state_bytes: float
    workers: Collection[int]

    def round_size(self, replicas: Number) -> Number:
        """k: an asynchronous stage updates when each replica has done one minibatch, a flushing one at the flush."""
        return replicas if self.schedule == "1f1b" else self.microbatches

    def in_flight(self, replicas: Number, following: Number) -> Number:
        """w of a stage that begins `following` workers before the end, its own among them."""
        return _in_flight(self.schedule, replicas, following, self.microbatches)

    def bubble(self, stages: int) -> float:
        """Time with fill and drain over time without: (M + p - 1) / M when each update flushes (GPipe, section 2.3)."""
        return 1.0 if self.schedule == "1f1b" else (self.microbatches + stages - 1) / self.microbatches

    def compute_s(self, load: Load, replicas: Number) -> Number:
        """Seconds per minibatch of the whole pipeline.

        In a round of k minibatches a replica does ceil(k/r) forwards and backwards and one update; 1/r of everything
        for PipeDream, where k = r.
        """
        k = self.round_size(replicas)
        return (-(-k // replicas) * load.forward_backward_s + load.update_s) / k

    def allreduce_s(self, load: Load, replicas: Number, units: Units) -> Number:
        """Seconds per minibatch to synchronise gradients, once in a round of k; overlaps with computing (section 3.1).

        Section 3.1 has (1/m) 2 (m-1) |w| / B: all that the m replicas send in a round, over one link. Replicas send
        at once, each over its own link, so a round takes 1/m of that.

        A tied parameter is summed over all replicas of all stages that hold it. Each of these is charged as if all
        workers of the plan took part: who they are is not known while the search has only one stage in hand.
        """
        alone = self.ring_s(load.parameter_bytes - load.tied_bytes, replicas, units)
        shared = self.ring_s(load.tied_bytes, len(self.workers), units_of(self.cluster, self.workers))
        return (alone + shared) / self.round_size(replicas)

    def ring_s(self, size_bytes: Number, members: Number, units: Units) -> Number:
        """Seconds of one ring all-reduce, at the pace of the slowest link on the ring; 2 (n-1) messages in turn."""
        pace = latency = 0.0
        for level, touched in zip(self.cluster.levels, units, strict=True):
            pace = np.maximum(pace, np.greater(touched, 1) / level.bandwidth_bytes_per_s)
            latency = np.maximum(latency, np.greater(touched, 1) * level.latency_s)
        return 2 * (members - 1) * (size_bytes / members * pace + np.greater(size_bytes, 0) * latency)

    def transfer_s(self, crossing_bytes: Number, pace: Number) -> Number:
        """Seconds per minibatch to bring a stage what it takes and to bring its gradients back: 2 a/B of section 3.1.

        All that the stage takes is charged to the border before it, also what comes straight from a stage further up.
        Latency delays a minibatch but does not slow the pace: the next one is already on its way.
        """
        return crossing_bytes * pace

    def border_pace(self, before: Units, after: Units, both: Units) -> Number:
        """Seconds per byte between two stages: the slowest level on the way.

        A member's link is shared by all workers below it; two stages that lie on several members use as many links at
        once as the smaller side has. The paper has one link.
        """
        pace = 0.0
        for level, a, b, touched in zip(self.cluster.levels, before, after, both, strict=True):
            pace = np.maximum(pace, np.greater(touched, 1) / (level.bandwidth_bytes_per_s * np.minimum(a, b)))
        return pace

    def memory_bytes(self, load: Load, in_flight: Number) -> Number:
        """Bytes on one worker: weight versions (one per minibatch in flight without a flush; section 3.3), gradients,
        optimizer state, and for each minibatch in flight what is kept for its backward and what was received."""
        copies = (in_flight if self.schedule == "1f1b" else 1) + 1 + self.optimizer_state_bytes
        return np.ceil(load.parameter_bytes * copies) + (load.stash_bytes + load.received_bytes) * in_flight


def in_flight(schedule: str, replicas: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """w of each stage of a plan."""
    return tuple(int(_in_flight(schedule, r, sum(replicas[s:]), microbatches)) for s, r in enumerate(replicas))


def _in_flight(schedule: str, replicas: Number, following: Number, microbatches: int) -> Number:
    """1F1B: ceil(following / r), as in schedule.default_in_flight; a flush never has more than the microbatches of
    one update, and GPipe has them all."""
    if schedule == "1f1b":
        return -(-following // replicas)
    all_of_them = -(-microbatches // replicas)
    return all_of_them if schedule == "gpipe" else np.minimum(-(-following // replicas), all_of_them)


def units_of(cluster: Cluster, workers: Collection[int]) -> list[int]:
    """Members of each level that `workers` lie on, outermost level first."""
    return [len({worker // below for worker in workers}) for below in _below(cluster)]


def units_between(cluster: Cluster, first: Number, end: Number) -> list[Number]:
    """`units_of` the contiguous workers [first, end); arrays give arrays."""
    return [(end - 1) // below - first // below + 1 for below in _below(cluster)]


def _below(cluster: Cluster) -> list[int]:
    """Workers in one member of each level."""
    sizes = [level.size for level in cluster.levels]
    return [math.prod(sizes[depth + 1 :]) for depth in range(len(sizes))]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a plan costs; times are seconds per minibatch, one per stage or per border, memory is on one worker.

    Attributes:
        bubble: factor for the fill and drain of a flushing schedule.
        traffic_bytes: sent by all workers together for one minibatch.
    """

    compute_s: tuple[float, ...]
    allreduce_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    traffic_bytes: int
    bubble: float

    @property
    def bottleneck_s(self) -> float:
        """The pace of the pipeline: computing, synchronising and sending overlap, so the slowest of all sets it."""
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
        ]


def loads(profile: Profile, stages: Sequence[Collection[str]]) -> list[Load]:
    """The load of each stage of a whole plan; `stages` hold node names."""
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    received, returned, tied = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    for name, takers in profile.graph.consumers.items():
        for s in {stage_of[taker] for taker in takers} - {stage_of[name]}:
            received[s] += profile.by_name[name].output_bytes
            returned[s] += profile.by_name[name].gradient_bytes
    for shared in profile.shared:
        holders = {stage_of[name] for name in shared.nodes}
        for s in holders if len(holders) > 1 else ():
            tied[s] += shared.bytes
    return [
        Load(
            forward_backward_s=sum(
                profile.by_name[name].forward_s + profile.by_name[name].backward_s for name in nodes
            ),
            update_s=sum(profile.by_name[name].update_s for name in nodes),
            parameter_bytes=profile.parameter_bytes(set(nodes)),
            tied_bytes=tied[s],
            stash_bytes=sum(profile.by_name[name].stash_bytes for name in nodes),
            received_bytes=received[s],
            returned_bytes=returned[s],
        )
        for s, nodes in enumerate(stages)
    ]


def evaluate(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[Collection[str]],
    workers: Sequence[Sequence[int]],
    *,
    schedule: str = "1f1b",
    microbatches: int = 1,
    flight: Sequence[int] | None = None,
) -> Costs:
    """Cost of any plan, also one written by hand.

    Args:
        stages: node names of each stage; convex and in order (Graph.stage_faults).
        workers: their numbers in the cluster, for each stage; as many as it has replicas.
        flight: minibatches in flight at each replica of each stage; None: what the schedule needs.
    """
    replicas = [len(numbers) for numbers in workers]
    rules = Rules(
        cluster=cluster, schedule=schedule, microbatches=microbatches,
        optimizer_state_bytes=profile.optimizer_state_bytes, workers=[w for numbers in workers for w in numbers],
    )  # fmt: skip
    flying = flight or in_flight(schedule, replicas, microbatches)
    work = loads(profile, stages)
    units = [units_of(cluster, numbers) for numbers in workers]
    transfers = []
    for s in range(1, len(stages)):
        pace = rules.border_pace(units[s - 1], units[s], units_of(cluster, {*workers[s - 1], *workers[s]}))
        transfers.append(float(rules.transfer_s(work[s].received_bytes + work[s].returned_bytes, pace)))
    allreduces = (rules.allreduce_s(load, r, u) for load, r, u in zip(work, replicas, units, strict=True))
    return Costs(
        compute_s=tuple(float(rules.compute_s(load, r)) for load, r in zip(work, replicas, strict=True)),
        allreduce_s=tuple(float(time) for time in allreduces),
        transfer_s=tuple(transfers),
        memory_bytes=tuple(int(rules.memory_bytes(load, w)) for load, w in zip(work, flying, strict=True)),
        traffic_bytes=_traffic_bytes(rules, work, replicas),
        bubble=rules.bubble(len(stages)),
    )


def _traffic_bytes(rules: Rules, work: Sequence[Load], replicas: Sequence[int]) -> int:
    """Tensors once to each stage that takes them, gradients back, and the rings: 2 (n-1) P in a round of k.

    The ring of a tied parameter has all replicas of its stages, n in all; 2 r for each stage is 2 bytes too many in 2n.
    """
    total = 0.0
    for load, r in zip(work, replicas, strict=True):
        ring = 2 * (r - 1) * (load.parameter_bytes - load.tied_bytes) + 2 * r * load.tied_bytes
        total += load.received_bytes + load.returned_bytes + ring / rules.round_size(r)
    return math.ceil(total)
