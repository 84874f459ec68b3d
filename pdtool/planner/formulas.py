"""Cost formulas: the time and memory of a stage, and the time of a border between two stages.

Each formula takes one stage or arrays of stages. The source is PipeDream (SOSP'19), section 3.1: T for a stage, 2 a/B
for a border, and the slowest of all is the time per minibatch. A function says if and why it departs from the paper.

    r: replicas of a stage in one copy of the pipeline     d: copies     R = r d: all its replicas
    k: minibatches between two of its updates              w: minibatches in flight at one replica
    members: for each level, outermost first, how many servers or devices a set of workers occupies
    border: between two consecutive stages, and the traffic over it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import BUCKET_BYTES, CostModelName
from pdtool.planner.stage_costs import Number, StageLoad
from pdtool.schedule import ExecutionConfig, ceil_div

_MAX_BUCKETS = 8  # that are told apart, however many the runtime has
TOLERANCE = 1 + 1e-9  # sums taken in another order differ in the last digits
_ANY_DEPTH = 1  # number of stages; no schedule with formulas depends on it
Members = Sequence[Number]  # one for each level
Fractions = list[NDArray[np.float64]]  # for each level, [..., members]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The formulas, and what they depend on besides the stage.

    Attributes:
        cluster: where one copy of the pipeline lies; its workers are numbered from 0.
        copy_members: for each level, how many members hold one worker of each copy; all 1 for one copy.
        optimizer_state_ratio: bytes of optimizer state for each byte of parameters.
        may_recompute: whether a stage that lacks memory may run its forward twice.
        first_in_flight: minibatches in flight at the first stage; None: the schedule decides.
    """

    cluster: Cluster
    execution: ExecutionConfig
    copy_members: tuple[int, ...]
    optimizer_state_ratio: float
    may_recompute: bool = True
    first_in_flight: int | None = None

    requires_all_workers = False  # True: plans must use every worker, so the first stage begins at worker 0

    @property
    def drains(self) -> bool:
        """Whether a pipeline fills and drains for each update."""
        return self.execution.kind.flushes and self.execution.is_pipelined

    @property
    def first_replicas(self) -> float | None:
        """Replicas that the first stage must have in a copy; None: any. Without pipelining it has one for each
        minibatch of an update: more would wait, fewer would take turns."""
        if self.execution.is_pipelined:
            return None
        return self.execution.microbatches / self.execution.copies

    def update_interval(self, replicas: Number) -> Number:
        """k: a stage updates at the flush; without a flush, once each replica has done one minibatch. The user can
        ask for another number."""
        return self.execution.minibatches_per_update or replicas * self.execution.copies

    def updates(self, load: StageLoad, replicas: Number) -> Number:
        """Updates per minibatch, 1/k.

        Without a flush, stages that share a parameter update together, after the least common multiple of their k. The
        search sees one stage at a time and does not know the others, so it counts no update: a lower bound.
        """
        may_wait = load.tied_bytes if self.execution.minibatches_per_update is None else 0
        return np.where(np.greater(may_wait, 0), 0.0, 1 / self.update_interval(replicas))

    @property
    def max_replicas(self) -> float:
        """Replicas that a stage may have in a copy: without a flush, each needs a minibatch in every update."""
        every = self.execution.update_every
        return every // self.execution.copies if every else np.inf

    def flush_factor(self, stages: int) -> float:
        """Time with fill and drain over time without: (M + p - 1) / M when each update flushes (GPipe, section 2.3)."""
        if not self.drains:
            return 1.0
        minibatches: int = ceil_div(self.execution.microbatches, self.execution.copies)
        return (minibatches + stages - 1) / minibatches

    def in_flight(self, replicas: Number, workers_from_here: Number) -> Number:
        """w, as the schedule has it; without pipelining and without a flush there is one.

        `workers_from_here` counts the workers of this stage and all later ones, in one copy. If the user asks for more
        in flight, a stage's number depends on earlier stages. The search does not know these, so it takes the usual
        number.
        """
        microbatches = ceil_div(self.execution.microbatches, self.execution.copies)
        in_flight = self.execution.kind.in_flight(replicas, workers_from_here, microbatches, _ANY_DEPTH, 1)
        if self.first_in_flight and self.execution.has_choice_in_flight:
            return np.minimum(in_flight, self.first_in_flight)
        takes_turns = not (self.execution.kind.flushes or self.execution.is_pipelined)
        return np.minimum(in_flight, 1) if takes_turns else in_flight

    def compute_s(self, load: StageLoad, replicas: Number, recompute: Number = False) -> Number:
        """Seconds per minibatch of the whole pipeline.

        In a round of k minibatches a replica does ceil(k/R) forwards and backwards and one update. PipeDream has k = R,
        so it divides everything by R.
        """
        k = self.update_interval(replicas)
        passes_s = load.forward_s * (1 + np.asarray(recompute)) + load.backward_s
        return ceil_div(k, replicas * self.execution.copies) * passes_s / k + load.update_s * self.updates(
            load, replicas
        )

    def allreduce_s(self, load: StageLoad, replicas: Number, members: Members) -> Number:
        """Seconds per minibatch to average gradients, once in a round of k; overlaps with computing (section 3.1).

        Section 3.1 has (1/m) 2 (m-1) |w| / B: all that the m replicas send in a round, over one link. But replicas send
        at once, each over its own link, so a round takes 1/m of that. With copies, one ring goes through the replicas
        of all of them, m = r d: 2 (m-1)/m |w| over its slowest link, once in a round of m minibatches. This is a lower
        bound: if several stages stand on one server, their rings share its link. Only a whole plan shows that
        (plan_cost.link_times_s, and the simulator).

        A tied parameter is summed over the replicas of every stage that holds it. The search does not know the others,
        so it charges each stage for its own replicas only.
        """
        round_s = self.ring_s(load.parameter_bytes, replicas * self.execution.copies, members)
        return round_s * self.updates(load, replicas)

    def stage_s(self, load: StageLoad, replicas: Number, compute_s: Number, allreduce_s: Number) -> Number:
        """Seconds per minibatch of a stage that computes and averages.

        Section 3.1 takes the larger of both. But a round's gradients exist only in its last backward, and its update
        waits for their averages, so averaging hides behind that one backward only (see `_offer_gradients` in the
        simulator's engine).
        """
        hidden_s = load.backward_s / self.update_interval(replicas)
        return compute_s + np.maximum(allreduce_s - hidden_s, 0.0)

    def ring_s(self, size_bytes: Number, ring_size: Number, members: Members) -> Number:
        """Seconds of one ring all-reduce over the slowest link on the ring: 2 (n-1) messages one after the other.

        Each rank sends 2 (n-1)/n of the bytes (Patarasuk and Yuan, JPDC 2009).
        """
        s_per_byte = s_per_message = 0.0
        for level, inside, copies in zip(self.cluster.levels, members, self.copy_members, strict=True):
            crosses = np.greater(np.maximum(inside, copies), 1)
            s_per_byte = np.maximum(s_per_byte, level.time_s(crosses, 0))
            s_per_message = np.maximum(s_per_message, level.time_s(0, crosses))
        return 2 * (ring_size - 1) * (size_bytes / ring_size * s_per_byte + np.greater(size_bytes, 0) * s_per_message)

    def border_bytes(self, load: StageLoad) -> Number:
        """Bytes per minibatch over the border before a stage: tensors in, gradients back. Links are full duplex, so
        both travel at once. Section 3.1 has their sum, 2 a.

        The border before a stage is charged for all its inputs, even those that come straight from an earlier stage.
        Without pipelining all stages wait for both: first for the tensors, later for the gradients.
        """
        sent_bytes = np.maximum(load.received_bytes, load.returned_bytes)
        if not self.execution.is_pipelined:
            sent_bytes = load.received_bytes + load.returned_bytes
        return sent_bytes / self.execution.copies

    def border_s(self, size_bytes: Number, s_per_byte: Number) -> Number:
        """Seconds per minibatch of the messages over a border; its bytes are those of `border_bytes`.

        Latency delays a minibatch but does not slow the pipeline, because the next one is already on its way. A fixed
        time that each message keeps its link busy would be added here.
        """
        return size_bytes * s_per_byte

    def border_s_per_byte(
        self, before: Fractions, after: Fractions, replicas: tuple[Number, Number], is_before_first: Number
    ) -> Number:
        """Seconds per byte between two stages of one copy: the busiest link on the way, at the slowest level.

        All workers below a member share its link. It carries what they send to, or receive from, other members.

        Args:
            before, after: for each level, [..., members] fraction of a stage's workers on each member.
            replicas: of the stage before, and of the stage after.
            is_before_first: whether the stage before is the first of all.
        """
        s_per_byte = 0.0
        for level, a, b in zip(self.cluster.levels, before, after, strict=True):
            busiest = np.maximum(a * (1 - b), b * (1 - a)).max(axis=-1)
            s_per_byte = np.maximum(s_per_byte, level.time_s(busiest, 0))
        return s_per_byte

    def memory(self, load: StageLoad, recompute: Number = False) -> StageMemory:
        """Return the memory of one worker of a stage, in its parts."""
        return StageMemory.of(load, self.optimizer_state_ratio, recompute)

    def memory_bytes(self, load: StageLoad, replicas: Number, in_flight: Number, recompute: Number = False) -> Number:
        """Bytes on one worker."""
        return self.memory(load, recompute).peak_bytes(self.versions(replicas, in_flight), in_flight)

    def versions(self, replicas: Number, in_flight: Number) -> Number:
        """Weight versions: without a flush one for each minibatch in flight (section 3.3), fewer if a replica has
        several minibatches in an update."""
        stage_replicas, first = replicas * self.execution.copies, 0  # no policy with formulas asks for the first stage
        interval, policy = self.update_interval(replicas), self.execution.kind.policies[0]
        return policy.max_versions(stage_replicas, in_flight, interval, first)

    def fit(self, load: StageLoad, replicas: Number, in_flight: Number) -> tuple[Number, Number]:
        """Return whether a stage must run its forward twice, because that is allowed and the only way to fit; and
        whether it fits then."""
        limit = self.cluster.memory_bytes
        if limit is None:
            return np.zeros_like(in_flight, dtype=bool), np.ones_like(in_flight, dtype=bool)
        versions = self.versions(replicas, in_flight)
        stashed, recomputed = (
            self.memory(load, recompute).peak_bytes(versions, in_flight) <= limit
            for recompute in (False, self.may_recompute)
        )
        return recomputed > stashed, recomputed | stashed


