"""The plans that a plan is compared with, one for each strategy that was named.

They are compared at equal samples per update, as far as the strategies have a choice. An update takes

    data-parallel       a minibatch of every worker: U minibatches for U workers
    gpipe               as many minibatches, each a microbatch, as the plan takes if that flushes, too; otherwise U
    hybrid              a minibatch of every replica of the first stage: fewer than U, whatever is fastest
    model-parallel      one minibatch: more would make an update rarer, and nothing faster
    straight, pipeline  what the replicas of its most replicated stage take, without a flush: 15 minibatches for 15-1

so the samples per update of data parallelism and GPipe are equal, and those of the others are no more. Minibatches keep
the size that was profiled: the time of smaller ones is not known from it. PipeDream (SOSP'19, section 5.4) gives GPipe
as many microbatches as PipeDream has minibatches in flight, which for a straight pipeline are U.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdtool.artifacts.cluster import Cluster, ClusterSpec
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.partition.planner import make_plan, refresh
from pdtool.partition.search.device_blocks import MAX_WORKERS_PER_COPY
from pdtool.partition.search.search import PlanSearch, SearchOptions
from pdtool.partition.strategies.strategy_options import strategy_options
from pdtool.schedule import RIVALS, STRATEGIES, is_asynchronous


def rival_plans(profile: Profile, cluster: Cluster, plan: Plan, names: Iterable[str]) -> dict[str, Plan]:
    """Return the best plan of each strategy on all workers of the cluster, by name, in the order of `names`.

    A rival that does not fit into the memory of a device is planned as if it did: `fits` tells.

    Args:
        plan: that they are compared with; it decides how many minibatches an update of GPipe takes.
        names: of RIVALS.

    Raises:
        UsageError: a name is not one of RIVALS, or its strategy needs more workers.
        NoPlanError: there is no plan of a strategy, whatever the memory.
    """
    return {name: _rival_plan(profile, cluster, plan, name) for name in names}


def fits(plan: Plan, cluster: Cluster) -> bool:
    """Whether every worker has the memory that the plan takes by the formulas."""
    needed = max(plan.predicted.memory_bytes) if plan.predicted else 0
    return cluster.memory_bytes is None or needed <= cluster.memory_bytes


def _rival_plan(profile: Profile, cluster: Cluster, plan: Plan, name: str) -> Plan:
    if name not in RIVALS:
        raise UsageError(f"strategy {name!r} cannot be compared with", f"choose of {', '.join(RIVALS)}")
    microbatches = None
    if name == "gpipe":
        microbatches = cluster.workers if is_asynchronous(plan.schedule) else plan.microbatches
    workers = _max_straight_workers(profile, cluster) if STRATEGIES[name].is_straight else None
    options = strategy_options(name, cluster, microbatches=microbatches, workers=workers)
    try:
        return make_plan(profile, plan.profile, cluster, options)
    except NoPlanError:
        if cluster.memory_bytes is None:
            raise
    unlimited = make_plan(profile, plan.profile, replace(cluster, memory_bytes=None), options)
    return refresh(unlimited.model_copy(update={"cluster": ClusterSpec.of(cluster)}), profile)


def _max_straight_workers(profile: Profile, cluster: Cluster) -> int:
    """Return on how many workers a pipeline without replicas can be."""
    max_stages = PlanSearch(profile, cluster, SearchOptions()).whole_space.cuts.max_stages
    return min(cluster.workers, max_stages, MAX_WORKERS_PER_COPY)
