"""Lists executed under blocking communication: when everything starts, or who is stuck."""

from __future__ import annotations

from collections.abc import Sequence

from pdtool.errors import ScheduleError
from pdtool.schedule.action import Action, ActionKind, Actions
from pdtool.schedule.grid import grid


def timeline(lists: Sequence[Actions], forward: float = 1.0, backward: float = 2.0) -> list[list[float]]:
    """Start time of every action when each takes its fixed time, updates and messages none.

    Executes the lists under blocking communication: a forward waits for the same minibatch's forward at the stage
    before, a backward for the backward at the stage after, an update for every replica's backwards of its round.
    The two parts of a split backward take half its time each.

    Raises:
        ScheduleError: the lists cannot be executed to their end; the text shows where each worker is stuck.
    """
    needs_of = _dependencies(lists)
    half = backward / 2
    lasts = dict(zip(ActionKind, (forward, backward, half, half, 0.0), strict=True))
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
    split = {a.stage for actions in lists for a in actions if a.kind is ActionKind.BACKWARD_INPUT}
    needs: dict[Action, list[Action]] = {}
    for actions in lists:
        ended: dict[int, list[Action]] = {}
        for action in actions:
            stage, i = action.stage, action.minibatch
            if action.kind is ActionKind.FORWARD:
                needs[action] = [Action(stage - 1, ActionKind.FORWARD, i)] if stage else []
            elif action.kind.sends_gradients:
                sender = ActionKind.BACKWARD_INPUT if stage + 1 in split else ActionKind.BACKWARD
                after = [Action(stage + 1, sender, i)] if stage < last else []
                needs[action] = [Action(stage, ActionKind.FORWARD, i), *after]
            elif action.kind is ActionKind.BACKWARD_WEIGHT:
                needs[action] = [Action(stage, ActionKind.BACKWARD_INPUT, i)]
            else:  # the gradients of all replicas are averaged first
                needs[action] = needs.get(action, []) + ended.pop(stage, [])
            if action.kind.completes_backward:
                ended.setdefault(stage, []).append(action)
    return needs


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
