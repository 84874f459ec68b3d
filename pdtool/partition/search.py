"""The search over schedules, layouts and stages: the fastest plan, or the simplest that is nearly as fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.errors import UsageError
from pdtool.partition.advice import nothing_fits
from pdtool.partition.attempt import Attempt, Candidate, candidate
from pdtool.partition.cost import SLACK
from pdtool.partition.evaluate import COSTS, Cost, Way
from pdtool.partition.layout import MOST_WORKERS, Layout, layouts
from pdtool.partition.space import MAX_CUTS, Space, build_space
from pdtool.partition.tables import Tables
from pdtool.schedule import SEARCHED_SCHEDULES

_FEWEST_CUTS = 100
_LONGEST = np.finfo(float).max  # seconds
_SIMPLE = 1024  # stages times workers: a plan with more is taken only for being the fastest


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        schedule: see artifacts.plan.Plan; `auto` takes the fastest.
        microbatches: of flushing schedules; `auto` looks at those only with more than one.
        workers: use at most so many, the first ones; None: all. Fewer are used where that is faster.
        straight: one stage on every worker, none replicated.
        max_stages: no more stages than that; None: no limit.
        simplest: prefer fewer stages (data parallelism first) within this fraction of the best pace.
        recompute: whether stages may run their forward twice to save memory.
        cost: whose formulas; see evaluate.COSTS.
        chunks: stages on each worker, of `interleaved`, which is not searched (beyond.py).
        cuts: of the graph that are searched at most, on 16 workers or fewer; on more workers fewer.
    """

    schedule: str = "1f1b"
    microbatches: int = 1
    workers: int | None = None
    straight: bool = False
    max_stages: int | None = None
    simplest: float = 0.03
    recompute: bool = True
    cost: Cost = "ours"
    chunks: int = 2
    cuts: int = MAX_CUTS

    @property
    def ways(self) -> list[Way]:
        """How a plan may be run."""
        names: tuple[str, ...] = (self.schedule,)
        if self.schedule == "auto":
            names = SEARCHED_SCHEDULES if self.microbatches > 1 else ("1f1b",)
        return [
            Way(
                schedule=name,
                microbatches=1 if name == "1f1b" else self.microbatches,
                cost=self.cost,
                may_recompute=self.recompute,
            )
            for name in names
        ]


