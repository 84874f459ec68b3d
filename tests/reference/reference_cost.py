"""The figures of a plan once more, by other code than the planner's: the oracle of the cost formulas.

It shares no formula with pdtool/planner/formulas.py and stage_costs.py, and no numpy: it is written from what their
docstrings and artifacts/plan.py say. Two implementations that agree are the evidence.

    n: replicas of a stage in all copies    d: copies    k: minibatches in a round    w: minibatches in flight at one
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Node, Profile


@dataclass(frozen=True, kw_only=True)
class Division:
    """A plan as far as its figures depend on it; see artifacts.plan.Plan and Stage."""

    stages: Sequence[Sequence[str]]
    workers: Sequence[Sequence[int]]
    flight: Sequence[int]
    recompute: Sequence[bool]
    schedule: str
    microbatches: int
    copies: int
    cost: str
    wire_dtype: str = "fp32"

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> Division:
        """Raises ArtifactError when the stages do not fit the profile."""
        return cls(
            stages=plan.stage_nodes(profile),
            workers=[stage.workers for stage in plan.stages],
            flight=[stage.in_flight for stage in plan.stages],
            recompute=[stage.recompute for stage in plan.stages],
            schedule=plan.schedule,
            microbatches=plan.microbatches,
            copies=plan.copies,
            cost=plan.predicted.cost if plan.predicted else "ours",
            wire_dtype=plan.wire_dtype,
        )

    def round(self, s: int) -> int:
        """k: without a flush each replica does one minibatch between two updates."""
        return len(self.workers[s]) if self.schedule == "1f1b" else self.microbatches

    def copy(self, s: int, number: int) -> Sequence[int]:
        """The workers of one copy of a stage."""
        return self.workers[s][number :: self.copies]


@dataclass(kw_only=True)
class Work:
    """What a stage does for one minibatch, and the bytes it holds."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    parameters: int = 0
    frozen: int = 0
    tied: int = 0
    stash: int = 0
    peak: int = 0  # of stash and working set
    arriving: int = 0
    held: int = 0
    received: int = 0
    returned: int = 0
    passing: int = 0


