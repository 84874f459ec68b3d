"""The kinds of schedules: the weight policies, the shape and the action lists of each.

`build` makes the lists as a pure function of a shape. `pipeline_shape` returns the shape of a plan, and `default_shape`
the one that a schedule is defined for. The simulator and the workers execute the lists without knowing the kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from pdtool.errors import UsageError
from pdtool.schedule.action import Action, ActionKind, Actions
from pdtool.schedule.shape import PipelineShape, total_in_flight

POLICIES = {  # of each schedule, the usual one first
    "1f1b": ("stash", "vertical-sync", "none"),
    "1f1b-flush": ("flush",),
    "gpipe": ("flush",),
    "2bw": ("2bw",),
    "interleaved": ("flush",),
    "zb-h1": ("flush",),
}
SCHEDULES = tuple(POLICIES)
SEARCHED_SCHEDULES = ("1f1b", "1f1b-flush", "gpipe")  # those that the planner has formulas for
_EQUAL_REPLICAS = ("interleaved", "zb-h1")
Round = tuple[int, list[int]]  # (number, the minibatches of one worker in it)


def is_asynchronous(schedule: str) -> bool:
    """Tell whether minibatches are in flight while the weights change."""
    return POLICIES[schedule] != ("flush",)


def build(name: str, shape: PipelineShape, minibatches: int) -> list[Actions]:
    """Build the action lists of schedule `name` for minibatches 0 .. minibatches - 1 of one epoch.

    All rounds are closed at the end; the last one is short when `update_every` does not divide `minibatches`.

    Raises:
        UsageError: the name is unknown, or the shape does not fit the schedule.
    """
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name!r} is unknown", f"choose one of {', '.join(SCHEDULES)}")
    if name in _EQUAL_REPLICAS and len(set(shape.replicas)) > 1:
        config = "-".join(map(str, shape.replicas[: shape.pipeline_depth]))
        raise UsageError(
            f"schedule {name} needs as many replicas of each stage, but the plan is {config}",
            "use a straight plan, or 1f1b-flush",
        )
    if name != "interleaved" and shape.chunks > 1:
        raise UsageError(f"schedule {name} has one chunk a worker, not {shape.chunks}", "use interleaved")
    return [_worker_actions(name, shape, s, k, minibatches) for s, k in shape.stage_replicas()]


def default_in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return w[s] = ceil(sum of r[j] for j >= s, over r[s]), just enough to keep every later worker busy.

    PipeDream, SOSP'19, section 3.2 (NOAM is this number at the input stage).
    """
    return tuple(math.ceil(sum(replicas[s:]) / r) for s, r in enumerate(replicas))


def default_shape(name: str, replicas: Sequence[int], microbatches: int = 1, chunks: int = 1) -> PipelineShape:
    """Return the shape that schedule `name` is defined for.

    Args:
        replicas: r[s]; for `interleaved` and `zb-h1` all the same, r pipelines side by side.
        microbatches: in one update of a flushing schedule; the minimum for `2bw`.
        chunks: v, for `interleaved`.
    """
    p, usual = len(replicas), default_in_flight(replicas)
    if name == "1f1b":
        return PipelineShape(replicas=tuple(replicas), in_flight=usual, update_every=tuple(replicas))
    per_replica = [math.ceil(microbatches / r) for r in replicas]  # microbatches of one update
    weights = "flush"
    match name:
        case "2bw":  # k >= all in flight, so that a third version is never begun (Narayanan et al., 2021, section 3.1)
            microbatches, weights = max(microbatches, total_in_flight(replicas, usual)), "2bw"
            in_flight = usual
        case "1f1b-flush":
            in_flight = tuple(map(min, usual, per_replica))
        case "interleaved":  # after the warm-up, one more; the last round may be short, and its groups larger
            rounds = range(1, per_replica[0] + 1)
            in_flight = tuple(
                max(min(interleaved_warm_up(p, r, n, chunks) + 1, n * chunks) for n in rounds) for r in range(p)
            )
        case "zb-h1":  # the memory of 1F1B's first stage, everywhere (ICLR'24, section 2.1)
            in_flight = (min(p, per_replica[0]),) * p
        case _:
            in_flight = tuple(per_replica)
    stages = p * chunks
    return PipelineShape(
        replicas=tuple(replicas) * chunks,
        in_flight=in_flight,
        update_every=(microbatches,) * stages,
        chunks=chunks,
        weights=weights,
    )


def pipeline_shape(
    schedule: str,
    *,
    replicas: Sequence[int],
    in_flight: Sequence[int],
    weights: str,
    microbatches: int = 1,
    update_every: int | None = None,
    chunks: int = 1,
    tied_stages: Sequence[Sequence[int]] = (),
) -> PipelineShape:
    """Return the shape of a plan, with the number of minibatches after which each stage updates.

    Args:
        replicas: of each stage.
        in_flight: of each stage; with chunks of the first stage on each worker.
        weights: the policy, one of POLICIES.
        microbatches: in one update of a flushing schedule.
        update_every: minibatches in one update of every stage, without a flush; None: as many as the stage has
            replicas (PipeDream), and with vertical sync or 2BW the fewest that suit all stages.
        tied_stages: groups of stages that share a parameter, and so must update after the same number of minibatches.
    """
    if not is_asynchronous(schedule):
        intervals = [microbatches] * len(replicas)
    elif update_every:
        intervals = [update_every] * len(replicas)
    elif weights == "vertical-sync":
        intervals = [math.lcm(*replicas)] * len(replicas)
    elif weights == "2bw":
        intervals = [total_in_flight(replicas[: len(in_flight)], in_flight)] * len(replicas)
    else:
        intervals = list(replicas)
        for stages in tied_stages:
            for s in stages:
                intervals[s] = math.lcm(*(replicas[t] for t in stages))
    return PipelineShape(
        replicas=tuple(replicas),
        in_flight=tuple(in_flight),
        update_every=tuple(intervals),
        chunks=chunks,
        weights=weights,
    )


