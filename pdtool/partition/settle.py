"""The last word on a plan: the search takes much to be hidden, the simulator knows what is.

The plan that the search likes best is simulated. Where that comes out much slower than predicted, a few others are
simulated too, and the fastest of them is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.errors import ScheduleError
from pdtool.partition.attempt import Candidate, as_plan
from pdtool.partition.cost import SLACK, Load, Rules
from pdtool.partition.evaluate import evaluate, rules_and_loads
from pdtool.partition.rivals import one_worker, straight
from pdtool.partition.search import Search
from pdtool.partition.simulator.compare import actions
from pdtool.partition.simulator.planned import planned_job
from pdtool.partition.simulator.simulate import simulate
from pdtool.partition.whole import link_loads, waits

_BELIEVED = 1.1  # times the predicted pace
_SLOWER_LINKS = 3.0  # than there are: what is planned for those sends less
_MOST_SIMULATED = 300_000  # actions times workers, about a second
_MOST_DEEPER = 2  # times the minibatches in flight that the schedule wants


def settled(search: Search, chosen: Candidate) -> tuple[Candidate, float | None]:
    """The plan to take, with the minibatches in flight to run it with, and its simulated pace; None: not simulated."""
    margin = search.options.simplest
    believed = chosen.costs.bottleneck_s * _BELIEVED
    best, pace = chosen, _simulated(search, chosen)
    if pace is not None and pace <= believed:
        return best, pace  # no deeper than it needs to be: each minibatch in flight is one more update of delay
    deeper = deepened(search.profile, search.cluster, chosen, margin)
    if deeper.costs.in_flight != best.costs.in_flight:
        best, pace = deeper, _simulated(search, deeper)
    if not margin or pace is None or pace <= believed:
        return best, pace  # without a margin the formulas' optimum is wanted, whatever comes of it
    for plan in _others(search, best, chosen.costs.in_flight):
        promising = search.fits(plan) and plan.costs.bottleneck_s * (1 + margin) < pace
        found = _simulated(search, plan) if promising else None
        if found is not None and found * (1 + margin) < pace:
            best, pace = plan, found
    return best, pace


def _others(search: Search, first: Candidate, flight: Sequence[int]) -> Iterator[Candidate]:
    """More minibatches in flight; what is best over slower links; straight; data parallelism; one worker."""
    profile, cluster, margin = search.profile, search.cluster, search.options.simplest
    denser = [*(_MOST_DEEPER * w for w in flight[:-1]), flight[-1]]
    if denser != list(first.costs.in_flight):
        yield with_flight(profile, cluster, first, denser)
    if search.options.straight:
        return
    slower = tuple(replace(v, bandwidth_bytes_per_s=v.bandwidth_bytes_per_s / _SLOWER_LINKS) for v in cluster.levels)
    frugal = replace(search, cluster=replace(cluster, levels=slower)).best()[0]
    way = replace(first.way, copies=1)
    for plan in (frugal, straight(search, way), search.data_parallel(way), one_worker(search, way)):
        if plan and len(plan.stages) <= (search.options.max_stages or math.inf):
            yield deepened(profile, cluster, plan, margin)


def _simulated(search: Search, plan: Candidate) -> float | None:
    if plan.way.cost != "ours":
        return None  # formulas that are only for comparison
    return simulated(as_plan(search.profile, "-", search.cluster, plan), search.profile)


def simulated(plan: Plan, profile: Profile) -> float | None:
    """Seconds per minibatch in steady state; None where it would take too long, or the plan cannot be executed."""
    if actions(plan) * sum(stage.replicas for stage in plan.stages) > _MOST_SIMULATED:
        return None
    try:
        return simulate(planned_job(plan, profile)).pace_s
    except ScheduleError:
        return None


def deepened(profile: Profile, cluster: Cluster, plan: Candidate, margin: float) -> Candidate:
    """The same with more minibatches in flight where messages or rounds would hold them up, as far as memory goes."""
    if plan.way.schedule != "1f1b" or plan.way.cost != "ours":
        return with_flight(profile, cluster, plan, plan.costs.in_flight)  # its costs may be those of slower links
    rules, work = rules_and_loads(profile, cluster, plan.stages, plan.workers, plan.way)
    links = link_loads(rules, profile, plan.stages, work, plan.workers)
    costs, flight = plan.costs, list(plan.costs.in_flight)
    pace = max(costs.bottleneck_s, *(float(load.max()) for load in links))
    for s in reversed(range(len(flight))):  # from the end: what a stage wants depends on those after it
        wait = waits(rules, work, plan.workers, costs.recompute, flight, pace)[s]
        fewest = flight[s]
        wanted = math.ceil(wait / (len(plan.workers[s]) * pace * (1 + margin) * SLACK)) if pace else fewest
        flight[s] = min(max(fewest, wanted), _MOST_DEEPER * fewest)
        while flight[s] > fewest and not _fits(rules, work[s], flight[s], costs.recompute[s]):
            flight[s] -= 1
    plans = (with_flight(profile, cluster, plan, way) for way in (flight, _in_step(plan, flight)))
    usual = with_flight(profile, cluster, plan, costs.in_flight)  # always runs
    return next((found for found in plans if _runs(profile, cluster, found)), usual)


def _in_step(plan: Candidate, flight: Sequence[int]) -> list[int]:
    """No stage has more in flight than the stage before it: where one lacks memory, all after it have less to do."""
    sizes = [len(numbers) for numbers in plan.workers]
    found = [flight[0]]
    for s in range(1, len(flight)):
        found.append(max(1, min(flight[s], found[-1] * sizes[s - 1] // sizes[s])))
    return found


def _runs(profile: Profile, cluster: Cluster, plan: Candidate) -> bool:
    """Whether no worker waits for ever."""
    try:
        as_plan(profile, "-", cluster, plan).check_schedule()
    except ScheduleError:
        return False
    return True


def _fits(rules: Rules, load: Load, flight: int, recompute: bool) -> bool:
    limit = rules.cluster.memory_bytes
    return limit is None or bool(rules.memory_bytes(load, flight, recompute) <= limit)


def with_flight(profile: Profile, cluster: Cluster, plan: Candidate, flight: Sequence[int]) -> Candidate:
    """The same plan with so many minibatches in flight at each replica of each stage."""
    costs = evaluate(
        profile, cluster, plan.stages, plan.workers, plan.way, flight=flight, recompute=plan.costs.recompute
    )
    return replace(plan, costs=costs)
