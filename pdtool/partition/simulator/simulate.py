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
from pdtool.partition.simulator.simulation import Record, Share, Simulation, pace
from pdtool.schedule import Action, Held, Kind, Reads, grid, reads

Tensors = tuple[int, bool, int]  # stage that waits for them, whether they are gradients, minibatch
Turn = tuple[int, bool, int]  # worker, whether gradients, how many it takes before


def simulate(job: Job) -> Simulation:
    """Execute the lists to their end.

    Complexity: a few events per action and message; each takes time in proportion to the messages that share a link.

    Raises:
        ScheduleError: a worker waits forever; the text holds the grid with its action marked.
    """
    clock = Clock()
    links = Links(job.cluster, clock)
    slots = list(job.shape.slots())
    record = Record(len(slots))
    homes = [[w for w, (s, _) in enumerate(slots) if s == stage % job.shape.places] for stage in range(len(job.stages))]
    workers: list[_Worker] = []
    averages = Averages(job, homes, links, clock, record, lambda w: workers[w].go_on())
    mail = _Mail(job, homes, links, record, workers)
    seen = reads(job.lists, job.shape.weights)
    workers += [_Worker(w, stage, job, seen[w], clock, mail, averages, record) for w, (stage, _) in enumerate(slots)]
    for worker in workers:
        worker.go_on()
    clock.run()
    for w, worker in enumerate(workers):
        if not worker.finished:
            at = worker.position
            text = grid(job.lists, mark=(w, at))
            raise ScheduleError(f"worker {w} waits forever in {job.lists[w][at]}\n{text}")
    return _result(job, workers, record)


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

    def __init__(self, job: Job, homes: list[list[int]], links: Links, record: Record, workers: list[_Worker]) -> None:
        self.job, self.homes, self.links, self.record, self.workers = job, homes, links, record, workers
        self.turn: dict[Tensors, int] = {}
        self.asked: Counter[tuple[int, bool]] = Counter()
        self.held: dict[Turn, list[Flow]] = {}
        for w, ((stage, _), actions) in enumerate(zip(job.shape.slots(), job.lists, strict=True)):
            for gradients in (False, True):
                taking = (a for a in actions if (a.kind.sends_gradients if gradients else a.kind is Kind.FORWARD))
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
        if action.kind is Kind.WEIGHT:
            return 0.0
        gradients = action.kind is not Kind.FORWARD
        key = (action.stage, gradients, action.minibatch)
        return self.departed_s.get(key, 0.0) if self.arrived[key] == self.needs[action.stage, gradients] else None

    def take(self, w: int, action: Action) -> None:
        """The worker has what the action takes: it asks for one more."""
        gradients = action.kind.sends_gradients
        if gradients or action.kind is Kind.FORWARD:
            for flow in self.held.pop((w, gradients, self.asked[w, gradients]), ()):
                self.links.send(flow)
            self.asked[w, gradients] += 1

    def post(self, w: int, action: Action) -> None:
        """Send all that an action of worker `w` has made."""
        if action.kind is Kind.FORWARD or action.kind.sends_gradients:
            gradients = action.kind is not Kind.FORWARD
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
        name = f"{key[0]}{'B' if key[1] else 'F'}{key[2]}"  # the action that takes it
        self.record.message(w, "send", f"for {name}", flow, sent=True)
        self.record.message(to, "receive", f"for {name}", flow, late_s=late_s)
        self.links.clock.at(self.links.clock.now + late_s, partial(self._deliver, to, key))

    def _deliver(self, to: int, key: Tensors) -> None:
        self.arrived[key] += 1
        self.workers[to].go_on()


