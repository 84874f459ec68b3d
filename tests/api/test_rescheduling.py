"""What `pdtool run` may change in a plan, and what it advises where the plan cannot be changed so."""

from types import SimpleNamespace

import pytest

from pdtool import Plan, Profile
from pdtool.api.rescheduling import rescheduled
from pdtool.errors import UsageError
from pdtool.options.run_options import RunOptions
from pdtool.planner.choice.comparison import simulated
from pdtool.planner.choice.without_formulas import under_schedule
from pdtool.planner.placement import Placement
from pdtool.schedule import SCHEDULES


@pytest.mark.parametrize(
    ("planned", "chunks", "asked", "remedy"),
    [
        ("interleaved", 2, "1f1b", "partition with --schedule 1f1b"),
        ("1f1b", 1, "interleaved", "partition with --schedule interleaved"),
    ],
)
def test_stages_in_chunks_need_a_plan_of_their_own(planned, chunks, asked, remedy):
    plan = SimpleNamespace(schedule=planned, chunks=chunks, weights="flush", wire_dtype="fp32")
    with pytest.raises(UsageError, match=rf"schedule {asked} cannot have {chunks} stage.*; use .* or {remedy}"):
        rescheduled(SimpleNamespace(plan=plan), RunOptions(schedule=asked))


def test_an_update_has_a_minibatch_for_each_replica(road):
    plan = Plan.load("plans/model-2.yaml")
    stages = tuple(stage.model_copy(update={"replicas": 3}) for stage in plan.stages[:1])
    inputs = SimpleNamespace(plan=plan.model_copy(update={"stages": stages}))
    with pytest.raises(
        UsageError, match=r"--update-every 2, some of a stage's 3 replicas get .*; pass --update-every 3"
    ):
        rescheduled(inputs, RunOptions(update_every=2))


@pytest.mark.parametrize("asked", [{"update_every": 2}, {"schedule": "gpipe"}, {"weights": "vertical-sync"}])
def test_a_stage_that_recomputes_by_choice_keeps_doing_so(road, asked):
    plan, profile = Plan.load("plans/model-2.yaml"), Profile.load("profiles/model.json")
    first, *others = plan.stages
    plan = plan.model_copy(update={"stages": (first.model_copy(update={"recompute": True}), *others)})
    found = rescheduled(SimpleNamespace(plan=plan, profile=profile), RunOptions(**asked))
    assert [stage.recompute for stage in found.stages] == [True, *(False for _ in others)]


@pytest.mark.parametrize("options", [("--samples-per-update", "16"), ("--schedule", "gpipe", "--microbatches", "1")])
def test_another_flushing_schedule_averages_as_many_samples_as_the_plan(road, options):
    """`--schedule 1f1b-flush` made four microbatches of fewer, even of a plan that had this schedule."""
    road.pdtool("partition", "--topology", "2", "--straight", *options, "-o", "plans/flushing.yaml")
    plan, profile = Plan.load("plans/flushing.yaml"), Profile.load("profiles/model.json")
    for schedule in ("1f1b-flush", "gpipe"):
        other = rescheduled(SimpleNamespace(plan=plan, profile=profile), RunOptions(schedule=schedule))
        assert other.microbatches == plan.microbatches < 4
        assert other.predicted.samples_per_update == plan.predicted.samples_per_update


@pytest.mark.parametrize("options", [(), ("--samples-per-update", "16"), ("--schedule", "gpipe")])
def test_a_simulation_of_another_schedule_has_the_updates_of_a_run(road, options):
    """A simulation flushed after four microbatches for each stage, a run after four. It had fewer minibatches in
    flight, too, and so took other time and memory."""
    road.pdtool("partition", "--topology", "2", "--straight", *options, "-o", "plans/planned.yaml")
    plan, profile = Plan.load("plans/planned.yaml"), Profile.load("profiles/model.json")
    for schedule in (kind.name for kind in SCHEDULES.values() if not kind.chunked and kind.name != plan.schedule):
        run = rescheduled(SimpleNamespace(plan=plan, profile=profile), RunOptions(schedule=schedule))
        placement = under_schedule(plan, profile, schedule, chunks=1)
        assert placement == Placement.of(run, profile)
        found = simulated(plan, profile, schedule, bandwidths=[plan.cluster.levels[0].bandwidth_bytes_per_s])
        assert found.result.time_per_minibatch_s == pytest.approx(run.predicted.simulated_s)
        assert found.sweep[0].time_per_minibatch_s == pytest.approx(run.predicted.simulated_s)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_a_simulation_refuses_what_a_run_refuses(road, schedule):
    """Model parallelism has one minibatch in flight; a simulation gave it another schedule."""
    road.pdtool("partition", "--topology", "2", "--strategy", "model-parallel", "-o", "plans/turns.yaml")
    error = "strategy model-parallel fixes the --schedule and the --weights of its plans; for others, partition again"
    assert error in road.pdtool("simulate", "plans/turns.yaml", "--schedule", schedule, code=2).stderr
    assert "assume that stages and messages never overlap" in road.pdtool("show", "plans/turns.yaml").stdout
