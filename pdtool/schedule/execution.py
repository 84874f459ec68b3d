"""Execute action lists on paper: prove that they keep the rules, time them, and draw them.

`validate` takes lists from any source. `timeline` computes when each action starts under blocking communication, or
names the workers that deadlock. `gradient_delays` counts how many updates late each stage's gradients are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from pdtool.errors import ScheduleError
from pdtool.schedule.action import Action, ActionKind, Actions, grid
from pdtool.schedule.kinds import ScheduleKind
from pdtool.schedule.policies import ForwardVersions
from pdtool.schedule.shape import PipelineShape


def validate(lists: Sequence[Actions], shape: PipelineShape, minibatches: int) -> None:
    """Prove that the lists can be executed as a schedule of this shape.

    The lists must be complete, have every minibatch on its replica and all updates in order, keep the bounds on
    minibatches in flight and weight versions, and not deadlock.

    Raises:
        ScheduleError: a rule is broken; the text holds the grid with the first fault marked.
    """
    stage_replicas = list(shape.stage_replicas())
    if len(lists) != len(stage_replicas):
        raise ScheduleError(f"{len(lists)} action lists for {len(stage_replicas)} workers")
    versions = shape.weights.forward_versions(lists, shape.replicas)
    for worker, (actions, (stage, replica)) in enumerate(zip(lists, stage_replicas, strict=True)):
        validator = _WorkerValidator(shape, stage, replica, minibatches, actions, versions[worker])
        for position, action in enumerate(actions):
            fault = validator.fault(action)
            if fault:
                raise ScheduleError(f"{action} {fault}\n{grid(lists, mark=(worker, position))}")
        if validator.missing:
            raise ScheduleError(f"{min(validator.missing)} is missing from worker {worker}\n{grid(lists)}")
    timeline(lists)


def check_executable(kind: ScheduleKind, shape: PipelineShape) -> None:
    """Build the action lists for filling, steady state and draining, and validate them.

    Raises:
        ScheduleError: the schedule deadlocks or breaks a bound; the text says which numbers in flight would work.
    """
    minibatches = shape.representative_minibatches
    try:
        validate(kind.build(shape, minibatches), shape, minibatches)
    except ScheduleError as error:
        replicas = shape.replicas[: shape.pipeline_depth]
        wanted = ", ".join(map(str, kind.usual_in_flight(replicas, shape.update_every[0], shape.chunks)))
        raise ScheduleError(error.what, f"give the stages in_flight {wanted}, as {kind.name} wants") from error


class _WorkerValidator:
    """Checks one worker's list action by action.

    Attributes:
        missing: actions still to come.
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
        """Say why this action cannot come next; "" if it can."""
        if action not in self.missing:
            return "happens twice" if action in self.expected else "does not belong to this worker"
        fault = self._out_of_order(action)
        if fault:
            return fault
        self.missing.discard(action)
        self.tracker.apply(action)
        in_flight, versions = len(self.tracker.in_flight), self.tracker.versions(action.stage)
        if in_flight > self.limit:
            return f"makes {in_flight} minibatches in flight; the plan allows {self.limit}"
        max_versions = self.max_versions[action.stage]
        if versions > max_versions:
            return f"makes {versions} weight versions; the plan allows {max_versions}"
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
        """Say what an update lacks: a backward of its round, or an earlier update."""
        stage, due = action.stage, self.tracker.updates[action.stage]
        every, r = self.shape.update_every[stage], self.shape.replicas[stage]
        first = due * every  # all backwards of earlier rounds are done: their updates were
        first += (self.replica - first) % r
        of_replica = range(first, min((action.minibatch + 1) * every, self.minibatches), r)
        if any(Action(stage, self.kinds[-1], i) in self.missing for i in of_replica):
            return "comes before a backward of its round"
        return f"comes when update {due} is due" if action.minibatch != due else ""


class StashTracker:
    """Track which minibatches are in flight and which weight versions are still needed, action by action.

    A minibatch is in flight from its forward to the end of its backward. A weight version lives until the last backward
    that needs it (PipeDream, SOSP'19, section 3.3).

    Args:
        forward_versions: the weight version that each forward reads.
        stashing: whether old versions are kept for the backwards that need them.

    Attributes:
        in_flight: (stage, minibatch) -> weight version that its forward read.
        updates: updates of each stage so far.
        peak: most minibatches in flight at once, over all stages of the worker.
        delay: most updates between a forward's weight version and its backward.
    """

    def __init__(self, forward_versions: ForwardVersions, *, stashing: bool = True) -> None:
        self.in_flight: ForwardVersions = {}
        self.updates: Counter[int] = Counter()
        self.peak = self.delay = 0
        self._forward_versions, self._stashing = forward_versions, stashing
        # (stage, version) -> minibatches that still need the version
        self._users = Counter((stage, version) for (stage, _), version in forward_versions.items())
        self._old_versions: Counter[int] = Counter()  # for each stage, versions kept besides the newest

    def apply(self, action: Action) -> None:
        """Account for one action; a backward must follow the forward of its minibatch."""
        stage, key = action.stage, (action.stage, action.minibatch)
        if action.kind is ActionKind.FORWARD:
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


