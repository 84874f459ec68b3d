"""One action of a worker, and lists of actions as a grid of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from pdtool.errors import ScheduleError


class ActionKind(StrEnum):
    """Forward or backward of one minibatch, or the weight update that ends a round of minibatches.

    A zero-bubble schedule splits the backward in two. The stage before waits for the gradient of the inputs. Only the
    update waits for the gradient of the weights.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UPDATE = "U"

    @cached_property
    def sends_gradients(self) -> bool:
        """Whether the stage before waits for this action."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)

    @cached_property
    def completes_backward(self) -> bool:
        """Whether the minibatch's stash is free after this action, and its gradients are ready for the update."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


class Action(NamedTuple):
    """`2F0`: stage 2, forward, minibatch 0. For an update the number is that of the round."""

    stage: int
    kind: ActionKind
    minibatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.minibatch}"

    def ends_round(self, following: Action | None) -> bool:
        """Whether it is the last backward of a round: the update of its stage comes right after it.

        Then gradients are averaged while they are computed.
        """
        is_update = following is not None and (following.stage, following.kind) == (self.stage, ActionKind.UPDATE)
        return self.kind.completes_backward and is_update

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` writes; raises ScheduleError."""
        match = re.fullmatch(r"([0-9]+)([FBIWU])([0-9]+)", text)
        if not match:
            what = f"{text!r} is not an action"
            raise ScheduleError(what, "write the stage, F, B, I, W or U, and the minibatch: 2F0")
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))


Actions = list[Action]


def grid(lists: Sequence[Actions], mark: tuple[int, int] | None = None, around: int = 12) -> str:
    """Write the lists, one worker a line.

    Args:
        mark: (worker, position) of an action to write as >0F3<, with `around` actions on each side.
    """
    first = max(0, mark[1] - around) if mark else 0
    rows = []
    for worker, actions in enumerate(lists):
        cells = [
            f">{a}<" if mark == (worker, i) else str(a)
            for i, a in enumerate(actions[first : first + 2 * around], start=first)
        ]
        rows.append(f"worker {worker:>2} | {'... ' if first else ''}{' '.join(cells)}")
    return "\n".join(rows)
