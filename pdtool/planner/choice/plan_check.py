"""Check a plan's claims about itself.

Compute the figures again from the profile and compare them. Test the certificate by searching again for a plan faster
than its lower bound. (The tests check the formulas themselves against an independent implementation, and the search
against brute force.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pdtool.artifacts.plan import Certificate, Plan, PlanOptions, Predicted
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, NoPlanError, ScheduleError, UsageError
from pdtool.planner.choice.make_plan import gap_to_bound
from pdtool.planner.choice.plan_figures import refresh
from pdtool.planner.choice.strategies import PLANNERS
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Candidate
from pdtool.planner.search.search import PlanSearch
from pdtool.schedule import STRATEGIES
from pdtool.units import counted, format_bytes, format_seconds, format_speedup, format_throughput

_RELATIVE_TOLERANCE = 1e-9  # sums taken in another order differ in the last digits
_NO_FIGURES = ("cost", "plan_sha256")  # fields of Predicted that say what the others are of
# Which earlier plans lack:
_LATER_FIGURES = ("samples_per_update", "data_parallel_samples_per_update", "data_parallel_fits", "one_worker_s")


@dataclass(frozen=True)
class Finding:
    """One claim of a plan, or for `check --fresh` one of its files.

    Attributes:
        claim: its name.
        holds: whether it is true, or the file fresh; None if unknown, and for a note.
        words: the finding, in words.
        field: the plan's field that stores the figure, if there is one.
        stored, recomputed: the two figures, if they differ.
        remedy: what to do about a stale file.
    """

    claim: str
    holds: bool | None
    words: str
    field: str = ""
    stored: Any = None
    recomputed: Any = None
    remedy: str = ""


def check_plan(plan: Plan, profile: Profile) -> Iterator[Finding]:
    """Yield the finding for each claim of a plan, in reading order.

    Ends early if the stages do not divide the profile or cannot be executed, because then there are no figures. For a
    plan edited by hand it reports the figures that it has now.
    """
    try:
        placement = Placement.of(plan, profile)
    except ArtifactError as error:
        yield Finding("stages", False, error.fault, error.field)
        return
    words = (
        f"{counted(len(profile.nodes), 'operator')} in {counted(len(placement.stages), 'stage')}, each in exactly one"
    )
    yield Finding("stages", True, f"{words}. No stage takes a tensor from a later one. HINTS are followed")
    schedule = _schedule(plan)
    yield schedule
    if not schedule.holds:
        return
    recomputed = refresh(plan, profile).predicted
    assert recomputed
    yield _memory(plan, recomputed)
    if plan.edited or not plan.predicted:  # the second for the type checker: without figures it is edited
        yield from _of_edited_plan(plan, profile, recomputed)
        return
    for name, stored in plan.predicted:
        if name not in _NO_FIGURES and not (name in _LATER_FIGURES and stored is None):
            yield _compared(name, stored, getattr(recomputed, name))
    yield from _certificate(plan, profile, recomputed.bottleneck_s)


def _of_edited_plan(plan: Plan, profile: Profile, recomputed: Predicted) -> Iterator[Finding]:
    """Report what an edited plan is now. Its stored figures belong to the plan before, so none can be false."""
    stored = "the plan was edited by hand, and its file still has the old figures"
    if plan.predicted is None:
        stored = "the file has no figures for this profile"
    words = (
        f"{stored}; it now takes {format_seconds(recomputed.time_s)} per minibatch "
        f"({format_throughput(recomputed.throughput_samples_per_s)}), "
        f"{format_speedup(recomputed.gain_over_data_parallel)} times as fast as data parallelism on "
        f"{counted(plan.cluster.workers, 'worker')}"
    )
    yield Finding("figures", None, words, "predicted", recomputed=recomputed.model_dump(mode="json"))
    with suppress(UsageError, NoPlanError):  # not searched, or only with options that the plan does not record
        if not (found := _found_again(plan, profile)):
            return
        fastest = found[0]
        best_s = fastest.time_per_minibatch_s
        ratio = recomputed.bottleneck_s / best_s if best_s else 1.0
        difference = f"{ratio - 1:.1%} more" if ratio >= 1 else f"{1 - ratio:.1%} less"
        words = (
            f"by the formulas it takes {format_seconds(recomputed.bottleneck_s)}, {difference} than the fastest plan "
            f"found with the options of the unedited plan ({fastest.placement.config}, {format_seconds(best_s)})"
        )
        yield Finding("lower bound", None, words, recomputed=best_s)


def _schedule(plan: Plan) -> Finding:
    in_flight = ", ".join(str(stage.in_flight) for stage in plan.stages)
    try:
        plan.check_schedule()
    except ScheduleError as error:
        return Finding("schedule", False, str(error), "stages", stored=in_flight)
    minibatches = "minibatch" if in_flight == "1" else "minibatches"
    return Finding("schedule", True, f"{plan.schedule} runs to its end with {in_flight} {minibatches} in flight")


def _memory(plan: Plan, recomputed: Predicted) -> Finding:
    needed = recomputed.memory_bytes
    worst, limit = max(range(len(needed)), key=needed.__getitem__), plan.cluster.memory_bytes
    words = f"stage {worst} needs most, {format_bytes(needed[worst])} on a worker that has "
    words += "no limit" if limit is None else format_bytes(limit)
    fits = limit is None or needed[worst] <= limit
    return Finding("memory", fits, words, f"stages[{worst}]", limit, needed[worst])


def _compared(name: str, stored: Any, recomputed: Any) -> Finding:
    """Compare a figure, or one for each stage. Bytes may differ by one, because they are rounded up."""
    old, new = (value if isinstance(value, tuple) else (value,) for value in (stored, recomputed))
    tolerance = 1.0 if name.endswith("_bytes") else 0.0
    holds = len(old) == len(new) and all(
        a == b or (None not in (a, b) and math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=tolerance))
        for a, b in zip(old, new, strict=False)
    )
    words = "as recomputed" if holds else f"the plan says {_listed(stored)}, but it is {_listed(recomputed)}"
    return Finding(name, holds, words, f"predicted.{name}", stored, recomputed)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _certificate(plan: Plan, profile: Profile, time_s: float) -> Iterator[Finding]:
    if not plan.why or not plan.why.certificate:
        yield Finding("lower bound", None, "none is claimed")
        return
    certificate = plan.why.certificate
    yield _lower_bound(plan, profile, certificate, time_s)
    stored, gap = certificate.gap, gap_to_bound(time_s, certificate.bound_s)
    is_same = stored is not None and abs(stored - gap) <= _RELATIVE_TOLERANCE * (1 + gap)
    words = f"this plan is {gap:.2%} slower than the lower bound" + f", but the plan says {stored}" * (not is_same)
    yield Finding("gap", is_same, words, "why.certificate.gap", stored, gap)


def _lower_bound(plan: Plan, profile: Profile, certificate: Certificate, time_s: float) -> Finding:
    """Search again, and compare the fastest plan with the bound.

    If a plan does not record its options, a faster plan proves nothing: the options may have excluded it.
    """
    fastest = _found_again(plan, profile)
    best_s = min([time_s, *(candidate.time_per_minibatch_s for candidate in fastest[:1])])
    bound_s, least_s = certificate.bound_s, certificate.bound_s * (1 - _RELATIVE_TOLERANCE)
    words = f"the certificate says that no plan takes less than {format_seconds(bound_s)}. The fastest plan found now "
    words += f"takes {format_seconds(best_s)}"
    if fastest and best_s < time_s:
        words += f" ({fastest[0].placement.config})"
    if plan.asked is None:
        words += "; the plan does not record its options, so the search took them from its stages"
    floor_s = sum(node.forward_s + node.backward_s for node in profile.nodes) / plan.cluster.workers
    if bound_s < floor_s * (1 - _RELATIVE_TOLERANCE):
        words += f"; this bound is weak, because workers that never wait would take {format_seconds(floor_s)}"
    holds = best_s >= least_s or (None if plan.asked is None and time_s >= least_s else False)
    return Finding("lower bound", holds, words, "why.certificate.bound_s", bound_s, best_s)


def _found_again(plan: Plan, profile: Profile) -> list[Candidate]:
    """Repeat the search behind the certificate. Use the plan's own schedule and strategy if it was edited or does not
    record its options. In the second case allow recomputation only if one of its stages recomputes.
    """
    asked = plan.asked or PlanOptions(
        straight=STRATEGIES[plan.strategy].is_straight,
        recompute=any(stage.recompute for stage in plan.stages),
        cost_model=plan.predicted.cost if plan.predicted else "ours",
    )
    if plan.edited or plan.asked is None:
        asked = replace(asked, schedule=plan.schedule, microbatches=plan.microbatches, strategy=plan.strategy)
        asked = replace(asked, update_every=plan.update_every)
    search = PlanSearch(profile.sent_as(plan.wire_dtype), plan.cluster, replace(asked, simplest=0.0))
    return PLANNERS[asked.strategy].candidates(search)
