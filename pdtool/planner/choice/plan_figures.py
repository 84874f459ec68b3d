"""A plan's figures: by the formulas and a simulation, or by the simulation alone if no formulas cover its schedule."""

from __future__ import annotations

from dataclasses import replace

from pdtool.artifacts.plan import Plan, Predicted, Why
from pdtool.artifacts.profile import Profile
from pdtool.planner.choice.strategies import PLANNERS
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Evaluator, PlanCost, samples_per_update
from pdtool.planner.simulator.engine import simulate, steady_state_s
from pdtool.planner.simulator.job import SimulationJob
from pdtool.schedule import ExecutionConfig


def refresh(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with figures for its stages as they are, which a person may have edited.

    Raises:
        ArtifactError: its stages do not fit the profile.
        ScheduleError: no formulas cover it, and its numbers in flight make it deadlock.
    """
    evaluator, placement = Evaluator.of(plan, profile), Placement.of(plan, profile)
    if not placement.execution.has_formulas:
        return _with_simulated_figures(plan, evaluator, placement)
    is_ours = evaluator.options.cost_model == "ours"
    simulated_s = steady_state_s(placement, evaluator.profile, evaluator.cluster) if is_ours else None
    cost = evaluator.cost(placement)
    figures = predicted_figures(plan, evaluator, cost, cost.time_per_minibatch_s, simulated_s)
    return plan.model_copy(update={"why": Why(bottleneck=cost.bottleneck), "predicted": figures})


def simulated_cost(evaluator: Evaluator, placement: Placement) -> tuple[PlanCost, float]:
    """Return the cost of a placement with the simulation's memory and traffic, and its simulated seconds per minibatch.
    What a stage, its average or a border takes by itself does not depend on the schedule, so that comes from the
    formulas.

    Raises:
        ScheduleError: its numbers in flight make it deadlock.
    """
    result = simulate(SimulationJob.of(placement, evaluator.profile, evaluator.cluster))
    depth = placement.pipeline_depth
    needed = [max(usage.memory_bytes for usage in result.workers if usage.stage == s) for s in range(depth)]
    memory_bytes = tuple(needed) * placement.execution.chunks
    cost = replace(
        evaluator.cost(placement),
        memory_bytes=memory_bytes,
        searched_memory_bytes=memory_bytes,
        traffic_bytes=round(result.sent_bytes),
    )
    return cost, result.time_per_minibatch_s


def _with_simulated_figures(plan: Plan, evaluator: Evaluator, placement: Placement) -> Plan:
    """Return the plan with the figures of a simulation."""
    cost, time_s = simulated_cost(evaluator, placement)
    execution = placement.execution
    weights = f" with --weights {execution.weights}" if execution.kind.has_formulas else ""
    figures = predicted_figures(plan, evaluator, cost, time_s, time_s)
    slowest = figures.slowest_part(placement.pipeline_depth)
    why = f"{slowest}; {execution.schedule}{weights} has no formulas, so it is simulated"
    return plan.model_copy(update={"why": Why(bottleneck=why), "predicted": figures})


def predicted_figures(
    plan: Plan, evaluator: Evaluator, cost: PlanCost, bottleneck_s: float, simulated_s: float | None
) -> Predicted:
    """Return the figures. The gain is over data parallelism on all workers of the cluster, even if that does not fit in
    memory. Both are simulated, or both computed by the same formulas. One worker sends nothing, so that its time by
    the formulas equals its simulated time.

    Args:
        bottleneck_s: seconds per minibatch by the formulas, or simulated if no formulas cover the plan.
        simulated_s: seconds per minibatch in a simulation; None: it was not simulated.
    """
    workers = evaluator.cluster.workers
    minibatches = PLANNERS["data-parallel"].rival_minibatches(plan.execution.minibatches_per_update, workers)
    execution = ExecutionConfig().averaging(minibatches)  # as the rival in `simulate`
    data_parallel = evaluator.data_parallel(workers, execution)
    one_worker = evaluator.data_parallel(1, ExecutionConfig().averaging(plan.execution.minibatches_per_update))
    data_parallel_s = None
    if simulated_s is not None:
        data_parallel_s = steady_state_s(data_parallel.placement, evaluator.profile, evaluator.cluster)
    time_s = bottleneck_s if simulated_s is None else simulated_s
    own_s, other_s = time_s, data_parallel_s
    if other_s is None:
        own_s, other_s = bottleneck_s, data_parallel.time_per_minibatch_s
    return Predicted(
        bottleneck_s=bottleneck_s,
        simulated_s=simulated_s,
        data_parallel_s=data_parallel_s,
        data_parallel_fits=evaluator.fits(data_parallel),
        one_worker_s=one_worker.time_per_minibatch_s if evaluator.fits(one_worker) else None,
        throughput_samples_per_s=plan.batch_size / time_s if time_s else 0.0,
        gain_over_data_parallel=other_s / own_s if own_s else 1.0,
        samples_per_update=samples_per_update(Placement.of(plan, evaluator.profile), evaluator.profile),
        data_parallel_samples_per_update=samples_per_update(data_parallel.placement, evaluator.profile),
        compute_s=cost.compute_s,
        allreduce_s=cost.allreduce_s,
        transfer_s=cost.transfer_s,
        memory_bytes=cost.memory_bytes,
        traffic_bytes=cost.traffic_bytes,
        cost=evaluator.options.cost_model,
        plan_sha256=plan.plan_sha256,
    )
