"""How many minibatches in flight a plan wants, where messages take time, links are shared and rounds wait.

The schedule's own number keeps all later workers busy when nothing does; each more is one more update of delay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.errors import ScheduleError
from pdtool.partition.attempt import Candidate, as_plan
from pdtool.partition.cost import SLACK, Load, Rules
from pdtool.partition.evaluate import evaluate, rules_and_loads
from pdtool.partition.whole import link_loads, waits

_MOST = 2  # times those that the schedule wants


def with_flight(profile: Profile, cluster: Cluster, plan: Candidate, flight: Sequence[int]) -> Candidate:
    """The same plan with so many minibatches in flight at each replica of each stage."""
    costs = evaluate(
        profile, cluster, plan.stages, plan.workers, plan.way, flight=flight, recompute=plan.costs.recompute
    )
    return replace(plan, costs=costs)


def wanted(profile: Profile, cluster: Cluster, plan: Candidate, margin: float) -> Candidate:
    """The plan with as many as it should want by its round trips and its rounds, as far as memory goes."""
    if plan.way.schedule != "1f1b" or plan.way.cost != "ours":
        return plan
    usual = plan.costs.in_flight
    flight = _wanted(profile, cluster, plan, margin)
    for tried in (flight, _in_step(plan, flight)):
        found = with_flight(profile, cluster, plan, tried)
        if tried == list(usual) or runs(as_plan(profile, "-", cluster, found)):
            return found
    return plan


def most_first(profile: Profile, cluster: Cluster, plan: Candidate, margin: float) -> list[Candidate]:
    """The plan with as many as are ever tried, as many as it should want, half as many more, and the schedule's own
    number, each once, all as far as memory goes; not all of them need run to their end."""
    if plan.way.schedule != "1f1b":
        return [plan]
    rules, work = rules_and_loads(profile, cluster, plan.stages, plan.workers, plan.way)
    usual = plan.costs.in_flight
    most = [
        _fitting(rules, load, _MOST * w, w, again)
        for load, w, again in zip(work, usual, plan.costs.recompute, strict=True)
    ]
    should = _wanted(profile, cluster, plan, margin)
    half = [(w + few + 1) // 2 for w, few in zip(should, usual, strict=True)]
    in_step = [_in_step(plan, flight) for flight in ([*most[:-1], usual[-1]], should, half)]
    tried = [in_step[0], should, *in_step[1:], list(usual)]
    return [with_flight(profile, cluster, plan, flight) for flight in dict.fromkeys(map(tuple, tried))]


def runs(plan: Plan) -> bool:
    """Whether no worker waits for ever."""
    try:
        plan.check_schedule()
    except ScheduleError:
        return False
    return True


def _wanted(profile: Profile, cluster: Cluster, plan: Candidate, margin: float) -> list[int]:
    rules, work = rules_and_loads(profile, cluster, plan.stages, plan.workers, plan.way)
    links = link_loads(rules, profile, plan.stages, work, plan.workers)
    costs, flight = plan.costs, list(plan.costs.in_flight)
    pace = max(costs.bottleneck_s, *(float(load.max()) for load in links))
    for s in reversed(range(len(flight))):  # from the end: what a stage wants depends on those after it
        wait = waits(rules, work, plan.workers, costs.recompute, flight, pace)[s]
        fewest = flight[s]
        enough = math.ceil(wait / (len(plan.workers[s]) * pace * (1 + margin) * SLACK)) if pace else fewest
        flight[s] = _fitting(rules, work[s], min(enough, _MOST * fewest), fewest, costs.recompute[s])
    return flight


def _fitting(rules: Rules, load: Load, most: int, fewest: int, recompute: bool) -> int:
    """As many as memory allows of `most`, but not less than `fewest`."""
    limit = rules.cluster.memory_bytes
    while most > fewest and limit is not None and rules.memory_bytes(load, most, recompute) > limit:
        most -= 1
    return max(most, fewest)


def _in_step(plan: Candidate, flight: Sequence[int]) -> list[int]:
    """No stage has more in flight than the stage before it: where one lacks memory, all after it have less to do."""
    sizes = [len(numbers) for numbers in plan.workers]
    found = [flight[0]]
    for s in range(1, len(flight)):
        found.append(max(1, min(flight[s], found[-1] * sizes[s - 1] // sizes[s])))
    return found