@dataclass(frozen=True, kw_only=True)
class PipeDreamCostModel(CostModel):
    """`T` and `A` of PipeDream's published optimizer (optimizer_graph_hierarchical.py), for comparison with it.

    They differ from the paper and from CostModel. They add communication to computing, and an all-reduce costs twice
    the bytes of a ring. A border costs both directions one after the other. Both its stages are charged, except the
    very first stage. Plans must use all workers. Memory is as in CostModel, because the original's check leaves out
    weights and gradients.

    Attributes:
        charges_activations: whether tensors between stages cost time (its --activation_compression_ratio 1); by its
            default they are free.
    """

    charges_activations: bool = True

    requires_all_workers = True

    def compute_s(self, load: StageLoad, replicas: Number, recompute: Number = False) -> Number:
        """Forward and backward over the replicas; the optimizer's step is not known to the original."""
        passes_s = load.forward_s * (1 + np.asarray(recompute)) + load.backward_s
        return passes_s / (replicas * self.execution.copies)

    def allreduce_s(self, load: StageLoad, replicas: Number, members: Members) -> Number:
        """4 (R-1) P / (B R) for a round of R minibatches; tied parameters are as any others."""
        ring_size = replicas * self.execution.copies
        return 2 * self.ring_s(load.parameter_bytes, ring_size, members) / ring_size

    def stage_s(self, load: StageLoad, replicas: Number, compute_s: Number, allreduce_s: Number) -> Number:
        """The sum: nothing overlaps."""
        return compute_s + allreduce_s

    def border_bytes(self, load: StageLoad) -> Number:
        """2 a for all that crosses the cut, even tensors that only pass by the stage."""
        return 2 * load.entering_bytes / self.execution.copies * self.charges_activations

    def border_s_per_byte(
        self, before: Fractions, after: Fractions, replicas: tuple[Number, Number], is_before_first: Number
    ) -> Number:
        """1 / (B m'). m' is the smaller number of replicas of both stages; if the stage before is first, that of the
        stage after."""
        touched_before, touched_after = ([np.greater(fraction, 0) for fraction in side] for side in (before, after))
        slowest = super().border_s_per_byte(touched_before, touched_after, replicas, is_before_first)
        return slowest / np.where(is_before_first, replicas[1], np.minimum(*replicas))


