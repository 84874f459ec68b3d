"""What would have to change where no plan is possible."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pdtool.cluster import Cluster
from pdtool.errors import NoPlanError
from pdtool.partition.attempt import Candidate
from pdtool.partition.evaluate import evaluate
from pdtool.units import format_bytes

if TYPE_CHECKING:
    from pdtool.partition.search import Search

_MOST_WORKERS = 64  # that are proposed


def nothing_fits(search: Search) -> NoPlanError:
    """Why there is no plan, and the smallest changes that would make one."""
    wants = search.options
    if wants.straight and search.workers > search.whole.most_stages:
        return NoPlanError(
            f"a straight pipeline on {search.workers} workers needs {search.workers} stages, but the model can be cut "
            f"into {search.whole.most_stages} at most",
            f"give --workers {search.whole.most_stages}",
        )
    least, limit = _least(search), search.cluster.memory_bytes
    if least is None or limit is None:
        return NoPlanError(
            "no division into stages keeps every pinned node where it is pinned",
            "loosen HINTS pin, or allow another number of stages",
        )
    need = max(least.costs.memory_bytes)
    stage = least.costs.memory_bytes.index(need)
    return NoPlanError(
        f"no plan fits: the one that needs the least memory, {least.config}, lacks {format_bytes(need - limit)} in "
        f"stage {stage}, which needs {format_bytes(need)} on a worker that has {format_bytes(limit)}",
        f"give each worker at least {need} bytes{_more_workers(search)}{_other_ways(search)}, or smaller minibatches",
    )


def _least(search: Search) -> Candidate | None:
    """The plan whose most loaded worker needs the least memory."""
    plans = []
    for layout in search.layouts:
        if layout.copies == 1:  # copies only hold the same once more
            for way in search.options.ways:
                attempt = replace(search.attempt(layout, way), least_memory=True)
                if np.isfinite(attempt.fastest.pace_s):
                    plans.append(_lean(search, attempt.traced(attempt.fastest)))
    return min(plans, key=lambda plan: max(plan.costs.memory_bytes), default=None)


def _lean(search: Search, plan: Candidate) -> Candidate:
    """The same with as little memory as may be."""
    recompute = [search.options.recompute] * len(plan.stages)
    costs = evaluate(search.profile, search.cluster, plan.stages, plan.workers, plan.way, recompute=recompute)
    return replace(plan, costs=costs)


def _more_workers(search: Search) -> str:
    """The fewest members of the outermost level with which a plan fits, doubling until then."""
    cluster = search.cluster
    while search.options.workers is None and not search.options.straight:
        outer = cluster.levels[0]
        cluster = replace(cluster, levels=(replace(outer, size=2 * outer.size), *cluster.levels[1:]))
        if cluster.workers > _MOST_WORKERS:
            break
        if _possible(replace(search, cluster=cluster, _tables={})):
            return f", or use --topology {_fewest(search, cluster).topology}"
    return ""


def _fewest(search: Search, enough: Cluster) -> Cluster:
    """The smallest cluster between one that is too small and one that is twice as large and large enough."""
    inner = enough.levels[1:]
    sizes = range(enough.levels[0].size // 2 + 1, enough.levels[0].size)
    for size in sizes:
        cluster = replace(enough, levels=(replace(enough.levels[0], size=size), *inner))
        if _possible(replace(search, cluster=cluster, _tables={})):
            return cluster
    return enough


def _other_ways(search: Search) -> str:
    """Other schedules that fit."""
    ways = [("1f1b", 1), ("1f1b-flush", max(4, search.options.microbatches))]
    tried = {way.schedule for way in search.options.ways}
    for schedule, microbatches in ways:
        options = replace(search.options, schedule=schedule, microbatches=microbatches)
        if schedule not in tried and _possible(replace(search, options=options)):
            return f", or use --schedule {schedule}"
    return ""


def _possible(search: Search) -> bool:
    least = _least(search)
    return least is not None and max(least.costs.memory_bytes) <= (search.cluster.memory_bytes or 0)
