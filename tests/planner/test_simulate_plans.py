"""Plans as the simulator runs them: paces worked out on paper, memory and traffic as the cost model has them."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
from graphs import chain, plan_of, profile_of, random_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.artifacts.profile import Node, SharedParameter
from pdtool.errors import NoPlanError, UsageError
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.plan_figures import refresh
from pdtool.planner.choice.without_formulas import even_pieces, under_schedule
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Evaluator, lower_bound_s
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob
from pdtool.planner.stage_costs import stage_loads
from pdtool.schedule import SCHEDULES, ExecutionConfig, steady_run


def job_of(plan, profile, minibatches=None):
    """The job that a run of the plan is."""
    return SimulationJob.of(Placement.of(plan, profile), profile, plan.cluster, minibatches)


def simulated(plan, profile, minibatches=None):
    """The simulation of a plan."""
    return simulate(job_of(plan, profile, minibatches))


def test_a_straight_plan_goes_at_the_pace_of_its_slowest_stage():
    """Six operators of 3 s, the second stage holds three: 9 s a minibatch."""
    net = chain([3.0] * 6, crossing=10)
    plan = plan_of(net, [["x", "a0", "a1"], ["a2", "a3", "a4"], ["a5"]], [[0], [1], [2]], make_cluster((3,), (1e3,)))
    found = simulated(plan, net)
    assert found.time_per_minibatch_s == pytest.approx(9)
    assert found.throughput_samples_per_s == pytest.approx(8 / 9)
    assert found.sent_bytes == pytest.approx(40), "10 bytes over each border, and back"
    assert [usage.stage for usage in found.workers] == [0, 1, 2]


@pytest.mark.parametrize("minibatches", [1, 2, 3, 20])
def test_without_a_steady_state_minibatches_take_all_the_time_together(minibatches):
    """The last update too: one minibatch took 409 µs, and all of them, which were one, 461 µs."""
    net = profile_of([Node(name="a", op="op", module="", forward_s=1.0, backward_s=2.0, update_s=0.5)])
    found = simulated(plan_of(net, [["a"]], [[0]], make_cluster((1,), (1e3,))), net, minibatches)
    assert found.steady or minibatches < 20
    assert found.makespan_s == pytest.approx(3.5 * minibatches)
    assert found.time_per_minibatch_s == pytest.approx(3.5)


def test_data_parallelism_waits_for_what_its_last_backward_does_not_hide():
    """One bucket of 400 bytes leaves when the backward has ended: F + B + 2 (3/4) 400 / 100 for four minibatches."""
    net = chain([3.0, 3.0], parameters=200)
    cluster = make_cluster((4,), (100.0,))
    found = simulated(plan_of(net, [net.graph.names], [range(4)], cluster), net)
    assert found.time_per_minibatch_s == pytest.approx((6 + 6) / 4)
    assert [usage.communication_s / found.makespan_s for usage in found.workers] == [pytest.approx(0.5)] * 4
    assert found.sent_bytes == pytest.approx(2 * 3 * 400 / 4)
    large = chain([3.0, 3.0], parameters=100_000_000)  # the gradients of the second leave halfway through the backward
    fast = make_cluster((4,), (1e8,))
    found = simulated(plan_of(large, [large.graph.names], [range(4)], fast), large)
    assert found.time_per_minibatch_s == pytest.approx((6 + 1.5 * 100e6 / 1e8) / 4)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_bucket_leaves_when_the_gradients_in_it_are_there(recompute):
    """Backwards of 2, 4 and 2 s, the last layer's first; 25 MB in each of the outer two, none in the middle."""
    net = chain([3.0, 6.0, 3.0], parameters=25_000_000)
    nodes = tuple(n.model_copy(update={"parameter_bytes": 0}) if n.name == "a1" else n for n in net.nodes)
    net = net.model_copy(update={"nodes": nodes})
    plan = plan_of(net, [net.graph.names], [range(2)], make_cluster((2,), (1e8,)))
    stage = plan.stages[0].model_copy(update={"recompute": recompute})
    [work] = job_of(plan.model_copy(update={"stages": (stage,)}), net).stages
    forward_s = 4.0 * recompute
    assert work.buckets_ready == ((forward_s + 2) / (forward_s + 8), 1.0)


