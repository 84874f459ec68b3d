"""Which version of its weights each minibatch is computed with, known from the lists alone.

stash           the newest when its forward runs, for its backward too (PipeDream, SOSP'19, section 3.3)
vertical-sync   the one that the first stage had when its forward ran there, at every stage (ibid.)
2bw             round j is computed with version j - 1 at every stage, one update late everywhere; updates are so rare
                that two versions are enough (Narayanan et al., ICML'21, section 3.1)
flush           the newest; nothing is in flight when it changes
none            the newest when its forward runs, and the newest when its backward runs, which may be another
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdtool.schedule.action import ActionKind, Actions

POLICIES = {  # of each schedule, the usual one first
    "1f1b": ("stash", "vertical-sync", "none"),
    "1f1b-flush": ("flush",),
    "gpipe": ("flush",),
    "2bw": ("2bw",),
    "interleaved": ("flush",),
    "zb-h1": ("flush",),
}
ForwardVersions = dict[tuple[int, int], int]  # (stage, minibatch) -> updates of the stage that its forward sees


def is_asynchronous(schedule: str) -> bool:
    """Whether minibatches are in flight while the weights change."""
    return POLICIES[schedule] != ("flush",)


def forward_versions(lists: Sequence[Actions], weights: str) -> list[ForwardVersions]:
    """For each worker, the version of every forward: how many updates of its stage it sees.

    Args:
        weights: the policy. With `vertical-sync` all stages must update after the same number of minibatches.
    """
    found = [_newest(actions) for actions in lists]
    match weights:
        case "vertical-sync":
            entered = {i: version for own in found for (stage, i), version in own.items() if stage == 0}
            return [{at: entered.get(at[1], version) for at, version in own.items()} for own in found]
        case "2bw":
            return [own | _one_late(actions) for own, actions in zip(found, lists, strict=True)]
    return found


def _newest(actions: Actions) -> ForwardVersions:
    updates: Counter[int] = Counter()
    found: ForwardVersions = {}
    for action in actions:
        if action.kind is ActionKind.UPDATE:
            updates[action.stage] += 1
        elif action.kind is ActionKind.FORWARD:
            found[action.stage, action.minibatch] = updates[action.stage]
    return found


def _one_late(actions: Actions) -> ForwardVersions:
    rounds: dict[int, int] = {}
    found: ForwardVersions = {}
    for action in reversed(actions):
        if action.kind is ActionKind.UPDATE:
            rounds[action.stage] = action.minibatch
        elif action.kind.completes_backward:
            found[action.stage, action.minibatch] = max(0, rounds.get(action.stage, 0) - 1)
    return found
