"""A machine that obeys the rules of NCCL, for the programs that schedules make of workers: it finds deadlocks.

The rules are those of docs/waiting.md ("What NCCL makes wait"):

1. The first operation of a communicator blocks the host until all members have begun theirs.
2. Operations of one communicator run in the order in which they were issued; one completes when all members run it.
3. An operation that was issued is a running kernel until it completes, and only so many run at once on a device.
4. What synchronises the device waits for every operation that was issued there. Any kernel may do so: one that is
   loaded when it is first used, or one whose memory has to be allocated.
5. Kernels run in order: what was issued after a receive or a sum, a send too, runs once these are complete. Through
   memory of a GPU a message asks no more than that of its receiver's device, and of the receiver's host that the
   sender's has issued it.

A program is what the host of a worker does: it issues operations, and synchronises. What is computed in between needs
no part in it, for it ends by itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

from pdtool.artifacts.bundle import TensorSpec
from pdtool.runtime.messages.routes import Edge, Route, list_routes
from pdtool.schedule import SCHEDULES, Action, ActionKind, PipelineShape, tied_update_lag

MAX_RUNNING = 8  # of a device whose user has set no CUDA_DEVICE_MAX_CONNECTIONS


@dataclass(frozen=True)
class Operation:
    """What the members of a communicator do together.

    Attributes:
        communicator: its name.
        members: ranks.
        name: of the message, or of the sum.
        is_nccl: whether the rules hold for it; else the host waits where the program says so.
        sender: rank, of a message; None of a sum.
        by_ipc: whether it goes through memory of a GPU.
    """

    communicator: str
    members: tuple[int, ...]
    name: str
    is_nccl: bool = True
    sender: int | None = None
    by_ipc: bool = False

    def __str__(self) -> str:
        return f"{self.name} on {self.communicator}"


@dataclass(frozen=True)
class Step:
    """One thing that the host of a worker does.

    Attributes:
        during: the action.
        issued: the operation that it begins; None for one that waits.
        awaited: the operation that the host waits for; None, with nothing issued, synchronises the device.
    """

    during: str
    issued: Operation | None = None
    awaited: Operation | None = None


Program = list[Step]


class DeadlockError(Exception):
    """Workers wait for each other; the text names the cycle."""


class Machine:
    """Runs the programs of all workers, each on a device of its own."""

    def __init__(self, programs: Sequence[Program], max_running: int = MAX_RUNNING) -> None:
        self._steps = [deque(program) for program in programs]
        self._max_running = max_running
        self._begun: defaultdict[str, set[int]] = defaultdict(set)  # communicator -> members that have begun
        self._issued: list[list[Operation]] = [[] for _ in programs]  # not complete, in order
        self._running: list[list[Operation]] = [[] for _ in programs]
        self._complete_operations: set[Operation] = set()
        self._device_waits: list[set[Operation]] = [set() for _ in programs]  # for, before what is issued next runs
        self._runs_after: dict[tuple[int, Operation], set[Operation]] = {}

    def run(self) -> None:
        """Run to the end; raises DeadlockError."""
        while any(self._steps):
            stepped = [self._advance(worker) for worker in range(len(self._steps))]
            completed = self._complete()
            if not any(stepped) and not completed:
                raise DeadlockError(self._cycle())

    def _advance(self, worker: int) -> bool:
        """Let the host of a worker do what it can; return whether that was anything."""
        advanced = False
        while self._steps[worker] and not self._waits_for(worker):
            step = self._steps[worker].popleft()
            if step.issued:
                self._issue(worker, step.issued)
            elif step.awaited and step.awaited.by_ipc:
                assert step.awaited.sender is not None
                self._device_waits[worker] |= self._runs_after[step.awaited.sender, step.awaited]
            advanced = True
        return advanced

    def _issue(self, worker: int, operation: Operation) -> None:
        """Issue an operation, which runs once all that the device waits for is complete."""
        self._runs_after[worker, operation] = set(self._unfinished(worker))
        if operation.by_ipc:
            return
        self._issued[worker].append(operation)
        if operation.is_nccl and operation.sender != worker:
            self._device_waits[worker].add(operation)

    def _unfinished(self, worker: int) -> set[Operation]:
        """What the device of a worker waits for before it runs what is issued next."""
        self._device_waits[worker] -= self._complete_operations
        return self._device_waits[worker]

    def _waits_for(self, worker: int) -> set[int]:
        """The workers that the host of this one waits for at its next step."""
        step = self._steps[worker][0]
        if operation := step.issued:
            begun = self._begun[operation.communicator]
            begun.add(worker)
            return set(operation.members) - begun if operation.is_nccl else set()
        if step.awaited and step.awaited.by_ipc:
            sender = step.awaited.sender
            assert sender is not None
            return set() if (sender, step.awaited) in self._runs_after else {sender}
        if step.awaited:
            return self._missing(step.awaited) if step.awaited in self._issued[worker] else set()
        issued = [operation for operation in self._issued[worker] if operation.is_nccl]
        return {other for operation in (*issued, *self._unfinished(worker)) for other in self._missing(operation)}

    def _missing(self, operation: Operation) -> set[int]:
        """The members that do not run an operation yet."""
        return {member for member in operation.members if operation not in self._running[member]}

    def _complete(self) -> bool:
        """Start what can run, and complete what all members run; return whether anything completed."""
        for worker, (issued, running) in enumerate(zip(self._issued, self._running, strict=True)):
            first: set[str] = set()
            for operation in issued:
                is_next = operation.communicator not in first
                first.add(operation.communicator)
                has_room = len([o for o in running if o.is_nccl]) < self._max_running or not operation.is_nccl
                is_due = not operation.is_nccl or self._runs_after[worker, operation] <= self._complete_operations
                if is_next and operation not in running and has_room and is_due:
                    running.append(operation)
        complete = {o for running in self._running for o in running if not self._missing(o)}
        self._complete_operations |= complete
        for operation in complete:
            for member in operation.members:
                self._running[member].remove(operation)
                self._issued[member].remove(operation)
        return bool(complete)

    def _cycle(self) -> str:
        """The workers that wait for each other, and at what."""
        waits = {w: self._waits_for(w) for w, steps in enumerate(self._steps) if steps}
        graph = nx.DiGraph((w, other) for w, others in waits.items() for other in others - {w})
        try:
            workers = [worker for worker, _ in nx.find_cycle(graph)]
        except nx.NetworkXNoCycle:
            workers = sorted(waits)
        lines = [f"rank {w} waits for {sorted(waits[w] - {w})}: {self._state(w)}" for w in workers]
        return "\n".join(lines)

    def _state(self, worker: int) -> str:
        step = self._steps[worker][0]
        under_way = ", ".join(map(str, self._issued[worker])) or "nothing"
        what = f"begins {step.issued}" if step.issued else f"waits for {step.awaited or 'its device'}"
        return f"in {step.during} it {what}; under way: {under_way}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A schedule of a shape, and what its stages send each other.

    Attributes:
        skips: pairs of stages besides neighbours of which the first sends the second a tensor.
        tied: groups of stages that hold a parameter together.
        receives_ahead: receives of each direction that are posted before they are needed, in minibatches.
        is_warm: whether each communicator is used once, in one order, before the first action.
        by_nccl: whether NCCL carries the messages of a route; else the host of the receiver waits for them.
        by_ipc: whether they go through memory of a GPU.
        synchronises: whether a worker's device is synchronised at a moment when it may be; asked at each.
        sums_in_backward: whether a stage starts to sum gradients while it computes others.
    """

    schedule: str
    shape: PipelineShape
    skips: Sequence[tuple[int, int]] = ()
    tied: Sequence[tuple[int, ...]] = ()
    receives_ahead: int = 0
    is_warm: bool = True
    by_nccl: Callable[[Route], bool] = lambda route: True
    by_ipc: Callable[[Route], bool] = lambda route: False
    synchronises: Callable[[int], bool] = lambda worker: True
    sums_in_backward: Callable[[int], bool] = lambda stage: True

    @property
    def ranks(self) -> list[list[int]]:
        """Of the replicas of each stage."""
        depth, replicas = self.shape.pipeline_depth, self.shape.replicas
        first = [sum(replicas[:s]) for s in range(depth)]
        return [[first[s % depth] + k for k in range(replicas[s])] for s in range(len(replicas))]

    @property
    def routes(self) -> list[Route]:
        """As pdtool makes them: activations to the next stage, skips, and the target to the last stage."""
        last = len(self.shape.replicas) - 1
        sent = [(s, s + 1, True) for s in range(last)] + [(a, b, True) for a, b in self.skips]
        sent += [(0, last, False)] if last else []
        edges = [Edge(f"t{n}", a, b, _tensor(n, a, b, gradient=g)) for n, (a, b, g) in enumerate(sent)]
        return [route for route in list_routes(edges, self.ranks) if not route.is_local]

    def programs(self, minibatches: int) -> list[Program]:
        """What the host of each worker does in an epoch."""
        routes, lists = self.routes, SCHEDULES[self.schedule].build(self.shape, minibatches)
        hosts = [_Host(self, worker, routes, actions) for worker, actions in enumerate(lists)]
        return [[*self._warm_up(w, routes), *self._program(w, host)] for w, host in enumerate(hosts)]

    def _program(self, worker: int, host: _Host) -> Iterator[Step]:
        for step in host.program():
            if step.issued or step.awaited or self.synchronises(worker):
                yield step

    def check(self) -> None:
        """Run an epoch that fills the pipeline, is steady and drains; raises DeadlockError."""
        Machine(self.programs(self.shape.representative_minibatches)).run()

    def _warm_up(self, worker: int, routes: Sequence[Route]) -> Iterator[Step]:
        messages = [self.message(route, -1) for route in routes]
        operations = [message for message in messages if message.is_nccl]
        operations += [_sum_of_replicas(s, ranks, -1) for s, ranks in enumerate(self.ranks) if len(ranks) > 1]
        for operation in operations if self.is_warm else ():
            if worker in operation.members:
                yield Step("the start", issued=operation)
                yield Step("the start")

    def message(self, route: Route, minibatch: int) -> Operation:
        """The message of a minibatch."""
        members = tuple(sorted((route.sender, route.receiver)))
        arrow = f"{route.direction} {route.source} to {route.destination}, rank {route.sender} to {route.receiver}"
        name = f"route {route.number} ({arrow})"
        by_ipc = self.by_ipc(route)
        is_nccl = not by_ipc and self.by_nccl(route)
        return Operation(name, members, f"minibatch {minibatch}", is_nccl, route.sender, by_ipc)


