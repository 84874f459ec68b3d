"""What a plan costs: every formula once, for one stage or for arrays of them.

Sources: PipeDream, SOSP'19, section 3.1 (T for a stage, 2 a/B for a border, the slowest of all is the pace), section
3.3 (weight versions); ring all-reduce: Patarasuk and Yuan, JPDC 2009 (each member sends 2 (n-1)/n of the bytes).
Where we depart from the paper, the function says so and why; `pipedream.py` has the formulas of the paper's own code.

    r: replicas of a stage in one copy of the pipeline     d: copies     R = r d: all its replicas
    k: minibatches between two of its updates              w: minibatches in flight at one replica
    units: members of each level that a set of workers lies on, outermost level first
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdtool.cluster import Cluster

SLACK = 1 + 1e-9  # sums taken in another order differ in the last digits
Number = Any  # one number, or a numpy array of them
Units = Sequence[Number]  # one for each level


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one stage does for one minibatch and holds on one worker.

    Attributes:
        forward_s, backward_s, update_s: seconds on one worker.
        parameter_bytes: distinct parameters, tied ones included.
        tied_bytes: those that other stages hold too.
        stash_bytes: kept from forward to backward.
        working_bytes: the most that one operator needs besides, while it computes.
        received_bytes: tensors from all earlier stages, each once.
        returned_bytes: gradients sent back for them.
        entering_bytes: all tensors that cross the cut before, whoever takes them; not the model's inputs.
    """

    forward_s: Number
    backward_s: Number
    update_s: Number
    parameter_bytes: Number
    tied_bytes: Number
    stash_bytes: Number
    working_bytes: Number
    received_bytes: Number
    returned_bytes: Number
    entering_bytes: Number


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the cost of a stage depends on besides the stage.

    Attributes:
        cluster: where one copy of the pipeline lies; its workers are numbered from 0.
        copies: d; each holds all weights, and each stage averages its own over all of them.
        everywhere: units of all workers of the pipeline.
        spread: units of the copies, one worker of each; all 1 for one copy.
        state_bytes: of the optimizer, for each byte of parameters.
        may_recompute: whether a stage that lacks memory may run its forward twice.
    """

    cluster: Cluster
    schedule: str
    microbatches: int
    state_bytes: float
    everywhere: tuple[int, ...]
    spread: tuple[int, ...]
    copies: int = 1
    may_recompute: bool = True

    all_workers = False  # whether a plan must use all there are; then the first stage is known by its place

    def round_size(self, replicas: Number) -> Number:
        """k: an asynchronous stage updates when each replica has done one minibatch, a flushing one at the flush."""
        return replicas * self.copies if self.schedule == "1f1b" else self.microbatches

    def bubble(self, stages: int) -> float:
        """Time with fill and drain over time without: (M + p - 1) / M when each update flushes (GPipe, section 2.3)."""
        if self.schedule == "1f1b":
            return 1.0
        rounds = -(-self.microbatches // self.copies)
        return (rounds + stages - 1) / rounds

    def in_flight(self, replicas: Number, following: Number) -> Number:
        """w that keeps all later workers busy: ceil(following / r), where `following` workers of the copy come from
        this stage on (PipeDream, section 3.2). A flush never has more than the microbatches of one update; GPipe has
        them all."""
        if self.schedule == "1f1b":
            return -(-following // replicas)
        all_of_them = -(-self.microbatches // (replicas * self.copies))
        return all_of_them if self.schedule == "gpipe" else np.minimum(-(-following // replicas), all_of_them)

    def compute_s(self, load: Load, replicas: Number, recompute: Number = False) -> Number:
        """Seconds per minibatch of the whole pipeline.

        In a round of k minibatches a replica does ceil(k/R) forwards and backwards and one update; 1/R of everything
        for PipeDream, where k = R.
        """
        k = self.round_size(replicas)
        passes = load.forward_s * (1 + np.asarray(recompute)) + load.backward_s
        return (-(-k // (replicas * self.copies)) * passes + load.update_s) / k

    def allreduce_s(self, load: Load, replicas: Number, units: Units) -> Number:
        """Seconds per minibatch to average gradients, once in a round of k; overlaps with computing (section 3.1).

        Section 3.1 has (1/m) 2 (m-1) |w| / B: all that the m replicas send in a round, over one link. Replicas send
        at once, each over its own link, so a round takes 1/m of that. With copies one ring goes through the replicas of
        all of them, m = r d: 2 (m-1)/m |w| over its slowest link, once in a round of m minibatches. That link alone:
        where stages of a copy stand on one server, their rings share its link, and only a whole plan shows the sum
        (whole.py, and the simulator, which has the last word). So this is a lower bound.

        A tied parameter is summed over the replicas of every stage that holds it; who they are is not known while the
        search has one stage in hand, so each is charged for one member more, over the slowest link of the pipeline.
        """
        members = replicas * self.copies
        rounds = self.ring_s(load.parameter_bytes - load.tied_bytes, members, units)
        if np.any(load.tied_bytes):
            rounds = rounds + self.ring_s(load.tied_bytes, members + 1, self.everywhere)
        return rounds / self.round_size(replicas)

    def stage_s(self, load: Load, replicas: Number, computing_s: Number, averaging_s: Number) -> Number:
        """Seconds per minibatch of a stage that computes and averages.

        Section 3.1 takes the larger of both. But the gradients of a round are there only in its last backward, and its
        update waits for their averages: they hide behind that one backward (see simulator/links.py).
        """
        hidden = load.backward_s / self.round_size(replicas)
        return computing_s + np.maximum(averaging_s - hidden, 0.0)

    def ring_s(self, size_bytes: Number, members: Number, units: Units) -> Number:
        """Seconds of one ring all-reduce, at the pace of the slowest link on the ring; 2 (n-1) messages in turn."""
        pace = latency = 0.0
        for level, inside, copies in zip(self.cluster.levels, units, self.spread, strict=True):
            touched = np.greater(np.maximum(inside, copies), 1)
            pace = np.maximum(pace, touched / level.bandwidth_bytes_per_s)
            latency = np.maximum(latency, touched * level.latency_s)
        return 2 * (members - 1) * (size_bytes / members * pace + np.greater(size_bytes, 0) * latency)

    def transfer_s(self, load: Load, pace: Number) -> Number:
        """Seconds per minibatch to bring a stage what it takes and its gradients back, both ways at once: links are
        full duplex. Section 3.1 has their sum, 2 a/B.

        All that the stage takes is charged to the border before it, also what comes straight from a stage further up.
        Latency delays a minibatch but does not slow the pace: the next one is already on its way.
        """
        return np.maximum(load.received_bytes, load.returned_bytes) * pace / self.copies

    def border_pace(self, before: Units, after: Units, sizes: tuple[Number, Number, Number]) -> Number:
        """Seconds per byte between two stages of one copy: the busiest link on the way, at the slowest level.

        A member's link is shared by all workers below it and carries what they send to, or take from, other members.

        Args:
            before, after: for each level, [..., members] share of a stage's workers on each member.
            sizes: replicas of the stage before, of the stage after, and whether the stage before is the first of all.
        """
        pace = 0.0
        for level, a, b in zip(self.cluster.levels, before, after, strict=True):
            busiest = np.maximum(a * (1 - b), b * (1 - a)).max(axis=-1)
            pace = np.maximum(pace, busiest / level.bandwidth_bytes_per_s)
        return pace

    def memory_bytes(self, load: Load, in_flight: Number, recompute: Number = False) -> Number:
        """Bytes on one worker: weight versions (one per minibatch in flight without a flush; section 3.3), gradients,
        optimizer state, what is kept of each minibatch in flight, what was received, and the working set.

        A stage that recomputes keeps only what it received, and one whole stash while it works (Chen et al., 2016).
        """
        versions = in_flight if self.schedule == "1f1b" else 1
        fixed = np.ceil(load.parameter_bytes * (1 + self.state_bytes)) + load.working_bytes
        stashes = np.where(recompute, 1, in_flight)
        return fixed + load.parameter_bytes * versions + load.stash_bytes * stashes + load.received_bytes * in_flight

    def recomputes(self, load: Load, in_flight: Number) -> Number:
        """Whether a stage must run its forward twice: it fits that way only, and it may."""
        if not self.may_recompute or self.cluster.memory_bytes is None:
            return np.zeros_like(in_flight, dtype=bool)
        limit = self.cluster.memory_bytes
        kept, again = (self.memory_bytes(load, in_flight, recompute) for recompute in (False, True))
        return (kept > limit) & (again <= limit)


def units_of(cluster: Cluster, workers: Collection[int]) -> list[int]:
    """Members of each level that `workers` lie on, outermost level first."""
    return [len({worker // below for worker in workers}) for below in cluster.below]


def units_between(cluster: Cluster, first: Number, end: Number) -> list[Number]:
    """`units_of` the contiguous workers [first, end); arrays give arrays."""
    return [(end - 1) // below - first // below + 1 for below in cluster.below]


def shares(cluster: Cluster, held: Number) -> list[Number]:
    """For each level, [..., members] share of the workers on each member, of `held` [..., workers] (1: holds one)."""
    held = np.asarray(held, dtype=float)
    total = held.sum(axis=-1, keepdims=True)
    parts = held / np.maximum(total, 1)
    return [parts.reshape(*parts.shape[:-1], -1, below).sum(axis=-1) for below in cluster.below]
