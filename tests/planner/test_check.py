"""`pdtool check`: an independent implementation of the cost formulas agrees, and a false claim does not pass."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import yaml
from conftest import of_the_day
from graphs import chain, plan_of, random_cluster, random_profile, with_nodes
from reference.local_search import LocalSearch
from reference.reference_cost import Division, ReferenceCost

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import Certificate, Plan, PlanOptions, Why
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.options.plan_options import PartitionOptions
from pdtool.planner.choice.comparison import simulated
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.plan_check import check_plan
from pdtool.planner.choice.plan_figures import refresh
from pdtool.planner.choice.strategies import PLANNERS
from pdtool.schedule import SCHEDULES, STRATEGIES
from pdtool.units import format_seconds

FIGURES = (
    "bottleneck_s",
    "simulated_s",
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
    return {one.claim: one.words for one in check_plan(plan, profile) if one.holds is False}


def random_question(seed):
    """A profile, a cluster and what is asked for; every third with larger tensors and slow outer links, so that copies
    pay."""
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randrange(2, 9))
    cluster = random_cluster(rng)
    if seed % 3 == 0:
        nodes = [n.model_copy(update={"output_bytes": n.output_bytes * 20}) for n in profile.nodes]
        profile = with_nodes(profile, nodes)
        sizes = rng.choice([(2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2)])
        rates = sorted(rng.choice([1e3, 3e3, 2e4, 1e5]) for _ in sizes)
        cluster = make_cluster(sizes, rates, latencies=[0.01] * len(sizes), memory_bytes=rng.choice([None, 90_000]))
    schedule = rng.choice(["1f1b", "1f1b", "1f1b-flush", "gpipe", "auto"])
    return (
        profile,
        cluster,
        PlanOptions(
            schedule=schedule,
            microbatches=1 if schedule == "1f1b" else rng.choice([2, 4, 7]),
            simplest=rng.choice([0.0, 0.03, 0.3]),
            recompute=rng.random() < 0.8,
            straight=rng.random() < 0.15,
            cost_model=rng.choice(["ours", "ours", "ours", "ours", "pipedream", "pipedream-free"]),
        ),
    )


@cache
def answered(seed):
    """The question's profile and its plan, if there is one."""
    profile, cluster, options = random_question(seed)
    profile = randomly_sent(random.Random(10**6 + seed), profile)
    with suppress(NoPlanError):
        return profile, make_plan(profile, "p.json", cluster, options)


def randomly_sent(rng, profile):
    """The profile with frozen parameters, outputs that are not float32, and outputs that others save, for any wire
    format; some with an optimizer that takes all parameters at once."""
    nodes = []
    for node in profile.nodes:
        exact, gradient = (
            rng.choice([0, 0, rng.randint(0, size)]) for size in (node.output_bytes, node.gradient_bytes)
        )
        frozen = rng.choice([0, 0, 300])
        sizes = {"exact_bytes": exact, "exact_gradient_bytes": gradient, "frozen_bytes": frozen}
        nodes.append(node.model_copy(update=sizes))
    for i, node in enumerate(nodes):
        takers = [n for n in nodes if node.name in n.inputs]
        if takers and rng.random() < 0.7:
            k = nodes.index(rng.choice(takers))
            nodes[k] = nodes[k].model_copy(update={"stash_bytes": nodes[k].stash_bytes + node.output_bytes})
            nodes[i] = nodes[i].model_copy(update={"saved_by": nodes[k].name})
    sent = with_nodes(profile, nodes).sent_as(rng.choice(["fp32", "fp32", "fp16", "bf16"]))
    return sent.model_copy(update={"step_scratch_bytes": rng.choice([0.0, 0.0, 1.0])})


def plans_of(seeds):
    """(seed, profile, plan) of the questions that have an answer."""
    return [(seed, *found) for seed in seeds if (found := answered(seed))]