class _Host:
    """Makes the program of one worker from its actions, as run/worker.py executes them."""

    def __init__(self, job: Job, worker: int, routes: Sequence[Route], actions: Sequence[Action]) -> None:
        self._job, self._worker, self._actions = job, worker, actions
        self._in = [route for route in routes if route.receiver == worker]
        self._out = [route for route in routes if route.sender == worker]
        self._unposted: dict[tuple[int, str], deque[int]] = {}
        self._due: defaultdict[tuple[int, ...], deque[Operation]] = defaultdict(deque)
        self._started: set[Action] = set()  # updates whose sums were started in the backward before
        backward = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        for direction, kinds in (("forward", (ActionKind.FORWARD,)), ("backward", backward)):
            for stage in {action.stage for action in actions}:
                received = [a.minibatch for a in actions if a.stage == stage and a.kind in kinds]
                self._unposted[stage, direction] = deque(received)

    def program(self) -> Iterator[Step]:
        """Yield the steps of an epoch; at its end everything has been sent."""
        for stage, direction in self._unposted:
            for _ in range(self._job.receives_ahead):
                yield from self._post(stage, direction, "the start")
        for action, following in zip(self._actions, [*self._actions[1:], None], strict=True):
            yield from self._tied_steps(action)
            is_update = following and (following.stage, following.kind) == (action.stage, ActionKind.UPDATE)
            yield from self._steps(action, following.minibatch if following and is_update else None)
        yield Step("the end")
        for sums in self._due.values():
            yield from (Step("the end", awaited=operation) for operation in sums)

    def _steps(self, action: Action, ends_round: int | None) -> Iterator[Step]:
        stage, during = action.stage, str(action)
        direction = "forward" if action.kind is ActionKind.FORWARD else "backward"
        is_message = action.kind not in (ActionKind.UPDATE, ActionKind.BACKWARD_WEIGHT)
        if is_message:
            if self._job.receives_ahead:
                yield Step(during)  # the receive was posted before: it is waited for, then the next one is posted
            yield from self._post(stage, direction, during)
        if action.kind is ActionKind.UPDATE:
            yield from self._update(action)
        else:
            yield from self._compute(stage, during, ends_round)
        for route in self._out if is_message else ():
            if (route.source, route.direction) == (stage, direction) and route.has(action.minibatch):
                yield Step(during, issued=self._job.message(route, action.minibatch))

    def _compute(self, stage: int, during: str, ends_round: int | None) -> Iterator[Step]:
        """Compute with kernels that may synchronise; while a round's last gradients come, their sums are started."""
        yield Step(during)
        if ends_round is not None and len(self._job.ranks[stage]) > 1 and self._job.sums_in_backward(stage):
            yield Step(during, issued=_sum_of_replicas(stage, self._job.ranks[stage], ends_round))
            self._started.add(Action(stage, ActionKind.UPDATE, ends_round))
            yield Step(during)

    def _update(self, action: Action) -> Iterator[Step]:
        during, ranks = str(action), self._job.ranks[action.stage]
        if len(ranks) > 1:
            gradients = _sum_of_replicas(action.stage, ranks, action.minibatch)
            if action not in self._started:  # a replica without a minibatch in a short round
                yield Step(during, issued=gradients)
            numbers = Operation(
                f"numbers of stage {action.stage}", gradients.members, f"{gradients.name}, numbers", is_nccl=False
            )
            yield Step(during, issued=numbers)
            yield Step(during, awaited=numbers)
        yield Step(during)
        for holders in self._job.tied:
            if action.stage in holders:
                members = sorted({rank for s in holders for rank in self._job.ranks[s]})
                summed = Operation(f"tied {holders}", tuple(members), f"sum {action.minibatch}", is_nccl=False)
                yield Step(during, issued=summed)
                self._due[holders].append(summed)

    def _tied_steps(self, action: Action) -> Iterator[Step]:
        """Wait for the sums of tied parameters whose step is due before the stage's next action."""
        for holders, due in self._due.items():
            late = not SCHEDULES[self._job.schedule].flushes
            lag = tied_update_lag(self._job.shape, holders, action.stage) if late else 0
            while action.stage in holders and len(due) > lag:
                yield Step(str(action), awaited=due.popleft())

    def _post(self, stage: int, direction: str, during: str) -> Iterator[Step]:
        unposted = self._unposted[stage, direction]
        minibatch = unposted.popleft() if unposted else None
        for route in self._in if minibatch is not None else ():
            if (route.destination, route.direction) == (stage, direction) and route.has(minibatch):
                message = self._job.message(route, minibatch)
                if not message.by_ipc:
                    yield Step(during, issued=message)
                if not message.is_nccl:
                    yield Step(during, awaited=message)


def _tensor(number: int, producer: int, consumer: int, *, gradient: bool) -> TensorSpec:
    ends = {"producer": producer, "consumers": (consumer,)}
    return TensorSpec(name=f"t{number}", **ends, shape=("batch", 1), dtype="float32", gradient=gradient)


def _sum_of_replicas(stage: int, ranks: Sequence[int], round_number: int) -> Operation:
    return Operation(f"replicas of stage {stage}", tuple(ranks), f"round {round_number}")
