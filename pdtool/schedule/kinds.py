"""The kinds of schedules: one object each, which defines its workers' actions and its properties.

The simulator and the workers execute lists of actions without knowing the kind. No other code compares names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, tee
from math import ceil

from pdtool.errors import UsageError
from pdtool.schedule.action import Action, ActionKind, Actions
from pdtool.schedule.policies import FLUSH, NONE, STASH, TWO_BW, VERTICAL_SYNC, Number, WeightPolicy, ceil_div, smaller
from pdtool.schedule.shape import PipelineShape

_TRIED_SIZES = 8  # rounds between n and 2n minibatches whose memory is looked at, for groups of at least n

Round = tuple[int, Sequence[int]]  # (number, the minibatches of one worker in it)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleKind:
    """A schedule.

    Attributes:
        name: in plans, and for `--schedule`.
        policies: its possible weight policies, the usual one first.
        actions: function of (shape, first stage, rounds) that yields one worker's actions in order. A flushing schedule
            gets one round at a time, since it drains the pipeline after each. The others get an iterator over all
            rounds, and must not read far ahead, because an epoch may have millions.
        in_flight: function of (r, u, m, p, v) that returns w, the usual number in flight at each of a stage's r
            replicas. In one copy: u workers of this stage and all later ones, m minibatches in one update, p stages
            (or workers with chunks), v chunks; r, u and w may be arrays.
        deepening: function of (s, p): stage s's share of what the first stage has in flight beyond `in_flight`, so that
            all messages get the same extra time. None: all of an update are always in flight.
        fuller_rounds: function of a shape that returns the minibatches of short rounds, as the last one of an epoch may
            be, that may have more in flight, or need more memory, than whole rounds; first the one with the most in
            flight. None: no round does.
        chunked: whether each worker has several stages, which are even pieces of the model.
        equal_replicas: whether all stages must have the same number of replicas: r pipelines side by side.
        splits_backward: whether the gradients of inputs and weights are computed separately.
        planned_as: the schedule to search with, because no formulas cover this one. The stages come from that
            search, unless they are chunks. The plan's data parallelism uses it, too. None: formulas cover this one.
    """

    name: str
    policies: tuple[WeightPolicy, ...]
    actions: Callable[[PipelineShape, int, Iterable[Round]], Iterable[Action]]
    in_flight: Callable[[Number, Number, int, int, int], Number]
    deepening: Callable[[int, int], float] | None = None
    fuller_rounds: Callable[[PipelineShape], Sequence[int]] | None = None
    chunked: bool = False
    equal_replicas: bool = False
    splits_backward: bool = False
    planned_as: ScheduleKind | None = None

    @property
    def flushes(self) -> bool:
        """Whether the pipeline drains before each update, so that nothing is in flight while weights change."""
        return self.policies[0] is FLUSH

    @property
    def has_formulas(self) -> bool:
        """Whether the cost formulas cover it, so that it can be searched; otherwise it is only simulated."""
        return self.planned_as is None

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The names of its weight policies, the usual one first."""
        return tuple(policy.name for policy in self.policies)

    def usual_in_flight(self, replicas: Sequence[int], microbatches: int = 1, chunks: int = 1) -> tuple[int, ...]:
        """Return w for each stage; with chunks for the first stage on each worker, over all its chunks.

        Args:
            replicas: r[s], of stages on workers of their own.
            microbatches: in one update of a flushing schedule.
        """
        p = len(replicas)
        return tuple(self.in_flight(r, sum(replicas[s:]), microbatches, p, chunks) for s, r in enumerate(replicas))

    def build(self, shape: PipelineShape, minibatches: int) -> list[Actions]:
        """Build the action lists for minibatches 0 .. minibatches - 1 of one epoch; see `worker_actions`.

        Raises:
            UsageError: the shape does not fit the schedule.
        """
        return [list(actions) for actions in self.worker_actions(shape, minibatches)]

    def worker_actions(self, shape: PipelineShape, minibatches: int) -> list[WorkerActions]:
        """Return the actions of each worker for minibatches 0 .. minibatches - 1 of one epoch, made lazily.

        All rounds are closed at the end; the last one is short when `update_every` does not divide `minibatches`.

        Raises:
            UsageError: the shape does not fit the schedule.
        """
        if self.equal_replicas and len(set(shape.replicas)) > 1:
            config = "-".join(map(str, shape.replicas[: shape.pipeline_depth]))
            what = f"schedule {self.name} needs the same number of replicas for each stage, but the plan is {config}"
            raise UsageError(what, "use a straight plan, or 1f1b-flush")
        return [WorkerActions(self, shape, s, k, minibatches) for s, k in shape.stage_replicas()]