def interleaved_groups(p: int, microbatches: int) -> list[int]:
    """Return the sizes of the groups that pass one chunk before the next: p, as in Megatron-LM (SC'21, section 2.2).

    Where p does not divide them the groups are even and larger than p: one smaller than p would deadlock.
    """
    count = max(1, microbatches // p)
    return [microbatches // count + (i < microbatches % count) for i in range(count)]


def interleaved_warm_up(p: int, worker: int, microbatches: int, chunks: int) -> int:
    """Count the forwards before the first 1F1B pair: the first minibatch must pass all chunks of the last worker."""
    return 2 * (p - worker - 1) + (chunks - 1) * interleaved_groups(p, microbatches)[0]


def _worker_actions(name: str, shape: PipelineShape, stage: int, replica: int, minibatches: int) -> Actions:
    """Build one worker's list: 1F1B runs through all rounds; the flushing schedules drain the pipeline after each."""
    every, replicas, in_flight = shape.update_every[stage], shape.replicas[stage], shape.in_flight[stage]
    rounds: list[Round] = [
        (i // every, list(range(i + (replica - i) % replicas, min(i + every, minibatches), replicas)))
        for i in range(0, minibatches, every)
    ]
    match name:
        case "1f1b" | "2bw":
            return _one_f_one_b(stage, rounds, in_flight)
        case "interleaved":
            return [action for one_round in rounds for action in _interleaved(stage, one_round, shape)]
        case "zb-h1":
            return [action for one_round in rounds for action in _zero_bubble(stage, one_round, shape)]
        case "gpipe":
            in_flight = minibatches
    return [action for one_round in rounds for action in _one_f_one_b(stage, [one_round], in_flight)]


def _one_f_one_b(stage: int, rounds: Sequence[Round], in_flight: int) -> Actions:
    """Build one forward, one backward: after w forwards, each backward makes room for one more forward.

    Three stages of one worker (w = 3, 2, 1), a forward takes one slot and a backward two:

        0 | F0 F1 F2 .  .  .  .  B0 == F3 B1 == F4 B2 == .  B3 == .  B4 ==
        1 | .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == F4 B3 == .  B4 ==
        2 | .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 ==

    With w >= n this is GPipe: all forwards, then all backwards. With k >= w it is PipeDream-2BW (ICML'21, section 3.1):
    every minibatch in flight was begun with this version of the weights or the one before.
    """
    all_minibatches = [i for _, minibatches in rounds for i in minibatches]
    actions = [Action(stage, ActionKind.FORWARD, i) for i in all_minibatches[:in_flight]]
    waiting = iter(all_minibatches[in_flight:])
    for number, minibatches in rounds:
        for i in minibatches:
            actions.append(Action(stage, ActionKind.BACKWARD, i))
            if i == minibatches[-1]:
                actions.append(Action(stage, ActionKind.UPDATE, number))
            actions += [Action(stage, ActionKind.FORWARD, j) for j in islice(waiting, 1)]
        if not minibatches:  # in a short round; the replica joins its update, for all-reduce needs everyone
            actions.append(Action(stage, ActionKind.UPDATE, number))
    return actions


def _interleaved(worker: int, one_round: Round, shape: PipelineShape) -> Actions:
    """Build 1F1B over chunks: p minibatches pass the first chunk, the same p the second, and so on.

    Source: Megatron-LM, SC'21, section 2.2. Two workers of two chunks (stages 0, 2 and 1, 3), every action takes one
    slot:

        0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
        1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    number, minibatches = one_round
    stages, groups = shape.stages_on_same_workers(worker), interleaved_groups(shape.pipeline_depth, len(minibatches))
    if not minibatches:
        return [Action(stage, ActionKind.UPDATE, number) for stage in stages[::-1]]
    forwards = _cycle(minibatches, groups, stages, ActionKind.FORWARD)
    backwards = _cycle(minibatches, groups, stages[::-1], ActionKind.BACKWARD)
    actions = list(islice(forwards, interleaved_warm_up(shape.pipeline_depth, worker, len(minibatches), shape.chunks)))
    for backward in backwards:
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


def _zero_bubble(stage: int, one_round: Round, shape: PipelineShape) -> Actions:
    """Build ZB-H1: the gradients of the weights are put off, by r minibatches at stage r, to fill the drain.

    Source: "Zero Bubble Pipeline Parallelism", ICLR'24, section 2.1. Three stages, every action takes one slot:

        0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    number, minibatches = one_round
    forwards = iter(minibatches)
    actions = [Action(stage, ActionKind.FORWARD, i) for i in islice(forwards, shape.pipeline_depth - 1 - stage)]
    for done, i in enumerate(minibatches):
        actions += [Action(stage, ActionKind.FORWARD, j) for j in islice(forwards, 1)]
        actions.append(Action(stage, ActionKind.BACKWARD_INPUT, i))
        if done >= stage:
            actions.append(Action(stage, ActionKind.BACKWARD_WEIGHT, minibatches[done - stage]))
    actions += [Action(stage, ActionKind.BACKWARD_WEIGHT, i) for i in minibatches[max(0, len(minibatches) - stage) :]]
    return [*actions, Action(stage, ActionKind.UPDATE, number)]
