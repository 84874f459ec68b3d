"""From a profile and a cluster to a Plan: the search, its figures and its certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdtool.artifacts.plan import Plan, Predicted, Why
from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.partition.attempt import Candidate, as_plan
from pdtool.partition.beyond import SOURCE, has_formulas, interleaved, with_simulated_figures
from pdtool.partition.evaluate import Costs, Way, evaluate
from pdtool.partition.paces import simulated, speed
from pdtool.partition.rivals import known, rivals
from pdtool.partition.search import Options, Search
from pdtool.partition.settle import settled
from pdtool.schedule import POLICIES, SEARCHED_SCHEDULES, default_shape


def make_plan(profile: Profile, profile_path: str, cluster: Cluster, options: Options | None = None) -> Plan:
    """The best plan for `profile` on `cluster`, with its figures, its certificate and its rivals.

    Raises:
        UsageError: the options make no sense together or on this cluster.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    options = options or Options()
    if options.schedule == "interleaved":
        return interleaved(profile, profile_path, cluster, options)
    if options.schedule in SOURCE:
        straight = options.straight or options.schedule == "zb-h1"
        source = replace(options, schedule=SOURCE[options.schedule], straight=straight)
        found = make_plan(profile, profile_path, cluster, source)
        return under(found, profile, {"schedule": options.schedule, "weights": POLICIES[options.schedule][0]})
    search = Search(profile, cluster, options)
    chosen, others = search.best()
    asked = list(known(search, chosen.way))
    way = chosen.way.schedule, chosen.way.microbatches
    alike = [plan for _, plan in asked if (plan.way.schedule, plan.way.microbatches) == way]
    final, simulated_s = settled(search, chosen, [*others, *alike])
    plan = as_plan(profile, profile_path, cluster, final)
    bound, proof = lower_bound(search, others)
    pace = final.costs.bottleneck_s
    why = Why(
        bottleneck=final.costs.bottleneck,
        lower_bound_s=bound,
        gap=max(0.0, pace / bound - 1) if bound else 0.0,
        proof=proof,
        rivals=tuple(rivals(search, final, asked, others)),
    )
    figures = predicted(plan, profile, final.costs, final.way, simulated_s)
    return plan.model_copy(update={"why": why, "predicted": figures})


def lower_bound(search: Search, others: Sequence[Candidate]) -> tuple[float, str]:
    """(seconds per minibatch that no plan can beat, why that is so)."""
    best = others[0].costs.bottleneck_s
    space, workers = search.whole, search.workers
    if search.exact:
        kind = "straight pipeline" if search.options.straight else "plan"
        most = f" of at most {search.options.max_stages} stages" if search.options.max_stages else ""
        return best, (
            f"every {kind}{most} on {workers} workers was searched, over {len(space.inside)} cuts, with the "
            "minibatches in flight that its schedule wants"
        )
    work = sum(node.forward_s + node.backward_s for node in search.profile.nodes)
    return work / workers, f"{search.limits}; even so no plan beats {workers} workers that never wait"


def refresh(plan: Plan, profile: Profile) -> Plan:
    """The same plan with figures for what it says now, after an edit by hand.

    Raises:
        ArtifactError: its stages do not fit the profile.
    """
    if not has_formulas(plan):
        return with_simulated_figures(plan, profile)
    way = way_of(plan)
    costs = evaluate(
        profile,
        plan.cluster.cluster(),
        plan.stage_nodes(profile),
        [stage.workers for stage in plan.stages],
        way,
        flight=[stage.in_flight for stage in plan.stages],
        recompute=[stage.recompute for stage in plan.stages],
    )
    figures = predicted(plan, profile, costs, way, simulated(plan, profile) if way.cost == "ours" else None)
    return plan.model_copy(update={"why": Why(bottleneck=costs.bottleneck), "predicted": figures})


def under(plan: Plan, profile: Profile, changes: Mapping[str, Any]) -> Plan:
    """The same stages run in another way, with the minibatches in flight that it wants.

    Args:
        changes: of schedule, weights, microbatches and update_every.

    Raises:
        UsageError: the schedule cannot have these replicas.
    """
    changed = plan.model_copy(update=changes)
    if changed.schedule in SEARCHED_SCHEDULES:
        workers = [stage.workers for stage in plan.stages]
        costs = evaluate(profile, plan.cluster.cluster(), plan.stage_nodes(profile), workers, way_of(changed))
        in_flight, recompute = costs.in_flight, costs.recompute
    else:
        replicas = [stage.replicas for stage in plan.stages[: plan.pipeline_depth]]
        wanted = default_shape(changed.schedule, replicas, changed.microbatches, changed.chunks).in_flight
        in_flight, recompute = wanted * plan.chunks, tuple(stage.recompute for stage in plan.stages)
    stages = tuple(
        stage.model_copy(update={"in_flight": w, "recompute": again})
        for stage, w, again in zip(plan.stages, in_flight, recompute, strict=True)
    )
    changed = changed.model_copy(update={"stages": stages})
    changed.check_schedule()
    return refresh(changed, profile)


def way_of(plan: Plan) -> Way:
    """How a plan says that it is run, and whose formulas its figures are by."""
    cost = plan.predicted.cost if plan.predicted else "ours"
    return Way(schedule=plan.schedule, microbatches=plan.microbatches, copies=plan.copies, cost=cost)


def predicted(plan: Plan, profile: Profile, costs: Costs, way: Way, simulated_s: float | None) -> Predicted:
    """The figures of a plan."""
    return Predicted(
        **speed(plan, profile, costs.bottleneck_s, simulated_s, way),
        compute_s=costs.compute_s,
        allreduce_s=costs.allreduce_s,
        transfer_s=costs.transfer_s,
        memory_bytes=costs.memory_bytes,
        traffic_bytes=costs.traffic_bytes,
        cost=way.cost,
        plan_sha256=plan.plan_sha256,
    )
