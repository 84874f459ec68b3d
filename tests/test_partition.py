"""Law 4: search equals brute force, and is never worse than a plan written by hand under the same cost."""

import random

import pytest

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Device, Node, Profile, SharedParameter
from pdtool.cluster import make_cluster
from pdtool.errors import NoPlanError, UsageError
from pdtool.partition import brute, cost
from pdtool.partition.search import Options, Search, make_plan, refresh
from pdtool.partition.space import Space
from pdtool.schedule import default_in_flight


def profile_of(nodes, **more):
    return Profile(
        name="p", model=None, batch_size=8, device=Device(name="none", kind="estimated"), step_s=0.0, coverage=0.0,
        nodes=tuple(nodes), **more,
    )  # fmt: skip


def chain(seconds, *, activation=1000, parameters=0, stash=0):
    """in -> n0 -> n1 -> ..., each with the same sizes."""
    nodes = [Node(name="in", op="input", module="", output_bytes=activation)]
    for i, s in enumerate(seconds):
        nodes.append(Node(
            name=f"n{i}", op="x", module=f"n{i}", inputs=(nodes[-1].name,), forward_s=s / 3, backward_s=2 * s / 3,
            output_bytes=activation, gradient_bytes=activation, parameter_bytes=parameters, stash_bytes=stash,
        ))  # fmt: skip
    return profile_of(nodes)


def random_case(seed):
    """A small DAG with branches, skips and ties, on a cluster of one or two levels, with or without a memory limit."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    nodes = [Node(name="in", op="input", module="", output_bytes=rng.randint(0, 4000))]
    for i in range(count):
        sources = {n.name for n in nodes if rng.random() < 0.4} or {nodes[-1].name}
        size = rng.randint(0, 5000)
        nodes.append(Node(
            name=f"n{i}", op="x", module=f"n{i}", inputs=tuple(sorted(sources)), forward_s=rng.random() * 1e-3,
            backward_s=rng.random() * 2e-3, update_s=rng.choice([0, 1e-4]), output_bytes=size,
            gradient_bytes=rng.choice([0, size]), parameter_bytes=rng.choice([0, 10, 5000, 20000]),
            stash_bytes=rng.randint(0, 9000),
        ))  # fmt: skip
    shared = ()
    holders = tuple(n.name for n in nodes[1:] if n.parameter_bytes)[:2]
    if len(holders) == 2 and rng.random() < 0.4:
        shared = (SharedParameter(name="w", bytes=10, nodes=holders),)
    together = ((f"n{count - 1}", "n0"),) if count > 2 and rng.random() < 0.2 else ()
    sizes = rng.choice([(1,), (2,), (3,), (4,), (2, 2)])
    bandwidths = [rng.choice([1e6, 5e6, 1e8]) for _ in sizes]
    memory = rng.choice([None, None, 30_000, 60_000, 150_000])
    cluster = make_cluster(sizes, bandwidths, latencies=[rng.choice([0, 1e-4])] * len(sizes), memory_bytes=memory)
    return profile_of(nodes, shared=shared, together=together, optimizer_state_bytes=rng.choice([0.0, 2.0])), cluster


@pytest.mark.parametrize("block", range(10))
def test_search_equals_brute_force(block):
    infeasible = 0
    for seed in range(block * 30, block * 30 + 30):
        profile, cluster = random_case(seed)
        expected = brute.best(profile, cluster, cluster.workers)
        found = Search(profile, cluster, Space.of(profile), Options()).run()
        assert (found is None) == (expected is None), seed
        if found is None:
            infeasible += 1
            with pytest.raises(NoPlanError, match="more than there is"):
                make_plan(profile, "p.json", cluster, Options())
        else:
            plan = make_plan(profile, "p.json", cluster, Options(simplest=0.0))
            assert plan.predicted.bottleneck_s == pytest.approx(expected, rel=1e-9, abs=1e-15), seed
            assert not cluster.memory_bytes or max(plan.predicted.memory_bytes) <= cluster.memory_bytes
            plan.stage_nodes(profile)
            plan.check_schedule()
    assert infeasible < 30


@pytest.mark.parametrize("seed", range(20))
def test_never_worse_than_a_plan_by_hand(seed):
    profile, cluster = random_case(seed + 1000)
    profile = profile.model_copy(update={"together": ()})
    cluster = make_cluster([cluster.workers], [cluster.levels[0].bandwidth_bytes_per_s])
    best = make_plan(profile, "p.json", cluster, Options(simplest=0.0)).predicted.bottleneck_s
    rng = random.Random(seed)
    names = profile.graph.names
    for _ in range(10):
        count = rng.randint(1, min(cluster.workers, len(names) - 1))
        ends = [*sorted(rng.sample(range(2, len(names)), count - 1)), len(names)]
        stages = [names[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        replicas = [1] * count
        for _ in range(rng.randint(0, cluster.workers - count)):
            replicas[rng.randrange(count)] += 1
        workers, at = [], 0
        for r in replicas:
            workers.append(range(at, at + r))
            at += r
        costs = cost.evaluate(profile, cluster, stages, workers, flight=default_in_flight(replicas))
        assert best <= costs.bottleneck_s * (1 + 1e-9)


def test_simplest_takes_fewer_stages_within_its_margin():
    profile = chain([1e-3] * 100)
    cluster = make_cluster([3], [1e12])
    assert make_plan(profile, "p", cluster, Options(simplest=0.0)).predicted.bottleneck_s == pytest.approx(100e-3 / 3)
    simple = make_plan(profile, "p", cluster, Options(simplest=0.03))
    assert simple.config == "3", "data parallelism is as fast here, and the simplest"


def test_15_1_is_found_where_it_is_best():
    """VGG-16's shape: layers with many activations and few weights, then one with nearly all the weights."""
    nodes = [*chain([15e-3 / 15] * 15).nodes]
    nodes.append(Node(name="fc", op="x", module="fc", inputs=("n14",), forward_s=0.3e-3, backward_s=0.7e-3,
                      output_bytes=0, parameter_bytes=500_000_000))  # fmt: skip
    plan = make_plan(profile_of(nodes), "p", make_cluster([4, 4], [1.25e9, 12e9]), Options())
    assert plan.config == "15-1"
    assert plan.predicted.gain_over_data_parallel > 5
    assert [r.plan for r in plan.why.rivals][:1] == ["data parallelism (16)"]