COST_MODELS: dict[CostModelName, Callable[..., CostModel]] = {
    "ours": CostModel,
    "pipedream": PipeDreamCostModel,
    "pipedream-free": partial(PipeDreamCostModel, charges_activations=False),
}


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one worker of a stage, or arrays of them: one formula for the search, a plan's figures and the
    simulator.

    A stage that recomputes keeps only its received tensors, and one whole stash while it works (Chen et al., 2016,
    "Training Deep Nets with Sublinear Memory Cost").

    Attributes:
        fixed_bytes: gradients, optimizer state, what operators need while they compute, and messages that arrive then.
        version_bytes: one set of weights, for each version that a minibatch in flight still needs (PipeDream, section
            3.3).
        minibatch_bytes: a minibatch's stash between its forward and its backward, and its messages (input_bytes).
    """

    fixed_bytes: Number
    version_bytes: Number
    minibatch_bytes: Number

    @classmethod
    def of(cls, load: StageLoad, optimizer_state_ratio: float, recompute: Number) -> StageMemory:
        """Split the memory of a stage.

        Args:
            optimizer_state_ratio: bytes of optimizer state for each byte of parameters.
            recompute: whether the stage runs its forward twice.
        """
        gradients_and_state = np.ceil(load.parameter_bytes * (1 + optimizer_state_ratio))
        while_computing = load.working_bytes + load.arriving_bytes + load.stash_bytes * np.asarray(recompute)
        return cls(
            fixed_bytes=gradients_and_state + while_computing,
            version_bytes=load.parameter_bytes + load.frozen_bytes,
            minibatch_bytes=load.input_bytes + load.stash_bytes * np.logical_not(recompute),
        )

    def peak_bytes(self, versions: Number, in_flight: Number) -> Number:
        """Return the bytes with so many weight versions and minibatches in flight."""
        return self.fixed_bytes + self.version_bytes * versions + self.minibatch_bytes * in_flight


def bucket_count(averaged_bytes: float) -> int:
    """Return how many equal buckets we assume when the replicas of a stage average their gradients."""
    return min(_MAX_BUCKETS, max(1, math.ceil(averaged_bytes / BUCKET_BYTES)))


def members_of(cluster: Cluster, workers: Collection[int]) -> list[int]:
    """Return how many members of each level `workers` lie on, outermost level first."""
    return [len({worker // below for worker in workers}) for below in cluster.below]


def members_between(cluster: Cluster, first: Number, end: Number) -> list[Number]:
    """Return `members_of` the contiguous workers [first, end); arrays give arrays."""
    return [(end - 1) // below - first // below + 1 for below in cluster.below]


def fractions_on_members(cluster: Cluster, is_used: Number) -> Fractions:
    """Return, for each level, [..., members] the fraction of the workers of a set that lie on each member.

    Args:
        is_used: [..., workers] 1 for each worker of the set.
    """
    used = np.asarray(is_used, dtype=float)
    fractions = used / np.maximum(used.sum(axis=-1, keepdims=True), 1)
    return [fractions.reshape(*fractions.shape[:-1], -1, below).sum(axis=-1) for below in cluster.below]


def fractions_by_class(cluster: Cluster, workers: Sequence[int], classes: int) -> Fractions:
    """Return [classes, members] for each level: where the workers lie whose positions are alike modulo `classes`."""
    is_used = np.zeros((classes, cluster.workers))
    is_used[np.arange(len(workers)) % classes, list(workers)] = 1
    return fractions_on_members(cluster, is_used)