@dataclass(frozen=True)
class WorkerActions:
    """The actions of one worker in an epoch, in order.

    Each iteration begins at the first action. It holds only minibatches in flight or in one update, so neither its
    memory nor the time to the first action depends on the number of minibatches.
    """

    kind: ScheduleKind
    shape: PipelineShape
    stage: int
    replica: int
    minibatches: int

    def __iter__(self) -> Iterator[Action]:
        rounds = self._rounds()
        if not self.kind.flushes:
            return iter(self.kind.actions(self.shape, self.stage, rounds))
        return chain.from_iterable(self.kind.actions(self.shape, self.stage, [one_round]) for one_round in rounds)

    def _rounds(self) -> Iterator[Round]:
        every, replicas = self.shape.update_every[self.stage], self.shape.replicas[self.stage]
        for i in range(0, self.minibatches, every):
            # minibatch j is this replica's if j mod r is its number; the first such j from i on
            first, end = i + (self.replica - i) % replicas, min(i + every, self.minibatches)
            yield i // every, range(first, end, replicas)


def _one_f_one_b(stage: int, rounds: Iterable[Round], in_flight: int) -> Iterator[Action]:
    """Make one forward, one backward: after w forwards, each backward makes room for one more forward.

    Three stages of one worker (w = 3, 2, 1), a forward takes one slot and a backward two:

        0 | F0 F1 F2 .  .  .  .  B0 == F3 B1 == F4 B2 == .  B3 == .  B4 ==
        1 | .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == F4 B3 == .  B4 ==
        2 | .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 ==

    With w >= n minibatches in all this is GPipe: all forwards, then all backwards. With k >= w minibatches per update
    it is PipeDream-2BW (ICML'21, section 3.1): every minibatch in flight began with the current weights or the version
    before.
    """
    rounds, ahead = tee(rounds)
    forwards = (Action(stage, ActionKind.FORWARD, i) for _, minibatches in ahead for i in minibatches)
    yield from islice(forwards, in_flight)
    for number, minibatches in rounds:
        for i in minibatches:
            yield Action(stage, ActionKind.BACKWARD, i)
            if i == minibatches[-1]:
                yield Action(stage, ActionKind.UPDATE, number)
            yield from islice(forwards, 1)
        if not minibatches:  # in a short round; the replica still joins its update, because all-reduce needs everyone
            yield Action(stage, ActionKind.UPDATE, number)


def _in_flight_of_update(r: Number, u: Number, m: int, p: int, v: int) -> Number:
    """Return all that a replica computes in one update."""
    return v * ceil_div(m, r)


def _in_flight_1f1b_flush(r: Number, u: Number, m: int, p: int, v: int) -> Number:
    return smaller(ceil_div(u, r), ceil_div(m, r))


ONE_F_ONE_B = ScheduleKind(
    name="1f1b",
    policies=(STASH, VERTICAL_SYNC, NONE),
    actions=lambda shape, stage, rounds: _one_f_one_b(stage, rounds, shape.in_flight[stage]),
    # It keeps every later worker busy (PipeDream, SOSP'19, section 3.2); at the input stage this is NOAM.
    in_flight=lambda r, u, m, p, v: ceil_div(u, r),
    deepening=lambda s, p: (p - 1 - s) / max(1, p - 1),  # the last stage sends each gradient at once
)
ONE_F_ONE_B_FLUSH = replace(ONE_F_ONE_B, name="1f1b-flush", policies=(FLUSH,), in_flight=_in_flight_1f1b_flush)
GPIPE = ScheduleKind(
    name="gpipe",
    policies=(FLUSH,),
    actions=lambda shape, stage, rounds: _one_f_one_b(stage, rounds, shape.update_every[stage]),
    in_flight=_in_flight_of_update,
)
TWO_BW_1F1B = replace(ONE_F_ONE_B, name="2bw", policies=(TWO_BW,), planned_as=ONE_F_ONE_B)


