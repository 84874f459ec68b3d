"""Cuts: exactly the downsets that keep groups and pins, and an end to every graph."""

import random
from itertools import combinations

import pytest
from graphs import chain, profile_of, random_profile

from pdtool.artifacts.profile import Node
from pdtool.partition.evaluate import loads
from pdtool.partition.space import build_space
from pdtool.partition.tables import Tables


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
    space = build_space(chain([1.0] * 1000))
    assert len(space.inside) == 1001  # the input goes with the first operator, so a stage of it alone is not counted
    assert space.most_stages == 1000


def test_side_by_side_branches_multiply():
    space = build_space(branches(3, 2))
    assert len(space.inside) == (2 + 1) ** 3 + 1  # of the input alone: left out; the empty cut and the whole: counted
    assert space.coarsened == ""


@pytest.mark.parametrize("seed", range(40))
def test_every_row_of_the_tables_is_the_load_of_that_stage(seed):
    """cost.loads, one plan at a time, against the arrays that the search computes with."""
    profile = random_profile(random.Random(seed), 5)
    space = build_space(profile)
    tables = Tables(profile, space)
    last = len(space.inside) - 1
    for i, j in combinations(range(last + 1), 2):
        if not space.contains[i, j]:
            continue
        parts = [space.nodes(0, i), space.nodes(i, j), space.nodes(j, last)]
        assert profile.graph.stage_faults(parts) == []
        wanted = loads(profile, parts)[1]
        ends, found = tables.rows[i]
        at = list(ends).index(j)
        assert {key: float(value[at]) for key, value in vars(found).items()} == pytest.approx(vars(wanted), abs=1e-9)


@pytest.mark.parametrize(("width", "length"), [(8, 6), (40, 1), (2, 500), (1, 3000)])
def test_too_many_cuts_are_coarsened_and_it_is_said(width, length):
    profile = branches(width, length)
    space = build_space(profile, max_cuts=300)
    assert 2 < len(space.inside) <= 302
    assert f"{width * length + 2} groups of operators were merged" in space.coarsened
    assert sorted(name for block in space.blocks for name in block) == sorted(profile.graph.names)
    assert profile.graph.stage_faults(space.blocks) == []


def test_groups_stay_whole_and_take_in_what_lies_between():
    space = build_space(profile_of(chain([1.0] * 5).nodes, together=(("a1", "a3"),)))
    assert ["a1", "a2", "a3"] in [list(block) for block in space.blocks]
    assert space.most_stages == 3


def test_inputs_are_in_the_first_stage_and_the_loss_in_the_last():
    nodes = [
        Node(name="x", op="input", module=""),
        Node(name="a", op="op", module="", inputs=("x",)),
        Node(name="dangling", op="op", module="", inputs=("a",)),
        Node(name="target", op="input", module=""),
        Node(name="loss", op="loss", module="", inputs=("a", "target")),
    ]
    space = build_space(profile_of(nodes))
    cuts = [set(space.nodes(0, i)) for i in range(1, len(space.inside))]
    assert cuts == [{"x", "target", "a"}, set(profile_of(nodes).graph.names)]


@pytest.mark.parametrize(
    ("pin", "stages"), [({"a2": 0}, 2), ({"a2": -1}, 3), ({"a1": 0, "a3": -1}, 3), ({"a0": -1}, 1), ({"a3": 0}, 1)]
)
def test_pins_to_the_ends_take_their_neighbours_along(pin, stages):
    assert build_space(profile_of(chain([1.0] * 4).nodes, pin=pin)).most_stages == stages


def test_a_pin_in_the_middle_counts_stages():
    space = build_space(profile_of(chain([1.0] * 4).nodes, pin={"a2": 1}))
    assert space.positional
    before_1_of_2 = [set(space.nodes(0, i)) for i in space.allowed(1, 2).nonzero()[0] if i]
    assert before_1_of_2 == [{"x", "a0"}, {"x", "a0", "a1"}]
