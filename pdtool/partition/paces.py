"""How fast a plan is: by a simulation, where that does not take too long, or else by the formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypedDict

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import ScheduleError
from pdtool.partition.attempt import Candidate, as_plan
from pdtool.partition.evaluate import Way, evaluate
from pdtool.partition.simulator.compare import actions
from pdtool.partition.simulator.planned import planned_job
from pdtool.partition.simulator.simulate import simulated_pace

_MOST_SIMULATED = 300_000  # actions times workers, about half a second


class Speed(TypedDict):
    """Fields of artifacts.plan.Predicted."""

    bottleneck_s: float
    simulated_s: float | None
    data_parallel_s: float | None
    throughput_samples_per_s: float
    gain_over_data_parallel: float


def simulated(plan: Plan, profile: Profile, limit_s: float = math.inf) -> float | None:
    """Seconds per minibatch in steady state, infinite above the limit; None where it would take too long, or the plan
    cannot be executed."""
    if too_large(plan):
        return None
    try:
        return simulated_pace(planned_job(plan, profile), limit_s)
    except ScheduleError:
        return None


def too_large(plan: Plan) -> bool:
    """Whether a simulation would take too long."""
    return actions(plan) * plan.workers > _MOST_SIMULATED


def speed(plan: Plan, profile: Profile, bottleneck_s: float, simulated_s: float | None, way: Way) -> Speed:
    """The figures of a plan. The gain is over data parallelism on all workers of the cluster, whether or not that fits
    in memory: of both in simulations, or of both by the same formulas."""
    cluster = plan.cluster.cluster()
    way = replace(way, copies=1)
    stages, workers = [profile.graph.names], [range(cluster.workers)]
    costs = evaluate(profile, cluster, stages, workers, way)
    alone = Candidate(stages=stages, workers=workers, way=way, costs=costs)
    other_s = None if simulated_s is None else simulated(as_plan(profile, "-", cluster, alone), profile)
    pace = bottleneck_s if simulated_s is None else simulated_s
    own, other = (bottleneck_s, costs.bottleneck_s) if other_s is None else (pace, other_s)
    return Speed(
        bottleneck_s=bottleneck_s,
        simulated_s=simulated_s,
        data_parallel_s=other_s,
        throughput_samples_per_s=plan.batch_size / pace if pace else 0.0,
        gain_over_data_parallel=other / own if own else 1.0,
    )
