"""Costs that can be worked out on paper."""

import random

import pytest
from graphs import chain, profile_of, random_profile
from reference.brute_force import divisions

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.artifacts.profile import Node, SharedParameter
from pdtool.planner.plan_cost import Evaluator
from pdtool.planner.search.layouts import layouts
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob
from pdtool.schedule import SCHEDULES, ExecutionConfig

#   x -> a -> b -> c      a's output goes to b, c and d: a skip
#        \----\--> d
SKIP = profile_of(
    [
        Node(name="x", op="input", module="", output_bytes=7),
        Node(
            name="a",
            op="op",
            module="",
            inputs=("x",),
            forward_s=1,
            backward_s=2,
            output_bytes=100,
            gradient_bytes=50,
            parameter_bytes=40,
            stash_bytes=9,
        ),
        Node(name="b", op="op", module="", inputs=("a",), forward_s=2, output_bytes=10, gradient_bytes=10),
        Node(name="c", op="op", module="", inputs=("a", "b"), forward_s=3, update_s=1, parameter_bytes=60),
        Node(name="d", op="op", module="", inputs=("a",), forward_s=1),
    ],
    optimizer_state_bytes=2.0,
)
STAGES = [["x", "a"], ["b"], ["c", "d"]]
ONE_F_ONE_B = ExecutionConfig()


def cost_of(profile, cluster, stages, workers, execution=ONE_F_ONE_B, **options):
    """The cost of a plan; `options` of Evaluator.place."""
    return Evaluator(profile, cluster).place(stages, workers, execution, **options).cost


def test_a_straight_pipeline():
    costs = cost_of(SKIP, make_cluster((3,), (10.0,)), STAGES, [[0], [1], [2]])
    assert costs.compute_s == (3, 2, 5)
    assert costs.allreduce_s == (0, 0, 0)
    assert costs.transfer_s == (10, 11), "a goes once to each stage that takes it, b's output to the last; full duplex"
    working = (100, 10 + 50, 60 * 2)  # an operator's output and the gradients of its inputs, or an optimizer step
    arriving = (50, 100 + 10, 110)  # the next inputs, and gradients of what later stages take
    assert costs.memory_bytes == (
        40 * (3 + 1 + 2) + 9 * 3 + working[0] + arriving[0],
        100 * 2 + working[1] + arriving[1],
        60 * (1 + 1 + 2) + 110 + working[2] + arriving[2],
    )
    assert costs.traffic_bytes == 150 + 170
    assert (costs.time_per_minibatch_s, costs.bottleneck) == (11, "border 1|2 transfer 11 s")


def test_data_parallelism():
    costs = cost_of(SKIP, make_cluster((4,), (10.0,), latencies=[0.5]), [SKIP.graph.names], [range(4)])
    assert costs.compute_s == (10 / 4,)
    assert costs.allreduce_s == ((2 * 3 / 4 * 100 / 10 + 2 * 3 * 0.5) / 4,), "one ring in a round of four minibatches"
    assert costs.memory_bytes == (100 * (1 + 1 + 2) + 60 * 2,), "there is no stash any more when the optimizer steps"
    assert costs.traffic_bytes == 2 * 3 * 100 / 4


def test_a_flush_updates_once_for_all_its_microbatches_and_drains():
    gpipe, flush = (ExecutionConfig.of_schedule(name, 4) for name in ("gpipe", "1f1b-flush"))
    costs = cost_of(SKIP, make_cluster((3,), (10.0,)), STAGES, [[0], [1], [2]], gpipe)
    assert costs.compute_s == (3, 2, 4 + 1 / 4)
    assert costs.time_per_minibatch_s == 11 * (4 + 3 - 1) / 4
    assert costs.memory_bytes[0] == 40 * (1 + 1 + 2) + 9 * 4 + 100 + 50, "one weight version, four stashes"
    uneven = cost_of(SKIP, make_cluster((3,), (10.0,)), [SKIP.graph.names], [range(3)], flush)
    assert uneven.compute_s == ((2 * 9 + 1) / 4,), "one of three replicas does two of four microbatches"


