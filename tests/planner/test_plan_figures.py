"""What a plan's first lines compare it with: data parallelism and one worker."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from graphs import chain, random_cluster, random_profile, with_nodes
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import Plan
from pdtool.cli.artifact_views import plan_view
from pdtool.errors import NoPlanError, UsageError
from pdtool.options.plan_options import PartitionOptions
from pdtool.planner.choice.comparison import rival_plans, simulated
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.plan_figures import refresh
from pdtool.planner.choice.strategies import planner_asked_for
from pdtool.planner.plan_cost import Evaluator
from pdtool.planner.simulator.engine import steady_state_s
from pdtool.reports.sentences import plan_sentence
from pdtool.schedule import SCHEDULES, ExecutionConfig
from pdtool.units import format_seconds, format_speedup

FAST = 1e9


def planned(profile, cluster, **options):
    asked = PartitionOptions(**options)
    return make_plan(profile, "p.json", cluster, planner_asked_for(asked).options(asked, cluster.workers))


def headline(plan: Plan) -> str:
    """The last line with the plan's time: what is simulated, if it was."""
    return [str(line) for line in plan_view(plan) if str(line).startswith(("predicted", "simulated"))][-1]


@pytest.mark.rows_of_the_day(days=2)
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
            ratio = format_speedup(plan.predicted.one_worker_s / plan.predicted.time_s)
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


@given(simulated_s=st.floats(0.5, 10))
def test_an_optimal_plan_says_if_the_simulation_takes_longer(simulated_s):
    """It was "optimal: ... no plan takes less than 4.73 ms" beside "simulated: 6.1 ms"."""
    profile = chain([1.0] * 2, crossing=1)
    plan = planned(profile, make_cluster((2,), (FAST,)), strategy="pipeline")
    figures = plan.predicted.model_copy(update={"simulated_s": simulated_s})
    claim = plan.model_copy(update={"predicted": figures}).certificate_lines[0]
    assert claim.startswith("optimal: by the formulas, no plan with these options takes less than 1 s per minibatch")
    says_so = claim.endswith(f". In the simulation, this plan takes {format_seconds(simulated_s)}")
    assert says_so == (simulated_s > 1.03)


def test_a_plan_of_one_worker_says_so():
    """Links are so slow that it does it all. The sentence on the page named a level that connects nothing."""
    profile = chain([1.0] * 2, parameters=100, crossing=100)
    plan = planned(profile, make_cluster((4,), (10.0,)))
    assert plan.config == "1"
    assert headline(plan).endswith("times as fast as data parallelism on 4 workers (this is one worker alone)")
    assert plan_sentence(plan, profile).endswith("everything on one worker")


def test_the_sentence_of_a_plan_names_the_rate_of_its_slowest_links():
    """It was "at 8 Tbit/s", the rate of a level with a single member."""
    profile = chain([1.0] * 4, crossing=1)
    plan = planned(profile, make_cluster((1, 2, 2), (1e12, 1.25e9, 12e9)), strategy="pipeline")
    assert " at 10 Gbit/s" in plan_sentence(plan, profile)


def test_a_rival_of_another_strategy_that_is_faster_names_it():
    """GPipe was "excluded by the options", though no option was given: it updates the weights every fourth time."""
    profile = chain([1.0] * 2, parameters=1000, crossing=1)
    profile = with_nodes(profile, [node.model_copy(update={"update_s": 2.0}) for node in profile.nodes])
    plan = planned(profile, make_cluster((4,), (100.0,)))
    [why] = [rival.why for rival in plan.why.rivals if rival.plan.startswith("GPipe")]
    assert why.endswith("faster by the formulas, but it needs --strategy gpipe")
    assert planned(profile, plan.cluster, strategy="gpipe").predicted.simulated_s < plan.predicted.simulated_s


@pytest.mark.rows_of_the_day(days=2)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), recompute=st.booleans())
def test_simulate_lets_no_rival_recompute_if_the_plan_may_not(seed, recompute):
    """Of GPipe `partition --no-recompute` said that it does not fit, and `simulate` that it does."""
    rng = random.Random(seed)
    profile, cluster = random_profile(rng, rng.randint(2, 6)), random_cluster(rng)
    with suppress(NoPlanError, UsageError):
        plan = planned(profile, cluster, recompute=recompute)
        for rival in rival_plans(profile, cluster, plan, ["data-parallel", "gpipe"]).values():
            assert rival.asked.recompute == recompute
            assert recompute or not any(stage.recompute for stage in rival.stages)


def test_the_stages_of_a_worker_count_together():
    """The page's sentence named the longest of them alone."""
    plan = planned(chain([1.0] * 4), make_cluster((2,), (FAST,)), strategy="pipeline")
    figures = plan.predicted.model_copy(update={"compute_s": (3, 4, 3, 1), "allreduce_s": (0,) * 4, "transfer_s": (5,)})
    assert figures.slowest_part(2) == "stages 0 and 2 together compute longest"
    assert figures.slowest_part(4) == "stages 0 and 1 send longest"


@pytest.mark.parametrize("schedule", [name for name, kind in SCHEDULES.items() if not kind.has_formulas])
@pytest.mark.parametrize(("bandwidth", "slowest"), [(FAST, r"computes? longest"), (1.0, "send longest")])
def test_the_bottleneck_of_a_schedule_without_formulas_may_be_a_border(schedule, bandwidth, slowest):
    """It was "stage 1 computes most", while workers computed for 6 % of the time and sent for 74 %."""
    profile = chain([1.0] * 6, parameters=1000, crossing=100)
    plan = planned(profile, make_cluster((3,), (bandwidth,)), schedule=schedule, strategy="pipeline")
    assert re.search(f"{slowest}$", plan.why.bottleneck.partition(";")[0])
    sends_longest = max(plan.predicted.transfer_s) > max(plan.predicted.compute_s)
    assert sends_longest == (slowest == "send longest") == ("send longest" in plan_sentence(plan, profile))