class _Worker:
    """One worker on its way through its list."""

    def __init__(
        self, w: int, stage: int, job: Job, seen: Reads, clock: Clock, mail: _Mail, averages: Averages, record: Record
    ) -> None:
        self.w, self.stage, self.job, self.actions = w, stage, job, job.lists[w]
        self.clock, self.mail, self.averages, self.record = clock, mail, averages, record
        self.stages = job.shape.stages_at(stage)
        self.position, self.running = 0, False
        self.busy_s = self.communication_s = 0.0
        self.begun_s, self.free_s = math.inf, 0.0
        self.done_s: dict[int, float] = {}  # when it had done with each minibatch
        self.held = Held(seen, stashing=job.shape.weights != "none")
        self.fixed_bytes = sum(job.stages[s].fixed_bytes for s in self.stages)
        self.memory_bytes = self.kept_bytes = self.versions = 0

    @property
    def finished(self) -> bool:
        return self.position == len(self.actions)

    def go_on(self) -> None:
        """Begin the next action if the worker is free and all is there that the action needs."""
        if self.running or self.finished:
            return
        action = self.actions[self.position]
        update = action.kind is Kind.UPDATE
        made_s = self.averages.ready(action.stage, action.minibatch, self.w) if update else self.mail.ready(action)
        if made_s is not None:
            self._begin(action, made_s)

    def _begin(self, action: Action, made_s: float) -> None:
        """Start an action whose last input was made at `made_s`, and has been under way since."""
        now, length = self.clock.now, self.job.stages[action.stage].seconds[action.kind]
        if self.position and now > self.free_s:
            self.record.action(self.w, "wait", "wait", self.free_s, now - self.free_s)
        self.record.action(self.w, str(action), action.kind.name.lower(), now, length)
        self.running, self.begun_s = True, min(self.begun_s, now)
        self.communication_s += now - max(self.free_s, made_s)
        self.busy_s += length
        self.mail.take(self.w, action)
        self._hold(action)
        self._offer_gradients(action, length)
        self.clock.at(now + length, partial(self._end, action))

    def _end(self, action: Action) -> None:
        self.running, self.free_s = False, self.clock.now
        self.position += 1
        if action.kind.ends:
            self.done_s[action.minibatch] = self.clock.now
        self.mail.post(self.w, action)
        self.go_on()

    def _offer_gradients(self, action: Action, length: float) -> None:
        """In the last backward of a round, gradients are there piece by piece, those of the last layers first."""
        after = self.actions[self.position + 1 : self.position + 2]
        if action.kind.ends and after and after[0].kind is Kind.UPDATE:
            pieces = self.averages.pieces(action.stage)
            for n in range(1, pieces):
                offer = partial(self.averages.offer, action.stage, after[0].minibatch, self.w, n)
                self.clock.at(self.clock.now + length * n / pieces, offer)

    def _hold(self, action: Action) -> None:
        """What was kept of a minibatch is free when its last action begins: nothing else begins before that ends."""
        self.held.take(action)
        work = self.job.stages[action.stage]
        if action.kind.ends:
            self.kept_bytes -= work.kept_bytes
        elif action.kind in (Kind.FORWARD, Kind.UPDATE):  # only these hold more than before
            self.kept_bytes += work.kept_bytes * (action.kind is Kind.FORWARD)
            versions = [self.held.versions(s) for s in self.stages]
            weights = sum(self.job.stages[s].weight_bytes * n for s, n in zip(self.stages, versions, strict=True))
            self.memory_bytes = max(self.memory_bytes, self.fixed_bytes + weights + self.kept_bytes)
            self.versions = max(self.versions, *versions)

    def share(self, makespan_s: float, sent_bytes: float) -> Share:
        """How the time was spent."""
        return Share(
            stage=self.stage, worker=self.job.workers[self.w], busy_s=self.busy_s,
            communication_s=self.communication_s, idle_s=makespan_s - self.busy_s - self.communication_s,
            span_s=self.free_s - min(self.begun_s, self.free_s), peak_stashed=self.held.peak, versions=self.versions,
            delay=self.held.delay, memory_bytes=self.memory_bytes, sent_bytes=round(sent_bytes),
        )  # fmt: skip


def _result(job: Job, workers: list[_Worker], record: Record) -> Simulation:
    end = max(worker.free_s for worker in workers)
    done_s: dict[int, float] = {}
    for worker in workers:
        done_s |= {i: max(time, done_s.get(i, 0.0)) for i, time in worker.done_s.items()}
    shares = tuple(worker.share(end, sent) for worker, sent in zip(workers, record.sent_bytes, strict=True))
    return Simulation(
        minibatches=len(done_s), batch_size=job.batch_size, makespan_s=end,
        pace_s=pace(sorted(done_s.values()), job.shape),
        fill_s=max(worker.begun_s for worker in workers), drain_s=end - min(worker.free_s for worker in workers),
        shares=shares, events=tuple(record.events),
    )  # fmt: skip
