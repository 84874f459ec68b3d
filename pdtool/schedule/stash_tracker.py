"""The minibatches and weight versions that one worker holds at each point of its action list."""

from __future__ import annotations

from collections import Counter

from pdtool.schedule.action import Action, ActionKind
from pdtool.schedule.versions import ForwardVersions


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