@pytest.mark.parametrize(
    ("workers", "seconds"),
    [
        (([0], [1]), 100 / 100),  # inside a server
        (([0], [2]), 100 / 10),  # between two
        (([0, 1], [2, 3]), 100 / 10),  # both share the one link of their server
        (([0, 1], [2]), 100 / 10),
        (([0, 1, 2], [3]), 2 / 3 * 100 / 10),  # two of three minibatches come from the other server
        (([0, 1, 2, 3], [4, 5, 6, 7]), 100 / 20),  # two servers on each side: two links
        (([0, 1, 2], [3, 4, 5]), max(2 / 3, 2 / 3) * 100 / 10),  # one server has some of both
    ],
)
def test_a_border_uses_the_links_its_workers_share(workers, seconds):
    cluster = make_cluster((4, 2), (10.0, 100.0))
    costs = cost_of(SKIP, cluster, [["x", "a"], ["b", "c", "d"]], workers)
    assert costs.transfer_s == (pytest.approx(seconds),)


def test_a_ring_goes_at_the_pace_of_its_slowest_link():
    cluster = make_cluster((2, 2), (10.0, 100.0))
    inside, across = (cost_of(SKIP, cluster, [SKIP.graph.names], [w]).allreduce_s[0] for w in ([2, 3], [1, 2]))
    assert (inside, across) == (pytest.approx(100 / 100 / 2), pytest.approx(100 / 10 / 2))


def test_tied_parameters_count_once_in_a_stage_and_are_free_by_the_formulas_between_stages():
    nodes = chain([1.0] * 3, parameters=40).nodes
    profile = profile_of(nodes, shared=(SharedParameter(name="w", bytes=40, nodes=("a0", "a2")),))
    cluster = make_cluster((2,), (10.0,))
    apart = cost_of(profile, cluster, [["x", "a0"], ["a1", "a2"]], [[0], [1]])
    assert apart.allreduce_s == (0, 0), "a lower bound: only the simulation knows when both stages update"
    assert apart.traffic_bytes == 2 * 40, "a ring of two"
    whole = cost_of(profile, cluster, [["x", "a0", "a1", "a2"]], [[0]])
    assert whole.allreduce_s == (0,)
    assert whole.memory_bytes == (80 * 2,)