def recomputed(reference):
    """The figures of a plan that the reference implementation gives, by the names of `Predicted`."""
    return {
        "bottleneck_s": reference.bottleneck_s(),
        "compute_s": tuple(map(reference.compute_s, reference.order)),
        "allreduce_s": tuple(map(reference.allreduce_s, reference.order)),
        "transfer_s": tuple(map(reference.transfer_s, reference.order[1:])),
        "memory_bytes": tuple(map(reference.memory_bytes, reference.order)),
        "traffic_bytes": reference.traffic_bytes(),
    }


@pytest.mark.rows_of_the_day(days=10)
@pytest.mark.parametrize("chunk", range(6))
def test_the_reference_implementation_agrees_on_random_plans(chunk):
    """More than 200 plans in all: every figure, that the plan fits, and that `check` finds nothing."""
    answered_questions = plans_of(range(chunk * 60, chunk * 60 + 60))
    assert len(answered_questions) >= 35
    for seed, profile, plan in answered_questions:
        reference = ReferenceCost(profile, plan.cluster, Division.of(plan, profile))
        for name, figure in recomputed(reference).items():
            tolerance = 1 if name.endswith("_bytes") else 0
            assert getattr(plan.predicted, name) == pytest.approx(figure, rel=1e-9, abs=tolerance), (seed, name)
        assert reference.fits()
        assert faults(plan, profile) == {}, f"seed {seed}"


@pytest.mark.rows_of_the_day(days=5)
@pytest.mark.parametrize("chunk", range(3))
def test_no_neighbour_of_a_plan_beats_its_lower_bound(chunk):
    """Operators and replicas moved over borders as long as that helps: an oracle of the search on larger graphs than
    brute force can look at."""
    tried = 0
    for seed, profile, plan in plans_of(range(chunk * 60, chunk * 60 + 60)):
        search = LocalSearch(profile, plan.cluster)
        fastest_s = search.go(Division.of(plan, profile))
        tried += search.tried
        assert fastest_s is None or fastest_s >= plan.why.certificate.bound_s * (1 - 1e-9), f"seed {seed}"
    assert tried > 40


@pytest.mark.rows_of_the_day(days=6)
@pytest.mark.parametrize("schedule", ["2bw", "zb-h1", "interleaved", "looped-bfs"])
def test_a_plan_whose_schedule_has_no_formulas_fits_or_there_is_none(schedule):
    """With what the best plan takes there is one, with less there may be; none lacks memory."""
    rng, found = random.Random(schedule), []
    for _ in range(6):
        profile = random_profile(rng, rng.randint(6, 9)).model_copy(update={"pin": {}, "shared": (), "together": ()})
        options = PlanOptions(schedule=schedule, microbatches=4 if SCHEDULES[schedule].flushes else 1)
        best = make_plan(profile, "p", make_cluster((2,), (1e4,)), options)
        for share in (1.0, 0.9, 0.7):
            cluster = make_cluster((2,), (1e4,), memory_bytes=int(share * max(best.predicted.memory_bytes)))
            with suppress(NoPlanError):
                plan = make_plan(profile, "p", cluster, options)
                assert faults(plan, profile) == {}
                found.append(share)
    assert found.count(1.0) == 6
    assert len(found) > 6


def test_check_and_simulate_find_what_a_fresh_plan_says_whatever_was_asked_for():
    """Of strategies, schedules, workers, replicas and message formats: one figure for one thing."""
    seen = set()
    for seed in of_the_day(90, days=3):
        rng = random.Random(seed)
        profile, cluster, _ = random_question(seed)
        wire_dtype = rng.choice(["fp32", "bf16"])
        strategy = rng.choice(["auto", "auto", *STRATEGIES])
        asked = {"strategy": strategy, "wire_dtype": wire_dtype, "recompute": rng.random() < 0.7}
        if strategy == "auto":
            asked["schedule"] = rng.choice([None, "auto", *SCHEDULES])
            narrowing = rng.choice(["workers", "replicas", ""])
            if narrowing == "workers":
                asked["workers"] = rng.randint(1, cluster.workers)
            elif narrowing:
                asked["replicas"] = tuple(rng.randint(1, 2) for _ in range(rng.randint(1, 3)))
        with suppress(NoPlanError, UsageError):
            sent = profile.sent_as(wire_dtype)
            options = PLANNERS[strategy].options(PartitionOptions(**asked), cluster.workers)
            plan = make_plan(sent, "p.json", cluster, options)
            assert faults(plan, profile) == {}, f"seed {seed}: {asked}"
            if plan.predicted.simulated_s is not None:
                again = simulated(plan, profile)
                assert again.result.time_per_minibatch_s == pytest.approx(plan.predicted.simulated_s), f"seed {seed}"
            seen.add((strategy, plan.schedule))
    assert len(seen) > 6


