"""Schedules: what each worker does, in which order, as plain data.

A schedule is one list of actions per worker. Workers are listed stage by stage, replica by replica, so a
"2-1" plan has three lists. The simulator and the worker execute the same lists.

    p: number of stages        r[s]: replicas of stage s      n: number of minibatches
    w[s]: minibatches in flight at one replica of stage s     k: minibatches in one update of a stage

Minibatch i is computed at stage s by replica i mod r[s] (round-robin; PipeDream, SOSP'19, section 3.2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from pdtool.errors import ScheduleError, UsageError


class Kind(StrEnum):
    """Forward or backward of one minibatch, or the weight update that ends a round of minibatches."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@dataclass(frozen=True, order=True)
class Action:
    """`2F0`: stage 2, forward, minibatch 0. For an update the number is that of the round."""

    stage: int
    kind: Kind
    minibatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.minibatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of `str`; raises ScheduleError."""
        match = re.fullmatch(r"([0-9]+)([FBU])([0-9]+)", text)
        if not match:
            raise ScheduleError(f"{text!r} is not an action", "write the stage, F, B or U, and the minibatch: 2F0")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


Actions = list[Action]
NAMES = ("1f1b", "1f1b-flush", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a schedule is made for.

    Attributes:
        replicas: r[s], for each stage.
        in_flight: w[s], for each stage; see `default_in_flight`.
        update_every: k[s], minibatches in one update of stage s, over all its replicas.
    """

    replicas: tuple[int, ...]
    in_flight: tuple[int, ...]
    update_every: tuple[int, ...]

    def slots(self) -> Iterator[tuple[int, int]]:
        """(stage, replica) of each worker list, in order."""
        return ((s, k) for s, r in enumerate(self.replicas) for k in range(r))


def default_in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """w[s] = ceil(sum of r[j] for j >= s, over r[s]): just enough to keep every later worker busy.

    PipeDream, SOSP'19, section 3.2 (NOAM is this number at the input stage).
    """
    return tuple(math.ceil(sum(replicas[s:]) / r) for s, r in enumerate(replicas))


def build(name: str, shape: Shape, minibatches: int) -> list[Actions]:
    """The action lists of schedule `name` for minibatches 0 .. minibatches - 1 of one epoch.

    All rounds are closed at the end; the last one is short when `update_every` does not divide `minibatches`.

    Raises:
        UsageError: unknown name.
    """
    if name not in NAMES:
        raise UsageError(f"schedule {name!r} is unknown", f"choose one of {', '.join(NAMES)}")
    return [_worker(name, shape, s, k, minibatches) for s, k in shape.slots()]


def _worker(name: str, shape: Shape, stage: int, replica: int, minibatches: int) -> Actions:
    """One worker's list: 1F1B runs through all rounds; the flushing schedules drain the pipeline after each."""
    every, replicas, in_flight = shape.update_every[stage], shape.replicas[stage], shape.in_flight[stage]
    rounds = [
        (i // every, [m for m in range(i, min(i + every, minibatches)) if m % replicas == replica])
        for i in range(0, minibatches, every)
    ]
    if name == "1f1b":
        return _one_f_one_b(stage, rounds, in_flight)
    if name == "gpipe":
        in_flight = minibatches
    return [action for part in rounds for action in _one_f_one_b(stage, [part], in_flight)]


def _one_f_one_b(stage: int, rounds: Sequence[tuple[int, list[int]]], in_flight: int) -> Actions:
    """One forward, one backward: after w forwards, each backward makes room for one more forward.

    Three stages of one worker (w = 3, 2, 1), a forward takes one slot and a backward two:

        0 | F0 F1 F2 .  .  .  .  B0 == F3 B1 == F4 B2 == .  B3 == .  B4 ==
        1 | .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == F4 B3 == .  B4 ==
        2 | .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 ==

    With w >= n this is GPipe: all forwards, then all backwards.
    """
    mine = [i for _, part in rounds for i in part]
    actions = [Action(stage, Kind.FORWARD, i) for i in mine[:in_flight]]
    waiting = iter(mine[in_flight:])
    for number, part in rounds:
        for i in part:
            actions.append(Action(stage, Kind.BACKWARD, i))
            if i == part[-1]:
                actions.append(Action(stage, Kind.UPDATE, number))
            actions += [Action(stage, Kind.FORWARD, j) for j in islice(waiting, 1)]
        if not part:  # a replica left out of a short round joins its update all the same: the all-reduce needs everyone
            actions.append(Action(stage, Kind.UPDATE, number))
    return actions


def timeline(lists: Sequence[Actions], forward: float = 1.0, backward: float = 2.0) -> list[list[float]]:
    """Start time of every action when each takes its fixed time, updates and messages none.

    Executes the lists under blocking communication: a forward waits for the same minibatch's forward at the stage
    before, a backward for the backward at the stage after, an update for every replica's backwards of its round.

    Raises:
        ScheduleError: the lists cannot be executed to their end; the text shows where each worker is stuck.
    """
    needs_of = _dependencies(lists)
    lasts = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.UPDATE: 0.0}
    done: dict[Action, float] = {}
    starts: list[list[float]] = [[] for _ in lists]
    free = [0.0] * len(lists)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(lists):
            while len(starts[worker]) < len(actions):
                action = actions[len(starts[worker])]
                needs = needs_of[action]
                if any(need not in done for need in needs):
                    break
                start = max([free[worker], *(done[need] for need in needs)])
                starts[worker].append(start)
                free[worker] = start + lasts[action.kind]
                done[action] = max(free[worker], done.get(action, 0.0))
                moved = True
    if any(len(s) < len(actions) for s, actions in zip(starts, lists, strict=True)):
        raise _stuck(lists, [len(s) for s in starts], needs_of, done)
    return starts


