"""A proof of any lists, whoever made them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdtool.errors import ScheduleError
from pdtool.schedule.action import Action, ActionKind, Actions
from pdtool.schedule.grid import grid
from pdtool.schedule.shape import PipelineShape
from pdtool.schedule.stash_tracker import StashTracker
from pdtool.schedule.timeline import timeline
from pdtool.schedule.versions import ForwardVersions, forward_versions


def validate(lists: Sequence[Actions], shape: PipelineShape, minibatches: int) -> None:
    """Prove of any lists: complete, every minibatch on its replica, bounds held, no deadlock, updates in order.

    Raises:
        ScheduleError: the first law that is broken; the text holds the grid with the fault marked.
    """
    slots = list(shape.stage_replicas())
    seen = forward_versions(lists, shape.weights) if shape.weights in ("vertical-sync", "2bw") else [None] * len(lists)
    if len(lists) != len(slots):
        raise ScheduleError(f"{len(lists)} action lists for {len(slots)} workers")
    for worker, (actions, (stage, replica)) in enumerate(zip(lists, slots, strict=True)):
        proof = _Proof(actions, seen[worker], shape, stage, replica, minibatches)
        for position, action in enumerate(actions):
            fault = proof.fault(action)
            if fault:
                raise ScheduleError(f"{action} {fault}\n{grid(lists, mark=(worker, position))}")
        if proof.missing:
            raise ScheduleError(f"{min(proof.missing)} is missing from worker {worker}\n{grid(lists)}")
    timeline(lists)


class _Proof:
    """One worker's list, gone through action by action.

    Attributes:
        missing: actions that are still to come.
    """

    def __init__(
        self,
        actions: Actions,
        seen: ForwardVersions | None,
        shape: PipelineShape,
        stage: int,
        replica: int,
        minibatches: int,
    ) -> None:
        self.shape, self.minibatches, self.replica = shape, minibatches, replica
        self.limit = max(1, shape.in_flight[stage])
        self.seen, self.held = seen, StashTracker(seen, stashing=shape.weights != "none")
        split = any(action.kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT) for action in actions)
        self.kinds = (
            (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
            if split
            else (ActionKind.FORWARD, ActionKind.BACKWARD)
        )
        self.missing = set()
        for s in shape.stages_on_same_workers(stage):
            mine = range(replica, minibatches, shape.replicas[s])
            rounds = math.ceil(minibatches / shape.update_every[s])
            self.missing |= {Action(s, kind, i) for kind in self.kinds for i in mine}
            self.missing |= {Action(s, ActionKind.UPDATE, j) for j in range(rounds)}
        self.expected = frozenset(self.missing)

    def fault(self, action: Action) -> str:
        """What is wrong with doing this action next; empty when nothing is."""
        if action not in self.missing:
            return "happens twice" if action in self.expected else "does not belong to this worker"
        fault = self._out_of_order(action)
        if fault:
            return fault
        self.missing.discard(action)
        self.held.apply(action)
        live, versions = len(self.held.in_flight), self.held.versions(action.stage)
        if live > self.limit:
            return f"makes {live} minibatches in flight; the plan allows {self.limit}"
        most = self.shape.versions(action.stage)
        if versions > most:
            return f"makes {versions} weight versions; the plan allows {most}"
        return ""

    def _out_of_order(self, action: Action) -> str:
        if action.kind is ActionKind.UPDATE:
            return self._early_update(action)
        if self.seen and self.seen.get((action.stage, action.minibatch), 0) > self.held.updates[action.stage]:
            return "comes before the update that makes its weights"
        before = self.kinds[: self.kinds.index(action.kind)]
        words = {ActionKind.FORWARD: "its forward", ActionKind.BACKWARD_INPUT: "the gradient of its inputs"}
        late = [words[kind] for kind in before if Action(action.stage, kind, action.minibatch) in self.missing]
        return f"comes before {late[0]}" if late else ""

    def _early_update(self, action: Action) -> str:
        """An update needs every backward of its round, and all updates before it."""
        stage, due = action.stage, self.held.updates[action.stage]
        every, r = self.shape.update_every[stage], self.shape.replicas[stage]
        first = due * every  # all backwards of earlier rounds are done: their updates were
        first += (self.replica - first) % r
        mine = range(first, min((action.minibatch + 1) * every, self.minibatches), r)
        if any(Action(stage, self.kinds[-1], i) in self.missing for i in mine):
            return "comes before a backward of its round"
        return f"comes when update {due} is due" if action.minibatch != due else ""