@pytest.mark.rows_of_the_day(days=3)
def test_the_random_plans_are_of_all_kinds():
    plans = [plan for _, _, plan in plans_of(range(150))]
    assert {plan.schedule for plan in plans} == {"1f1b", "1f1b-flush", "gpipe"}
    assert {plan.predicted.cost for plan in plans} == {"ours", "pipedream", "pipedream-free"}
    assert max(plan.copies for plan in plans) > 1
    assert any(stage.recompute for plan in plans for stage in plan.stages)
    assert any(len({stage.replicas for stage in plan.stages}) > 1 for plan in plans)


@pytest.fixture
def net():
    """Five operators; 2-1 on three of four workers, say, is not far from the best."""
    return chain([0.4, 0.3, 0.3, 0.2, 0.1], parameters=1000, crossing=50, stash=100)


@pytest.fixture
def plan(net):
    """The fastest pipeline for four workers."""
    found = make_plan(
        net, "profiles/net.json", make_cluster((4,), (3000.0,), memory_bytes=40_000), PlanOptions(simplest=0)
    )
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


def claimed(plan, **changes):
    """The plan with another certificate."""
    certificate = plan.why.certificate.model_copy(update=changes)
    return plan.model_copy(update={"why": plan.why.model_copy(update={"certificate": certificate})})


def test_an_altered_gap_is_caught(plan, net):
    assert set(faults(claimed(plan, gap=0.5), net)) == {"gap"}


def claiming(profile, stages, workers, cluster, bound=None, **fields):
    """A plan by hand, with figures for what it is, that claims to be the best there is."""
    made = refresh(plan_of(profile, stages, workers, cluster, **fields), profile)
    pace = made.predicted.bottleneck_s
    bound = pace if bound is None else bound
    certificate = Certificate(bound_s=bound, gap=max(0.0, pace / bound - 1))
    return made.model_copy(update={"asked": PlanOptions(), "why": Why(bottleneck="x", certificate=certificate)})


def test_a_bound_above_the_plan_itself_is_caught(plan, net):
    wrong = claimed(plan, bound_s=2 * plan.predicted.bottleneck_s)
    assert "lower bound" in faults(wrong, net)
    assert "lower bound" in faults(wrong.model_copy(update={"asked": None}), net)


@pytest.mark.parametrize(("rate", "workers", "config"), [(1e9, [[0], [1]], "4"), (1.0, [[0, 1], [2, 3]], "1")])
def test_a_bound_above_a_simple_plan_is_caught(net, rate, workers, config):
    made = claiming(net, [["x", "a0", "a1"], ["a2", "a3", "a4"]], workers, make_cluster((4,), (rate,)))
    assert faults(made, net)["lower bound"].endswith(f"({config})")


@pytest.mark.parametrize(
    ("stages", "workers"),
    [([["x", "a0"], ["a1", "a2", "a3", "a4"]], [[0], [1]]), ([["x", "a0", "a1", "a2"], ["a3", "a4"]], [[0], [1, 2]])],
)
def test_a_bound_above_another_pipeline_is_caught(net, stages, workers):
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
    assert re.search(r"takes .* \([0-9]-[0-9-]+\)$", found["lower bound"])