def test_straight_gives_each_worker_its_own_stage():
    plan = make_plan(chain([1e-3] * 8), "p", make_cluster([4], [1e9]), Options(straight=True))
    assert plan.config == "1-1-1-1"
    assert [s.in_flight for s in plan.stages] == [4, 3, 2, 1]


def test_fewer_workers_when_asked():
    plan = make_plan(chain([1e-3] * 8), "p", make_cluster([2, 4], [1e9, 1e10]), Options(workers=3))
    assert sorted(w for s in plan.stages for w in s.workers) == [0, 1, 2]


def test_more_stages_than_operators_is_refused():
    with pytest.raises(NoPlanError, match=r"needs 4 stages, but the model can be cut into 3.*--workers 3"):
        make_plan(chain([1e-3] * 3), "p", make_cluster([4], [1e9]), Options(straight=True))


def test_too_little_memory_is_explained_with_what_would_fit():
    profile = chain([1e-3] * 4, parameters=1_000_000)
    with pytest.raises(NoPlanError, match=r"stage 0.*more than there is; give each worker at least") as raised:
        make_plan(profile, "p", make_cluster([2], [1e9], memory_bytes=1_000_000), Options())
    wanted = int(float(raised.value.remedy.split("at least ")[1].split(" MB")[0]) * 1.02e6)
    make_plan(profile, "p", make_cluster([2], [1e9], memory_bytes=wanted), Options())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (Options(workers=5), "the cluster has 4"),
        (Options(workers=0), "the cluster has 4"),
        (Options(microbatches=4), "schedule 1f1b, which has none"),
        (Options(simplest=-0.1), "is negative"),
    ],
)
def test_contradicting_options_are_refused(options, what):
    with pytest.raises(UsageError, match=what):
        make_plan(chain([1e-3] * 3), "p", make_cluster([4], [1e9]), options)


def test_pins_hold_and_others_are_refused():
    profile = chain([1e-3] * 6).model_copy(update={"pin": {"n4": 0}})
    plan = make_plan(profile, "p", make_cluster([2], [1e9]), Options(straight=True))
    assert "n4" in plan.stage_nodes(profile)[0]
    with pytest.raises(UsageError, match="first and last stage only"):
        make_plan(profile.model_copy(update={"pin": {"n4": 1}}), "p", make_cluster([2], [1e9]), Options())


def test_a_flushing_schedule_pays_for_its_bubble():
    profile, cluster = chain([1e-3] * 4), make_cluster([2], [1e12])
    plain = make_plan(profile, "p", cluster, Options(straight=True))
    flush = make_plan(profile, "p", cluster, Options(straight=True, schedule="1f1b-flush", microbatches=4))
    assert flush.predicted.bottleneck_s == pytest.approx(plain.predicted.bottleneck_s * 5 / 4)
    assert (flush.weights, flush.microbatches) == ("flush", 4)


def test_an_edited_plan_is_predicted_anew():
    profile = chain([1e-3] * 4)
    plan = make_plan(profile, "p", make_cluster([2], [1e12]), Options(straight=True))
    assert not plan.edited
    text = plan.dump().replace("[in, n0, n1]", "[in, n0, n1, n2]").replace("[n2, n3]", "[n3]")
    edited = Plan.parse(text)
    assert edited.edited
    again = refresh(edited, profile)
    assert not again.edited
    assert again.predicted.bottleneck_s == pytest.approx(3e-3)


def test_a_graph_with_too_many_cuts_is_coarsened_and_says_so():
    """Eight branches of eight operators: 9^8 cuts."""
    nodes = [Node(name="in", op="input", module="", output_bytes=8)]
    for b in range(8):
        for i in range(8):
            source = f"b{b}_{i - 1}" if i else "in"
            nodes.append(Node(name=f"b{b}_{i}", op="x", module="", inputs=(source,), forward_s=1e-3 * (1 + i % 3)))
    nodes.append(Node(name="out", op="x", module="", inputs=tuple(f"b{b}_7" for b in range(8)), forward_s=1e-3))
    profile = profile_of(nodes)
    plan = make_plan(profile, "p", make_cluster([4], [1e9]), Options(straight=True))
    assert "merged" in plan.why.bottleneck
    plan.stage_nodes(profile)


def test_the_same_inputs_give_the_same_bytes():
    profile, cluster = random_case(5)
    cluster = make_cluster([4], [1e7])
    assert make_plan(profile, "p", cluster, Options()).dump() == make_plan(profile, "p", cluster, Options()).dump()