@pytest.mark.parametrize("schedule", [kind.name for kind in SCHEDULES.values() if kind.has_formulas])
def test_in_flight_is_that_of_the_schedule(schedule):
    replicas, workers = (3, 2, 1), [[0, 1, 2], [3, 4], [5]]
    execution = ExecutionConfig.of_schedule(schedule, 4 if SCHEDULES[schedule].flushes else 1)
    plan = Evaluator(SKIP, make_cluster((6,), (10.0,))).place(STAGES, workers, execution)
    found = plan.placement.in_flight
    usual = SCHEDULES["1f1b"].usual_in_flight(replicas)
    flush = tuple(min(w, -(-4 // r)) for w, r in zip(usual, replicas, strict=True))
    assert found == {"1f1b": usual, "1f1b-flush": flush, "gpipe": (2, 2, 4)}[schedule]


def test_copies_side_by_side_share_the_work_and_average_over_the_servers():
    cluster = make_cluster((2, 3), (10.0, 100.0))
    evaluator = Evaluator(SKIP, cluster)
    two = evaluator.place(STAGES, [[0, 3], [1, 4], [2, 5]], ExecutionConfig(copies=2))
    single = evaluator.place(STAGES, [[0], [1], [2]], ONE_F_ONE_B)
    copies, one = two.cost, single.cost
    assert copies.compute_s == tuple(time / 2 for time in one.compute_s)
    assert copies.transfer_s == tuple(time / 2 for time in one.transfer_s), "no tensor leaves its copy"
    assert copies.allreduce_s == (40 / 10 / 2, 0, 60 / 10 / 2), "each stage's weights, once in a round of two"
    assert two.placement.in_flight == single.placement.in_flight
    assert copies.traffic_bytes == one.traffic_bytes + 2 * 100 / 2


def test_the_ring_of_a_stage_goes_through_its_replicas_in_all_copies():
    """Two copies of 3-1: a round of six minibatches for the three replicas in each, of two for the other stage."""
    costs = cost_of(
        SKIP,
        make_cluster((2, 4), (10.0, 100.0)),
        [["x", "a", "b"], ["c", "d"]],
        [[0, 4, 1, 5, 2, 6], [3, 7]],
        ExecutionConfig(copies=2),
    )
    assert costs.allreduce_s == pytest.approx((2 * 5 / 6 * 40 / 10 / 6, 2 * 1 / 2 * 60 / 10 / 2))


@pytest.mark.parametrize("block", range(3))
def test_copies_are_never_predicted_slower_than_they_are(block):
    """Or a plan that wins could be passed over for one that loses: what the formulas hide, the simulation shows."""
    seen = set()
    for seed in range(25 * block, 25 * block + 25):
        rng = random.Random(seed)
        profile = random_profile(rng, rng.randint(2, 5)).model_copy(update={"shared": ()})
        sizes = rng.choice([(2, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2)])
        cluster = make_cluster(sizes, sorted(rng.choice([300.0, 1e3, 5e3, 1e5]) for _ in sizes))
        layout = rng.choice([layout for layout in layouts(cluster, cluster.workers) if layout.copies > 1])
        stages, replicas = rng.choice(list(divisions(profile, layout.workers)))
        ends = [sum(replicas[: s + 1]) for s in range(len(replicas))]
        workers = [
            [layout.worker(copy, position) for position in range(end - r, end) for copy in range(layout.copies)]
            for r, end in zip(replicas, ends, strict=True)
        ]
        execution = ExecutionConfig(copies=layout.copies)
        plan = Evaluator(profile, cluster).place(stages, workers, execution)
        simulated = simulate(SimulationJob.of(plan.placement, profile, cluster)).time_per_minibatch_s
        told = f"seed {seed}: {plan.placement.config} on {sizes}"
        assert plan.time_per_minibatch_s <= simulated * (1 + 1e-9), told
        seen |= {min(replicas), max(replicas)}
    assert {1, 2, 3} <= seen


def test_a_stage_that_lacks_memory_recomputes():
    """Three stages of 3 s; the first wants three in flight, each 100 bytes of stash, and has no parameters."""
    profile = chain([3.0, 3.0, 3.0], stash=100)
    stages, workers = [["x", "a0"], ["a1"], ["a2"]], [[0], [1], [2]]

    def plan(memory, may_recompute=True):
        cluster = make_cluster((3,), (10.0,), memory_bytes=memory)
        evaluator = Evaluator(profile, cluster, PlanOptions(recompute=may_recompute))
        return evaluator.place(stages, workers, ONE_F_ONE_B)

    assert plan(300).placement.recompute == (False, False, False)
    assert plan(299).placement.recompute == (True, False, False)
    assert plan(299).cost.compute_s[0] == pytest.approx(4.0), "one more forward"
    assert plan(299).cost.memory_bytes == (100, 200, 100), "one stash, while it works"
    assert plan(299, may_recompute=False).cost.memory_bytes[0] == 300
    assert max(plan(50).cost.memory_bytes) > 50, "what does not fit says what it would need"


def test_fewer_minibatches_in_flight_than_the_schedule_wants_are_slower():
    profile = chain([3.0, 3.0, 3.0])
    stages, workers = [["x", "a0"], ["a1"], ["a2"]], [[0], [1], [2]]
    times_s = [
        cost_of(profile, make_cluster((3,), (10.0,)), stages, workers, in_flight=in_flight).time_per_minibatch_s
        for in_flight in ([3, 2, 1], [2, 2, 1], [1, 1, 1])
    ]
    assert times_s == pytest.approx([3.0, 9 / 2, 9.0]), "two in a round trip of nine seconds; model parallelism"
