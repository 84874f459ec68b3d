"""The operator graph: blocks, faults of a partition, and the short way to write a stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtool.errors import FieldError
from pdtool.graph import Graph

#   a -> b -> d -> e        b, c: two branches in module m; d in m.inner
#   a -> c ---^
DIAMOND = Graph(
    {"a": [], "m.b": ["a"], "m.c": ["a"], "m.inner.d": ["m.b", "m.c"], "e": ["m.inner.d"]},
    {"a": "", "m.b": "m.b", "m.c": "m", "m.inner.d": "m.inner", "e": "e"},
)


@st.composite
def graphs(draw):
    """Graphs of up to ten nodes in modules up to two deep."""
    count = draw(st.integers(1, 10))
    inputs, modules = {}, {}
    for i in range(count):
        module = draw(st.sampled_from(["", "a", "a.b", "a.c", "d"]))
        name = f"{module}.n{i}" if module else f"n{i}"
        inputs[name] = draw(st.lists(st.sampled_from(list(inputs)), unique=True)) if inputs else []
        modules[name] = module
    return Graph(inputs, modules)


@given(graphs(), st.data())
def test_expand_inverts_compress(graph, data):
    chosen = data.draw(st.sets(st.sampled_from(graph.names)))
    assert set(graph.expand(graph.compress(chosen))) == chosen


@given(graphs(), st.data())
def test_blocks_hold_every_node_once_and_never_send_backwards(graph, data):
    groups = data.draw(st.lists(st.lists(st.sampled_from(graph.names), min_size=1), max_size=3))
    blocks = graph.contracted(groups)
    assert sorted(n for b in blocks for n in b) == sorted(graph.names)
    assert graph.stage_faults(blocks) == []
    place = {name: i for i, block in enumerate(blocks) for name in block}
    for group in groups:
        assert len({place[name] for name in group}) == 1


def test_a_whole_module_is_written_by_its_path():
    assert DIAMOND.compress({"m.b", "m.c", "m.inner.d"}) == ["m"]
    assert DIAMOND.compress({"m.b", "m.inner.d"}) == ["m.b", "m.inner"]


def test_a_group_takes_in_what_lies_between():
    assert DIAMOND.contracted([["a", "m.inner.d"]]) == [["a", "m.b", "m.c", "m.inner.d"], ["e"]]


def test_consumers_are_the_other_way_round():
    assert DIAMOND.consumers["a"] == ["m.b", "m.c"]


@pytest.mark.parametrize(
    ("stages", "fault"),
    [
        ([["a", "m.b"], ["m.c", "m.inner.d"]], "'e' is in no stage"),
        ([["a", "a2"], ["m.b", "m.c", "m.inner.d", "e"]], "names 'a2', which the profile does not have"),
        ([["a", "e"], ["m.b", "m.c", "m.inner.d", "e"]], "'e' is in stage 0 and in stage 1"),
        ([["a", "m.inner.d", "e"], ["m.b", "m.c"]], "'m.inner.d' in stage 0 takes 'm.b' from the later stage 1"),
    ],
)
def test_faults_of_a_partition_are_named(stages, fault):
    assert any(fault in text for text in DIAMOND.stage_faults(stages))


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        ({"a": ["b"]}, "takes 'b', which is not a node"),
        ({"a": ["b"], "b": []}, "comes after it"),
        ({"a": ["a"]}, "comes after it"),
    ],
)
def test_dangling_edges_and_cycles_are_refused(inputs, what):
    with pytest.raises(FieldError, match=what):
        Graph(inputs, dict.fromkeys(inputs, ""))
