"""Cuts: exactly the downsets that keep groups and pins, and an end to every graph."""

import math
import random
from itertools import combinations

import pytest
from graphs import chain, profile_of, random_profile

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.artifacts.profile import Node
from pdtool.planner.formulas import COST_MODELS
from pdtool.planner.search.cuts import find_cuts
from pdtool.planner.search.search import PlanSearch
from pdtool.planner.stage_costs import stage_loads


def branches(width, length):
    """`width` chains side by side between an input and a sum."""
    nodes = [Node(name="x", op="input", module="")]
    for b in range(width):
        for i in range(length):
            source = f"b{b}_{i - 1}" if i else "x"
            nodes.append(Node(name=f"b{b}_{i}", op="op", module="", inputs=(source,), forward_s=1.0 + b + i))
    nodes.append(Node(name="sum", op="add", module="", inputs=tuple(f"b{b}_{length - 1}" for b in range(width))))
    return profile_of(nodes)


def test_a_chain_can_be_cut_between_any_two():
    space = find_cuts(chain([1.0] * 1000))
    assert len(space.inside) == 1001  # the input goes with the first operator, so a stage of it alone is not counted
    assert space.max_stages == 1000


def test_side_by_side_branches_multiply():
    space = find_cuts(branches(3, 2))
    assert len(space.inside) == (2 + 1) ** 3 + 1  # of the input alone: left out; the empty cut and the whole: counted
    assert space.merged_operators is None


@pytest.mark.parametrize("seed", range(40))
def test_every_row_of_the_tables_is_the_load_of_that_stage(seed):
    """cost.loads, one plan at a time, against the arrays that the search computes with."""
    profile = random_profile(random.Random(seed), 5)
    space = find_cuts(profile)
    last = len(space.inside) - 1
    for i, j in combinations(range(last + 1), 2):
        if not space.contains[i, j]:
            continue
        parts = [space.nodes(0, i), space.nodes(i, j), space.nodes(j, last)]
        assert profile.graph.stage_faults(parts) == []
        wanted = stage_loads(profile, tuple(map(tuple, parts)))[1]
        ends, found = space.stages_from[i]
        at = list(ends).index(j)
        assert {key: float(value[at]) for key, value in vars(found).items()} == pytest.approx(vars(wanted), abs=1e-9)


@pytest.mark.parametrize(("width", "length"), [(8, 6), (40, 1), (2, 500), (1, 3000)])
def test_too_many_cuts_are_coarsened_and_it_is_said(width, length):
    profile = branches(width, length)
    space = find_cuts(profile, max_cuts=300)
    assert 2 < len(space.inside) <= 302
    assert space.merged_operators.groups == width * length + 2
    assert space.merged_operators.merged_into == len(space.blocks)
    assert sorted(name for block in space.blocks for name in block) == sorted(profile.graph.names)
    assert profile.graph.stage_faults(space.blocks) == []


def diffusion(seed):
    """A U-Net whose blocks each take an embedding of their own, with operators of random times."""
    rng = random.Random(seed)
    nodes = [Node(name="x", op="input", module="")]

    def add(*inputs, heaviest=1.0):
        figures = {"forward_s": heaviest * rng.random() ** 3, "output_bytes": rng.randint(1, 100)}
        nodes.append(Node(name=f"n{len(nodes)}", op="op", module="", inputs=inputs, **figures))
        return nodes[-1].name

    embedding, h, skips = add("x"), add("x"), []
    for _ in range(12):
        h = add(add(h), add(embedding, heaviest=0.3))
        h = add(add(h), heaviest=0.02)
        skips.append(h)
    for skip in reversed(skips):
        h = add(add(h), add(skip, heaviest=0.02))
        h = add(h, add(embedding, heaviest=0.3), heaviest=0.02)
    return profile_of(nodes)


def slowest_stage_s(space, count):
    """The time of the slowest of so many stages in the best division."""
    fastest_s = {0: 0.0}  # cut -> time of the slowest stage before it
    for _ in range(count):
        longer: dict[int, float] = {}
        for cut, before_s in fastest_s.items():
            ends, load = space.stages_from[cut]
            for end, time_s in zip(ends.tolist(), load.forward_s.tolist(), strict=True):
                longer[end] = min(longer.get(end, math.inf), max(before_s, time_s))
        fastest_s = longer
    return fastest_s[len(space.inside) - 1]


def test_merged_operators_still_make_balanced_stages():
    """A diffusion model's slowest stage took up to five times the mean: all that lay between the operators of a merged
    pair was merged with them."""
    ratios = []
    for seed in range(6):
        profile = diffusion(seed)
        space = find_cuts(profile, max_cuts=300)
        assert space.merged_operators
        even_s = max(sum(node.forward_s for node in profile.nodes) / 4, max(node.forward_s for node in profile.nodes))
        ratios.append(slowest_stage_s(space, 4) / even_s)
    assert max(ratios) < 1.25, ratios


