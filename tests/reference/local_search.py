"""From a plan to its neighbours: a lower bound that one of these beats is false. An oracle of the search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.profile import Profile
from reference.reference_cost import Division, ReferenceCost

_SAME = 1 - 1e-9
_MOST_WORK = 400_000  # operators and workers looked at: about a second
_NOT_MOVED = ("input", "loss")  # the first stage loads the data; only the last can have the loss


class LocalSearch:
    """From a plan to its neighbours, and on from each that is faster, as long as one is."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile, self.cluster, self.tried = profile, cluster, 0
        self.most = _MOST_WORK // (len(profile.nodes) + cluster.workers)
        self.blocks = profile.graph.contracted(profile.together)
        self.kept = {node.name for node in profile.nodes if node.op in _NOT_MOVED} | set(profile.pin)

    def go(self, plan: Division) -> float | None:
        """Seconds per minibatch of the fastest plan on the way; None when the first round is too long."""
        best, here = math.inf, plan
        while True:
            there = list(self._neighbours(here))
            if self.tried + len(there) > self.most:
                return best if self.tried else None
            self.tried += len(there)
            paces = [(other.bottleneck_s(), other.plan) for other in map(self._fitted, there) if other]
            pace, here = min(paces, key=lambda entry: entry[0], default=(math.inf, here))
            if pace >= best * _SAME:
                return min(pace, best)
            best = pace

    def _neighbours(self, plan: Division) -> Iterator[Division]:
        """One block over a border, or one replica of each copy; workers stay in their order."""
        home = {name: s for s, names in enumerate(plan.stages) for name in names}
        for block in self.blocks if len(plan.stages) > 1 else ():
            for to in self._where(block, home, len(plan.stages)):
                stages = [[name for name in names if name not in block] for names in plan.stages]
                stages[to] = [*stages[to], *block]
                if all(any(self.profile.by_name[n].op not in _NOT_MOVED for n in names) for names in stages):
                    yield replace(plan, stages=stages)
        d = plan.copies
        for s, (a, b) in enumerate(zip(plan.workers, plan.workers[1:], strict=False)):
            for left, right in ((a[:-d], [*a[-d:], *b]), ([*a, *b[:d]], b[d:])):
                if left and right:
                    yield replace(plan, workers=[*plan.workers[:s], left, right, *plan.workers[s + 2 :]])

    def _where(self, block: Sequence[str], home: dict[str, int], stages: int) -> Iterator[int]:
        """The neighbouring stages to which a block may go without sending anything backwards."""
        s, graph, inside = home[block[0]], self.profile.graph, set(block)
        if inside & self.kept:
            return
        if s + 1 < stages and all(home[t] > s for name in block for t in graph.consumers[name] if t not in inside):
            yield s + 1
        if s and all(home[t] < s for name in block for t in graph.inputs[name] if t not in inside):
            yield s - 1

    def _fitted(self, plan: Division) -> ReferenceCost | None:
        """With the minibatches in flight that the schedule wants: fewer are not in the space that is claimed. A stage
        recomputes where it fits that way only, if one of the plan's does."""
        sizes = [len(numbers) for numbers in plan.workers]
        flight = [math.ceil(sum(sizes[s:]) / n) for s, n in enumerate(sizes)]
        if plan.schedule != "1f1b":
            most = [math.ceil(plan.microbatches / n) for n in sizes]
            flight = most if plan.schedule == "gpipe" else [min(both) for both in zip(flight, most, strict=True)]
        limit, may = self.cluster.memory_bytes or math.inf, any(plan.recompute)
        found = ReferenceCost(self.profile, self.cluster, replace(plan, flight=flight, recompute=[False] * len(sizes)))
        again = [may and found.memory_bytes(s, searched=True) > limit for s in found.order]
        found.plan = replace(found.plan, recompute=again)
        return found if found.fits() else None
