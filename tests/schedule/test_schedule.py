"""Laws of schedules, over all shapes; broken lists are refused and the fault is marked."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.listed_actions import listed, listed_versions
from reference.schedule_rules import validate

from pdtool.errors import ScheduleError, UsageError
from pdtool.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Actions,
    ExecutionConfig,
    PipelineShape,
    ScheduleKind,
    StashTracker,
    check_executable,
    grid,
)
from pdtool.schedule.execution import draw, timeline
from pdtool.schedule.policies import STASH, VERTICAL_SYNC


def more_in_flight(shape: PipelineShape, more: int) -> PipelineShape:
    """What a hand-edited plan may ask for at its first stage."""
    return replace(shape, in_flight=(shape.in_flight[0] + more, *shape.in_flight[1:]))


def shape_of(name: str, replicas: Sequence[int], *microbatches_and_chunks: int) -> PipelineShape:
    """The shape that a schedule is defined for."""
    return ExecutionConfig.of_schedule(name, *microbatches_and_chunks).shape(replicas)


def usual(name: str, replicas: Sequence[int], n: int, *microbatches_and_chunks: int) -> list[Actions]:
    """The lists of a schedule for n minibatches, with as many in flight as it wants."""
    return SCHEDULES[name].build(shape_of(name, replicas, *microbatches_and_chunks), n)


replicas_lists = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[ScheduleKind, PipelineShape]:
    """Any schedule, and a shape that it is defined for, with as many in flight as it wants or more."""
    kind = draw(st.sampled_from(list(SCHEDULES.values())))
    replicas = draw(replicas_lists)
    if kind.equal_replicas:
        replicas = (draw(st.integers(1, 3)),) * draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if kind.chunked else 1
    weights = draw(st.sampled_from(kind.policy_names))
    microbatches = draw(st.integers(1, 12))
    execution = ExecutionConfig(schedule=kind.name, weights=weights, microbatches=microbatches, chunks=chunks)
    shape = execution.shape(replicas, execution.deeper_in_flight(replicas, draw(st.integers(0, 9))))
    rounds = draw(st.one_of(st.none(), st.integers(1, 3)))
    if kind.flushes or rounds is None:
        return kind, shape
    return kind, replace(shape, update_every=(rounds * math.lcm(*shape.update_every),) * len(replicas))


@settings(max_examples=300)
@given(shapes(), st.integers(1, 30))
def test_every_schedule_validates(case: tuple[ScheduleKind, PipelineShape], n: int) -> None:
    """Complete, in bounds, free of deadlock, whatever the replicas and however n divides."""
    kind, shape = case
    lists = kind.build(shape, n)
    validate(lists, shape, n)
    for actions, (first, replica) in zip(lists, shape.stage_replicas(), strict=True):
        for s in shape.stages_on_same_workers(first):  # round-robin: minibatch i is computed by replica i mod r
            of_stage = [a for a in actions if a.stage == s]
            for step in "BFIW":
                minibatches = [a.minibatch for a in of_stage if a.kind == step]
                is_there = step in ("FIW" if kind.splits_backward else "FB")
                assert minibatches == (list(range(replica, n, shape.replicas[s])) if is_there else [])
            rounds = [a.minibatch for a in of_stage if a.kind is ActionKind.UPDATE]
            assert rounds == list(range(math.ceil(n / shape.update_every[s])))


@pytest.mark.parametrize("name", ["1f1b", "1f1b-flush"])
def test_no_stage_waits_forever_with_more_in_flight(name: str) -> None:
    """A replica may wait for an update, and so for minibatches of other replicas that later stages must not hold up."""
    execution = ExecutionConfig.of_schedule(name, *([12] if SCHEDULES[name].flushes else []))
    uneven = [*product(range(1, 4), repeat=4), (6, 4, 1, 6, 3, 2), (1, 6, 5, 5), (1, 2, 6, 3, 5, 5, 1), (1, 6, 3, 2, 2)]
    for replicas, more in product(uneven, (1, 2, 7, 16)):
        shape = execution.shape(replicas, execution.deeper_in_flight(replicas, more))
        validate(SCHEDULES[name].build(shape, 24), shape, 24)


@settings(max_examples=300)
@given(shapes(), st.integers(0, 40))
def test_actions_made_as_they_are_needed_are_those_listed_before(
    case: tuple[ScheduleKind, PipelineShape], n: int
) -> None:
    """Of every schedule and shape, with the weight versions that forwards read; both are made again when asked."""
    kind, shape = case
    workers, lists = kind.worker_actions(shape, n), listed(kind, shape, n)
    assert [list(actions) for actions in workers] == lists == [list(actions) for actions in workers]
    for worker, expected in enumerate(listed_versions(lists, shape.weights.name)):
        versions = list(shape.weights.reads(workers, worker, shape.replicas, shape.update_every))
        assert dict(versions) == expected
        forwards = [(a.stage, a.minibatch) for a in lists[worker] if a.kind is ActionKind.FORWARD]
        assert [forward for forward, _ in versions] == forwards
        for s in {s for s, _ in forwards}:  # a version is never read again after a newer one
            of_stage = [version for (of, _), version in versions if of == s]
            assert of_stage == sorted(of_stage)


@settings(max_examples=150)
@given(shapes(), st.integers(-1, 3), st.data())
def test_what_the_representative_minibatches_prove_holds_for_every_epoch(
    case: tuple[ScheduleKind, PipelineShape], more: int, data: st.DataObject
) -> None:
    """Also of numbers in flight that nobody planned: a deadlock or a broken bound comes within so many, or never."""
    kind, shape = case
    s = data.draw(st.integers(0, shape.pipeline_depth - 1))
    changed = [max(1, w + more * (s == i)) for i, w in enumerate(shape.in_flight)]
    shape = replace(shape, in_flight=tuple(changed))
    try:
        check_executable(kind, shape)
    except ScheduleError:
        return
    longer = shape.representative_minibatches + data.draw(st.integers(1, 2 * math.lcm(*shape.update_every)))
    validate(kind.build(shape, longer), shape, longer)


def test_a_last_round_that_has_more_in_flight_than_a_whole_one_is_checked() -> None:
    """Five of ten minibatches pass all chunks as one group: the first worker has twelve in flight, not eleven."""
    kind = SCHEDULES["interleaved"]
    usual = kind.usual_in_flight((1, 1), 10, 3)
    shape = replace(shape_of("interleaved", (1, 1), 10), replicas=(1,) * 6, update_every=(10,) * 6, chunks=3)
    check_executable(kind, replace(shape, in_flight=usual))
    with pytest.raises(ScheduleError, match="12 minibatches in flight, but the plan allows 11"):
        check_executable(kind, replace(shape, in_flight=(11, 11)))


def test_few_short_rounds_are_looked_at_however_many_are_in_flight() -> None:
    """Each of three thousand sizes took a minute."""
    kind = SCHEDULES["interleaved"]
    for in_flight in (5, 41, 2002):
        shape = ExecutionConfig.of_schedule("interleaved", 10_000, 2).shape([1, 1], [in_flight, in_flight])
        rounds = kind.fuller_rounds(shape)
        assert 3 <= len(rounds) <= 50
        assert all(size < 10_000 for size in rounds)
        stashed = [max(map(peak, kind.build(shape, size))) for size in rounds]
        assert stashed[0] == max(stashed)


def peak(actions: Sequence[Action]) -> int:
    """The most minibatches in flight at once."""
    steps = ((action.kind is ActionKind.FORWARD) - action.kind.completes_backward for action in actions)
    return max(accumulate(steps))


def test_large_updates_are_checked_with_a_few_of_them() -> None:
    """The number of minibatches checked is a sum, no product: 1,000 microbatches on two stages were two million."""
    for name in SCHEDULES:
        shape = shape_of(name, (1, 1), 1000)
        assert shape.representative_minibatches <= 2001


@settings(max_examples=100)
@given(replicas_lists, st.integers(0, 3), st.integers(1, 20))
def test_more_in_flight_at_the_first_stage_never_deadlocks(replicas: tuple[int, ...], more: int, n: int) -> None:
    """A hand-edited plan may hold more than the default there; later stages take what comes."""
    shape = more_in_flight(shape_of("1f1b", replicas), more)
    validate(SCHEDULES["1f1b"].build(shape, n), shape, n)


@settings(max_examples=150)
@given(shapes(), st.integers(2, 12), st.data())
def test_a_schedule_with_any_one_action_moved_forward_is_proved_or_refused(
    case: tuple[ScheduleKind, PipelineShape], n: int, data: st.DataObject
) -> None:
    """Moving an action before those that it needs is found; what is still accepted runs to its end."""
    kind, shape = case
    lists = kind.build(shape, n)
    worker = data.draw(st.sampled_from([w for w, actions in enumerate(lists) if len(actions) > 1]))
    start = data.draw(st.integers(1, len(lists[worker]) - 1))
    end = data.draw(st.integers(0, start - 1))
    changed = list(lists[worker])
    action = changed.pop(start)
    changed.insert(end, action)
    broken = [*lists[:worker], changed, *lists[worker + 1 :]]
    jumped = lists[worker][end:start]
    same_minibatch = {
        a
        for a in jumped
        if (a.stage, a.minibatch) == (action.stage, action.minibatch) and a.kind is not ActionKind.UPDATE
    }
    same_round = {
        a for a in jumped if a.stage == action.stage and (a.kind.completes_backward or a.kind is ActionKind.UPDATE)
    }
    if (same_minibatch and action.kind is not ActionKind.UPDATE) or (action.kind is ActionKind.UPDATE and same_round):
        with pytest.raises(ScheduleError, match=r">\w+<"):
            validate(broken, shape, n)
        return
    refusal = ""
    try:
        validate(broken, shape, n)
    except ScheduleError as error:
        refusal = str(error)
    assert ">" in refusal or len(timeline(broken)) == len(lists)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_vertical_sync_reads_what_the_first_stage_read_and_keeps_as_many_versions(p: int) -> None:
    """PipeDream, section 3.3: minibatch i sees version i - (p - 1) at every stage, so all stages keep p versions."""
    shape = ExecutionConfig(weights="vertical-sync").shape((1,) * p)
    lists = SCHEDULES["1f1b"].build(shape, 20)
    for s, (versions, actions) in enumerate(
        zip(VERTICAL_SYNC.forward_versions(lists, shape.replicas, shape.update_every), lists, strict=True)
    ):
        assert versions == {(s, i): max(0, i - (p - 1)) for i in range(20)}
        tracker, peak_versions = StashTracker(versions), 1
        for action in actions:
            tracker.apply(action)
            peak_versions = max(peak_versions, tracker.versions(s))
        assert peak_versions == shape.versions(s) == p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_2bw_is_one_update_late_at_every_stage_and_keeps_two_versions(p: int) -> None:
    """PipeDream-2BW, section 3.1: round j of p minibatches reads version j - 1."""
    shape = shape_of("2bw", (1,) * p)
    lists = SCHEDULES["2bw"].build(shape, 6 * p)
    for s, (versions, actions) in enumerate(
        zip(shape.weights.forward_versions(lists, shape.replicas, shape.update_every), lists, strict=True)
    ):
        assert versions == {(s, i): max(0, i // p - 1) for i in range(6 * p)}
        tracker, peak_versions = StashTracker(versions), 1
        for action in actions:
            tracker.apply(action)
            peak_versions = max(peak_versions, tracker.versions(s))
        assert (peak_versions, tracker.delay) == (shape.versions(s), 1) == (2, 1)


def test_updates_of_2bw_that_come_too_often_are_refused() -> None:
    """FACTS: accumulation over at least p - 1 minibatches; with one less the version that is due is not made yet."""
    enough, too_few = (replace(shape_of("2bw", (1,) * 4), update_every=(k,) * 4) for k in (3, 2))
    validate(SCHEDULES["2bw"].build(enough, 20), enough, 20)
    with pytest.raises(ScheduleError, match=r"0F4 comes before the update that makes its weights\nworker  0.*>0F4<"):
        validate(SCHEDULES["2bw"].build(too_few, 20), too_few, 20)


def test_a_flush_that_is_none_is_refused() -> None:
    """One version of the weights: nothing may be in flight when they are updated."""
    shape = shape_of("1f1b-flush", (1, 1), 4)
    running = SCHEDULES["1f1b"].build(shape, 8)
    with pytest.raises(ScheduleError, match=r"0U0 makes 2 weight versions, but the plan allows 1\n.*>0U0<"):
        validate(running, shape, 8)


def tracked(actions: list[Action]) -> StashTracker:
    """A worker's tracker at the end of its list."""
    tracker = StashTracker(STASH.forward_versions([actions], [1], [1])[0])
    for action in actions:
        tracker.apply(action)
    return tracker


