"""Execute action lists on paper: prove that they keep the bounds of a plan, time them, and draw them.

tests/reference/schedule_rules.py checks that lists are complete and in order. `timeline` computes when each action
starts under blocking communication, or names the workers that deadlock. `gradient_delays` counts how many updates late
the gradients of each stage are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdtool.errors import ScheduleError
from pdtool.schedule.action import Action, ActionKind, Actions, grid
from pdtool.schedule.kinds import ScheduleKind
from pdtool.schedule.policies import ForwardVersions
from pdtool.schedule.shape import PipelineShape

_MAX_MINIBATCHES_TIMES_STAGES = 250_000  # of a check; data parallelism on MAX_WORKERS has 200,001


def check_executable(kind: ScheduleKind, shape: PipelineShape) -> None:
    """Execute the action lists for filling, steady state and draining on paper, and those of the fullest short round.

    Raises:
        ScheduleError: the schedule deadlocks, or breaks the bounds on minibatches in flight or weight versions; the
            text holds the grid with the first fault marked, and the remedy names the schedule's usual numbers in
            flight. Or the schedule is far too long to check.
    """
    minibatches, stages = shape.representative_minibatches, len(shape.replicas)
    if minibatches * stages > _MAX_MINIBATCHES_TIMES_STAGES:
        limit = f"at most {_MAX_MINIBATCHES_TIMES_STAGES // stages} can be checked"
        what = f"{stages} stages need {minibatches} minibatches to fill the pipeline and update, but {limit}"
        raise ScheduleError(what, "use fewer minibatches in flight or per update, or fewer replicas")
    try:
        _execute(kind.build(shape, minibatches), shape)
        if kind.fuller_rounds:
            _execute(kind.build(shape, kind.fuller_rounds(shape)[0]), shape)
    except ScheduleError as error:
        replicas = shape.replicas[: shape.pipeline_depth]
        wanted = kind.usual_in_flight(replicas, shape.update_every[0], shape.chunks) * shape.chunks
        remedy = f"set in_flight of the stages to {', '.join(map(str, wanted))}, as {kind.name} requires"
        raise ScheduleError(error.what, remedy) from error


def _execute(lists: Sequence[Actions], shape: PipelineShape) -> None:
    versions = shape.weights.forward_versions(lists, shape.replicas, shape.update_every)
    for worker, actions in enumerate(lists):
        tracker = StashTracker(versions[worker], stashing=shape.weights.stashes)
        for position, action in enumerate(actions):
            if fault := _fault(action, tracker, versions[worker], shape):
                raise ScheduleError(f"{action} {fault}\n{grid(lists, mark=(worker, position))}")
    timeline(lists)


def _fault(action: Action, tracker: StashTracker, forward_versions: ForwardVersions, shape: PipelineShape) -> str:
    """Execute an action, and say which bound of the plan it breaks; empty when none."""
    stage = action.stage
    if action.kind is ActionKind.FORWARD and forward_versions[stage, action.minibatch] > tracker.updates[stage]:
        return "comes before the update that makes its weights"
    tracker.apply(action)
    limit = max(1, shape.in_flight[stage % shape.pipeline_depth])
    if len(tracker.in_flight) > limit:
        return f"puts {len(tracker.in_flight)} minibatches in flight, but the plan allows {limit}"
    versions, max_versions = tracker.versions(stage), shape.versions(stage)
    if versions > max_versions:
        return f"makes {versions} weight versions, but the plan allows {max_versions}"
    return ""


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
    # All replicas have the same update: it is in several lists, and its needs are those of all of them. A need that has
    # ended is popped, so that it is looked at once, not once per replica.
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
                needs = needs_of[action]
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
    versions = shape.weights.forward_versions(lists, shape.replicas, shape.update_every)
    delays = [0] * len(shape.replicas)
    for worker_versions, actions, (stage, _) in zip(versions, lists, shape.stage_replicas(), strict=True):
        tracker = StashTracker(worker_versions)
        for action in actions:
            tracker.apply(action)
        for s in shape.stages_on_same_workers(stage):
            delays[s] = max(delays[s], tracker.delay)
    return delays


def draw(
    lists: Sequence[Actions],
    forward: int = 1,
    backward: int = 2,
    width: int = 100,
    workers: Sequence[int] | None = None,
) -> str:
    """Draw an ASCII timeline in slots: `F3` forward, `B3 ==` backward, `.` idle.

    A split backward is `I3` and `W3`, of half its slots each. With several stages on a worker each box names its stage.

    Args:
        forward, backward: slots that each takes.
        width: characters to cut lines at.
        workers: number of each list's worker; None: its position.
    """
    starts = timeline(lists, forward, backward)
    slots = dict(zip(ActionKind, (forward, backward, backward // 2, backward // 2, 0), strict=True))
    chunked = any(len({a.stage for a in actions}) > 1 for actions in lists)
    names = [[str(a) if chunked else f"{a.kind}{a.minibatch}" for a in actions] for actions in lists]
    size = max((len(name) for row in names for name in row), default=2)
    numbers = workers or range(len(lists))
    labels = [f"stage {a[0].stage if a else 0} worker {w}" for w, a in zip(numbers, lists, strict=True)]
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