def _interleaved(shape: PipelineShape, worker: int, rounds: Iterable[Round]) -> Actions:
    """Build 1F1B over chunks: p minibatches pass the first chunk, the same p the second, and so on.

    Source: Megatron-LM, SC'21, section 2.2. Two workers of two chunks (stages 0, 2 and 1, 3), every action takes one
    slot:

        0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
        1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    With more in flight than that, more minibatches pass one chunk before the next, and messages have more time.
    """
    (one_round,) = rounds
    microbatches = len(one_round[1])
    groups = _interleaved_groups(_interleaved_group(shape), microbatches)
    warm_up = _interleaved_warm_up(shape.pipeline_depth, worker, groups[0] if groups else 0, shape.chunks)
    return _over_chunks(shape, worker, one_round, groups, warm_up)


def _interleaved_group(shape: PipelineShape) -> int:
    """Return the least number of minibatches that pass one chunk before the next, so that the last worker can have
    enough in flight. A round that it does not divide has a group of up to twice as many, less one."""
    p, v = shape.pipeline_depth, shape.chunks
    microbatches = ceil_div(shape.update_every[0], shape.replicas[0])
    largest = (shape.in_flight[p - 1] - 1) // max(1, v - 1)
    return microbatches if largest >= microbatches else max(p, (largest + 1) // 2)


def _interleaved_groups(least: int, microbatches: int) -> list[int]:
    """Return the sizes of the groups that pass one chunk before the next: p, as in Megatron-LM (SC'21, section 2.2).

    If `least` does not divide them, the groups are even and larger, because a group smaller than p would deadlock.
    """
    count = max(1, microbatches // least)
    return [microbatches // count + (i < microbatches % count) for i in range(count)]


def _fuller_interleaved_rounds(shape: PipelineShape) -> Sequence[int]:
    """Return the minibatches of rounds of one to three groups. The largest single group has the most in flight. A
    worker whose stages need different memory may need the most in another round; of large ones, not each is tried."""
    least, replicas, whole_round = _interleaved_group(shape), shape.replicas[0], shape.update_every[0]
    sizes = [2 * least - 1, *range(least, 4 * least, max(1, least // _TRIED_SIZES))]
    return list(dict.fromkeys(min(whole_round, size * replicas) for size in sizes))


def _interleaved_warm_up(p: int, worker: int, group: int, chunks: int) -> int:
    """Count the forwards before the first 1F1B pair: the first minibatch must pass all chunks of the last worker."""
    return 2 * (p - worker - 1) + (chunks - 1) * group


def _in_flight_interleaved(r: Number, u: Number, m: int, p: int, v: int) -> Number:
    """Return one more than the warm-up; the last round may be short, and its groups larger."""
    rounds = range(1, ceil_div(m, r) + 1)
    return max(min(_interleaved_warm_up(p, p - u // r, _interleaved_groups(p, n)[0], v) + 1, n * v) for n in rounds)


def _over_chunks(shape: PipelineShape, worker: int, one_round: Round, groups: Sequence[int], warm_up: int) -> Actions:
    """Build the list of a worker with several stages, through which minibatches pass in groups.

    Args:
        groups: how many minibatches pass one chunk before the next.
        warm_up: forwards before the first backward; then forwards and backwards take turns.
    """
    number, minibatches = one_round
    stages = shape.stages_on_same_workers(worker)
    if not minibatches:
        return [Action(stage, ActionKind.UPDATE, number) for stage in stages[::-1]]
    forwards = _cycle(minibatches, groups, stages, ActionKind.FORWARD)
    actions = list(islice(forwards, warm_up))
    for backward in _cycle(minibatches, groups, stages[::-1], ActionKind.BACKWARD):
        actions += [*islice(forwards, 1), backward]
        if backward.minibatch == minibatches[-1]:
            actions.append(Action(backward.stage, ActionKind.UPDATE, number))
    return actions


def _cycle(minibatches: Sequence[int], groups: Sequence[int], stages: range, kind: ActionKind) -> Iterator[Action]:
    remaining = iter(minibatches)
    for size in groups:
        group = list(islice(remaining, size))
        for stage in stages:
            yield from (Action(stage, kind, i) for i in group)


INTERLEAVED = ScheduleKind(
    name="interleaved",
    policies=(FLUSH,),
    actions=_interleaved,
    in_flight=_in_flight_interleaved,
    deepening=lambda s, p: float(p > 1),  # the last worker sends to the first one, for the next chunk
    fuller_rounds=_fuller_interleaved_rounds,
    chunked=True,
    equal_replicas=True,
    planned_as=ONE_F_ONE_B_FLUSH,
)


def _looped_bfs(shape: PipelineShape, worker: int, rounds: Iterable[Round]) -> Actions:
    """Build breadth-first: all minibatches pass the first chunk, then all the second, and backwards likewise.

    Source: "Breadth-First Pipeline Parallelism", MLSys'23. A message may take as long as the other minibatches of its
    chunk. Backwards come in the order of forwards, so that gradients are summed as in the unsplit model; torch's
    ScheduleLoopedBFS reverses them. Two workers of two chunks, every action takes one slot:

        0 | 0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1
        1 | .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    (one_round,) = rounds
    microbatches = len(one_round[1])
    return _over_chunks(shape, worker, one_round, [microbatches], microbatches * shape.chunks)


LOOPED_BFS = replace(
    INTERLEAVED, name="looped-bfs", actions=_looped_bfs, in_flight=_in_flight_of_update, deepening=None
)


def _zero_bubble(shape: PipelineShape, stage: int, rounds: Iterable[Round]) -> Actions:
    """Build ZB-H1: delay the gradients of the weights by s minibatches at stage s, to fill the drain.

    Source: "Zero Bubble Pipeline Parallelism", ICLR'24, section 2.1. With more than p in flight, the warm-up is deeper
    and the gradients are delayed more, in the same proportion: with 2p - 1 this is ZB-H2 (section 2.2). Three stages,
    every action takes one slot:

        0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    ((number, minibatches),) = rounds
    p, in_flight = shape.pipeline_depth, shape.in_flight[stage]
    if in_flight >= ceil_div(shape.update_every[stage], shape.replicas[stage]):  # an update has no more
        in_flight = max(p, in_flight)
    warm_up = ceil((in_flight - 1) * (p - 1 - stage) / max(1, p - 1))
    put_off = in_flight - 1 - warm_up
    forwards = iter(minibatches)
    actions = [Action(stage, ActionKind.FORWARD, i) for i in islice(forwards, warm_up)]
    for done, i in enumerate(minibatches):
        actions += [Action(stage, ActionKind.FORWARD, j) for j in islice(forwards, 1)]
        actions.append(Action(stage, ActionKind.BACKWARD_INPUT, i))
        if done >= put_off:
            actions.append(Action(stage, ActionKind.BACKWARD_WEIGHT, minibatches[done - put_off]))
    actions += [Action(stage, ActionKind.BACKWARD_WEIGHT, i) for i in minibatches[max(0, len(minibatches) - put_off) :]]
    return [*actions, Action(stage, ActionKind.UPDATE, number)]


ZERO_BUBBLE = ScheduleKind(
    name="zb-h1",
    policies=(FLUSH,),
    actions=_zero_bubble,
    in_flight=lambda r, u, m, p, v: min(p, ceil_div(m, r)),  # the memory of 1F1B's first stage, everywhere
    deepening=lambda s, p: float(p > 1),
    equal_replicas=True,
    splits_backward=True,
    planned_as=ONE_F_ONE_B_FLUSH,
)

SCHEDULES = {
    kind.name: kind
    for kind in (ONE_F_ONE_B, ONE_F_ONE_B_FLUSH, GPIPE, TWO_BW_1F1B, INTERLEAVED, LOOPED_BFS, ZERO_BUBBLE)
}


def schedule_names(is_wanted: Callable[[ScheduleKind], bool], conjunction: str = "or") -> str:
    """Return the names of some schedules, for sentences: `a`, `a or b`, `a, b or c`."""
    *names, last = (kind.name for kind in SCHEDULES.values() if is_wanted(kind))
    return f"{', '.join(names)} {conjunction} {last}" if names else last