@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 3))
def test_peak_stash_of_straight_pipelines(p: int, m: int, v: int) -> None:
    """FACTS.md, the table of schedules."""

    def peaks(name: str, chunks: int = 1) -> list[int]:
        return [tracked(actions).peak for actions in usual(name, (1,) * p, m, m, chunks)]

    assert peaks("1f1b") == peaks("1f1b-flush") == [min(p - r, m) for r in range(p)]
    assert peaks("gpipe") == [m] * p
    assert peaks("zb-h1") == [min(p, m)] * p
    assert peaks("looped-bfs", v) == [m * v] * p
    if m % p == 0:
        assert peaks("interleaved", v) == [min(2 * (p - r - 1) + (v - 1) * p + 1, m * v) for r in range(p)]


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 3), st.integers(1, 14))
def test_as_many_are_in_flight_as_the_plan_says(p: int, m: int, v: int, first: int) -> None:
    """Where it may be chosen at all; with a flush no more than an update has."""
    for kind in SCHEDULES.values():
        execution = ExecutionConfig.of_schedule(kind.name, m, v if kind.chunked else 1)
        in_flight = execution.in_flight_from((1,) * p, first)
        usual = execution.usual_in_flight((1,) * p)
        if kind.deepening is None:
            assert in_flight == usual
        elif first >= usual[0] or not kind.chunked:  # its first minibatch must pass all chunks of the last worker
            n = m if kind.flushes else 40
            peaks = [tracked(actions).peak for actions in kind.build(execution.shape((1,) * p, in_flight), n)]
            most = execution.max_in_flight((1,) * p)[0]
            assert in_flight[0] == min(first, most) or first < usual[0] or p == 1
            assert all(peak <= w for peak, w in zip(peaks, in_flight, strict=True))
            # of short rounds, whose groups are larger, a worker with chunks may have more
            assert tuple(peaks) == in_flight or kind.chunked


