"""`partition --replicas 15-1`: the fastest of the plans with exactly these stages and replicas."""

import random
from dataclasses import replace

import pytest
from graphs import chain, profile_of, random_cluster, random_profile
from reference.brute_force import divisions, placed

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.artifacts.profile import Node
from pdtool.errors import NoPlanError, UsageError
from pdtool.options.plan_options import PartitionOptions
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.plan_check import check_plan
from pdtool.planner.choice.strategies import PLANNERS
from pdtool.planner.formulas import COST_MODELS
from pdtool.planner.plan_cost import Evaluator
from pdtool.planner.search.layouts import Layout
from pdtool.schedule import ExecutionConfig

FAST = 1e9


def planned(profile, cluster, replicas, strategy="auto", **options):
    """The plan with these replicas."""
    asked = PartitionOptions(replicas=replicas, **options)
    return make_plan(profile, "p.json", cluster, PLANNERS[strategy].options(asked, cluster.workers))


def random_replicas(rng, workers):
    """Of one to three stages on some of the workers."""
    used = rng.randint(1, workers)
    ends = sorted(rng.sample(range(1, used), min(rng.randint(0, 2), used - 1)))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, used], strict=True))


def vgg():
    """VGG's shape: the compute in front, the weights behind."""
    fc = Node(name="fc", op="Linear", module="", inputs=("a14",), forward_s=0.3, backward_s=0.5, parameter_bytes=10**11)
    return profile_of([*chain([1.0] * 15, crossing=10**6).nodes, fc])


def test_it_is_the_fastest_over_all_cuts():
    """By the formulas, without a margin, on 60 random graphs, clusters, memory limits, schedules and cost models."""
    outcomes = []
    for seed in range(60):
        rng = random.Random(seed)
        profile, cluster = random_profile(rng, rng.randint(2, 6)), random_cluster(rng)
        replicas = random_replicas(rng, cluster.workers)
        schedule = rng.choice(["1f1b", "1f1b", "1f1b-flush", "gpipe"])
        execution = ExecutionConfig.of_schedule(schedule, 1 if schedule == "1f1b" else rng.choice([1, 3, 8]))
        cost_model = rng.choice([*COST_MODELS]) if schedule == "1f1b" and rng.random() < 0.3 else "ours"
        evaluator = Evaluator(profile, cluster, PlanOptions(cost_model=cost_model))
        layout = Layout.whole(cluster, sum(replicas))
        every = (stages for stages, other in divisions(profile, sum(replicas)) if tuple(other) == replicas)
        plans = (placed(evaluator, layout, stages, replicas, execution) for stages in every)
        optimum_s = min((plan.time_per_minibatch_s for plan in plans if evaluator.fits(plan)), default=None)
        options = {
            "schedule": schedule,
            "microbatches": execution.microbatches,
            "simplest": 0.0,
            "cost_model": cost_model,
        }
        outcomes.append(optimum_s is not None)
        if optimum_s is None:
            with pytest.raises(NoPlanError):
                planned(profile, cluster, replicas, **options)
            continue
        plan = planned(profile, cluster, replicas, **options)
        assert tuple(stage.replicas for stage in plan.stages) == replicas
        assert [worker for stage in plan.stages for worker in stage.workers] == list(range(sum(replicas)))
        assert plan.predicted.bottleneck_s == pytest.approx(optimum_s, rel=1e-9), f"seed {seed}"
        assert plan.why.certificate.bound_s == pytest.approx(optimum_s, rel=1e-9), f"seed {seed}"
        plan.check_schedule()
    assert sum(outcomes) > 20
    assert set(outcomes) == {True, False}


def test_all_that_the_plan_says_is_true():
    """Though plans with other replicas are faster; with the margin, by which it is simulated and its borders moved."""
    faster, seen = 0, 0
    for seed in range(12):
        rng = random.Random(seed)
        profile, cluster = random_profile(rng, 6), random_cluster(rng)
        replicas = random_replicas(rng, cluster.workers)
        try:
            plan = planned(profile, cluster, replicas)
        except NoPlanError:
            continue
        seen += 1
        assert tuple(stage.replicas for stage in plan.stages) == replicas
        assert [one.words for one in check_plan(plan, profile) if one.holds is False] == [], f"seed {seed}"
        free = make_plan(profile, "p.json", cluster, PlanOptions())
        faster += free.why.certificate.bound_s < plan.why.certificate.bound_s * (1 - 1e-9)
        assert f"with replicas {plan.config} on" in plan.why.certificate.sentence()
    assert seen > 5
    assert faster > 3


def test_a_claim_about_other_replicas_is_not_believed():
    net = chain([1.0] * 6, parameters=10)
    plan = planned(net, make_cluster((4,), (FAST,)), (1, 3))
    forged = replace(plan.asked, replicas=None)
    findings = check_plan(plan.model_copy(update={"asked": forged}), net)
    assert [one.claim for one in findings if one.holds is False] == ["lower bound"]


def test_the_figures_of_a_plan():
    """Fifteen operators of 1 s, of which the one worker takes three: 12 s on three, 3 s + 0.8 s on the one."""
    plan = planned(vgg(), make_cluster((4, 4), (1.25e9, 12e9)), (3, 1), simplest=0.0)
    assert plan.predicted.compute_s == (pytest.approx(12 / 3), pytest.approx(3.8))
    assert plan.predicted.bottleneck_s == pytest.approx(4)
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    assert plan.why.certificate.sentence().startswith(
        "proof: the search covered every plan with replicas 3-1 on 4 workers"
    )