def test_the_smallest_number_of_cuts_leaves_one_stage():
    """It was an IndexError when one block was left."""
    inputs = [(), ("n0",), ("n0",), ("n0", "n1", "n2"), ("n0", "n2")]
    nodes = [Node(name=f"n{i}", op="op", module="", inputs=names) for i, names in enumerate(inputs)]
    assert find_cuts(profile_of(nodes), max_cuts=1).max_stages == 1


def test_groups_stay_whole_and_take_in_what_lies_between():
    space = find_cuts(profile_of(chain([1.0] * 5).nodes, together=(("a1", "a3"),)))
    assert ["a1", "a2", "a3"] in [list(block) for block in space.blocks]
    assert space.max_stages == 3


def test_inputs_are_in_the_first_stage_and_the_loss_in_the_last():
    nodes = [
        Node(name="x", op="input", module=""),
        Node(name="a", op="op", module="", inputs=("x",)),
        Node(name="dangling", op="op", module="", inputs=("a",)),
        Node(name="b", op="op", module="", inputs=("a",)),
        Node(name="target", op="input", module=""),
        Node(name="loss", op="loss", module="", inputs=("b", "target")),
    ]
    space = find_cuts(profile_of(nodes))
    cuts = [set(space.nodes(0, i)) for i in range(1, len(space.inside))]
    assert cuts == [{"x", "target", "a", "dangling"}, set(profile_of(nodes).graph.names)]


def counting_chain(length):
    """Pairs of a counter, from and to which no tensor goes, and an operator; then a counter, and the loss."""
    nodes = [Node(name="x", op="input", module="")]
    for i in range(length):
        nodes.append(Node(name=f"count{i}", op="add_", module="", forward_s=0.1))
        nodes.append(Node(name=f"a{i}", op="op", module="", inputs=(f"a{i - 1}" if i else "x",), forward_s=1.0))
    nodes.append(Node(name="last", op="add_", module="", forward_s=0.1))
    nodes.append(Node(name="loss", op="loss", module="", inputs=(f"a{length - 1}",)))
    return profile_of(nodes)


def test_what_only_writes_a_buffer_stays_with_a_neighbour():
    """Without a neighbour 40 counters would make 2 ** 40 cuts, and stages that send nothing."""
    space = find_cuts(counting_chain(40))
    assert (space.max_stages, space.merged_operators) == (40, None)
    assert all({f"count{i}", f"a{i}"} <= set(block) for i in range(40) for block in space.blocks if f"a{i}" in block)
    assert ["count39", "a39", "last"] in [list(block) for block in space.blocks]


def test_a_pinned_counter_stays_where_it_is_pinned():
    profile = profile_of(counting_chain(3).nodes, pin={"count2": 0})
    space = find_cuts(profile)
    assert all("count2" in space.nodes(0, cut) for cut in range(1, len(space.inside)))


@pytest.mark.parametrize(
    ("pin", "stages"), [({"a2": 0}, 2), ({"a2": -1}, 3), ({"a1": 0, "a3": -1}, 3), ({"a0": -1}, 1), ({"a3": 0}, 1)]
)
def test_pins_to_the_ends_take_their_neighbours_along(pin, stages):
    assert find_cuts(profile_of(chain([1.0] * 4).nodes, pin=pin)).max_stages == stages


def test_a_pin_in_the_middle_counts_stages():
    space = find_cuts(profile_of(chain([1.0] * 4).nodes, pin={"a2": 1}))
    assert space.has_counted_pins
    before_1_of_2 = [set(space.nodes(0, i)) for i in space.allowed_before(1, 2).nonzero()[0] if i]
    assert before_1_of_2 == [{"x", "a0"}, {"x", "a0", "a1"}]


def free_merged(profile):
    """The space with just so few cuts allowed that the free operators alone are merged; None: impossible."""
    fewer = (find_cuts(profile, cuts) for cuts in range(len(find_cuts(profile).inside) - 2, 0, -1))
    return next((space for space in fewer if space.merged_free_blocks and not space.merged_operators), None)


@pytest.mark.rows_of_the_day(days=2)
def test_merging_operators_that_cost_nothing_loses_no_plan():
    """The best pace is the same with and without the cuts around them, under every cost model."""
    merged = 0
    for seed in range(100):
        rng = random.Random(seed)
        nodes = [
            n.model_copy(update={"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0, "parameter_bytes": 0})
            if n.op == "op" and rng.random() < 0.6
            else n
            for n in random_profile(rng, 7).nodes
        ]
        profile = profile_of(nodes)
        space = free_merged(profile)
        if space is None:
            continue
        merged += 1
        cluster = make_cluster((2, 2), (rng.choice([500.0, 3e3]), 1e4))
        for cost_model in COST_MODELS:
            options = PlanOptions(simplest=0, cost_model=cost_model)
            fewer = PlanSearch(profile, cluster, options, {options.max_cuts: space})
            wanted = PlanSearch(profile, cluster, options).fastest_plans()[0].time_per_minibatch_s
            time_s = fewer.fastest_plans()[0].time_per_minibatch_s
            assert time_s == pytest.approx(wanted, rel=1e-9), f"seed {seed}, {cost_model}"
    assert merged > 20