@dataclass(frozen=True)
class Search:
    """Everything that may be asked of one profile on one cluster; raises UsageError for options that make no sense."""

    profile: Profile
    cluster: Cluster
    options: Options
    _tables: dict[int, Tables] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wants = self.options
        if wants.schedule not in (*SEARCHED_SCHEDULES, "auto"):
            raise UsageError(
                f"schedule {wants.schedule!r} is not searched", f"choose one of {', '.join(SEARCHED_SCHEDULES)}, auto"
            )
        if wants.cost not in COSTS:
            raise UsageError(f"cost {wants.cost!r} is unknown", f"choose one of {', '.join(COSTS)}")
        if wants.microbatches < 1 or (wants.schedule == "1f1b" and wants.microbatches != 1):
            raise UsageError(
                f"--microbatches {wants.microbatches} with schedule {wants.schedule}",
                "give 1 or more to 1f1b-flush or gpipe; 1f1b has none",
            )
        if not 1 <= self.workers <= self.cluster.workers:
            raise UsageError(
                f"--workers {self.workers}: the cluster has {self.cluster.workers}",
                f"give between 1 and {self.cluster.workers}",
            )
        if wants.straight and self.workers > MOST_WORKERS:
            raise UsageError(f"a straight pipeline on {self.workers} workers", f"give at most --workers {MOST_WORKERS}")
        if wants.max_stages is not None and wants.max_stages < (self.workers if wants.straight else 1):
            least = f"straight pipeline on {self.workers} workers" if wants.straight else "plan"
            raise UsageError(f"a {least} cannot have at most {wants.max_stages} stages", "raise the number of stages")
        if wants.cuts < _FEWEST_CUTS:
            raise UsageError(f"--cuts {wants.cuts}", f"give {_FEWEST_CUTS} or more")
        if not 0 <= wants.simplest < float("inf"):
            raise UsageError(f"a margin of {wants.simplest} for the simplest plan", "give 0 or more, such as 0.03")

    @property
    def workers(self) -> int:
        """All that may be used."""
        return self.cluster.workers if self.options.workers is None else self.options.workers

    @cached_property
    def layouts(self) -> list[Layout]:
        """Those to search, small blocks first."""
        found = layouts(self.cluster, self.workers)
        if self.options.straight:
            found = [Layout.of(self.cluster, self.workers)]
        return [layout for layout in found if layout.workers <= MOST_WORKERS]

    def tables(self, workers: int) -> Tables:
        """The loads of all stages; the more workers, the fewer cuts can be searched."""
        cuts = self.options.cuts * 16 // max(16, workers)
        if cuts not in self._tables:
            finer = [tables for limit, tables in sorted(self._tables.items()) if limit > cuts][:1]
            enough = finer and len(finer[0].space.inside) <= cuts
            if enough:
                self._tables[cuts] = finer[0]
            else:
                space = build_space(self.profile, cuts, finer[0].space if finer else None)
                self._tables[cuts] = Tables(self.profile, space)
        return self._tables[cuts]

    @property
    def whole(self) -> Space:
        """The cuts that are searched on all the workers."""
        return self.tables(min(self.workers, MOST_WORKERS)).space

    @property
    def exact(self) -> bool:
        """Whether nothing was left out."""
        return not self.limits

    @property
    def limits(self) -> str:
        """What was left out."""
        large = f"one copy of the pipeline has at most {MOST_WORKERS} workers" if self.workers > MOST_WORKERS else ""
        freed = self.whole.freed if self.cluster.memory_bytes else 0
        tight = f"{freed} operators without cost stand with a neighbour, whatever they stash" if freed else ""
        return "; ".join(words for words in (large, self.whole.coarsened, tight) if words)

    def attempt(self, layout: Layout, way: Way, bound: float = np.inf, *, straight: bool = False) -> Attempt:
        """One layout under one schedule, up to a pace."""
        tables = self.tables(layout.workers)
        most = min(self.options.max_stages or layout.workers, tables.space.most_stages)
        return Attempt(
            tables=tables,
            layout=layout,
            way=replace(way, copies=layout.copies),
            bound=bound * SLACK,
            straight=straight or self.options.straight,
            most_stages=most,
        )

    def data_parallel(self, way: Way) -> Candidate:
        """One stage on all workers."""
        layout = Layout.of(self.cluster, self.workers)
        return candidate(self.profile, layout, [self.profile.graph.names], [range(self.workers)], way)

    def fits(self, plan: Candidate) -> bool:
        """Whether every worker has the memory it takes."""
        return max(plan.costs.memory_bytes) <= (self.cluster.memory_bytes or np.inf)

    def best(self) -> tuple[Candidate, list[Candidate]]:
        """The plan to take, and the fastest of each layout and schedule that was looked at, the fastest first.

        Raises:
            NoPlanError: there is none.
        """
        alone = [] if self.options.straight and self.workers > 1 else [self.data_parallel(w) for w in self.options.ways]
        alone = [plan for plan in alone if self.fits(plan)]
        pace = min((plan.costs.bottleneck_s for plan in alone), default=np.inf)
        attempts = self._attempts(pace)
        found = [*alone, *(attempt.traced(attempt.fastest) for attempt in attempts)]
        if not found:
            raise nothing_fits(self)
        found.sort(key=lambda plan: (plan.costs.bottleneck_s, SEARCHED_SCHEDULES.index(plan.way.schedule)))
        if self.options.straight:
            return found[0], found
        bound = found[0].costs.bottleneck_s * (1 + self.options.simplest) * SLACK
        simple = [plan for plan in alone if plan.costs.bottleneck_s <= bound]
        return next(iter(simple), None) or self._simplest(attempts, bound) or found[0], found

    def _attempts(self, pace: float) -> list[Attempt]:
        """Each layout and schedule on which a plan is nearly as fast as `pace` and the best found before."""
        pairs = [(layout, way) for layout in self.layouts for way in self.options.ways]
        for layout, way in pairs:  # the small ones first: what they give spares most of the work on the large ones
            attempt = self.attempt(layout, way, pace)
            if self.promising(attempt):
                pace = min(pace, attempt.rough())
        found = []
        for layout, way in reversed(pairs):
            attempt = self.attempt(layout, way, pace * (1 + self.options.simplest))
            if self.promising(attempt) and attempt.fastest.pace_s <= min(attempt.bound, _LONGEST):
                found.append(attempt)
                pace = min(pace, attempt.fastest.pace_s)
        return found

    def promising(self, attempt: Attempt) -> bool:
        """Whether there are workers enough to compute within the bound."""
        work = float(attempt.tables.forward_backward_s[-1])
        least = work / (attempt.layout.workers * attempt.layout.copies)
        return least <= attempt.bound

    def _simplest(self, attempts: Sequence[Attempt], bound: float) -> Candidate | None:
        """Fewest stages first, then one copy, then the best pace; None when it takes many stages to be near."""
        near = [attempt for attempt in attempts if attempt.fastest.pace_s <= bound]
        ladders = [(attempt, attempt.solutions()) for attempt in near]
        for _ in range(max(4, _SIMPLE // self.workers)):
            step = [(attempt, found) for attempt, ladder in ladders if (found := next(ladder, None))]
            enough = [entry for entry in step if entry[1].pace_s <= bound]
            if enough:
                attempt, found = min(
                    enough, key=lambda v: (v[0].layout.copies, v[1].pace_s, SEARCHED_SCHEDULES.index(v[0].way.schedule))
                )
                return attempt.traced(found)
        return None
