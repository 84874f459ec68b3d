"""`pdtool check`: two implementations of the cost of a plan agree, and a false claim does not pass."""

from __future__ import annotations

import ast
import json
import random
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from graphs import chain, plan_of, random_cluster, random_profile

from pdtool.artifacts.plan import Plan, Why
from pdtool.artifacts.profile import Profile
from pdtool.cluster import make_cluster
from pdtool.errors import NoPlanError
from pdtool.partition.checker.check import Check
from pdtool.partition.planning import make_plan, refresh
from pdtool.partition.search import Options

PLANNER = Path(__file__).parent.parent / "pdtool" / "partition" / "checker"
FIGURES = (
    "bottleneck_s",
    "throughput_samples_per_s",
    "gain_over_data_parallel",
    "compute_s",
    "allreduce_s",
    "transfer_s",
    "memory_bytes",
    "traffic_bytes",
)


def faults(plan, profile):
    """The claims that do not hold, with what was found."""
    return {one.claim: one.words for one in Check(plan, profile).findings() if one.holds is False}


def random_question(seed):
    """A profile, a cluster and what is asked for; every third with larger tensors and slow outer links, so that copies
    pay."""
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randrange(2, 9))
    cluster = random_cluster(rng)
    if seed % 3 == 0:
        nodes = [n.model_copy(update={"output_bytes": n.output_bytes * 20}) for n in profile.nodes]
        profile = profile.model_copy(update={"nodes": tuple(nodes)})
        sizes = rng.choice([(2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2)])
        rates = sorted(rng.choice([1e3, 3e3, 2e4, 1e5]) for _ in sizes)
        cluster = make_cluster(sizes, rates, latencies=[0.01] * len(sizes), memory_bytes=rng.choice([None, 90_000]))
    schedule = rng.choice(["1f1b", "1f1b", "1f1b-flush", "gpipe", "auto"])
    return (
        profile,
        cluster,
        Options(
            schedule=schedule,
            microbatches=1 if schedule == "1f1b" else rng.choice([2, 4, 7]),
            simplest=rng.choice([0.0, 0.03, 0.3]),
            recompute=rng.random() < 0.8,
            straight=rng.random() < 0.15,
            cost=rng.choice(["ours", "ours", "ours", "ours", "pipedream", "pipedream-free"]),
        ),
    )


@cache
def answered(seed):
    """The question's profile and its plan, if there is one."""
    profile, cluster, options = random_question(seed)
    with suppress(NoPlanError):
        return profile, make_plan(profile, "p.json", cluster, options)


def plans_of(seeds):
    """(seed, profile, plan) of the questions that have an answer."""
    return [(seed, *found) for seed in seeds if (found := answered(seed))]


@pytest.mark.parametrize("chunk", range(6))
def test_both_implementations_agree_on_random_plans(chunk):
    found = plans_of(range(chunk * 60, chunk * 60 + 60))
    assert len(found) >= 35  # more than 200 in all
    assert {seed: faults(plan, profile) for seed, profile, plan in found if faults(plan, profile)} == {}


def test_the_random_plans_are_of_all_kinds():
    plans = [plan for _, _, plan in plans_of(range(150))]
    assert {plan.schedule for plan in plans} == {"1f1b", "1f1b-flush", "gpipe"}
    assert {plan.predicted.cost for plan in plans} == {"ours", "pipedream", "pipedream-free"}
    assert max(plan.copies for plan in plans) > 1
    assert any(stage.recompute for plan in plans for stage in plan.stages)
    assert any(len({stage.replicas for stage in plan.stages}) > 1 for plan in plans)


def test_no_formula_is_shared():
    shared = {"artifacts", "cluster", "schedule", "graph", "units", "errors"}
    for name in ("check", "recount", "walk"):
        modules = {
            node.module
            for node in ast.walk(ast.parse((PLANNER / f"{name}.py").read_text()))
            if isinstance(node, ast.ImportFrom) and node.module.startswith("pdtool")
        }
        own = {f"pdtool.partition.checker.{other}" for other in ("recount", "walk")}
        assert {module.split(".")[1] for module in modules - own} <= shared
        assert "numpy" not in (PLANNER / f"{name}.py").read_text().replace("no numpy", "")


@pytest.fixture
def net():
    """Five operators; 2-1 on three of four workers, say, is not far from the best."""
    return chain([0.4, 0.3, 0.3, 0.2, 0.1], parameters=1000, crossing=50, stash=100)


