"""What one worker holds on its way through its list: minibatches and weight versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pdtool.schedule.action import Action, Kind


class Held:
    """Minibatches between their forward and the end of their backward, and the versions of the weights that they and
    later ones are computed with; a version dies with its last backward (PipeDream, SOSP'19, section 3.3).

    Args:
        reads: (stage, minibatch) -> version, of every forward to come (versions.reads); None: each reads the newest.
        stashing: whether versions are kept for those that read them.

    Attributes:
        begun: (stage, minibatch) -> version that its forward read.
        updates: of each stage so far.
        peak: most minibatches at once, over all stages of the worker.
        delay: most updates between the version that a forward reads and its backward.
    """

    def __init__(self, reads: Mapping[tuple[int, int], int] | None = None, *, stashing: bool = True) -> None:
        self.begun: dict[tuple[int, int], int] = {}
        self.updates: Counter[int] = Counter()
        self.peak = self.delay = 0
        self._reads, self._stashing = reads, stashing
        # (stage, version) -> minibatches that are not done with it
        self._users = Counter((stage, version) for (stage, _), version in (reads or {}).items())
        self._old: Counter[int] = Counter()  # versions of each stage that are kept besides the newest

    def take(self, action: Action) -> None:
        """Do one action; one that ends a minibatch must follow its forward."""
        stage, at = action.stage, (action.stage, action.minibatch)
        if action.kind is Kind.FORWARD:
            if self._reads is None:
                self._users[stage, self.updates[stage]] += 1
            self.begun[at] = self.updates[stage] if self._reads is None else self._reads[at]
            self.peak = max(self.peak, len(self.begun))
        elif action.kind.ends:
            version = self.begun.pop(at)
            self._users[stage, version] -= 1
            self.delay = max(self.delay, self.updates[stage] - version)
            if version < self.updates[stage] and not self._users[stage, version]:
                self._old[stage] -= 1
        elif action.kind is Kind.UPDATE:
            self._old[stage] += bool(self._users[stage, self.updates[stage]])
            self.updates[stage] += 1

    def versions(self, stage: int) -> int:
        """Weight versions of a stage: the newest, and those that somebody still needs."""
        return 1 + self._old[stage] * self._stashing