def test_a_bound_that_claims_too_little_is_only_weak(net, plan):
    weak = claimed(plan, bound_s=1e-3, gap=plan.predicted.bottleneck_s / 1e-3 - 1)
    assert faults(weak, net) == {}
    assert any("this bound is weak" in one.words for one in check_plan(weak, net))


def test_what_was_asked_for_is_what_is_searched_again(net):
    """`--straight` was asked for; data parallelism is faster, and the bound is for straight pipelines."""
    made = make_plan(net, "net.json", make_cluster((4,), (1e9,)), PlanOptions(straight=True))
    assert made.predicted.gain_over_data_parallel < 1
    assert faults(made, net) == {}
    assert "lower bound" in faults(made.model_copy(update={"asked": PlanOptions()}), net)
    silent = made.model_copy(update={"asked": None})
    unsure = [one for one in check_plan(silent, net) if one.holds is None]
    assert [one.claim for one in unsure] == ["lower bound"]
    assert "takes 325 ms (4); the plan does not record its options" in unsure[0].words


@pytest.mark.parametrize(
    "options", ["--no-recompute", "--no-recompute --schedule auto", "--workers 3", "--replicas 3-1"]
)
def test_the_search_is_repeated_as_it_was_asked_for(folder, options):
    """Once, the figures of data parallelism were those of one that recomputes, which the plan was told not to."""
    deep = chain([0.4, 0.3, 0.3, 0.2], parameters=1000, crossing=50, stash=1000)
    deep.save("deep.json")
    asked = ["--topology", "4", "--bandwidth", "3kB/s", "--memory", "20kB", "--microbatches", "16"]
    schedule = [] if "--schedule" in options else ["--schedule", "gpipe"]
    folder.pdtool("partition", "deep.json", *asked, *schedule, *options.split(), "-o", "deep.yaml")
    plan = Plan.load("deep.yaml")
    assert plan.asked.recompute is ("--no-recompute" not in options)
    assert "✗" not in folder.pdtool("check", "deep.yaml").stdout


EARLIER = """  lower_bound_s: {bound_s!r}
  gap: {gap!r}
  proof: every plan on 4 workers was searched, over 6 cuts, with the minibatches in flight that its schedule requires
"""


@pytest.fixture
def earlier(planned, plan):
    """plans/net.yaml as pdtool wrote it before certificates were data."""
    text = re.sub(r"asked:.*\n( .*\n)*", "", Path("plans/net.yaml").read_text())
    said = EARLIER.format(**plan.why.certificate.model_dump())
    text = re.sub(r"  certificate: .*\n(    .*\n)*", said, text)
    assert "lower_bound_s" in text
    assert "asked" not in text
    Path("plans/net.yaml").write_text(text)
    return planned


def test_a_plan_of_an_earlier_pdtool_is_read_shown_and_checked(earlier, plan):
    found = Plan.load("plans/net.yaml")
    assert found.plan_sha256 == plan.plan_sha256 == found.predicted.plan_sha256
    assert (found.asked, found.why.certificate.workers) == (None, None)
    assert found.why.certificate.bound_s == plan.why.certificate.bound_s
    assert found.why.rivals == plan.why.rivals
    shown = " ".join(earlier.pdtool("show", "plans/net.yaml").stdout.split())
    assert "proof: every plan on 4 workers was searched, over 6 cuts" in shown
    lines = " ".join(earlier.pdtool("check", "plans/net.yaml").stdout.split())
    assert "✓ lower bound" in lines
    assert "the plan does not record its options, so the search took them from its stages" in lines


