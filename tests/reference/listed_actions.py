"""The lists of an epoch as pdtool made them before they were made lazily: all at once, each from a list of rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdtool.schedule import Action, ActionKind, ForwardVersions, PipelineShape, ScheduleKind

F, B, U = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.UPDATE


def listed(kind: ScheduleKind, shape: PipelineShape, n: int) -> list[list[Action]]:
    """The actions of each worker for n minibatches."""
    lists = []
    for s, k in shape.stage_replicas():
        every, r = shape.update_every[s], shape.replicas[s]
        rounds = [(i // every, [j for j in range(i, min(i + every, n)) if j % r == k]) for i in range(0, n, every)]
        if not kind.flushes:
            lists.append(_one_f_one_b(s, rounds, shape.in_flight[s]))
        elif kind.name in ("1f1b-flush", "gpipe"):
            in_flight = [n if kind.name == "gpipe" else shape.in_flight[s] for _ in rounds]
            parts = zip(rounds, in_flight, strict=True)
            lists.append([action for one, w in parts for action in _one_f_one_b(s, [one], w)])
        else:
            lists.append([action for one in rounds for action in kind.actions(shape, s, [one])])
    return lists


def _one_f_one_b(s: int, rounds: Sequence[tuple[int, list[int]]], w: int) -> list[Action]:
    """All forwards in a list; a backward makes room for the next of them."""
    forwards = [Action(s, F, i) for _, minibatches in rounds for i in minibatches]
    actions, forwards = forwards[:w], forwards[w:]
    for number, minibatches in rounds:
        for i in minibatches:
            actions.append(Action(s, B, i))
            actions += [Action(s, U, number)] * (i == minibatches[-1])
            actions += forwards[:1]
            forwards = forwards[1:]
        actions += [Action(s, U, number)] * (not minibatches)
    return actions


def listed_versions(lists: Sequence[Sequence[Action]], policy: str) -> list[ForwardVersions]:
    """The version that each forward of each worker reads, from whole lists."""
    newest: list[ForwardVersions] = []
    for actions in lists:
        updates: Counter[int] = Counter()
        newest.append({})
        for action in actions:
            updates[action.stage] += action.kind is U
            if action.kind is F:
                newest[-1][action.stage, action.minibatch] = updates[action.stage]
    if policy == "vertical-sync":
        first = {i: version for own in newest for (s, i), version in own.items() if s == 0}
        return [{key: first[key[1]] for key in own} for own in newest]
    if policy == "2bw":
        for actions, own in zip(lists, newest, strict=True):
            number: dict[int, int] = {}
            for action in reversed(actions):
                if action.kind is U:
                    number[action.stage] = action.minibatch
                elif action.kind is B:
                    own[action.stage, action.minibatch] = max(0, number[action.stage] - 1)
    return newest