@pytest.mark.parametrize(("schedule", "lags"), [("1f1b", (0, 1)), ("gpipe", (0, 0))])
def test_tied_parameters_are_summed_by_all_who_hold_them(schedule, lags):
    """Two stages hold 40 bytes: each sends 40 in the ring of two; the rest of the parameters stay where they are."""
    net = profile_of(
        chain([3.0] * 2, parameters=100).nodes, shared=(SharedParameter(name="w", bytes=40, nodes=("a0", "a1")),)
    )
    flush = schedule == "gpipe"
    plan = plan_of(
        net,
        [["x", "a0"], ["a1"]],
        [[0], [1]],
        make_cluster((2,), (10.0,)),
        schedule,
        in_flight=(2, 2) if flush else None,
        microbatches=2 if flush else 1,
    )
    job = job_of(plan, net)
    assert [tied.lags for tied in job.tied] == [lags]
    found = simulate(job)
    rounds = len(job.lists[0]) - 2 * found.minibatches
    assert [usage.sent_bytes for usage in found.workers] == [40 * rounds] * 2


@pytest.mark.parametrize("seed", range(25))
def test_memory_and_traffic_are_those_of_the_cost_model(seed):
    """What the lists hold at their fullest is what `cost` says of the plan; nothing is faster than computing."""
    rng = random.Random(seed)
    net = random_profile(rng, rng.randint(2, 6))
    net = profile_of(net.nodes, optimizer_state_bytes=net.optimizer_state_bytes, shared=net.shared)
    inputs = [node.name for node in net.nodes if node.op == "input"]
    rest = [name for name in net.graph.names if name not in inputs]
    cut = rng.randint(1, len(rest) - 1)
    stages = [[*inputs, *rest[:cut]], rest[cut:]]
    workers = rng.choice([[[0, 1], [2]], [[0], [1]], [[2], [0, 1, 3]]])
    recompute = [rng.random() < 0.5 for _ in stages]
    cluster = make_cluster((4,), (1e6,))
    found = simulated(plan_of(net, stages, workers, cluster, recompute=recompute), net, minibatches=24)
    in_flight = SCHEDULES["1f1b"].usual_in_flight([len(numbers) for numbers in workers])
    evaluator = Evaluator(net, cluster)
    placed = evaluator.place(stages, workers, ExecutionConfig(), in_flight=in_flight, recompute=recompute)
    costs = placed.cost
    assert [usage.memory_bytes for usage in found.workers] == [
        costs.memory_bytes[usage.stage] for usage in found.workers
    ]
    assert found.sent_bytes == pytest.approx(costs.traffic_bytes, abs=3)
    assert found.time_per_minibatch_s >= lower_bound_s(evaluator, placed) - 1e-9


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_on_a_plan_without_replicas(schedule):
    """Two stages of F = 6, I = W = 6, four microbatches in an update: all are as fast as their bubbles allow."""
    net = chain([3.0] * 12, parameters=5)
    stages = [["x", *(f"a{i}" for i in range(6))], [f"a{i}" for i in range(6, 12)]]
    plan = plan_of(net, stages, [[0], [1]], make_cluster((2,), (1e9,)))
    placement = Placement.of(plan, net)
    if schedule != "1f1b":
        placement = under_schedule(plan, net, schedule, chunks=2).with_usual_in_flight()
    found = simulate(SimulationJob.of(placement, net, plan.cluster))
    kind = SCHEDULES[schedule]
    idle = kind.flushes * (6 if kind.splits_backward else 18 / placement.execution.chunks)
    assert found.time_per_minibatch_s == pytest.approx(18 + idle / 4, rel=1e-6)


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize("schedule", [kind.name for kind in SCHEDULES.values() if kind.equal_replicas])
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6))
def test_more_workers_are_no_reason_for_a_slower_plan(schedule, seed):
    """Stages that need equal replicas took every worker: GNMT on 16 was 1.9 times as slow as on four of them."""
    rng = random.Random(seed)
    times = [rng.choice([0, 1, 3, 9]) for _ in range(9)]
    net = chain(times, parameters=100, crossing=rng.choice([1, 10**5]))
    cluster, options = make_cluster((4,), (1e4,)), PlanOptions(schedule=schedule, microbatches=4)
    plan = make_plan(net, "p.json", cluster, options)
    for workers in (4, plan.workers):
        with contextlib.suppress(NoPlanError):  # nine operators are enough for four workers, but not everywhere
            other = make_plan(net, "p.json", cluster, replace(options, workers=workers))
            assert plan.predicted.time_s <= other.predicted.time_s * (1 + options.simplest)
    assert plan.asked == options


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("schedule", [kind.name for kind in SCHEDULES.values() if kind.flushes])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_no_length_of_an_epoch_needs_more_memory_than_the_plan_says(schedule, seed):
    """The last round of an interleaved epoch may be short, and have more in flight than a whole one, or more of the
    stage that needs more memory."""
    rng = random.Random(seed)
    net = chain([rng.choice([1, 3, 9]) for _ in range(9)], parameters=100, crossing=rng.choice([1, 500]), stash=10**6)
    options = PlanOptions(schedule=schedule, microbatches=rng.randint(2, 9), workers=rng.randint(2, 4), simplest=0)
    plan = make_plan(net, "p.json", make_cluster((4,), (1e4,)), options)
    for usage in simulated(plan, net).workers:
        assert usage.memory_bytes == plan.predicted.memory_bytes[usage.stage]
    for minibatches in range(1, 3 * options.microbatches):
        for usage in simulated(plan, net, minibatches).workers:
            assert usage.memory_bytes <= plan.predicted.memory_bytes[usage.stage], f"{minibatches} minibatches"
            assert usage.peak_stashed <= plan.stages[usage.stage].in_flight


