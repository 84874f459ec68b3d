"""Why no plan is possible, and the smallest changes that would make one."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import Any

from pdtool.artifacts.cluster import Cluster
from pdtool.errors import NoPlanError
from pdtool.planner.search.search import PlanSearch
from pdtool.schedule import ONE_F_ONE_B, SCHEDULES, STRATEGIES
from pdtool.units import bytes_option, counted, format_bytes

_MAX_WORKERS = 64  # that are proposed


def explain_infeasible(search: PlanSearch) -> NoPlanError:
    """Return the error that says why there is no plan, and what would help."""
    options, max_stages = search.options, search.whole_space.max_stages
    if options.straight and search.workers > max_stages:
        return NoPlanError(
            f"a straight pipeline on {search.workers} workers needs {search.workers} stages, but the model can be cut "
            f"into {max_stages} at most",
            f"pass --workers {max_stages}{', or remove pins of HINTS and profile again' if search.profile.pin else ''}",
        )
    smallest, limit = search.smallest_plan, search.cluster.memory_bytes
    if smallest is None or limit is None:
        what = "no split into stages puts every pinned module of HINTS into its stage"
        return NoPlanError(
            what, "remove pins of HINTS and profile again, or leave out the options that set the number of stages"
        )
    needed = max(smallest.cost.searched_memory_bytes)
    if options.in_flight and needed <= limit:
        in_flight = counted(options.in_flight, "minibatch")
        what = f"no plan{options.with_replicas} was found that fits with {in_flight} in flight"
        fewer = "pass fewer, or " if options.in_flight > 1 else ""
        return NoPlanError(what, f"{fewer}leave --in-flight out")
    stage = smallest.cost.searched_memory_bytes.index(needed)
    short = f" lacks {format_bytes(needed - limit)} in stage {stage}" if limit > 1 else " does not fit"
    left = f"a worker has {format_bytes(limit) if limit > 1 else 'nothing left'} for them"
    least = search.profile.memory_for(needed, search.cluster.levels[-1].size)
    recomputing = " with every stage recomputing" if options.recompute else ""
    is_recomputing_help = not options.recompute and _is_possible(search, recompute=True)
    recompute = ", or leave out --no-recompute" if is_recomputing_help else ""
    is_replicas_help = options.replicas is not None and _is_possible(search, replicas=None)
    other_replicas = ", or leave --replicas out" if is_replicas_help else ""
    return NoPlanError(
        f"no plan{options.with_replicas} fits into memory. Even the smallest, {smallest.placement.config}"
        f"{recomputing},{short}: its tensors need {format_bytes(needed)}, and {left}",
        f"give each worker at least --memory {bytes_option(least)}{recompute}"
        f"{_more_workers(search)}{_other_schedules(search)}{other_replicas}, or use smaller minibatches",
    )


def _more_workers(search: PlanSearch) -> str:
    """Return the fewest members of the outermost level with which a plan fits: with more, plans need no more memory."""
    options, cluster, (outer, *inner) = search.options, search.cluster, search.cluster.levels
    if options.workers is not None or options.straight or options.replicas:
        return ""
    sizes = range(outer.size + 1, _MAX_WORKERS * outer.size // cluster.workers + 1)
    larger = [replace(cluster, levels=(replace(outer, size=size), *inner)) for size in sizes]
    if not larger or not _fits_on(search, larger[-1]):
        return ""
    smallest = bisect_left(larger, True, hi=len(larger) - 1, key=partial(_fits_on, search))
    return f", or use --topology {larger[smallest].topology}"


def _other_schedules(search: PlanSearch) -> str:
    """Return another schedule that fits; for a strategy with only one schedule, whether another strategy fits."""
    if STRATEGIES[search.options.strategy].schedule:
        anything = {"strategy": "auto", "schedule": ONE_F_ONE_B.name, "microbatches": 1}
        is_help = _is_possible(search, straight=False, **anything)
        return ", or use --strategy auto" if is_help else ""
    searched = [execution.kind for execution in search.options.executions]
    for kind in (kind for kind in SCHEDULES.values() if kind.has_formulas and kind not in searched):
        microbatches = max(4, search.options.microbatches) if kind.flushes else 1
        if _is_possible(search, schedule=kind.name, microbatches=microbatches):
            return f", or use --schedule {kind.name}"
    return ""


def _fits_on(search: PlanSearch, cluster: Cluster) -> bool:
    return _is_possible(PlanSearch(search.profile, cluster, search.options))


def _is_possible(search: PlanSearch, **changes: Any) -> bool:
    """Return whether a plan fits under other options."""
    return replace(search, options=replace(search.options, **changes)).may_fit