class ReferenceCost:
    """The figures of one division, by the names of `Predicted`; times are seconds per minibatch."""

    def __init__(self, profile: Profile, cluster: Cluster, plan: Division) -> None:
        self.profile, self.cluster, self.plan = profile, cluster, plan
        self.below = [math.prod(level.size for level in cluster.levels[i + 1 :]) for i in range(len(cluster.levels))]
        self.ours = plan.cost == "ours"
        self.order = range(len(plan.stages))
        self.on_cpu = profile.is_measured_on_cpu
        self.work = self._work()

    def _work(self) -> list[Work]:
        home = {name: s for s, names in enumerate(self.plan.stages) for name in names}
        takers: dict[str, set[int]] = {}
        step = [0] * len(self.plan.stages)
        nodes = self.profile.nodes
        last_taker = {  # (stage, node): the last that takes it in this stage or an earlier one
            (s, name): i for i, node in enumerate(nodes) for name in node.inputs for s in self.order[home[node.name] :]
        }
        work = [Work() for _ in self.order]
        for i, node in enumerate(nodes):
            one = work[s := home[node.name]]
            one.forward += node.forward_s
            one.backward += node.backward_s
            one.update += node.update_s
            one.parameters += node.parameter_bytes
            one.frozen += node.frozen_bytes
            received = [n for n in nodes if n.saved_by == node.name and home[n.name] != home[node.name]]
            one.stash += max(0, node.stash_bytes - sum(n.output_bytes for n in received))
            arriving = sum(self.profile.by_name[source].gradient_bytes for source in node.inputs)
            skipping = sum(before.gradient_bytes for before in nodes[:i] if i < last_taker.get((s, before.name), -1))
            one.peak = max(one.peak, one.stash + node.output_bytes + arriving + node.scratch_bytes + skipping)
            step[s] = max(step[s], math.ceil(node.parameter_bytes * self.profile.optimizer_state_bytes))
            for source in node.inputs:
                takers.setdefault(source, set()).add(home[node.name])
        for name, stages in takers.items():
            node, here = self.profile.by_name[name], home[name]
            for s in stages - {here}:
                work[s].held += node.output_bytes
                work[s].arriving += node.output_bytes * (1 if self.on_cpu else 4)
                work[s].received += self._sent(node, node.output_bytes, node.exact_bytes)
                work[s].returned += self._sent(node, node.gradient_bytes, node.exact_gradient_bytes)
            if stages != {here}:  # on a GPU, messages have slots of their own: in flight, and three more
                work[here].arriving += node.gradient_bytes * (1 if self.on_cpu else 3)
                work[here].held += node.gradient_bytes * (0 if self.on_cpu else 1)
            for s in range(here + 1, max(stages) + 1) if node.op != "input" else ():
                work[s].passing += self._sent(node, node.output_bytes, node.exact_bytes)
        for one, step_bytes in zip(work, step, strict=True):
            of_all = one.parameters * self.profile.step_scratch_bytes
            one.peak = max(one.peak, step_bytes, of_all, one.stash)
        for shared in self.profile.shared:
            users = [home[name] for name in shared.nodes]
            for s in set(users):
                work[s].parameters -= shared.bytes * (users.count(s) - 1)
                work[s].tied += shared.bytes * (len(set(users)) > 1)
        return work

    def _sent(self, node: Node, size: int, exact: int) -> int:
        """Half of what is float32 with two bytes for each number; the data of the dataset goes as it is."""
        narrows = self.plan.wire_dtype != "fp32" and node.op != "input"
        return size - (size - exact + 1) // 2 if narrows else size

    def passes_s(self, s: int) -> float:
        """Forwards and backwards, shared by the replicas."""
        work = self.work[s]
        return (work.forward * (2 if self.plan.recompute[s] else 1) + work.backward) / len(self.plan.workers[s])

    def compute_s(self, s: int) -> float:
        """In a round a replica does its share of the minibatches, whole ones, and one update."""
        work, n, k = self.work[s], len(self.plan.workers[s]), self.plan.round(s)
        update_s = 0 if self._waits(s) else work.update / k
        return math.ceil(k / n) * n * self.passes_s(s) / k + update_s if self.ours else self.passes_s(s)

    def _waits(self, s: int) -> bool:
        """Whether its updates wait for those of other stages, with which it shares a parameter."""
        return self.plan.schedule == "1f1b" and self.work[s].tied > 0

    def allreduce_s(self, s: int) -> float:
        """One ring a round, none where updates wait for other stages."""
        work, numbers = self.work[s], self.plan.workers[s]
        n = len(numbers)
        if not self.ours:
            return 2 * self._ring_s(work.parameters, n, numbers) / n
        return 0.0 if self._waits(s) else self._ring_s(work.parameters, n, numbers) / self.plan.round(s)

    def _ring_s(self, size: float, members: int, numbers: Sequence[int]) -> float:
        """2 (n-1) messages in turn, each of 1/n of the bytes, over the slowest link that the ring crosses."""
        if not size or members < 2:
            return 0.0
        copies = self.plan.workers[0][: self.plan.copies]
        levels = zip(self.cluster.levels, self.below, strict=True)
        crossed = [level for level, below in levels if any(len({w // below for w in v}) > 1 for v in (numbers, copies))]
        slowest = max((1 / level.bandwidth_bytes_per_s for level in crossed), default=0.0)
        latency = max((level.latency_s for level in crossed), default=0.0)
        return 2 * (members - 1) * (size / members * slowest + latency)

    def _stage_s(self, s: int) -> float:
        """Averages hide behind the last backward of a round and no further; with PipeDream's formulas they do not."""
        if not self.ours:
            return self.compute_s(s) + self.allreduce_s(s)
        return self.compute_s(s) + max(0.0, self.allreduce_s(s) - self.work[s].backward / self.plan.round(s))

    def transfer_s(self, s: int) -> float:
        """Over the border before stage s: the busiest link of any member, the slowest level, the slowest copy."""
        pace = 0.0
        q, r = (len(self.plan.copy(stage, 0)) for stage in (s - 1, s))
        for c in range(self.plan.copies):
            for level, below in zip(self.cluster.levels, self.below, strict=True):
                for _, a, b in self._on_members(s - 1, s, c, below):
                    if self.ours:
                        busy = max(a * (r - b), b * (q - a)) / (q * r)
                    else:  # each replica after the border takes its share; those before it send theirs
                        busy = (bool(a) != bool(b)) / (r if s == 1 else min(q, r))
                    pace = max(pace, busy / level.bandwidth_bytes_per_s)
        size = max(self.work[s].received, self.work[s].returned)
        if not self.ours:
            size = 2 * self.work[s].passing if self.plan.cost == "pipedream" else 0
        return size * pace / self.plan.copies

    def _on_members(self, a: int, b: int, copy: int, below: int) -> Iterator[tuple[int, int, int]]:
        """(member, replicas of stage a on it, replicas of stage b on it), of one copy."""
        counts: dict[int, list[int]] = {}
        for side, s in enumerate((a, b)):
            for worker in self.plan.copy(s, copy):
                counts.setdefault(worker // below, [0, 0])[side] += 1
        return ((member, *both) for member, both in counts.items())  # type: ignore[misc]

    def _waiting_s(self) -> list[float]:
        """The pace that w n minibatches in flight allow, each on its way through all later stages and back."""
        again = self.plan.recompute
        passes = [work.forward * (2 if again[s] else 1) + work.backward for s, work in enumerate(self.work)]
        flying = (w * len(numbers) for w, numbers in zip(self.plan.flight, self.plan.workers, strict=True))
        return [sum(passes[s:]) / w for s, w in enumerate(flying)] if self.plan.schedule == "1f1b" else []

    def memory_bytes(self, s: int, *, searched: bool = False) -> int:
        """Gradients and optimizer state; weight versions; stash and working set at their peak; what is kept of each
        other minibatch in flight, and one of each message. With recomputing that is only what was received. The search
        does not know who shares a parameter, and so updates more rarely."""
        work, w = self.work[s], self.plan.flight[s]
        versions = 1
        if self.plan.schedule == "1f1b":
            versions = self._begun_with_different_weights(s, self.plan.round(s) if searched else self._round(s))
        state = math.ceil(work.parameters * (1 + self.profile.optimizer_state_bytes))
        stashes = 0 if self.plan.recompute[s] else w - 1
        kept = work.stash * stashes + work.held * w + work.arriving
        return state + (work.parameters + work.frozen) * versions + work.peak + kept

    def _begun_with_different_weights(self, s: int, interval: int) -> int:
        """How many of the w minibatches in flight at a replica, which is at its newest one, had other weights, with an
        update after `interval` at all replicas."""
        each = interval // len(self.plan.workers[s])  # minibatches between two updates
        oldest = max(len({(i + k) // each for i in range(self.plan.flight[s])}) for k in range(each))
        return min(oldest, self.plan.flight[s])

    def _holders(self) -> list[tuple[list[int], int]]:
        """(stages, bytes) of each parameter that several stages hold."""
        home = {name: s for s, names in enumerate(self.plan.stages) for name in names}
        found = [(sorted({home[name] for name in shared.nodes}), shared.bytes) for shared in self.profile.shared]
        return [(stages, size) for stages, size in found if len(stages) > 1]

    def _round(self, s: int) -> int:
        """As the plan's, but without a flush the holders of a parameter wait for each other."""
        others = [t for stages, _ in self._holders() if s in stages for t in stages]
        own = self.plan.round(s)
        return math.lcm(own, *map(self.plan.round, others)) if self.plan.schedule == "1f1b" else own

    def traffic_bytes(self) -> int:
        """Tensors, gradients back, and 2 (n-1) times the bytes of each ring of n, once a round."""
        total = 0.0
        for s, work in enumerate(self.work):
            n = len(self.plan.workers[s])
            total += work.received + work.returned + 2 * (n - 1) * (work.parameters - work.tied) / self._round(s)
        for stages, size in self._holders():
            n = sum(len(self.plan.workers[s]) for s in stages)
            total += 2 * (n - 1) * size / self._round(stages[0])
        return math.ceil(total)

    def bottleneck_s(self) -> float:
        """The slowest of all; a flushing schedule fills and drains once in M minibatches of each copy."""
        transfers = [self.transfer_s(s) for s in self.order[1:]]
        stages = [self._stage_s(s) for s in self.order]
        averages = [self.allreduce_s(s) for s in self.order]
        rounds = math.ceil(self.plan.microbatches / self.plan.copies)
        flush = (rounds + len(self.order) - 1) / rounds if self.plan.schedule != "1f1b" else 1.0
        return max(*transfers, *stages, *averages, *self._waiting_s()) * flush

    def fits(self) -> bool:
        """Whether each worker has the memory that the search takes it for."""
        needed = max(self.memory_bytes(s, searched=True) for s in self.order)
        return needed <= (self.cluster.memory_bytes or math.inf)