def test_a_stage_that_computes_nothing_takes_no_worker_and_no_negative_time():
    net = chain([9, 0, 9], crossing=1)
    plan = make_plan(net, "p.json", make_cluster((3,), (1e9,)), PlanOptions(schedule="zb-h1", microbatches=8))
    assert plan.workers == 2
    for seed in range(40):  # differences of rounded sums
        rng = random.Random(seed)
        net = chain([rng.choice([0, rng.random(), rng.random()]) for _ in range(14)])
        stages = (("x", "a0"), *((f"a{i}",) for i in range(1, 14)))
        assert all(load.forward_s >= 0 <= load.backward_s for load in stage_loads(net, stages))


@pytest.mark.parametrize("schedule", [kind.name for kind in SCHEDULES.values() if not kind.has_formulas])
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_a_stage_and_a_border_have_their_figures_under_any_schedule(schedule, seed):
    """A worker computes what its stages do together, and a border takes as long as its bytes do: 0, the plan said."""
    rng = random.Random(seed)
    net = chain([rng.randint(1, 9) for _ in range(8)], parameters=100, crossing=10)
    cluster, is_replicated = make_cluster((3,), (1e3,)), not SCHEDULES[schedule].equal_replicas
    stages = [["x", *(f"a{i}" for i in range(4))], [f"a{i}" for i in range(4, 8)]]
    plan = plan_of(net, stages, [[0, 2], [1]] if is_replicated else [[0], [1]], cluster)
    placement = under_schedule(plan, net, schedule, chunks=2)
    figures = refresh(placement.to_plan(net, "p.json", cluster), net).predicted
    found = simulate(SimulationJob.of(placement, net, cluster))
    for usage in found.workers:
        of_its_stages_s = sum(figures.compute_s[usage.stage :: placement.pipeline_depth])
        assert usage.busy_s / found.minibatches == pytest.approx(of_its_stages_s)
    assert figures.transfer_s == pytest.approx([0.01] * (len(figures.compute_s) - 1))
    assert [seconds > 0 for seconds in figures.allreduce_s] == [replicas > 1 for replicas in placement.replicas]


def test_recomputing_takes_one_more_forward():
    net = chain([3.0] * 4)
    stages = [["x", "a0", "a1"], ["a2", "a3"]]
    plain, again = (
        simulated(plan_of(net, stages, [[0], [1]], make_cluster((2,), (1e9,)), recompute=[r, r]), net)
        for r in (False, True)
    )
    assert (plain.time_per_minibatch_s, again.time_per_minibatch_s) == (pytest.approx(6), pytest.approx(8))


def test_copies_never_meet_but_to_average():
    """Two copies of 1-1 on two servers: nothing but gradients crosses."""
    net = chain([3.0, 3.0], parameters=8, crossing=100)
    cluster = make_cluster((2, 2), (1e3, 1e6))
    plan = plan_of(net, [["x", "a0"], ["a1"]], [[0, 2], [1, 3]], cluster, in_flight=(2, 1), copies=2)
    found = simulated(plan, net)
    messages = [event for events in found.events for event in events if event.track == "send"]
    assert max(event.length_s for event in messages) == pytest.approx(1e-4, rel=0.01), "100 bytes at 1 MB/s"
    assert found.sent_bytes == pytest.approx(200 + 2 * 8), (
        "each of two rings: two members, 8 bytes, every 2 minibatches"
    )


