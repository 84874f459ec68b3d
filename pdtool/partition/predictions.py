"""The figures of a plan: from the formulas and a simulation, or, where no formulas cover it, from the simulation."""

from __future__ import annotations

from statistics import fmean

from pdtool.artifacts.plan import Plan, Predicted, Why
from pdtool.artifacts.profile import Profile
from pdtool.partition.cost.plan_cost import Evaluator, PlanCost
from pdtool.partition.placement import ExecutionConfig, Placement
from pdtool.partition.simulator.engine import simulate
from pdtool.partition.simulator.job import SimulationJob
from pdtool.partition.simulator.steady_state import steady_state_s
from pdtool.partition.stage_loads import tied_bytes
from pdtool.schedule import is_asynchronous


def samples_per_update(placement: Placement, profile: Profile) -> int:
    """Return the samples whose gradients an update averages, at the stage where these are most."""
    return profile.batch_size * max(placement.shape(tied_bytes(profile, placement.stages)).update_every)


def predict(plan: Plan, evaluator: Evaluator, placement: Placement) -> Plan:
    """Return the plan with figures for what it says, and what bounds it.

    Raises:
        ScheduleError: no formulas cover it, and its numbers in flight make it deadlock.
    """
    if not placement.execution.has_formulas:
        return _with_simulated_figures(plan, evaluator, placement)
    is_ours = evaluator.cost_model == "ours"
    simulated_s = steady_state_s(placement, evaluator.profile, evaluator.cluster) if is_ours else None
    cost = evaluator.cost(placement)
    figures = with_formulas(plan, evaluator, cost, placement.execution, simulated_s)
    return plan.model_copy(update={"why": Why(bottleneck=cost.bottleneck), "predicted": figures})


def with_formulas(
    plan: Plan, evaluator: Evaluator, cost: PlanCost, execution: ExecutionConfig, simulated_s: float | None
) -> Predicted:
    """Return the figures of a plan that the formulas cover.

    Args:
        simulated_s: seconds per minibatch in a simulation; None: it was not simulated.
    """
    return _predicted(plan, evaluator, execution, cost.time_per_minibatch_s, simulated_s, cost)


def _with_simulated_figures(plan: Plan, evaluator: Evaluator, placement: Placement) -> Plan:
    result = simulate(SimulationJob.of(placement, evaluator.profile, evaluator.cluster))
    depth, chunks = placement.pipeline_depth, placement.execution.chunks
    usages = [[usage for usage in result.workers if usage.stage == s] for s in range(depth)]
    compute_s = [fmean(usage.busy_s for usage in stage) / result.minibatches for stage in usages]
    memory_bytes = [max(usage.memory_bytes for usage in stage) for stage in usages]
    stages = range(len(placement.stages))
    cost = PlanCost(
        compute_s=tuple(compute_s[s % depth] / chunks for s in stages),
        allreduce_s=(0.0,) * len(stages),
        transfer_s=(0.0,) * (len(stages) - 1),
        stage_s=(),
        round_trip_s=(),
        memory_bytes=tuple(memory_bytes[s % depth] for s in stages),
        traffic_bytes=round(result.sent_bytes),
        flush_factor=1.0,
    )
    time_s = result.time_per_minibatch_s
    slowest = max(range(depth), key=compute_s.__getitem__)
    why = f"stage {slowest} computes most; {placement.execution.schedule} is simulated, there is no formula for it"
    flushing = ExecutionConfig.of_schedule("1f1b-flush", plan.microbatches)
    execution = flushing if plan.flushes else ExecutionConfig()
    figures = _predicted(plan, evaluator, execution, time_s, time_s, cost)
    return plan.model_copy(update={"why": Why(bottleneck=why), "predicted": figures})


def _predicted(
    plan: Plan,
    evaluator: Evaluator,
    execution: ExecutionConfig,
    bottleneck_s: float,
    simulated_s: float | None,
    cost: PlanCost,
) -> Predicted:
    """Return the figures. The gain is over data parallelism on all workers of the cluster, whether or not that fits in
    memory: of both in simulations, or of both by the same formulas. With a flush it takes no fewer minibatches in an
    update than the plan, as many on each worker.

    Args:
        execution: how data parallelism is run, but for its copies.
    """
    workers, microbatches = evaluator.cluster.workers, execution.microbatches
    if not is_asynchronous(execution.schedule):
        microbatches = -(-microbatches // workers) * workers
    data_parallel = evaluator.data_parallel(workers, ExecutionConfig.of_schedule(execution.schedule, microbatches))
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
        throughput_samples_per_s=plan.batch_size / time_s if time_s else 0.0,
        gain_over_data_parallel=other_s / own_s if own_s else 1.0,
        samples_per_update=samples_per_update(Placement.of(plan, evaluator.profile), evaluator.profile),
        data_parallel_samples_per_update=samples_per_update(data_parallel.placement, evaluator.profile),
        compute_s=cost.compute_s,
        allreduce_s=cost.allreduce_s,
        transfer_s=cost.transfer_s,
        memory_bytes=cost.memory_bytes,
        traffic_bytes=cost.traffic_bytes,
        cost=evaluator.cost_model,
        plan_sha256=plan.plan_sha256,
    )