@given(st.integers(1, 8), st.integers(0, 20))
def test_versions_and_delays(p: int, more: int) -> None:
    """FACTS.md: PipeDream has p - r versions, p - 1 - r updates late; a flush has one."""
    n = 3 * p + more

    def counted(name: str, m: int) -> list[tuple[int, int]]:
        return [versions_and_delay(actions) for actions in usual(name, (1,) * p, n, m)]

    assert counted("1f1b", 1) == [(p - r, p - 1 - r) for r in range(p)]
    for name in ("gpipe", "1f1b-flush", "zb-h1"):
        assert counted(name, p) == [(1, 0)] * p


def versions_and_delay(actions: list[Action]) -> tuple[int, int]:
    """Counted the slow way: the versions that live minibatches were begun with, and the latest."""
    begun: dict[int, int] = {}
    updates = versions = delay = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            begun[action.minibatch] = updates
        elif action.kind.completes_backward:
            delay = max(delay, updates - begun.pop(action.minibatch))
        elif action.kind is ActionKind.UPDATE:
            updates += 1
        versions = max(versions, len({*begun.values(), updates}))
    assert tracked(actions).delay == delay
    return versions, delay


@settings(max_examples=100)
@given(shapes(), st.integers(1, 30))
def test_versions_are_counted_as_they_live(case: tuple[ScheduleKind, PipelineShape], n: int) -> None:
    """At every action: the latest version, and those that minibatches in flight were begun with."""
    kind, shape = case
    for actions in kind.build(shape, n):
        tracker = StashTracker(STASH.forward_versions([actions], [1], [1])[0])
        for action in actions:
            tracker.apply(action)
            live = {version for (stage, _), version in tracker.in_flight.items() if stage == action.stage}
            assert tracker.versions(action.stage) == len(live | {tracker.updates[action.stage]})


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "looped-bfs"])
def test_torch_has_the_same_order(name: str) -> None:
    """torch.distributed.pipelining generates the same lists, where it has the schedule; only the backwards of one stage
    are in reverse there if they come breadth-first."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedules = {"interleaved": torch.ScheduleInterleaved1F1B, "zb-h1": torch.ScheduleInterleavedZeroBubble}
    schedule = schedules.get(name, torch.ScheduleLoopedBFS)
    for p, m, v in [(2, 4, 2), (4, 8, 2), (3, 6, 3), (4, 16, 3), (8, 16, 2), (4, 10, 2)]:
        chunks = v if SCHEDULES[name].chunked else 1
        peer = SimpleNamespace(_stages=[None] * chunks, n_local_stages=chunks, pp_group_size=p, _n_microbatches=m)
        peer.number_of_rounds = max(1, m // p)
        peer.microbatches_per_round = m // peer.number_of_rounds
        lists = usual(name, (1,) * p, m, m, chunks)
        for rank, actions in enumerate(lists):
            torchs = list(filter(None, schedule._calculate_single_rank_operations(peer, rank)))
            if name == "looped-bfs":
                torchs[m * v :] = sorted(torchs[m * v :], key=lambda a: (-a.stage_index, a.microbatch_index))
            texts = [f"{a.stage_index}{a.computation_type.value}{a.microbatch_index}" for a in torchs]
            assert texts == [str(a) for a in actions if a.kind is not ActionKind.UPDATE]


@given(st.integers(2, 6), st.integers(10, 20))
def test_1f1b_has_no_idle_time_in_steady_state(p: int, n: int) -> None:
    """From its first backward to its last forward the last stage never waits; with a flush, (p-1)(F+B) idle a round."""
    one = (1,) * p
    lists = usual("1f1b", one, n)
    starts = timeline(lists, 1, 2)
    forwards = [t for a, t in zip(lists[-1], starts[-1], strict=True) if a.kind is ActionKind.FORWARD]
    assert [b - a for a, b in pairwise(forwards)] == [3.0] * (n - 1)
    for name in ("1f1b-flush", "gpipe"):
        lists = usual(name, one, n, n)
        assert max(max(t) for t in timeline(lists, 1, 2)) == (p - 1) * 3 + 3 * n


def test_noam_of_the_paper() -> None:
    """Section 3.2: ceil(workers / replicas of the input stage); 15-1 keeps two in flight, a straight four keeps 4."""
    assert SCHEDULES["1f1b"].usual_in_flight((15, 1)) == (2, 1)
    assert SCHEDULES["1f1b"].usual_in_flight((1, 1, 1, 1)) == (4, 3, 2, 1)
    assert SCHEDULES["1f1b"].usual_in_flight((2, 1)) == (2, 1)


def test_the_picture_of_1f1b() -> None:
    """Figure 4 of the paper, for three stages; the backward takes twice the forward."""
    lists = usual("1f1b", (1, 1, 1), 5)
    assert draw(lists) == (
        "stage 0 worker 0 | F0 F1 F2 .  .  .  .  B0 == F3 B1 == F4 B2 == .  B3 == .  B4 ==\n"
        "stage 1 worker 1 | .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == F4 B3 == .  B4 ==\n"
        "stage 2 worker 2 | .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 =="
    )
    assert all(len(line) <= 40 for line in draw(lists, width=40).splitlines())


def test_the_pictures_of_the_others() -> None:
    """The drawings of Megatron-LM (figure 4), breadth-first (figure 4) and zero bubble (figure 3), small."""
    interleaved = usual("interleaved", (1, 1), 2, 2, 2)
    assert draw(interleaved, 1, 1) == (
        "stage 0 worker 0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1\n"
        "stage 1 worker 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )
    looped = usual("looped-bfs", (1, 1), 2, 2, 2)
    assert draw(looped, 1, 1) == (
        "stage 0 worker 0 | 0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1\n"
        "stage 1 worker 1 | .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
    )
    zero_bubble = usual("zb-h1", (1, 1, 1), 4, 4)
    assert draw(zero_bubble) == (
        "stage 0 worker 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3\n"
        "stage 1 worker 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3\n"
        "stage 2 worker 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    )


@given(st.integers(0, 99), st.sampled_from(ActionKind), st.integers(0, 999))
def test_actions_print_and_parse_back(stage: int, kind: ActionKind, minibatch: int) -> None:
    action = Action(stage, kind, minibatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F0 "])
def test_text_that_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action; write the stage"):
        Action.parse(text)


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
        validate(lists, shape_of("1f1b", (1, 1)), n)
    assert re.findall(r">(\w+)<", str(caught.value)) == ([mark] if mark else [])
    assert caught.value.exit_code == 3


def test_broken_lists_are_refused_and_the_fault_is_marked() -> None:
    first, second = usual("1f1b", (1, 1), 3)
    refused([swap(first, "0F0", "0B0"), second], "0B0 comes before its forward", "0B0")
    refused([swap(first, "0B0", "0U0"), second], "0U0 comes before a backward of its round", "0U0")
    refused([swap(first, "0U0", "0U1"), second], "0U1 comes before a backward of its round", "0U1")
    refused([[*first, first[0]], second], "0F0 happens twice", "0F0")
    refused([first, [*second, Action.parse("1F3")]], "1F3 does not belong to this worker", "1F3")
    refused([first[:-1], second], "0U2 is missing from worker 0", "")
    refused([first], "1 action lists for 2 workers", "")
    refused([swap(first, "0B0", "0F2"), second], "0F2 puts 3 minibatches in flight, but the plan allows 2", "0F2")


def test_a_schedule_that_does_not_go_with_the_shape() -> None:
    with pytest.raises(
        UsageError, match="schedule zb-h1 needs the same number of replicas for each stage, but the plan is 2-1"
    ):
        SCHEDULES["zb-h1"].build(shape_of("1f1b", (2, 1)), 4)


def test_broken_zero_bubble_lists_are_refused() -> None:
    """The parts of a backward have their order, and the update comes after the last of them."""
    shape = shape_of("zb-h1", (1,), 2)
    texts = "0F0 0I0 0W0 0F1 0I1 0W1 0U0"
    for broken, match, mark in [
        (("0I0", "0W0"), "0W0 comes before the gradient of its inputs", "0W0"),
        (("0F1", "0W1"), "0W1 comes before its forward", "0W1"),
        (("0W1", "0U0"), "0U0 comes before a backward of its round", "0U0"),
    ]:
        with pytest.raises(ScheduleError, match=match) as caught:
            validate([swap([Action.parse(text) for text in texts.split()], *broken)], shape, 2)
        assert re.findall(r">(\w+)<", str(caught.value)) == [mark]


def test_updates_out_of_turn_are_refused() -> None:
    """Both rounds' backwards are done, but round 1 is closed first."""
    order = [Action.parse(text) for text in ("0F0", "0B0", "0F1", "0B1", "0U1", "0U0")]
    with pytest.raises(ScheduleError, match="0U1 comes when update 0 is due"):
        validate([order], shape_of("1f1b", (1,)), 2)


