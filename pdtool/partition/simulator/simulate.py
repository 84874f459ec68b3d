"""Any action lists, executed on a clock: when everything happens, who waits for what, and what each worker holds.

As in the runtime, sends never hold up computing. A message goes straight from the stage that makes a tensor to each
stage that takes it, as soon as that one has asked for it: in the order of its list, and for one minibatch more than it
has in flight (run/transport.py). The gradients of a round leave in pieces while its last backward goes on
(run/replicas.py), all replicas of a stage start a piece together, and the update waits for all pieces.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

from pdtool.errors import ScheduleError
from pdtool.partition.simulator.averages import Averages
from pdtool.partition.simulator.job import Job
from pdtool.partition.simulator.links import Clock, Flow, Links
from pdtool.partition.simulator.simulation import Record, Room, Share, Simulation, Unrecorded, pace, steady
from pdtool.schedule import Action, ActionKind, grid

Tensors = tuple[int, bool, int]  # stage that waits for them, whether they are gradients, minibatch
Turn = tuple[int, bool, int]  # worker, whether gradients, how many it takes before


def simulate(job: Job) -> Simulation:
    """Execute the lists to their end.

    Complexity: a few events per action and message; each takes time in proportion to the messages that share a link.

    Raises:
        ScheduleError: a worker waits forever; the text holds the grid with its action marked.
    """
    record = Record(job)
    workers, done = _executed(job, record)
    end = max(worker.free_s for worker in workers)
    shares = tuple(
        worker.share(end, room, sent)
        for worker, room, sent in zip(workers, record.rooms, record.sent_bytes, strict=True)
    )
    return Simulation(
        minibatches=len(done.at_s),
        steady=len(done.watched),
        batch_size=job.batch_size,
        makespan_s=end,
        pace_s=done.pace_s,
        fill_s=max(worker.begun_s for worker in workers),
        drain_s=end - min(worker.free_s for worker in workers),
        shares=shares,
        events=tuple(record.events),
    )


def simulated_pace(job: Job, limit_s: float = math.inf) -> float:
    """The pace that `simulate` finds, sooner: nothing is recorded, and what comes after the steady state is left out.

    Args:
        limit_s: paces above it are not looked for; then the answer is infinite.
    """
    _, done = _executed(job, Unrecorded(), limit_s)
    return done.pace_s if done.pace_s <= limit_s else math.inf


def _executed(job: Job, record: Unrecorded, limit_s: float | None = None) -> tuple[list[_Worker], _Done]:
    """All workers at their end; with a limit, when the pace is known or known to be above it."""
    clock = Clock()
    links = Links(job.cluster, clock)
    slots = list(job.shape.stage_replicas())
    homes = [
        [w for w, (s, _) in enumerate(slots) if s == stage % job.shape.pipeline_depth]
        for stage in range(len(job.stages))
    ]
    workers: list[_Worker] = []
    averages = Averages(job, homes, links, clock, record, lambda w: workers[w].go_on())
    mail = _Mail(job, homes, links, record, workers)
    done = _Done(job, clock, limit_s)
    workers += [_Worker(w, stage, job, clock, mail, averages, record, done) for w, (stage, _) in enumerate(slots)]
    for worker in workers:
        worker.go_on()
    clock.run()
    for w, worker in enumerate(workers):
        if not worker.finished and not done.known:
            at = worker.position
            text = grid(job.lists, mark=(w, at))
            raise ScheduleError(f"worker {w} waits forever in {job.lists[w][at]}\n{text}")
    return workers, done


class _Done:
    """Minibatches that all stages have done with.

    Args:
        limit_s: stop as soon as the pace is known or known to be above it; None: go on to the end.

    Attributes:
        at_s: when each was done, in order.
        watched: those in steady state.
        known: whether it was stopped.
    """

    def __init__(self, job: Job, clock: Clock, limit_s: float | None) -> None:
        self.clock, self.limit_s, self.known = clock, limit_s, False
        self.at_s: list[float] = []
        ends = Counter(a.minibatch for actions in job.lists for a in actions if a.kind.completes_backward)
        self._missing, self.watched = ends, steady(len(ends), job.shape)

    def end(self, minibatch: int) -> None:
        """One stage has done with it."""
        self._missing[minibatch] -= 1
        if self._missing[minibatch]:
            return
        self.at_s.append(self.clock.now)
        past = len(self.at_s) - self.watched.start
        if self.limit_s is not None and self.watched and past >= 0:
            took = self.clock.now - self.at_s[self.watched.start - 1]
            self.known = past >= len(self.watched) or took > self.limit_s * len(self.watched)
            if self.known:
                self.clock.stop()

    @property
    def pace_s(self) -> float:
        """Seconds per minibatch in steady state; infinite where it was stopped before its end."""
        stopped = self.known and len(self.at_s) < self.watched.stop
        return math.inf if stopped else pace(self.at_s, self.watched)


class _Mail:
    """Tensors under way, between any two workers.

    Attributes:
        turn: when the worker that takes the tensors does so, in its list.
        asked: turns that each worker has asked for, of tensors and of gradients.
        held: messages that nobody has asked for yet.
        outgoing: (stage, gradients?) -> the stages that take what it makes, and the bytes of each.
        arrived: messages so far; departed_s: when the last was sent.
        needs: (stage, gradients?) -> messages for each minibatch.
    """

    def __init__(
        self, job: Job, homes: list[list[int]], links: Links, record: Unrecorded, workers: list[_Worker]
    ) -> None:
        self.job, self.homes, self.links, self.record, self.workers = job, homes, links, record, workers
        self.turn: dict[Tensors, int] = {}
        self.asked: Counter[tuple[int, bool]] = Counter()
        self.held: dict[Turn, list[Flow]] = {}
        for w, ((stage, _), actions) in enumerate(zip(job.shape.stage_replicas(), job.lists, strict=True)):
            for gradients in (False, True):
                taking = (a for a in actions if (a.kind.sends_gradients if gradients else a.kind is ActionKind.FORWARD))
                self.turn |= {(a.stage, gradients, a.minibatch): n for n, a in enumerate(taking)}
                self.asked[w, gradients] = job.shape.in_flight[stage] + 1
        self.arrived: Counter[Tensors] = Counter()
        self.departed_s: dict[Tensors, float] = {}
        self.outgoing: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for border in job.borders:
            self.outgoing.setdefault((border.source, False), []).append((border.destination, border.forward_bytes))
            if border.returns:
                self.outgoing.setdefault((border.destination, True), []).append((border.source, border.backward_bytes))
        self.needs = Counter((to, gradients) for (_, gradients), takers in self.outgoing.items() for to, _ in takers)

    def ready(self, action: Action) -> float | None:
        """When the last tensor that the action takes was sent; None while one has not arrived."""
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return 0.0
        gradients = action.kind is not ActionKind.FORWARD
        key = (action.stage, gradients, action.minibatch)
        return self.departed_s.get(key, 0.0) if self.arrived[key] == self.needs[action.stage, gradients] else None

    def take(self, w: int, action: Action) -> None:
        """The worker has what the action takes: it asks for one more."""
        gradients = action.kind.sends_gradients
        if gradients or action.kind is ActionKind.FORWARD:
            for flow in self.held.pop((w, gradients, self.asked[w, gradients]), ()):
                self.links.send(flow)
            self.asked[w, gradients] += 1

    def post(self, w: int, action: Action) -> None:
        """Send all that an action of worker `w` has made."""
        if action.kind is ActionKind.FORWARD or action.kind.sends_gradients:
            gradients = action.kind is not ActionKind.FORWARD
            for stage, size in self.outgoing.get((action.stage, gradients), ()):
                self._send(w, (stage, gradients, action.minibatch), size)

    def _send(self, w: int, key: Tensors, size: int) -> None:
        stage, gradients, minibatch = key
        to = self.homes[stage][minibatch % len(self.homes[stage])]
        self.departed_s[key] = self.links.clock.now
        if to == w:
            self._deliver(to, key)
            return
        links, late_s = self.links.path(self.job.workers[w], self.job.workers[to])
        ended = partial(self._sent, w, to, key, late_s)
        flow = Flow(channel=(w, to, gradients), size_bytes=size, links=dict.fromkeys(links, 1), ended=ended)
        if self.turn[key] < self.asked[to, gradients]:
            self.links.send(flow)
        else:
            self.held.setdefault((to, gradients, self.turn[key]), []).append(flow)

    def _sent(self, w: int, to: int, key: Tensors, late_s: float, flow: Flow) -> None:
        self.record.message(w, to, key, flow, late_s)
        self.links.clock.at(self.links.clock.now + late_s, partial(self._deliver, to, key))

    def _deliver(self, to: int, key: Tensors) -> None:
        self.arrived[key] += 1
        self.workers[to].go_on()


class _Worker:
    """One worker on its way through its list."""

    def __init__(
        self,
        w: int,
        stage: int,
        job: Job,
        clock: Clock,
        mail: _Mail,
        averages: Averages,
        record: Unrecorded,
        done: _Done,
    ) -> None:
        self.w, self.stage, self.job, self.actions = w, stage, job, job.lists[w]
        self.clock, self.mail, self.averages, self.record, self.done = clock, mail, averages, record, done
        self.position, self.running = 0, False
        self.busy_s = self.communication_s = 0.0
        self.begun_s, self.free_s = math.inf, 0.0

    @property
    def finished(self) -> bool:
        return self.position == len(self.actions)

    def go_on(self) -> None:
        """Begin the next action if the worker is free and all is there that the action needs."""
        if self.running or self.finished:
            return
        action = self.actions[self.position]
        update = action.kind is ActionKind.UPDATE
        made_s = self.averages.ready(action.stage, action.minibatch, self.w) if update else self.mail.ready(action)
        if made_s is not None:
            self._begin(action, made_s)

    def _begin(self, action: Action, made_s: float) -> None:
        """Start an action whose last input was made at `made_s`, and has been under way since."""
        now, length = self.clock.now, self.job.stages[action.stage].seconds[action.kind]
        if self.position and now > self.free_s:
            self.record.wait(self.w, self.free_s, now - self.free_s)
        self.record.action(self.w, action, now, length)
        self.running, self.begun_s = True, min(self.begun_s, now)
        self.communication_s += now - max(self.free_s, made_s)
        self.busy_s += length
        self.mail.take(self.w, action)
        self._offer_gradients(action, length)
        self.clock.at(now + length, partial(self._end, action))

    def _end(self, action: Action) -> None:
        self.running, self.free_s = False, self.clock.now
        self.position += 1
        if action.kind.completes_backward:
            self.done.end(action.minibatch)
        self.mail.post(self.w, action)
        self.go_on()

    def _offer_gradients(self, action: Action, length: float) -> None:
        """In the last backward of a round, gradients are there piece by piece, those of the last layers first."""
        after = self.actions[self.position + 1 : self.position + 2]
        if action.kind.completes_backward and after and after[0].kind is ActionKind.UPDATE:
            pieces = self.averages.pieces(action.stage)
            for n in range(1, pieces):
                offer = partial(self.averages.offer, action.stage, after[0].minibatch, self.w, n)
                self.clock.at(self.clock.now + length * n / pieces, offer)

    def share(self, makespan_s: float, room: Room, sent_bytes: float) -> Share:
        """How the time was spent."""
        return Share(
            stage=self.stage,
            worker=self.job.workers[self.w],
            busy_s=self.busy_s,
            communication_s=self.communication_s,
            idle_s=makespan_s - self.busy_s - self.communication_s,
            span_s=self.free_s - min(self.begun_s, self.free_s),
            peak_stashed=room.held.peak,
            versions=room.versions,
            delay=room.held.delay,
            memory_bytes=room.memory_bytes,
            sent_bytes=round(sent_bytes),
        )
