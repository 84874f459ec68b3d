"""The rules that the action lists of any schedule keep: a check of lists that anybody made."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdtool.errors import ScheduleError
from pdtool.schedule import Action, ActionKind, Actions, ForwardVersions, PipelineShape, StashTracker, grid, timeline


def validate(lists: Sequence[Actions], shape: PipelineShape, minibatches: int) -> None:
    """Prove that the lists can be executed as a schedule of this shape.

    They are complete, have every minibatch on its replica and all updates in order, keep the bounds on minibatches in
    flight and weight versions, and do not deadlock.

    Raises:
        ScheduleError: a rule is broken; the text holds the grid with the first fault marked.
    """
    stage_replicas = list(shape.stage_replicas())
    if len(lists) != len(stage_replicas):
        raise ScheduleError(f"{len(lists)} action lists for {len(stage_replicas)} workers")
    versions = shape.weights.forward_versions(lists, shape.replicas, shape.update_every)
    for worker, (actions, (stage, replica)) in enumerate(zip(lists, stage_replicas, strict=True)):
        validator = _WorkerValidator(shape, stage, replica, minibatches, actions, versions[worker])
        for position, action in enumerate(actions):
            fault = validator.fault(action)
            if fault:
                raise ScheduleError(f"{action} {fault}\n{grid(lists, mark=(worker, position))}")
        if validator.missing:
            raise ScheduleError(f"{min(validator.missing)} is missing from worker {worker}\n{grid(lists)}")
    timeline(lists)


class _WorkerValidator:
    """Checks one worker's list action by action.

    Attributes:
        missing: actions that are still to come.
    """

    def __init__(
        self,
        shape: PipelineShape,
        stage: int,
        replica: int,
        minibatches: int,
        actions: Actions,
        versions: ForwardVersions,
    ) -> None:
        self.shape, self.minibatches, self.replica = shape, minibatches, replica
        self.limit = max(1, shape.in_flight[stage])
        self.versions, self.tracker = versions, StashTracker(versions, stashing=shape.weights.stashes)
        split = any(action.kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT) for action in actions)
        backward = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT) if split else (ActionKind.BACKWARD,)
        self.kinds = (ActionKind.FORWARD, *backward)
        self.missing = set()
        self.max_versions = {s: shape.versions(s) for s in shape.stages_on_same_workers(stage)}
        for s in self.max_versions:
            of_replica = range(replica, minibatches, shape.replicas[s])
            rounds = math.ceil(minibatches / shape.update_every[s])
            self.missing |= {Action(s, kind, i) for kind in self.kinds for i in of_replica}
            self.missing |= {Action(s, ActionKind.UPDATE, j) for j in range(rounds)}
        self.expected = frozenset(self.missing)

    def fault(self, action: Action) -> str:
        """Say what is wrong with this action as the next one; empty when nothing is."""
        if action not in self.missing:
            return "happens twice" if action in self.expected else "does not belong to this worker"
        fault = self._out_of_order(action)
        if fault:
            return fault
        self.missing.discard(action)
        self.tracker.apply(action)
        in_flight, versions = len(self.tracker.in_flight), self.tracker.versions(action.stage)
        if in_flight > self.limit:
            return f"puts {in_flight} minibatches in flight, but the plan allows {self.limit}"
        max_versions = self.max_versions[action.stage]
        if versions > max_versions:
            return f"makes {versions} weight versions, but the plan allows {max_versions}"
        return ""

    def _out_of_order(self, action: Action) -> str:
        if action.kind is ActionKind.UPDATE:
            return self._early_update(action)
        version = self.versions.get((action.stage, action.minibatch), 0)
        if version > self.tracker.updates[action.stage]:
            return "comes before the update that makes its weights"
        needed = self.kinds[: self.kinds.index(action.kind)]
        words = {ActionKind.FORWARD: "its forward", ActionKind.BACKWARD_INPUT: "the gradient of its inputs"}
        missing = [words[kind] for kind in needed if Action(action.stage, kind, action.minibatch) in self.missing]
        return f"comes before {missing[0]}" if missing else ""

    def _early_update(self, action: Action) -> str:
        """Say what an update lacks: every backward of its round, or an update before it."""
        stage, due = action.stage, self.tracker.updates[action.stage]
        every, r = self.shape.update_every[stage], self.shape.replicas[stage]
        first = due * every  # all backwards of earlier rounds are done: their updates were
        first += (self.replica - first) % r
        of_replica = range(first, min((action.minibatch + 1) * every, self.minibatches), r)
        if any(Action(stage, self.kinds[-1], i) in self.missing for i in of_replica):
            return "comes before a backward of its round"
        return f"comes when update {due} is due" if action.minibatch != due else ""