def test_a_deadlock_names_everyone_who_waits_and_for_what() -> None:
    """Stage 1 wants two forwards before its first backward; stage 0 sends one and waits for the gradient."""
    shape = PipelineShape(replicas=(1, 1), in_flight=(1, 2), update_every=(1, 1), weights=STASH)
    with pytest.raises(
        ScheduleError, match=r"deadlock: worker 0 waits in 0B0 for 1B0; worker 1 waits in 1F1 for 0F1\n.*>0B0<"
    ):
        validate(SCHEDULES["1f1b"].build(shape, 3), shape, 3)


def test_the_grid_shows_the_surroundings_of_the_mark() -> None:
    lists = usual("1f1b", (1, 1), 50)
    text = grid(lists, mark=(1, 90), around=2)
    assert text.splitlines()[1] == "worker  1 | ... " + " ".join(
        f">{a}<" if i == 90 else str(a) for i, a in enumerate(lists[1][88:92], start=88)
    )


def test_many_replicas_are_checked_in_time_that_grows_with_their_number():
    """1,024 took 1.0 s and 3,000 took 25 s: each replica's update looked at the backwards of all."""
    shape = shape_of("1f1b", [3000])
    began = time.process_time()
    check_executable(SCHEDULES["1f1b"], shape)
    assert time.process_time() - began < 10  # 0.4 s


@given(st.data())
def test_stages_that_share_parameters_update_together(data: st.DataObject) -> None:
    """Also those that share none themselves, but each one with a third."""
    replicas = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    stages = st.lists(st.integers(0, len(replicas) - 1), min_size=2, max_size=3, unique=True)
    tied = data.draw(st.lists(stages, max_size=4))
    intervals = ExecutionConfig().shape(replicas, tied_stages=tied).update_every
    assert all(interval % r == 0 for interval, r in zip(intervals, replicas, strict=True))
    assert all(len({intervals[s] for s in group}) == 1 for group in tied)
    in_no_group = set(range(len(replicas))).difference(*tied)
    assert all(intervals[s] == replicas[s] for s in in_no_group)


@pytest.mark.parametrize(
    ("replicas", "fields", "text"),
    [
        ([15, 1], {}, "15-1"),
        ([12, 4], {"copies": 4}, "4 x 3-1"),
        ([1, 1], {"chunks": 2}, "1-1 (2 chunks)"),
        ([2] * 17, {}, "17 stages on 34 workers"),
    ],
)
def test_a_plan_is_told_in_a_few_words(replicas, fields, text):
    assert ExecutionConfig(**fields).describe(replicas) == text
