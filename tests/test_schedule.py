"""Laws of schedules, over all shapes; broken lists are refused and the fault is marked."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtool.errors import ScheduleError, UsageError
from pdtool.schedule import (
    NAMES,
    Action,
    Kind,
    Shape,
    build,
    default_in_flight,
    draw,
    grid,
    timeline,
    validate,
)


def shape_of(name: str, replicas: tuple[int, ...], microbatches: int, more: int = 0) -> Shape:
    """The shape a plan gives: an update per round of replicas, or per `microbatches` with a flush."""
    in_flight = default_in_flight(replicas)
    if name == "gpipe":
        in_flight = (microbatches,) * len(replicas)
    every = replicas if name == "1f1b" else (microbatches,) * len(replicas)
    return Shape(replicas=replicas, in_flight=(in_flight[0] + more, *in_flight[1:]), update_every=every)


replicas_lists = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)
names = st.sampled_from(NAMES)


@settings(max_examples=150, deadline=None)
@given(names, replicas_lists, st.integers(1, 6), st.integers(1, 20))
def test_every_schedule_validates(name: str, replicas: tuple[int, ...], microbatches: int, n: int) -> None:
    """Complete, in bounds, free of deadlock, whatever the replicas and however n divides."""
    shape = shape_of(name, replicas, microbatches)
    lists = build(name, shape, n)
    validate(lists, shape, n)
    for s in range(len(replicas)):  # round-robin: minibatch i is computed by replica i mod r
        mine = [lists[w] for w, slot in enumerate(shape.slots()) if slot[0] == s]
        for replica, actions in enumerate(mine):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                assert [a.minibatch for a in actions if a.kind is kind] == list(range(replica, n, replicas[s]))
            rounds = [a.minibatch for a in actions if a.kind is Kind.UPDATE]
            assert rounds == list(range(math.ceil(n / shape.update_every[s])))


@settings(max_examples=80, deadline=None)
@given(replicas_lists, st.integers(0, 3), st.integers(1, 20))
def test_more_in_flight_at_the_first_stage_never_deadlocks(replicas: tuple[int, ...], more: int, n: int) -> None:
    """A hand-edited plan may hold more than the default there; later stages take what comes."""
    shape = shape_of("1f1b", replicas, 1, more)
    validate(build("1f1b", shape, n), shape, n)


def stashed(actions: list[Action]) -> int:
    """Most minibatches between their forward and their backward."""
    live = most = 0
    for action in actions:
        live += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0}[action.kind]
        most = max(most, live)
    return most


@given(st.integers(1, 6), st.integers(1, 12))
def test_peak_stash_of_straight_pipelines(p: int, m: int) -> None:
    """FACTS: 1F1B with or without flush holds p - r minibatches at stage r, GPipe all m."""
    one = (1,) * p
    for name in ("1f1b", "1f1b-flush"):
        assert [stashed(a) for a in build(name, shape_of(name, one, m), m)] == [min(p - r, m) for r in range(p)]
    assert [stashed(a) for a in build("gpipe", shape_of("gpipe", one, m), m)] == [m] * p


@given(st.integers(2, 6), st.integers(10, 20))
def test_1f1b_has_no_idle_time_in_steady_state(p: int, n: int) -> None:
    """From its first backward to its last forward the last stage never waits; with a flush, (p-1)(F+B) idle a round."""
    one = (1,) * p
    lists = build("1f1b", shape_of("1f1b", one, 1), n)
    starts = timeline(lists, 1, 2)
    forwards = [t for a, t in zip(lists[-1], starts[-1], strict=True) if a.kind is Kind.FORWARD]
    assert [b - a for a, b in pairwise(forwards)] == [3.0] * (n - 1)
    for name in ("1f1b-flush", "gpipe"):
        lists = build(name, shape_of(name, one, n), n)
        assert max(max(t) for t in timeline(lists, 1, 2)) == (p - 1) * 3 + 3 * n


def test_noam_of_the_paper() -> None:
    """Section 3.2: ceil(workers / replicas of the input stage); 15-1 keeps two in flight, a straight four keeps 4."""
    assert default_in_flight((15, 1)) == (2, 1)
    assert default_in_flight((1, 1, 1, 1)) == (4, 3, 2, 1)
    assert default_in_flight((2, 1)) == (2, 1)


def test_the_picture_of_1f1b() -> None:
    """Figure 4 of the paper, for three stages; the backward takes twice the forward."""
    lists = build("1f1b", shape_of("1f1b", (1, 1, 1), 1), 5)
    assert draw(lists) == (
        "stage 0 worker 0 | F0 F1 F2 .  .  .  .  B0 == F3 B1 == F4 B2 == .  B3 == .  B4 ==\n"
        "stage 1 worker 1 | .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == F4 B3 == .  B4 ==\n"
        "stage 2 worker 2 | .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 =="
    )
    assert all(len(line) <= 40 for line in draw(lists, width=40).splitlines())


@given(st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 999))
def test_actions_print_and_parse_back(stage: int, kind: Kind, minibatch: int) -> None:
    action = Action(stage, kind, minibatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F0 "])
def test_text_that_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action; write the stage"):
        Action.parse(text)


def test_an_unknown_schedule_lists_the_known() -> None:
    with pytest.raises(UsageError, match="'2bw' is unknown; choose one of 1f1b, 1f1b-flush, gpipe"):
        build("2bw", shape_of("1f1b", (1,), 1), 1)


def swap(actions: list[Action], a: str, b: str) -> list[Action]:
    """The list with two actions exchanged."""
    texts = [str(action) for action in actions]
    i, j = texts.index(a), texts.index(b)
    actions = list(actions)
    actions[i], actions[j] = actions[j], actions[i]
    return actions


def refused(lists: list[list[Action]], match: str, mark: str, n: int = 3) -> None:
    """`validate` refuses the lists of a 1-1 plan: what it says, and the action it marks in the grid."""
    with pytest.raises(ScheduleError, match=match) as caught:
        validate(lists, shape_of("1f1b", (1, 1), 1), n)
    assert re.findall(r">(\w+)<", str(caught.value)) == ([mark] if mark else [])
    assert caught.value.exit_code == 3


def test_broken_lists_are_refused_and_the_fault_is_marked() -> None:
    first, second = build("1f1b", shape_of("1f1b", (1, 1), 1), 3)
    refused([swap(first, "0F0", "0B0"), second], "0B0 comes before its forward", "0B0")
    refused([swap(first, "0B0", "0U0"), second], "0U0 comes before a backward of its round", "0U0")
    refused([swap(first, "0U0", "0U1"), second], "0U1 comes before a backward of its round", "0U1")
    refused([[*first, first[0]], second], "0F0 happens twice", "0F0")
    refused([first, [*second, Action.parse("1F3")]], "1F3 does not belong to this worker", "1F3")
    refused([first[:-1], second], "0U2 is missing from worker 0", "")
    refused([first], "1 action lists for 2 workers", "")
    refused([swap(first, "0B0", "0F2"), second], "0F2 makes 3 minibatches in flight; the plan allows 2", "0F2")


def test_updates_out_of_turn_are_refused() -> None:
    """Both rounds' backwards are done, but round 1 is closed first."""
    order = [Action.parse(text) for text in ("0F0", "0B0", "0F1", "0B1", "0U1", "0U0")]
    with pytest.raises(ScheduleError, match="0U1 comes when update 0 is due"):
        validate([order], shape_of("1f1b", (1,), 1), 2)


def test_a_deadlock_names_everyone_who_waits_and_for_what() -> None:
    """Stage 1 wants two forwards before its first backward; stage 0 sends one and waits for the gradient."""
    shape = Shape(replicas=(1, 1), in_flight=(1, 2), update_every=(1, 1))
    with pytest.raises(
        ScheduleError, match=r"deadlock: worker 0 waits in 0B0 for 1B0; worker 1 waits in 1F1 for 0F1\n.*>0B0<"
    ):
        validate(build("1f1b", shape, 3), shape, 3)


def test_the_grid_shows_the_surroundings_of_the_mark() -> None:
    lists = build("1f1b", shape_of("1f1b", (1, 1), 1), 50)
    text = grid(lists, mark=(1, 90), around=2)
    assert text.splitlines()[1] == "worker  1 | ... " + " ".join(
        f">{a}<" if i == 90 else str(a) for i, a in enumerate(lists[1][88:92], start=88)
    )