def test_an_edited_plan_of_an_earlier_pdtool_is_updated(earlier, net):
    text = Path("plans/net.yaml").read_text()
    Path("plans/net.yaml").write_text(
        text.replace("in_flight: 1", "in_flight: 2", 1).replace("  gap:", "  # a\n  gap:")
    )
    earlier.pdtool("check", "--update")
    text = Path("plans/net.yaml").read_text()
    assert "\n# a\n" in text
    assert "lower_bound_s" not in text
    assert Plan.load("plans/net.yaml").why == refresh(Plan.load("plans/net.yaml"), net).why


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES.values() if not kind.has_formulas])
def test_plans_without_formulas_are_simulated_again(kind):
    deep = chain([0.4, 0.3, 0.3, 0.2, 0.1, 0.2, 0.3, 0.4])
    options = PlanOptions(schedule=kind.name, microbatches=4 if kind.flushes else 1)
    made = make_plan(deep, "net.json", make_cluster((2,), (1e9,)), options)
    assert faults(made, deep) == {}
    assert set(faults(altered(made, "simulated_s"), deep)) == {"simulated_s"}


def test_memory_schedule_and_stages_are_looked_at(net):
    cluster = make_cluster((2,), (1e6,), memory_bytes=6000)
    halves = [["x", "a0", "a1"], ["a2", "a3", "a4"]]
    assert "memory" in faults(claiming(net, halves, [[0], [1]], cluster), net)
    waiting = plan_of(net, [["x", "a0"], ["a1", "a2", "a3", "a4"]], [[0], [1]], cluster, in_flight=[1, 2])
    assert "schedule" in faults(waiting, net)
    gap = plan_of(net, [["x", "a0"], ["a2", "a3", "a4"]], [[0], [1]], cluster)
    assert "is in no stage" in faults(gap, net)["stages"]


def test_a_plan_without_a_certificate_claims_nothing(net):
    made = refresh(plan_of(net, [net.graph.names], [[0, 1]], make_cluster((2,), (1e6,))), net)
    assert faults(made, net) == {}
    assert [one.words for one in check_plan(made, net) if one.holds is None] == ["none is claimed"]


@pytest.fixture
def planned(folder, net, plan):
    """profiles/net.json and plans/net.yaml."""
    net.save("profiles/net.json")
    plan.save("plans/net.yaml")
    return folder


def test_the_command_says_each_claim(planned):
    lines = planned.pdtool("check").stdout.splitlines()
    assert [line[0] for line in lines] == ["✓"] * len(lines)
    assert [line[2:].split(":")[0] for line in lines][-2:] == ["lower bound", "gap"]
    assert planned.pdtool("check", "-", stdin=Path("plans/net.yaml").read_text()).stdout.splitlines() == lines


def test_the_command_as_json(planned):
    found = json.loads(planned.pdtool("check", "--json").stdout)
    assert {one["claim"] for one in found["findings"]} >= {*FIGURES, "stages", "schedule", "memory", "gap"}
    assert all(one["holds"] for one in found["findings"])


@pytest.mark.parametrize(
    ("part", "name", "value", "match"),
    [
        ("predicted", "bottleneck_s", 0.125, "predicted.bottleneck_s: the plan says 0.125, but it is"),
        ("predicted", "simulated_s", 0.125, "predicted.simulated_s: the plan says 0.125, but it is"),
        ("predicted", "traffic_bytes", 5, "predicted.traffic_bytes: the plan says 5, but it is"),
    ],
)
def test_the_command_names_what_is_false(planned, plan, part, name, value, match):
    altered(plan, name, part, value).save("plans/net.yaml")
    result = planned.pdtool("check", code=3)
    assert match in result.stderr
    assert "; do not rely on it: plan again" in result.stderr
    assert "✗" in result.stdout
    assert json.loads(planned.pdtool("check", "--json", code=3).stdout)


def test_the_command_names_a_false_certificate(planned, plan):
    claimed(plan, gap=0.25).save("plans/net.yaml")
    match = "why.certificate.gap: this plan is 0.00% slower than the lower bound, but the plan says 0.25"
    assert match in planned.pdtool("check", code=3).stderr