def timeline(lists: Sequence[Actions], forward: float = 1.0, backward: float = 2.0) -> list[list[float]]:
    """Compute the start time of every action, in slots, when updates and messages take no time.

    Communication is blocking: a forward waits for the same minibatch's forward at the stage before, a backward for the
    backward at the stage after, an update for every replica's backwards of its round.

    Args:
        forward, backward: slots that each takes; each part of a split backward takes half.

    Raises:
        ScheduleError: the lists cannot be executed to their end; the text shows where each worker is stuck.
    """
    needs_of = _dependencies(lists)
    half = backward / 2
    durations = dict(zip(ActionKind, (forward, backward, half, half, 0.0), strict=True))
    ends: dict[Action, float] = {}
    ready: dict[Action, float] = {}  # when the inputs of each action, as far as they were seen, had ended
    starts: list[list[float]] = [[] for _ in lists]
    free = [0.0] * len(lists)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(lists):
            while len(starts[worker]) < len(actions):
                action = actions[len(starts[worker])]
                needs = needs_of[action]  # an update needs those of all replicas: see each once, not once per replica
                while needs and needs[-1] in ends:
                    ready[action] = max(ready.get(action, 0.0), ends[needs.pop()])
                if needs:
                    break
                start = max(free[worker], ready.get(action, 0.0))
                starts[worker].append(start)
                free[worker] = start + durations[action.kind]
                ends[action] = max(free[worker], ends.get(action, 0.0))
                moved = True
    if any(len(s) < len(actions) for s, actions in zip(starts, lists, strict=True)):
        raise _deadlock(lists, [len(s) for s in starts], needs_of, ends)
    return starts


def _dependencies(lists: Sequence[Actions]) -> dict[Action, list[Action]]:
    """Return for each action the actions, on any worker, that must end before it starts."""
    last = max((a.stage for actions in lists for a in actions), default=0)
    split = {a.stage for actions in lists for a in actions if a.kind is ActionKind.BACKWARD_INPUT}
    needs: dict[Action, list[Action]] = {}
    for actions in lists:
        backwards: dict[int, list[Action]] = {}  # of each stage, in the current round
        for action in actions:
            stage, i = action.stage, action.minibatch
            if action.kind is ActionKind.FORWARD:
                needs[action] = [Action(stage - 1, ActionKind.FORWARD, i)] if stage else []
            elif action.kind.sends_gradients:
                sender = ActionKind.BACKWARD_INPUT if stage + 1 in split else ActionKind.BACKWARD
                gradient = [Action(stage + 1, sender, i)] if stage < last else []
                needs[action] = [Action(stage, ActionKind.FORWARD, i), *gradient]
            elif action.kind is ActionKind.BACKWARD_WEIGHT:
                needs[action] = [Action(stage, ActionKind.BACKWARD_INPUT, i)]
            else:  # the gradients of all replicas are averaged first
                needs.setdefault(action, []).extend(backwards.pop(stage, []))
            if action.kind.completes_backward:
                backwards.setdefault(stage, []).append(action)
    return needs


def _deadlock(
    lists: Sequence[Actions], positions: list[int], needs_of: dict[Action, list[Action]], ends: dict[Action, float]
) -> ScheduleError:
    """Make the error that names every stuck worker and what it waits for."""
    stuck = [(worker, position) for worker, position in enumerate(positions) if position < len(lists[worker])]
    waits = []
    for worker, position in stuck:
        action = lists[worker][position]
        missing = ", ".join(str(need) for need in needs_of[action] if need not in ends)
        waits.append(f"worker {worker} waits in {action} for {missing}")
    return ScheduleError(f"deadlock: {'; '.join(waits)}\n{grid(lists, mark=stuck[0])}")


def gradient_delays(kind: ScheduleKind, shape: PipelineShape) -> list[int]:
    """Return for each stage the most updates between a forward's weights and the same minibatch's backward."""
    lists = kind.build(shape, shape.representative_minibatches)
    versions = shape.weights.forward_versions(lists, shape.replicas)
    delays = [0] * len(shape.replicas)
    for worker_versions, actions, (stage, _) in zip(versions, lists, shape.stage_replicas(), strict=True):
        tracker = StashTracker(worker_versions)
        for action in actions:
            tracker.apply(action)
        for s in shape.stages_on_same_workers(stage):
            delays[s] = max(delays[s], tracker.delay)
    return delays


def draw(lists: Sequence[Actions], forward: int = 1, backward: int = 2, width: int = 100) -> str:
    """Draw an ASCII timeline in slots: `F3` forward, `B3 ==` backward, `.` idle.

    A split backward is `I3` and `W3`, of half its slots each. With several stages on a worker each box names its stage.

    Args:
        forward, backward: slots that each takes.
        width: characters to cut lines at.
    """
    starts = timeline(lists, forward, backward)
    slots = dict(zip(ActionKind, (forward, backward, backward // 2, backward // 2, 0), strict=True))
    chunked = any(len({a.stage for a in actions}) > 1 for actions in lists)
    names = [[str(a) if chunked else f"{a.kind}{a.minibatch}" for a in actions] for actions in lists]
    size = max((len(name) for row in names for name in row), default=2)
    labels = [f"stage {a[0].stage if a else 0} worker {worker}" for worker, a in enumerate(lists)]
    longest = max(map(len, labels), default=0)
    rows = []
    for worker, (actions, times) in enumerate(zip(lists, starts, strict=True)):
        cells: list[str] = []
        for action, name, start in zip(actions, names[worker], times, strict=True):
            if action.kind is not ActionKind.UPDATE:
                cells += ["."] * (int(start) - len(cells))
                cells += [name] + ["=" * size] * (slots[action.kind] - 1)
        text = f"{labels[worker].ljust(longest)} | " + " ".join(cell.ljust(size) for cell in cells)
        rows.append((text if len(text) <= width else text[: width - 1] + "…").rstrip())
    return "\n".join(rows)
