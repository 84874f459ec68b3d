"""What the options of `pdtool run` change in a plan: its schedule, updates, weight policy and messages."""

from __future__ import annotations

from pdtool.api.inputs import Inputs
from pdtool.artifacts.plan import Plan
from pdtool.errors import UsageError
from pdtool.options.run_options import RunOptions
from pdtool.schedule import SCHEDULES, schedule_names
from pdtool.units import counted


def rescheduled(inputs: Inputs, asked: RunOptions) -> Plan:
    """Return the plan with the same stages, run as `asked` says; None keeps the plan's value.

    Raises:
        UsageError: the schedule excludes an option, or cannot have these stages.
    """
    plan, microbatches, weights, update_every = inputs.plan, asked.microbatches, asked.weights, asked.update_every
    if asked.wire_dtype not in (None, plan.wire_dtype):
        from pdtool.planner.choice.plan_figures import refresh

        plan = refresh(plan.model_copy(update={"wire_dtype": asked.wire_dtype}), inputs.profile)
    if (asked.schedule, microbatches, weights, update_every) == (None,) * 4:
        return plan
    from pdtool.planner.choice.without_formulas import reschedule

    name = asked.schedule or plan.schedule
    kind = SCHEDULES[name]
    if not kind.flushes and microbatches not in (None, 1):
        raise UsageError(f"schedule {name} has no microbatches", "use --update-every, or --schedule 1f1b-flush")
    if kind.flushes and update_every:
        raise UsageError(
            f"schedule {name} updates after all microbatches, so it has no --update-every", "pass --microbatches"
        )
    kept = plan.weights if name == plan.schedule else kind.policy_names[0]
    if weights and weights not in kind.policy_names:
        remedy = f"pass {' or '.join(kind.policy_names)}" if len(kind.policies) > 1 else "leave --weights out"
        raise UsageError(f"schedule {name} cannot be combined with --weights {weights}", remedy)
    if kind.chunked != (plan.chunks > 1):
        chunked = schedule_names(lambda other: other.chunked)
        remedy = f"use another schedule, or partition with --schedule {chunked if kind.chunked else name}"
        raise UsageError(f"schedule {name} cannot have {counted(plan.chunks, 'stage')} on each worker", remedy)
    replicas = max(stage.replicas for stage in plan.stages)
    if update_every and update_every < replicas:
        what = f"with --update-every {update_every}, some of a stage's {replicas} replicas get no minibatch"
        raise UsageError(what, f"pass --update-every {replicas} or more")
    usual = plan.execution.under(name)
    interval = {"microbatches": microbatches or usual.microbatches, "update_every": update_every or usual.update_every}
    return reschedule(plan, inputs.profile, {"schedule": name, "weights": weights or kept, **interval})
