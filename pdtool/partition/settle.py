"""The last word on a plan: the search takes much to be hidden, the simulator knows what is.

The plan that the search likes best is simulated, and where others may be faster so are they: those that everyone asks
about, the best of each layout that was searched, and, where it comes out much slower than predicted, a few more. None
can be simulated faster than the formulas say, nor than its busiest link allows: most need not be simulated at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from pdtool.partition.attempt import Candidate, as_plan
from pdtool.partition.evaluate import Way, rules_and_loads
from pdtool.partition.flight import most_first, runs, wanted, with_flight
from pdtool.partition.paces import simulated, too_large
from pdtool.partition.search import Search
from pdtool.partition.whole import link_loads

_BELIEVED = 1.1  # times the predicted pace
_HOPELESS = 2.0  # times the bound: plans that are not simulated faster are not looked for
_SLOWER_LINKS = (1.0, 2.0)  # than there are: what is planned for those sends less
_DELAY = 0.1  # of the pace: what more minibatches in flight must bring, since their delay may cost epochs
_MOST_STAGES = 5  # of these plans, but for the best
_MOST_TRIED = 3  # of these plans, simulated, besides the best for each number of copies


def settled(search: Search, chosen: Candidate, asked: Sequence[Candidate]) -> tuple[Candidate, float | None]:
    """The plan to take, with the minibatches in flight to run it with, and its simulated pace; None: not simulated.

    Args:
        asked: plans that it must not be slower than, but for the margin that fewer stages are worth; those that do not
            fit, that are too large to simulate or not what the user wants are left out.
    """
    profile, cluster, margin = search.profile, search.cluster, search.options.simplest
    if chosen.way.cost != "ours" or too_large(as_plan(profile, "-", cluster, chosen)):
        return wanted(profile, cluster, chosen, margin), None
    believed, bound = chosen.costs.bottleneck_s * _BELIEVED, bound_s(search, chosen)
    race = _Race(search, chosen)
    alone = search.options.straight or not margin  # then the formulas' optimum is wanted, whatever comes of it
    if alone or bound <= believed:
        race.enter(bound, chosen)
    if not alone:
        for slower in _SLOWER_LINKS if race.pace_s > believed else ():
            more = _more(search, chosen.way, min(race.pace_s, _HOPELESS * bound), slower)
            race.enter_few(_promising(search, more))
        for limit, plan in _promising(search, [chosen, *asked]):
            race.enter(limit, plan)
    return race.best, race.pace_s if race.pace_s < math.inf else None


@dataclass
class _Race:
    """The fastest plan of those that were simulated."""

    search: Search
    best: Candidate
    pace_s: float = math.inf
    entered: set[object] = field(default_factory=set)

    def enter(self, bound_s: float, plan: Candidate) -> bool:
        """Simulate a plan that may win; whether that was done."""
        margin = self.search.options.simplest
        enough = self.pace_s if len(plan.stages) <= len(self.best.stages) else self.pace_s / (1 + margin)
        key = plan.way, tuple(map(tuple, plan.stages)), tuple(map(tuple, plan.workers))
        if bound_s >= enough or key in self.entered:
            return False
        self.entered.add(key)
        plan, pace_s = _tried(self.search, plan, enough)
        if pace_s < enough:
            self.best, self.pace_s = plan, pace_s
        return True

    def enter_few(self, plans: Iterable[tuple[float, Candidate]]) -> None:
        """Those that may win by more than the margin: the best by its bound for each number of copies, a few more."""
        left, seen = _MOST_TRIED, set[int]()
        for limit, plan in plans:
            first = plan.way.copies not in seen
            seen.add(plan.way.copies)
            if (first or left) and limit * (1 + self.search.options.simplest) < self.pace_s:
                left -= self.enter(limit, plan) and not first


def bound_s(search: Search, plan: Candidate) -> float:
    """Seconds per minibatch that no simulation of the plan beats: of its slowest stage, and of its busiest link.

    Of the formulas only what they are sure of: they cannot see which replicas meet at a border, who holds a tied
    parameter, which stages do not depend on the one before, and which have less to do when the pipeline fills.
    """
    rules, work = rules_and_loads(search.profile, search.cluster, plan.stages, plan.workers, plan.way)
    links = link_loads(rules, search.profile, plan.stages, work, plan.workers)
    stages = (
        (load.forward_s + load.backward_s) / len(numbers) if load.tied_bytes else seconds
        for load, numbers, seconds in zip(work, plan.workers, plan.costs.stage_s, strict=True)
    )
    return max(*stages, *(float(load.max()) for load in links))


def _promising(search: Search, plans: Iterable[Candidate]) -> list[tuple[float, Candidate]]:
    """Those that fit and that may be taken, with their bounds, the least first."""
    most = search.options.max_stages or math.inf
    rest = [plan for plan in plans if search.fits(plan) and len(plan.stages) <= most]
    return sorted(((bound_s(search, plan), plan) for plan in rest), key=lambda entry: entry[0])


def _more(search: Search, way: Way, limit_s: float, slower: float) -> Iterator[Candidate]:
    """For each layout the best plans of at most 1, 2, ... stages and of any number, roughly, up to a pace, as if links
    were so much slower."""
    levels = (replace(v, bandwidth_bytes_per_s=v.bandwidth_bytes_per_s / slower) for v in search.cluster.levels)
    cluster = replace(search.cluster, levels=tuple(levels))
    for layout in search.layouts:
        attempt = search.attempt(replace(layout, cluster=cluster), way, limit_s).coarse
        if not search.promising(attempt) or attempt.fastest.pace_s > attempt.bound:
            continue
        best = math.nextafter(attempt.bound, math.inf)
        for found in (*islice(attempt.solutions(), _MOST_STAGES), attempt.fastest):
            if found.pace_s < best:
                best, plan = found.pace_s, attempt.traced(found)
                yield with_flight(search.profile, search.cluster, plan, plan.costs.in_flight)


def _tried(search: Search, plan: Candidate, limit_s: float) -> tuple[Candidate, float]:
    """The plan with as few minibatches in flight as it takes to be nearly as fast as it can be, since each is one more
    update of delay; and its simulated pace, infinite above the limit."""
    margin = search.options.simplest
    worth = max(margin, _DELAY) if margin else 0.0
    found, pace = plan, math.inf
    for one in most_first(search.profile, search.cluster, plan, margin):
        made = as_plan(search.profile, "-", search.cluster, one)
        seconds = simulated(made, search.profile, limit_s)
        if seconds is not None and seconds < math.inf and runs(made):
            found, pace, limit_s = one, seconds, min(limit_s, seconds * (1 + worth))
    return found, pace