@pytest.fixture
def edited(planned):
    """plans/net.yaml edited by hand, with comments in all kinds of places."""
    text = Path("plans/net.yaml").read_text()
    for old, new in (
        ("in_flight: 1", "in_flight: 2  # one more, to be sure"),
        ("\nschedule: 1f1b", "\n# no flush\nschedule: 1f1b"),
        ("predicted:", "\npredicted: # by pdtool"),
        ("  rivals:\n", "  # who else\n  rivals: # all of them\n"),
        ("...", "# the end\n..."),
    ):
        assert old in text
        text = text.replace(old, new)
    Path("plans/net.yaml").write_text(text)
    assert Plan.load("plans/net.yaml").edited
    return planned


def test_check_and_show_compute_what_an_edited_plan_says_now(edited, net):
    now = refresh(Plan.load("plans/net.yaml"), net).predicted
    figures = f"{format_seconds(now.simulated_s)} per minibatch ({now.throughput_samples_per_s:.4g} samples/s)"
    lines = " ".join(edited.pdtool("check").stdout.split())
    assert "– figures: the plan was edited by hand, and its file still has the old figures; " in lines
    assert f"it now takes {figures}" in lines
    assert "more than the fastest plan found with the options of the unedited plan" in lines
    shown = edited.pdtool("show", "plans/net.yaml")
    assert f"simulated: {figures}" in shown.stdout
    assert "the plan was edited by hand" in shown.stderr
    assert "certificate" not in shown.stdout
    assert Plan.parse(edited.pdtool("show", "plans/net.yaml", "--json").stdout).predicted == now


def test_an_edited_plan_may_be_faster_than_its_options_allow():
    """It was `0.0% more` than the fastest plan with them."""
    profile, cluster = chain([1.0] * 4), make_cluster((2,), (1e9,))
    alone, free = (make_plan(profile, "p.json", cluster, PlanOptions(workers=workers)) for workers in (1, None))
    edited = alone.model_copy(update={"stages": free.stages})
    findings = {finding.claim: finding.words for finding in check_plan(edited, profile)}
    assert (
        "50.0% less than the fastest plan found with the options of the unedited plan (1, " in findings["lower bound"]
    )


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("nodes: [x, ", "nodes: [xx, ", "stage 0 names 'xx', which the profile does not have (did you mean x?)"),
        ("in_flight:", "in_fligth:", "stages[0].in_fligth: is not a field here; did you mean in_flight?"),
        ("schedule: 1f1b", "schedule: 1f1b-flsh", "did you mean 1f1b-flush?"),
    ],
)
def test_an_invalid_edit_is_never_shown_as_a_success(edited, old, new, match):
    text = Path("plans/net.yaml").read_text()
    assert old in text
    Path("plans/net.yaml").write_text(text.replace(old, new))
    for command in ("show", "check"):
        result = edited.pdtool(command, "plans/net.yaml", code=3)
        assert match in result.stderr
        assert "per minibatch" not in result.stdout


def test_an_edit_that_deadlocks_is_not_shown(planned, net):
    halves, cluster = [["x", "a0"], ["a1", "a2", "a3", "a4"]], make_cluster((2,), (1e6,))
    waiting = plan_of(net, halves, [[0], [1]], cluster, in_flight=[1, 2])
    waiting.model_copy(update={"profile": "profiles/net.json"}).save("plans/net.yaml")
    assert "deadlock: worker 0 waits in 0B0" in planned.pdtool("show", "plans/net.yaml", code=3).stderr


def test_update_writes_the_figures_and_keeps_comments_and_order(edited, net):
    before = Path("plans/net.yaml").read_text()
    edited.pdtool("check", "--update")
    after = Path("plans/net.yaml").read_text()
    plan = Plan.load("plans/net.yaml")
    assert not plan.edited
    assert plan.predicted == refresh(plan, net).predicted
    assert faults(plan, net) == {}
    head = before.index("predicted:")
    assert after[:head] == before[:head], "nothing above the figures is touched"
    assert re.findall("#.*", after) == re.findall("#.*", before)
    assert re.findall(r"^\w+", after, re.MULTILINE) == re.findall(r"^\w+", before, re.MULTILINE)
    assert "nothing to update" in edited.pdtool("check", "--update").stderr
    assert Path("plans/net.yaml").read_text() == after


