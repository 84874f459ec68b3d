"""Weight policies: the version of the weights that each minibatch is computed with, from the action lists alone.

stash          the newest when its forward runs, for its backward too (PipeDream, SOSP'19, section 3.3)
vertical-sync  the one that the first stage had when its forward ran there, at every stage (ibid.)
2bw            version j - 1 in round j at every stage, one update late everywhere; updates are so rare that two
               versions are enough (Narayanan et al., ICML'21, section 3.1)
flush          the newest; nothing is in flight when it changes
none           the newest when its forward runs, and the newest when its backward runs, which may be another
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdtool.schedule.action import Action, ActionKind, Actions

ForwardVersions = dict[tuple[int, int], int]  # (stage, minibatch) -> updates of the stage that its forward sees


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


class StashTracker:
    """Track which minibatches are in flight and which weight versions are still needed, action by action.

    A minibatch is in flight from its forward to the end of its backward. A weight version lives until the last backward
    that needs it (PipeDream, SOSP'19, section 3.3).

    Args:
        forward_versions: the weight version that each forward reads; None: each reads the newest.
        stashing: whether old versions are kept for the backwards that need them.

    Attributes:
        in_flight: (stage, minibatch) -> weight version that its forward read.
        updates: updates of each stage so far.
        peak: most minibatches in flight at once, over all stages of the worker.
        delay: most updates between the version that a forward reads and its backward.
    """

    def __init__(self, forward_versions: ForwardVersions | None = None, *, stashing: bool = True) -> None:
        self.in_flight: ForwardVersions = {}
        self.updates: Counter[int] = Counter()
        self.peak = self.delay = 0
        self._forward_versions, self._stashing = forward_versions, stashing
        # (stage, version) -> minibatches that still need the version
        self._users = Counter((stage, version) for (stage, _), version in (forward_versions or {}).items())
        self._old_versions: Counter[int] = Counter()  # of each stage, versions kept besides the newest

    def apply(self, action: Action) -> None:
        """Account for one action; a backward must follow the forward of its minibatch."""
        stage, key = action.stage, (action.stage, action.minibatch)
        if action.kind is ActionKind.FORWARD:
            if self._forward_versions is None:
                self._users[stage, self.updates[stage]] += 1
                self.in_flight[key] = self.updates[stage]
            else:
                self.in_flight[key] = self._forward_versions[key]
            self.peak = max(self.peak, len(self.in_flight))
        elif action.kind.completes_backward:
            version = self.in_flight.pop(key)
            self._users[stage, version] -= 1
            self.delay = max(self.delay, self.updates[stage] - version)
            if version < self.updates[stage] and not self._users[stage, version]:
                self._old_versions[stage] -= 1
        elif action.kind is ActionKind.UPDATE:
            self._old_versions[stage] += bool(self._users[stage, self.updates[stage]])
            self.updates[stage] += 1

    def versions(self, stage: int) -> int:
        """Return the number of live weight versions of a stage: the newest, and those that a backward still needs."""
        return 1 + self._old_versions[stage] * self._stashing