@pytest.fixture
def plan(net):
    """The fastest pipeline for four workers."""
    found = make_plan(net, "profiles/net.json", make_cluster((4,), (3000.0,), memory_bytes=40_000), Options(simplest=0))
    assert len(found.stages) > 1
    assert faults(found, net) == {}
    return found


def altered(plan, name, part="predicted", value=None):
    """The plan with one figure, or the first of several, a little larger."""
    old = getattr(getattr(plan, part), name)
    first = old[0] if isinstance(old, tuple) else old
    more = value if value is not None else first + 2 if isinstance(first, int) else first * (1 + 1e-6)
    assert more != first
    new = (more, *old[1:]) if isinstance(old, tuple) else more
    return plan.model_copy(update={part: getattr(plan, part).model_copy(update={name: new})})


@pytest.mark.parametrize("name", FIGURES)
def test_an_altered_figure_is_caught(plan, net, name):
    if name == "allreduce_s" and not plan.predicted.allreduce_s[0]:
        plan = altered(plan, name, value=1e-6)
    else:
        plan = altered(plan, name)
    assert set(faults(plan, net)) == {name}


@pytest.mark.parametrize("name", ["compute_s", "transfer_s", "memory_bytes"])
def test_a_missing_figure_is_caught(plan, net, name):
    fewer = plan.predicted.model_copy(update={name: getattr(plan.predicted, name)[1:]})
    assert set(faults(plan.model_copy(update={"predicted": fewer}), net)) == {name}


def test_an_altered_gap_is_caught(plan, net):
    assert set(faults(altered(plan, "gap", "why", 0.5), net)) == {"gap"}


def claiming(profile, stages, workers, cluster, bound=None, **fields):
    """A plan by hand, with figures for what it is, that claims to be the best there is."""
    made = refresh(plan_of(profile, stages, workers, cluster, **fields), profile)
    pace = made.predicted.bottleneck_s
    bound = pace if bound is None else bound
    return made.model_copy(update={"why": Why(bottleneck="x", lower_bound_s=bound, gap=max(0.0, pace / bound - 1))})


def test_a_bound_above_the_plan_itself_is_caught(plan, net):
    assert "lower bound" in faults(altered(plan, "lower_bound_s", "why", 2 * plan.predicted.bottleneck_s), net)


@pytest.mark.parametrize(
    ("rate", "workers", "words"),
    [(1e9, [[0], [1]], r"data parallelism \(4\) takes"), (1.0, [[0, 1], [2, 3]], r"one worker takes")],
)
def test_a_bound_above_a_simple_plan_is_caught(net, rate, workers, words):
    made = claiming(net, [["x", "a0", "a1"], ["a2", "a3", "a4"]], workers, make_cluster((4,), (rate,)))
    found = faults(made, net)
    assert "simple plans" in found
    assert re.match(words, found["simple plans"])


@pytest.mark.parametrize(
    ("stages", "workers"),
    [([["x", "a0"], ["a1", "a2", "a3", "a4"]], [[0], [1]]), ([["x", "a0", "a1", "a2"], ["a3", "a4"]], [[0], [1, 2]])],
)
def test_a_bound_above_a_neighbour_is_caught(net, stages, workers):
    """Data parallelism is slow here; one operator, or one replica, over the border makes the plan faster."""
    heavy = net.model_copy(
        update={
            "nodes": tuple(
                node.model_copy(update={"parameter_bytes": 10 * node.parameter_bytes * (node.name == "a4")})
                for node in net.nodes
            )
        }
    )
    found = faults(claiming(heavy, stages, workers, make_cluster((4,), (8000.0,))), heavy)
    assert "neighbours" in found


def test_a_bound_that_claims_too_little_is_only_weak(net, plan):
    weak = altered(altered(plan, "lower_bound_s", "why", 1e-3), "gap", "why", plan.predicted.bottleneck_s / 1e-3 - 1)
    assert faults(weak, net) == {}
    assert any("a weak claim" in one.words for one in Check(weak, net).findings())


def test_a_plan_that_says_it_is_not_the_fastest_is_not_blamed(net):
    """`--straight` was asked for; data parallelism is faster and stands among the rivals."""
    made = make_plan(net, "net.json", make_cluster((4,), (1e9,)), Options(straight=True))
    found = {one.claim: one for one in Check(made, net).findings()}
    assert found["simple plans"].holds is None
    assert "not what was asked for" in found["simple plans"].words
    assert faults(made, net) == {}
    silent = made.model_copy(update={"why": made.why.model_copy(update={"rivals": ()})})
    assert "simple plans" in faults(silent, net)


