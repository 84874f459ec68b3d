"""What one worker holds on its way through its list: minibatches and weight versions."""

from __future__ import annotations

from collections import Counter

from pdtool.schedule.action import Action, Kind


class Held:
    """Minibatches between their forward and the end of their backward, and the versions of the weights they were begun
    with; a version dies with its last backward (PipeDream, SOSP'19, section 3.3).

    Attributes:
        begun: (stage, minibatch) -> updates of the stage before its forward.
        updates: of each stage so far.
        peak: most minibatches at once, over all stages of the worker.
        delay: most updates between the forward and the backward of one minibatch.
    """

    def __init__(self) -> None:
        self.begun: dict[tuple[int, int], int] = {}
        self.updates: Counter[int] = Counter()
        self.peak = self.delay = 0
        self._users: Counter[tuple[int, int]] = Counter()  # (stage, version) -> minibatches
        self._old: Counter[int] = Counter()  # versions of each stage that only minibatches in flight need

    def take(self, action: Action) -> None:
        """Do one action; one that ends a minibatch must follow its forward."""
        stage, at = action.stage, (action.stage, action.minibatch)
        if action.kind is Kind.FORWARD:
            self.begun[at] = self.updates[stage]
            self._users[stage, self.updates[stage]] += 1
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
        """Weight versions of a stage: the latest, and those that minibatches in flight were begun with."""
        return 1 + self._old[stage]