def test_update_adds_figures_where_there_are_none(planned):
    text = Path("plans/net.yaml").read_text()
    Path("plans/net.yaml").write_text(text[: text.index("predicted:")] + "why: null # none\n...\n")
    planned.pdtool("check", "--update")
    assert not Plan.load("plans/net.yaml").edited
    again = planned.pdtool("partition", "profiles/net.json", "--topology", "2", "-o", "plans/net.yaml", code=2)
    assert "was edited by hand" in again.stderr
    assert planned.pdtool("check", "--update", "-", stdin=text, code=2)
    assert "pass only one" in planned.pdtool("check", "--update", "--fresh", code=2).stderr
    content = {**yaml.safe_load(text), "predicted": None}
    for written in (json.dumps(content), f"# a comment first\n{json.dumps(content)}\n...\n"):
        Path("plans/braces.yaml").write_text(written)
        error = planned.pdtool("check", "--update", "plans/braces.yaml", code=2).stderr
        assert "plans/braces.yaml is written in braces; write its keys on lines of their own" in error


def test_a_stale_profile_is_refused(planned):
    net = Profile.load("profiles/net.json")
    net.model_copy(update={"step_s": 1.0}).save("profiles/net.json")
    assert "profiles/net.json has changed since the plan was made" in planned.pdtool("check", code=3).stderr


def test_an_edited_plan_is_kept_with_a_profile_that_was_made_again(edited, net):
    """Of the same operators, measured anew; of other operators or minibatches it is refused."""
    nodes = tuple(node.model_copy(update={"forward_s": 2 * node.forward_s}) for node in net.nodes)
    again = net.model_copy(update={"nodes": nodes}).with_graph("0" * 64)
    again.save("profiles/net.json")
    assert "keep this plan with `pdtool check plans/net.yaml --update`" in edited.pdtool("check", code=3).stderr
    before, comments = Plan.load("plans/net.yaml"), re.findall("#.*", Path("plans/net.yaml").read_text())
    edited.pdtool("check", "--update")
    plan = Plan.load("plans/net.yaml")
    assert plan.stages == before.stages
    assert plan.predicted == refresh(plan, again).predicted
    assert re.findall("#.*", Path("plans/net.yaml").read_text()) == comments
    edited.pdtool("check")
    for other in (again.model_copy(update={"batch_size": 2 * net.batch_size}), again.with_graph("1" * 64)):
        other.save("profiles/net.json")
        assert "differ in operators or in batch size" in edited.pdtool("check", "--update", code=3).stderr


def test_minibatches_of_another_size_than_the_profiles_are_refused(planned):
    text = Path("plans/net.yaml").read_text()
    Path("plans/net.yaml").write_text(text.replace("batch_size: ", "batch_size: 1"))
    assert "profile with --batch-size 1" in planned.pdtool("show", "plans/net.yaml", code=3).stderr


def test_partition_overwrites_no_plan_that_someone_edited(planned):
    """Neither fields nor comments; what pdtool wrote itself it writes again."""
    again = ("partition", "profiles/net.json", "--topology", "2", "-o", "plans/net.yaml")
    planned.pdtool(*again)
    text = Path("plans/net.yaml").read_text()
    planned.pdtool(*again)
    for old, new in (
        ("in_flight: 1", "in_flight: 2"),
        ("\nschedule: 1f1b", "\nschedule: 1f1b  # x"),
        ("name:", "# x\nname:"),
    ):
        Path("plans/net.yaml").write_text(text.replace(old, new))
        stderr = planned.pdtool(*again, code=2).stderr
        assert (
            "plans/net.yaml was edited by hand and would be overwritten; pass another path with -o, or delete" in stderr
        )
        assert Path("plans/net.yaml").read_text() == text.replace(old, new)