def test_a_faster_plan_with_other_replicas_is_named():
    """Five operators of 1 s: 4 s / 3 on three workers, 5 s / 4 as data parallelism."""
    plan = planned(chain([1.0] * 5), make_cluster((4,), (FAST,)), (3, 1), simplest=0.0)
    assert plan.predicted.bottleneck_s == pytest.approx(4 / 3)
    rivals = {rival.plan: rival.why for rival in plan.why.rivals}
    assert rivals["data parallelism (4)"] == "83.3 ms faster by the formulas, but excluded by the options"


def test_what_the_planner_would_choose_anyway_is_the_same_plan():
    cluster = make_cluster((4, 4), (1.25e9, 12e9))
    free = make_plan(vgg(), "p.json", cluster)
    plan = planned(vgg(), cluster, (15, 1))
    assert (plan.stages, plan.predicted) == (free.stages, free.predicted)


def test_2bw_has_no_more_in_flight_than_an_update_has_minibatches():
    """It named the numbers in flight of a plan that nobody had."""
    cluster = make_cluster((4,), (FAST,))
    profile = chain([1.0] * 6)
    plan = planned(profile, cluster, None, schedule="2bw", samples_per_update=2)
    assert (plan.stages[0].in_flight, plan.asked.workers) == (2, None)
    with pytest.raises(
        UsageError, match=r"1-1-1-1 has more minibatches in flight than an update has \(2\); pass a larger"
    ):
        planned(profile, cluster, (1, 1, 1, 1), schedule="2bw", samples_per_update=2)


def test_2bw_keeps_the_replicas():
    plan = planned(chain([1.0] * 6), make_cluster((4,), (FAST,)), (2, 1), schedule="2bw")
    assert (plan.config, plan.schedule) == ("2-1", "2bw")


def test_there_is_no_such_plan():
    two, cluster = chain([1.0] * 2, parameters=1000), make_cluster((4,), (FAST,))
    with pytest.raises(NoPlanError, match="--replicas 1-1-1 needs 3 stages, but the model can be cut into at most 2"):
        planned(two, cluster, (1, 1, 1))
    small = make_cluster((4,), (FAST,), memory_bytes=5000)
    lacks = r"no plan with replicas 3-1 fits .* lacks 1 kB in .* give each worker at least --memory 6kB, .*"
    lacks += "or leave --replicas out, or "
    with pytest.raises(NoPlanError, match=lacks):
        planned(chain([1.0] * 4, parameters=1000), small, (3, 1))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["3-2"], "--replicas 3-2 needs 5 workers, but the cluster has 4; pass fewer replicas, or a larger --topology"),
        (["3-x"], "--replicas '3-x' is not a list of workers per stage; write 15-1 for 15 workers and then one"),
        (["3-0"], "--replicas '3-0' is not a list of workers"),
        (
            ["9" * 18 + "-1"],
            "--replicas 999999999999999999-1 needs 1000000000000000000 workers, but the cluster has 4;",
        ),
        (["9" * 5000], f"--replicas '{'9' * 79} is not a list of workers"),
        (["2-1", "--straight"], "--replicas 2-1 and --strategy straight cannot be combined; pass only one"),
        (["2-1", "--strategy", "hybrid"], "--replicas 2-1 and --strategy hybrid cannot be combined; pass only one"),
        (["2-1", "--workers", "3"], "--replicas 2-1 and --workers 3 cannot be combined; leave --workers out"),
        (["2-1", "--schedule", "zb-h1"], "--schedule zb-h1 cannot be combined with --replicas 2-1"),
        (["1-1", "--schedule", "interleaved"], "--replicas 1-1; choose from 1f1b, 1f1b-flush, gpipe, 2bw, zb-h1\n"),
        (["2-1", "--schedule", "interleaved"], "--replicas 2-1; choose from 1f1b, 1f1b-flush, gpipe, 2bw\n"),
        (
            ["4", "--strategy", "pipeline"],
            "--replicas 4 is one stage, but --strategy pipeline needs 2 or more; name two stages",
        ),
    ],
)
def test_replicas_that_make_no_sense(folder, arguments, error):
    chain([1.0] * 4).save("net.json")
    assert error in folder.pdtool("partition", "net.json", "--topology", "4", "--replicas", *arguments, code=2).stderr


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 2)])
def test_zb_h1_takes_as_many_replicas_of_each_stage(replicas):
    cluster = make_cluster((4,), (1e9,))
    options = PlanOptions(schedule="zb-h1", microbatches=4, replicas=replicas)
    plan = make_plan(chain([1.0] * 4), "net.json", cluster, options)
    assert (plan.schedule, tuple(stage.replicas for stage in plan.stages)) == ("zb-h1", replicas)


def test_more_replicas_than_one_pipeline_can_have():
    with pytest.raises(
        UsageError, match="--replicas 256-1 needs 257 workers; pass replicas that add up to 256 or less"
    ):
        planned(chain([1.0] * 4), make_cluster((300,), (FAST,)), (256, 1))


def test_by_the_command(folder):
    chain([1.0] * 6).save("net.json")
    printed = folder.pdtool("partition", "net.json", "--topology", "2x2", "--replicas", "2-1").stderr
    assert "the search covered every plan with replicas 2-1 on 3 workers" in " ".join(printed.split())
    folder.pdtool("check", "plans/net-2x2.yaml")
    folder.pdtool("partition", "net.json", "--topology", "2x2", "--replicas", "1-1-1-1-1-1-1", code=2)
    chain([1.0]).save("one.json")
    folder.pdtool("partition", "one.json", "--topology", "2x2", "--replicas", "1-1", code=4)
