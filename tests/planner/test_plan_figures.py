"""What a plan's first lines compare it with: data parallelism and one worker."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from graphs import chain, random_cluster, random_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import Plan
from pdtool.cli.artifact_views import plan_view
from pdtool.errors import NoPlanError, UsageError
from pdtool.options.plan_options import PartitionOptions
from pdtool.planner.choice.comparison import simulated
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.plan_figures import refresh
from pdtool.planner.choice.strategies import planner_asked_for
from pdtool.planner.plan_cost import Evaluator
from pdtool.planner.simulator.engine import steady_state_s
from pdtool.schedule import SCHEDULES, ExecutionConfig
from pdtool.units import format_ratio

FAST = 1e9


def planned(profile, cluster, **options):
    asked = PartitionOptions(**options)
    return make_plan(profile, "p.json", cluster, planner_asked_for(asked).options(asked, cluster.workers))


def headline(plan: Plan) -> str:
    """The last line with the plan's time: what is simulated, if it was."""
    return [str(line) for line in plan_view(plan) if str(line).startswith(("predicted", "simulated"))][-1]


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), schedule=st.sampled_from([*SCHEDULES]))
def test_every_plan_is_compared_with_one_worker(seed, schedule):
    """Plans with schedules without formulas were not: zb-h1 took 1.02 s, where one worker takes 90 ms."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, rng.randint(2, 6)), replace(random_cluster(rng), memory_bytes=None)
    with suppress(NoPlanError, UsageError):
        plan = planned(profile, cluster, schedule=schedule)
        execution = ExecutionConfig().averaging(plan.execution.minibatches_per_update)
        alone = Evaluator(profile, cluster).data_parallel(1, execution).placement
        assert plan.predicted.one_worker_s == pytest.approx(steady_state_s(alone, profile, cluster))
        assert plan.predicted.one_worker_s == refresh(plan, profile).predicted.one_worker_s
        if plan.workers > 1 and plan.predicted.time_s:
            ratio = format_ratio(plan.predicted.one_worker_s / plan.predicted.time_s)
            assert headline(plan).endswith(f", {ratio} times as fast as one worker")


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    schedule=st.sampled_from(["1f1b", "1f1b-flush", "gpipe", "auto"]),
    minibatches=st.integers(1, 6),
)
def test_a_plan_is_compared_with_only_one_data_parallelism(seed, schedule, minibatches):
    """It was "14.7 times as fast as data parallelism", but below that took 3 times as long, because it had one worker:
    an update averages one minibatch."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, rng.randint(2, 6)), replace(random_cluster(rng), memory_bytes=None)
    with suppress(NoPlanError, UsageError):
        samples = minibatches * profile.batch_size
        plan = planned(profile, cluster, schedule=schedule, samples_per_update=samples)
        rivals = {rival.plan: rival for rival in plan.why.rivals if rival.plan.startswith("data parallelism")}
        assert set(rivals) <= {f"data parallelism ({cluster.workers})"}
        assert rivals or plan.config == str(cluster.workers)
        for rival in rivals.values():
            assert rival.samples_per_update == plan.predicted.data_parallel_samples_per_update
            if rival.samples_per_update > samples and "faster" in rival.why:
                assert rival.why.endswith(("but excluded by the options", "but not in the simulation"))


@pytest.mark.parametrize("samples", [1, 2, 8])
def test_one_worker_is_compared_with_for_any_samples_in_an_update(samples):
    """For 8 samples in a minibatch of 8, data parallelism was one worker, which hid the other one."""
    profile = chain([0.03] * 3, parameters=1000)
    plan = planned(profile, make_cluster((3,), (FAST,)), samples_per_update=samples, schedule="1f1b")
    assert headline(plan).endswith(" times as fast as one worker")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_headline_says_what_does_not_fit(schedule):
    """It was "14.7 times as fast as data parallelism, 2.99 times as fast as one worker", which would both not fit."""
    profile = chain([1.0] * 6, parameters=1000)
    for memory_bytes in (None, 11_000):
        cluster = make_cluster((3,), (FAST,), memory_bytes=memory_bytes)
        plan = planned(profile, cluster, schedule=schedule, strategy="pipeline")
        _, rival = simulated(plan, profile, against=["data-parallel"]).comparison.plans
        assert plan.predicted.data_parallel_fits == rival.fits == (memory_bytes is None)
        assert ("as data parallelism (which does not fit)" in headline(plan)) == (memory_bytes is not None)
        assert (plan.predicted.one_worker_s is None) == ("one worker" not in headline(plan)) == bool(memory_bytes)
