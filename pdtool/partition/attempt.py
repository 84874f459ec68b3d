"""The best pipelines of one layout under one schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pdtool.artifacts.cluster_file import ClusterSpec
from pdtool.artifacts.plan import Plan, Stage
from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.partition.cost import Rules, units_between
from pdtool.partition.dynamic import Array, Dynamic
from pdtool.partition.evaluate import Costs, Way, evaluate
from pdtool.partition.layout import Layout
from pdtool.partition.tables import Tables

_ROUGH = 160  # cuts times the root of the workers


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan: its stages' nodes, their workers, how it is run, what it costs."""

    stages: Sequence[Sequence[str]]
    workers: Sequence[Sequence[int]]
    way: Way
    costs: Costs

    @property
    def config(self) -> str:
        """`15-1`, `4 copies of 3-1`; long ones are counted."""
        sizes = [len(numbers) // self.way.copies for numbers in self.workers]
        text = "-".join(map(str, sizes)) if len(sizes) <= 16 else f"{len(sizes)} stages on {sum(sizes)} workers"
        return f"{self.way.copies} copies of {text}" if self.way.copies > 1 else text


@dataclass(frozen=True)
class Found:
    """The best plan of at most some number of stages: its pace with fill and drain, and the layers to trace it by."""

    pace_s: float
    layers: list[Array]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The recurrence on one layout.

    Attributes:
        bound: paces above it are not looked for.
        most_stages: that a plan may have.
    """

    tables: Tables
    layout: Layout
    way: Way
    straight: bool = False
    bound: float = np.inf
    least_memory: bool = False
    most_stages: int

    @property
    def profile(self) -> Profile:
        """What is divided."""
        return self.tables.profile

    @cached_property
    def rules(self) -> Rules:
        """The costs on this layout."""
        layout = self.layout
        everywhere = units_between(layout.block, 0, layout.workers)
        return self.way.rules(self.profile, layout.block, everywhere, layout.spread)

    @cached_property
    def dynamic(self) -> Dynamic:
        """The values."""
        return Dynamic(self.tables, self.rules, self.layout.workers, self.straight, self.bound, self.least_memory)

    @cached_property
    def fastest(self) -> Found:
        """The best of all `solutions`; without looking at each number of stages where nothing depends on it."""
        dynamic = self.dynamic
        everything = self.most_stages >= min(self.layout.workers, self.tables.space.most_stages)
        if self.way.schedule == "1f1b" and not self.tables.space.positional and everything:
            return Found(dynamic.pace(dynamic.free), [dynamic.free])
        best = Found(np.inf, [])
        floor = dynamic.pace(dynamic.free)
        for stages, found in enumerate(self.solutions(), 1):
            best = min(best, found, key=lambda entry: entry.pace_s)
            if floor * self._factor(stages + 1) >= best.pace_s:
                break  # more stages cannot win it back
        return best

    def solutions(self) -> Iterator[Found]:
        """The best plans of at most 1, 2, ... stages; of exactly so many where a pin counts stages."""
        dynamic = self.dynamic
        for stages in range(1, min(self.most_stages, self.layout.workers) + 1):
            if self.tables.space.positional:
                layers = dynamic.exactly(stages)
            else:
                dynamic.layer(stages)
                layers = dynamic.layers[: stages + 1]
            yield Found(dynamic.pace(layers[-1]) * self._factor(stages), layers)

    def rough(self) -> float:
        """A pace that can be had, found in a small part of the space, so that the search can leave out most of it."""
        coarse = self.coarse
        return self.bound if coarse.tables is self.tables else min(self.bound, coarse.fastest.pace_s)

    @property
    def coarse(self) -> Attempt:
        """The same over few cuts."""
        return replace(self, tables=self.tables.coarse(int(_ROUGH * self.layout.workers**-0.5)))

    def traced(self, found: Found) -> Candidate:
        """The plan behind a value of the recurrence."""
        pieces = self.dynamic.trace(found.layers)
        stages = [self.tables.space.nodes(p.before, p.after) for p in pieces]
        places = [range(p.first, p.first + p.replicas) for p in pieces]
        copies = self.layout.copies
        workers = [[self.layout.place(c, worker) for worker in place for c in range(copies)] for place in places]
        if len(stages) == 1 and copies > 1:  # copies of one stage are data parallelism
            return candidate(self.profile, self.layout, stages, [sorted(workers[0])], replace(self.way, copies=1))
        return candidate(self.profile, self.layout, stages, workers, self.way)

    def _factor(self, stages: int) -> float:
        """What turns a pace into the time per minibatch."""
        return 1.0 if self.least_memory else self.rules.bubble(stages)


def candidate(
    profile: Profile, layout: Layout, stages: Sequence[Sequence[str]], workers: Sequence[Sequence[int]], way: Way
) -> Candidate:
    """Any stages on any workers, with the nodes in topological order."""
    held = [set(nodes) for nodes in stages]
    ordered = [[name for name in profile.graph.names if name in nodes] for nodes in held]
    costs = evaluate(profile, layout.cluster, ordered, workers, way)
    return Candidate(stages=ordered, workers=workers, way=way, costs=costs)


def as_plan(profile: Profile, profile_path: str, cluster: Cluster, found: Candidate) -> Plan:
    """The plan as an artifact, without its figures."""
    way = found.way
    return Plan.model_validate(
        {
            "name": f"{profile.name}-{cluster.topology}",
            "model": profile.model,
            "profile": str(profile_path),
            "digests": {**profile.digests, str(profile_path): profile.content_sha256},
            "batch_size": profile.batch_size,
            "cluster": ClusterSpec.of(cluster),
            "schedule": way.schedule,
            "weights": "stash" if way.schedule == "1f1b" else "flush",
            "microbatches": way.microbatches,
            "copies": way.copies,
            "stages": tuple(
                Stage(
                    nodes=tuple(profile.graph.compress(nodes)),
                    replicas=len(numbers),
                    workers=tuple(numbers),
                    in_flight=w,
                    recompute=again,
                )
                for nodes, numbers, w, again in zip(
                    found.stages, found.workers, found.costs.in_flight, found.costs.recompute, strict=True
                )
            ),
        }
    )