def test_memory_schedule_and_stages_are_looked_at(net):
    cluster = make_cluster((2,), (1e6,), memory_bytes=6000)
    halves = [["x", "a0", "a1"], ["a2", "a3", "a4"]]
    assert "memory" in faults(claiming(net, halves, [[0], [1]], cluster), net)
    waiting = plan_of(net, [["x", "a0"], ["a1", "a2", "a3", "a4"]], [[0], [1]], cluster, in_flight=[1, 2])
    assert "schedule" in faults(waiting, net)
    gap = plan_of(net, [["x", "a0"], ["a2", "a3", "a4"]], [[0], [1]], cluster)
    assert "stands in no stage" in faults(gap, net)["stages"]


def test_a_plan_without_a_certificate_claims_nothing(net):
    made = refresh(plan_of(net, [net.graph.names], [[0, 1]], make_cluster((2,), (1e6,))), net)
    assert faults(made, net) == {}
    assert [one.words for one in Check(made, net).findings() if one.holds is None] == ["none is claimed"]


def test_the_walk_ends_in_time():
    """ResNet-50 has some 190 operators."""
    net = chain([0.1 + 0.01 * (i % 7) for i in range(190)], parameters=1000, crossing=100)
    made = make_plan(net, "net.json", make_cluster((4, 4), (1e5, 1e6)), Options(straight=True))
    before = time.process_time()
    assert faults(made, net) == {}
    assert time.process_time() - before < 4


def test_a_plan_too_large_to_walk_is_said_to_be(net, plan, monkeypatch):
    monkeypatch.setattr("pdtool.partition.checker.walk._MOST_WORK", 0)
    assert "not tried, there are more than 0" in [one.words for one in Check(plan, net).findings()]


@pytest.fixture
def planned(folder, net, plan):
    """profiles/net.json and plans/net.yaml."""
    net.save("profiles/net.json")
    plan.save("plans/net.yaml")
    return folder


def test_the_command_says_each_claim(planned):
    lines = planned.pdtool("check").stdout.splitlines()
    assert [line[0] for line in lines] == ["✓"] * len(lines)
    assert [line[2:].split(":")[0] for line in lines][-4:] == ["lower bound", "gap", "simple plans", "neighbours"]
    assert planned.pdtool("check", "-", stdin=Path("plans/net.yaml").read_text()).stdout.splitlines() == lines


def test_the_command_as_json(planned):
    found = json.loads(planned.pdtool("check", "--json").stdout)
    assert {one["claim"] for one in found["findings"]} >= {*FIGURES, "stages", "schedule", "memory", "gap"}
    assert all(one["holds"] for one in found["findings"])


@pytest.mark.parametrize(
    ("part", "name", "value", "match"),
    [
        ("predicted", "bottleneck_s", 0.125, "predicted.bottleneck_s: the plan says 0.125, recomputed it is"),
        ("predicted", "simulated_s", 0.125, "predicted.simulated_s: 125 ms, and the slowest stage computes 400 ms"),
        ("predicted", "traffic_bytes", 5, "predicted.traffic_bytes: the plan says 5, recomputed it is"),
        ("why", "gap", 0.25, "why.gap: this plan is 0.00% slower than the lower bound, it says 0.25"),
    ],
)
def test_the_command_names_what_is_false(planned, plan, part, name, value, match):
    altered(plan, name, part, value).save("plans/net.yaml")
    result = planned.pdtool("check", code=3)
    assert match in result.stderr
    assert "; do not rely on it; plan again" in result.stderr
    assert "✗" in result.stdout
    assert json.loads(planned.pdtool("check", "--json", code=3).stdout)


def test_an_edited_plan_is_said_to_be_edited(planned):
    text = Path("plans/net.yaml").read_text()
    Path("plans/net.yaml").write_text(text.replace("in_flight: 1", "in_flight: 2"))
    assert Plan.load("plans/net.yaml").edited
    result = planned.pdtool("check", code=3)
    assert "plans/net.yaml: predicted: those of another plan, this one was edited by hand since" in result.stderr
    assert "compute them again" in result.stderr
    assert "lower bound" not in result.stdout


def test_a_stale_profile_is_refused(planned):
    net = Profile.load("profiles/net.json")
    net.model_copy(update={"step_s": 1.0}).save("profiles/net.json")
    assert "profiles/net.json has changed since the plan was made" in planned.pdtool("check", code=3).stderr