def _dependencies(lists: Sequence[Actions]) -> dict[Action, list[Action]]:
    """What must have ended, on any worker, before each action starts."""
    last = max((a.stage for actions in lists for a in actions), default=0)
    needs: dict[Action, list[Action]] = {}
    for actions in lists:
        backwards: list[Action] = []
        for action in actions:
            stage, i = action.stage, action.minibatch
            if action.kind is Kind.FORWARD:
                needs[action] = [Action(stage - 1, Kind.FORWARD, i)] if stage else []
            elif action.kind is Kind.BACKWARD:
                after = [Action(stage + 1, Kind.BACKWARD, i)] if stage < last else []
                needs[action] = [Action(stage, Kind.FORWARD, i), *after]
                backwards.append(action)
            else:  # the gradients of all replicas are averaged first
                needs[action] = needs.get(action, []) + backwards
                backwards = []
    return needs


def validate(lists: Sequence[Actions], shape: Shape, minibatches: int) -> None:
    """Prove of any lists: complete, every minibatch on its replica, bounds held, no deadlock, updates in order.

    Raises:
        ScheduleError: the first law that is broken; the text holds the grid with the fault marked.
    """
    slots = list(shape.slots())
    if len(lists) != len(slots):
        raise ScheduleError(f"{len(lists)} action lists for {len(slots)} workers")
    for worker, (actions, (stage, replica)) in enumerate(zip(lists, slots, strict=True)):
        _validate_worker(lists, worker, actions, shape, stage, replica, minibatches)
    timeline(lists)


def _validate_worker(
    lists: Sequence[Actions], worker: int, actions: Actions, shape: Shape, stage: int, replica: int, minibatches: int
) -> None:
    every, r = shape.update_every[stage], shape.replicas[stage]
    expected = {Action(stage, k, i) for k in "FB" for i in range(replica, minibatches, r)}  # type: ignore[arg-type]
    rounds = math.ceil(minibatches / every)
    expected |= {Action(stage, Kind.UPDATE, j) for j in range(rounds)}
    seen: set[Action] = set()
    live: set[int] = set()
    closed = 0
    for position, action in enumerate(actions):
        fault = ""
        if action not in expected or action in seen:
            fault = "happens twice" if action in seen else "does not belong to this worker"
        elif action.kind is Kind.FORWARD:
            live.add(action.minibatch)
            if len(live) > max(shape.in_flight[stage], 1):
                fault = f"makes {len(live)} minibatches in flight; the plan allows {shape.in_flight[stage]}"
        elif action.kind is Kind.BACKWARD:
            if action.minibatch not in live:
                fault = "comes before its forward"
            live.discard(action.minibatch)
        else:
            missing = [i for i in range(replica, min((action.minibatch + 1) * every, minibatches), r)
                       if Action(stage, Kind.BACKWARD, i) not in seen]  # fmt: skip
            if action.minibatch != closed or missing:
                fault = "comes before a backward of its round" if missing else f"comes when update {closed} is due"
            closed += 1
        if fault:
            raise ScheduleError(f"{action} {fault}\n{grid(lists, mark=(worker, position))}")
        seen.add(action)
    if expected - seen:
        raise ScheduleError(f"{min(expected - seen)} is missing from worker {worker}\n{grid(lists)}")


def _stuck(
    lists: Sequence[Actions], at: list[int], needs_of: dict[Action, list[Action]], done: dict[Action, float]
) -> ScheduleError:
    """Name every worker that cannot go on and what it waits for."""
    stuck = [(worker, position) for worker, position in enumerate(at) if position < len(lists[worker])]
    waits = []
    for worker, position in stuck:
        action = lists[worker][position]
        missing = ", ".join(str(need) for need in needs_of[action] if need not in done)
        waits.append(f"worker {worker} waits in {action} for {missing}")
    return ScheduleError(f"deadlock: {'; '.join(waits)}\n{grid(lists, mark=stuck[0])}")


def grid(lists: Sequence[Actions], mark: tuple[int, int] | None = None, around: int = 12) -> str:
    """The lists, one worker a line; the marked action stands in >brackets<, with `around` actions on each side."""
    first = max(0, mark[1] - around) if mark else 0
    rows = []
    for worker, actions in enumerate(lists):
        cells = [
            f">{a}<" if mark == (worker, i) else str(a)
            for i, a in enumerate(actions[first : first + 2 * around], start=first)
        ]
        rows.append(f"worker {worker:>2} | {'... ' if first else ''}{' '.join(cells)}")
    return "\n".join(rows)


def draw(lists: Sequence[Actions], forward: int = 1, backward: int = 2, width: int = 100) -> str:
    """An ASCII timeline in slots: `F3` forward, `B3 ==` backward, `.` idle; cut at `width` characters."""
    starts = timeline(lists, forward, backward)
    size = 1 + max((len(str(a.minibatch)) for actions in lists for a in actions), default=1)
    rows = []
    for worker, (actions, times) in enumerate(zip(lists, starts, strict=True)):
        cells: list[str] = []
        for action, start in zip(actions, times, strict=True):
            if action.kind is not Kind.UPDATE:
                cells += ["."] * (int(start) - len(cells))
                lasts = forward if action.kind is Kind.FORWARD else backward
                cells += [f"{action.kind}{action.minibatch}"] + ["=" * size] * (lasts - 1)
        stage = actions[0].stage if actions else 0
        text = f"stage {stage} worker {worker} | " + " ".join(cell.ljust(size) for cell in cells)
        rows.append((text if len(text) <= width else text[: width - 1] + "…").rstrip())
    return "\n".join(rows)