def test_skips_go_straight_and_what_has_no_gradient_is_not_waited_for():
    """x -> a, b, c; a -> c. Stage 0 sends x to 1 and 2, a to 2; nothing comes back for x."""
    net = profile_of(
        [
            Node(name="x", op="input", module="", output_bytes=7),
            Node(
                name="a", op="op", module="", inputs=("x",), forward_s=1, backward_s=1, output_bytes=5, gradient_bytes=3
            ),
            Node(name="b", op="op", module="", inputs=("x",), forward_s=1, backward_s=1, output_bytes=2),
            Node(name="c", op="op", module="", inputs=("a", "b", "x"), forward_s=1, backward_s=1),
        ]
    )
    plan = plan_of(net, [["x", "a"], ["b"], ["c"]], [[0], [1], [2]], make_cluster((3,), (1e9,)))
    edges = job_of(plan, net).edges
    assert [(b.source, b.destination, b.forward_bytes, b.backward_bytes, b.has_gradient) for b in edges] == [
        (0, 1, 7, 0, False),
        (0, 2, 12, 3, True),
        (1, 2, 2, 0, False),
    ]


@given(st.lists(st.integers(1, 30), min_size=4, max_size=20), st.integers(1, 4))
def test_pieces_are_even_as_far_as_operators_go(times, count):
    """In order, none empty; with room to choose, none is over its even share by more than its last operator."""
    net = chain([float(t) for t in times])
    made = even_pieces(net, count)
    assert [name for piece in made for name in piece] == net.graph.names
    assert all(made)
    if max(times) <= sum(times) / count / 2:
        seconds = [sum(net.by_name[n].forward_s + net.by_name[n].backward_s for n in piece) for piece in made]
        assert max(seconds) <= sum(times) / count + max(times) + 1e-9


def test_more_minibatches_than_can_be_simulated_are_refused():
    net = chain([1.0] * 3)
    plan = plan_of(net, [["x", "a0"], ["a1", "a2"]], [[0], [1]], make_cluster((2,), (1e9,)))
    with pytest.raises(UsageError, match="--minibatches 1000000 takes too long to simulate on 2 stages; pass at most"):
        job_of(plan, net, minibatches=10**6)


def test_what_cannot_be_interleaved_is_refused():
    net = chain([1.0] * 3)
    plan = plan_of(net, [["x", "a0"], ["a1", "a2"]], [[0], [1]], make_cluster((2,), (1e9,)))
    with pytest.raises(
        NoPlanError,
        match=r"at most 4 stages, too few for 6 \(workers times --chunks\); pass a smaller --workers or --chunks",
    ):
        under_schedule(plan, net, "interleaved", chunks=3)
    with pytest.raises(
        UsageError, match="HINTS pins a2 to stage 1, but interleaved divides the model into 4 even parts"
    ):
        under_schedule(plan, profile_of(net.nodes, pin={"a2": 1}), "interleaved", chunks=2)
    uneven = plan_of(net, [["x", "a0"], ["a1", "a2"]], [[0, 1], [2]], make_cluster((3,), (1e9,)))
    interleaved = under_schedule(uneven, net, "interleaved", chunks=2)
    with pytest.raises(
        UsageError, match="interleaved needs the same number of replicas for each stage, but the plan is 2-1; use"
    ):
        SimulationJob.of(interleaved, net, uneven.cluster)
    twice = make_plan(net, "net.json", make_cluster((2,), (1e9,)), PlanOptions(schedule="interleaved", microbatches=4))
    with pytest.raises(UsageError, match="schedule 1f1b cannot have 2 stages on each worker"):
        under_schedule(twice, net, "1f1b", chunks=2)


def test_interleaved_stages_of_one_worker_share_no_parameter():
    """A run refuses them, so they are not planned."""
    net, cluster = chain([1.0] * 8), make_cluster((2,), (1e9,))
    options = PlanOptions(schedule="interleaved", microbatches=4)
    for nodes, is_planned in ((("a0", "a7"), True), (("a0", "a4"), False)):  # of stages 0 and 3, 0 and 2
        tied = profile_of(net.nodes, shared=(SharedParameter(name="w", bytes=0, nodes=nodes),))
        if is_planned:
            assert make_plan(tied, "net.json", cluster, options).chunks == 2
        else:
            with pytest.raises(UsageError, match="stages 0, 2 share a parameter, and two of them are on one"):
                make_plan(tied, "net.json", cluster, options)


def test_enough_minibatches_see_whole_periods():
    """Three periods of 15, the least that is 32 or more, and more than is ever in flight on either side."""
    shape = ExecutionConfig.of_schedule("1f1b").shape((5, 3, 1))
    started = max(w * r for w, r in zip(shape.in_flight, shape.replicas, strict=True))
    assert steady_run(shape) == 2 * started + 45
    assert steady_run(ExecutionConfig.of_schedule("1f1b").shape((1,))) == 2 + 32
    assert steady_run(ExecutionConfig.of_schedule("gpipe", 64).shape((1, 1))) == 3 * 64
