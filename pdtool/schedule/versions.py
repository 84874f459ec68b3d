"""The weight version that each minibatch is computed with, derived from the action lists alone.

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
    """Tell whether minibatches are in flight while the weights change."""
    return POLICIES[schedule] != ("flush",)


def forward_versions(lists: Sequence[Actions], weights: str) -> list[ForwardVersions]:
    """Return for each worker the version that every forward reads: how many updates of its stage precede it.

    Args:
        weights: the policy. With `vertical-sync` all stages must update after the same number of minibatches.
    """
    newest = [_newest(actions) for actions in lists]
    match weights:
        case "vertical-sync":
            first = {i: version for versions in newest for (stage, i), version in versions.items() if stage == 0}
            return [{key: first.get(key[1], version) for key, version in versions.items()} for versions in newest]
        case "2bw":
            return [versions | _one_update_late(actions) for versions, actions in zip(newest, lists, strict=True)]
    return newest


def _newest(actions: Actions) -> ForwardVersions:
    updates: Counter[int] = Counter()
    versions: ForwardVersions = {}
    for action in actions:
        if action.kind is ActionKind.UPDATE:
            updates[action.stage] += 1
        elif action.kind is ActionKind.FORWARD:
            versions[action.stage, action.minibatch] = updates[action.stage]
    return versions


def _one_update_late(actions: Actions) -> ForwardVersions:
    rounds: dict[int, int] = {}  # of each stage, that of the update after the current action
    versions: ForwardVersions = {}
    for action in reversed(actions):
        if action.kind is ActionKind.UPDATE:
            rounds[action.stage] = action.minibatch
        elif action.kind.completes_backward:
            versions[action.stage, action.minibatch] = max(0, rounds.get(action.stage, 0) - 1)
    return versions
