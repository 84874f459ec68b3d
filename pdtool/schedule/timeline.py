"""Execute action lists under blocking communication: when each action starts, or which workers deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from pdtool.errors import ScheduleError
from pdtool.schedule.action import Action, ActionKind, Actions, grid


def timeline(lists: Sequence[Actions], forward: float = 1.0, backward: float = 2.0) -> list[list[float]]:
    """Compute the start time of every action, in slots, when updates and messages take no time.

    Communication is blocking: a forward waits for the same minibatch's forward at the stage before, a backward for the
    backward at the stage after, an update for every replica's backwards of its round.

    Args:
        forward, backward: time that each takes; each part of a split backward takes half of it.

    Raises:
        ScheduleError: the lists cannot be executed to their end; the text shows where each worker is stuck.
    """
    needs_of = _dependencies(lists)
    half = backward / 2
    durations = dict(zip(ActionKind, (forward, backward, half, half, 0.0), strict=True))
    ends: dict[Action, float] = {}
    ready: dict[Action, float] = {}  # when what each action needs, as far as it was seen, had ended
    starts: list[list[float]] = [[] for _ in lists]
    free = [0.0] * len(lists)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(lists):
            while len(starts[worker]) < len(actions):
                action = actions[len(starts[worker])]
                needs = needs_of[action]  # an update's are those of all replicas: each is seen once, not once by each
                while needs and needs[-1] in ends:
                    ready[action] = max(ready.get(action, 0.0), ends[needs.pop()])
                if needs:
                    break
                start = max(free[worker], ready.get(action, 0.0))
                starts[worker].append(start)
                free[worker] = start + durations[action.kind]
                ends[action] = max(free[worker], ends.get(action, 0.0))
                moved = True
    if any(len(s) < len(actions) for s, actions in zip(starts, lists, strict=True)):
        raise _deadlock(lists, [len(s) for s in starts], needs_of, ends)
    return starts


def _dependencies(lists: Sequence[Actions]) -> dict[Action, list[Action]]:
    """Return for each action those that must have ended, on any worker, before it starts."""
    last = max((a.stage for actions in lists for a in actions), default=0)
    split = {a.stage for actions in lists for a in actions if a.kind is ActionKind.BACKWARD_INPUT}
    needs: dict[Action, list[Action]] = {}
    for actions in lists:
        backwards: dict[int, list[Action]] = {}  # of each stage, in the current round
        for action in actions:
            stage, i = action.stage, action.minibatch
            if action.kind is ActionKind.FORWARD:
                needs[action] = [Action(stage - 1, ActionKind.FORWARD, i)] if stage else []
            elif action.kind.sends_gradients:
                sender = ActionKind.BACKWARD_INPUT if stage + 1 in split else ActionKind.BACKWARD
                gradient = [Action(stage + 1, sender, i)] if stage < last else []
                needs[action] = [Action(stage, ActionKind.FORWARD, i), *gradient]
            elif action.kind is ActionKind.BACKWARD_WEIGHT:
                needs[action] = [Action(stage, ActionKind.BACKWARD_INPUT, i)]
            else:  # the gradients of all replicas are averaged first
                needs.setdefault(action, []).extend(backwards.pop(stage, []))
            if action.kind.completes_backward:
                backwards.setdefault(stage, []).append(action)
    return needs


def _deadlock(
    lists: Sequence[Actions], positions: list[int], needs_of: dict[Action, list[Action]], ends: dict[Action, float]
) -> ScheduleError:
    """Make the error that names every stuck worker and what it waits for."""
    stuck = [(worker, position) for worker, position in enumerate(positions) if position < len(lists[worker])]
    waits = []
    for worker, position in stuck:
        action = lists[worker][position]
        missing = ", ".join(str(need) for need in needs_of[action] if need not in ends)
        waits.append(f"worker {worker} waits in {action} for {missing}")
    return ScheduleError(f"deadlock: {'; '.join(waits)}\n{grid(lists, mark=stuck[0])}")
