"""Traffic of a simulation: messages between stages, and ring all-reduces of gradients, on shared links.

A message goes straight to each stage that takes a tensor, as soon as that stage has asked for it. Workers average their
gradients round by round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import TypeAlias

from pdtool.artifacts.plan import ASKED_AHEAD
from pdtool.planner.simulator.job import SimulationJob, TiedGroup
from pdtool.planner.simulator.network import Flow, Link, Network
from pdtool.planner.simulator.result import Consumer, NullRecorder
from pdtool.schedule import Action, ActionKind

Averaged: TypeAlias = TiedGroup | int  # the gradients of a group of tied parameters, or of a stage
_Turn = tuple[int, bool, int]  # worker, whether gradients, how many it takes before


class MessageDelivery:
    """The tensors and gradients under way between the workers.

    Attributes:
        turn: position in the receiving worker's list at which it takes the tensors.
        asked: turns that each worker has asked for, of tensors and of gradients.
        held: messages that nobody has asked for yet.
        outgoing: (stage, gradients?) -> the stages that take its outputs, and the bytes for each.
        arrived: messages so far; departed_s: when the last was sent.
        needs: (stage, gradients?) -> messages for each minibatch.
        resume: called with each worker that may have waited for a message.
    """

    def __init__(
        self, job: SimulationJob, network: Network, recorder: NullRecorder, resume: Callable[[int], None]
    ) -> None:
        self.job, self.network, self.recorder, self.resume = job, network, recorder, resume
        self.turn: dict[Consumer, int] = {}
        self.asked: Counter[tuple[int, bool]] = Counter()
        self.held: dict[_Turn, list[Flow]] = {}
        for w, ((stage, _), actions) in enumerate(zip(job.shape.stage_replicas(), job.lists, strict=True)):
            forwards = [a for a in actions if a.kind is ActionKind.FORWARD]
            backwards = [a for a in actions if a.kind.sends_gradients]
            for is_gradient, consumers in ((False, forwards), (True, backwards)):
                self.turn |= {(a.stage, is_gradient, a.minibatch): n for n, a in enumerate(consumers)}
                self.asked[w, is_gradient] = job.shape.in_flight[stage] + ASKED_AHEAD
        self.arrived: Counter[Consumer] = Counter()
        self.departed_s: dict[Consumer, float] = {}
        self.outgoing: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for edge in job.edges:
            self.outgoing.setdefault((edge.source, False), []).append((edge.destination, edge.forward_bytes))
            if edge.has_gradient:
                self.outgoing.setdefault((edge.destination, True), []).append((edge.source, edge.backward_bytes))
        self.needs = Counter(
            (to, is_gradient) for (_, is_gradient), takers in self.outgoing.items() for to, _ in takers
        )

    def per_minibatch(self) -> Iterator[tuple[Counter[Link], float]]:
        """Yield links, and the bytes on each of them for one minibatch, of all messages."""
        workers, numbers = self.job.stage_workers, self.job.workers
        for (stage, _), takers in self.outgoing.items():
            for to, size_bytes in takers:
                count = math.lcm(len(workers[stage]), len(workers[to]))
                for a, b in islice(zip(cycle(workers[stage]), cycle(workers[to])), count):
                    links = self.network.path(numbers[a], numbers[b])[0] if a != b else ()
                    yield Counter(links), size_bytes / count

    def ready(self, action: Action) -> float | None:
        """Return when the last tensor that the action takes was sent; None while one has not arrived."""
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return 0.0
        is_gradient = action.kind is not ActionKind.FORWARD
        key = (action.stage, is_gradient, action.minibatch)
        return self.departed_s.get(key, 0.0) if self.arrived[key] == self.needs[action.stage, is_gradient] else None

    def take(self, w: int, action: Action) -> None:
        """The worker has the action's inputs: it asks for one more."""
        is_gradient = action.kind.sends_gradients
        if is_gradient or action.kind is ActionKind.FORWARD:
            for flow in self.held.pop((w, is_gradient, self.asked[w, is_gradient]), ()):
                self.network.send(flow)
            self.asked[w, is_gradient] += 1

    def send_results(self, w: int, action: Action) -> None:
        """Send everything that an action of worker `w` has made."""
        if action.kind is ActionKind.FORWARD or action.kind.sends_gradients:
            is_gradient = action.kind is not ActionKind.FORWARD
            for stage, size_bytes in self.outgoing.get((action.stage, is_gradient), ()):
                self._send(w, (stage, is_gradient, action.minibatch), size_bytes)

    def _send(self, w: int, consumer: Consumer, size_bytes: int) -> None:
        stage, is_gradient, minibatch = consumer
        workers = self.job.stage_workers[stage]
        to = workers[minibatch % len(workers)]
        self.departed_s[consumer] = self.network.clock.now
        if to == w:
            self._deliver(to, consumer)
            return
        links, latency_s = self.network.path(self.job.workers[w], self.job.workers[to])
        ended = partial(self._sent, w, to, consumer, latency_s)
        flow = Flow(channel=(w, to, is_gradient), size_bytes=size_bytes, links=dict.fromkeys(links, 1), ended=ended)
        if self.turn[consumer] < self.asked[to, is_gradient]:
            self.network.send(flow)
        else:
            self.held.setdefault((to, is_gradient, self.turn[consumer]), []).append(flow)

    def _sent(self, w: int, to: int, consumer: Consumer, latency_s: float, flow: Flow) -> None:
        self.recorder.message(w, to, consumer, flow, latency_s)
        self.network.clock.at(self.network.clock.now + latency_s, partial(self._deliver, to, consumer))

    def _deliver(self, to: int, consumer: Consumer) -> None:
        self.arrived[consumer] += 1
        self.resume(to)


@dataclass(frozen=True, kw_only=True)
class AllReduceRing:
    """Workers that average gradients once a round; each sends to the next, the last to the first.

    Attributes:
        members: positions of their lists, ordered by worker number, which crosses the fewest links.
        buckets: equal parts, sent one after the other, each as soon as all members have it.
        sent_bytes: sent by each member for one bucket (Patarasuk and Yuan, JPDC 2009).
        latency_s: latency of all messages of one bucket, one after the other.
    """

    members: Sequence[int]
    buckets: int
    sent_bytes: float
    links: Counter[Link]
    latency_s: float


@dataclass
class AllReduceRound:
    """One round of a ring.

    Attributes:
        ready: buckets that each member has.
        started: buckets that were sent, or wait for their turn.
        complete_s: when the last member had its last bucket.
        has_ended: whether all members have the average.
    """

    ready: dict[int, int]
    started: int = 0
    complete_s: float = 0.0
    has_ended: bool = False


class GradientAllReduces:
    """All averages of a job: of each stage over its replicas, of each tied parameter over those of all its stages.

    Attributes:
        rings: of each of these.
        resume: called with each worker that may have waited for an average.
    """

    def __init__(
        self, job: SimulationJob, network: Network, recorder: NullRecorder, resume: Callable[[int], None]
    ) -> None:
        self.job, self.network, self.recorder, self.resume = job, network, recorder, resume
        self.rings: dict[Averaged, AllReduceRing] = {
            s: self._ring([s], work.averaged_bytes, len(work.buckets_ready)) for s, work in enumerate(job.stages)
        }
        self.rings |= {tied: self._ring(tied.stages, tied.size_bytes, 1) for tied in job.tied}
        self._rounds: dict[tuple[Averaged, int], AllReduceRound] = {}

    def bucket_s(self, averaged: Averaged) -> float:
        """Return the seconds of one bucket if nothing else is sent."""
        ring = self.rings[averaged]
        rate = min((link.bandwidth / messages for link, messages in ring.links.items()), default=math.inf)
        return ring.sent_bytes / rate + ring.latency_s

    def per_minibatch(self) -> Iterator[tuple[Counter[Link], float]]:
        """Yield links, and the bytes of each message over them for one minibatch, of all averages."""
        for averaged, ring in self.rings.items():
            stage = averaged if isinstance(averaged, int) else averaged.stages[0]
            yield ring.links, ring.sent_bytes * ring.buckets / self.job.shape.update_every[stage]

    def offer(self, averaged: Averaged, number: int, w: int, buckets: int) -> None:
        """Worker `w` has so many buckets of round `number` ready: start those that all members have."""
        ring, current = self.rings[averaged], self._round(averaged, number)
        if current.has_ended:  # a ring of one worker
            return
        current.ready[w] = max(current.ready[w], buckets)
        ready_everywhere = min(current.ready.values())
        if ready_everywhere == ring.buckets and current.started < ready_everywhere:
            current.complete_s = self.network.clock.now
        while current.started < ready_everywhere:
            current.started += 1
            ended = partial(self._bucket_sent, ring, current, is_last=current.started == ring.buckets)
            self.network.send(Flow(channel=averaged, size_bytes=ring.sent_bytes, links=ring.links, ended=ended))

    def ready(self, stage: int, number: int, w: int) -> float | None:
        """Return when the average for update `number` of worker `w` was complete; None: it is not yet."""
        awaited: list[tuple[Averaged, int]] = [(stage, number)]
        self.offer(stage, number, w, self.rings[stage].buckets)
        for tied in self.job.tied:
            if stage in tied.stages:
                self.offer(tied, number, w, 1)
                awaited.append((tied, number - tied.lags[tied.stages.index(stage)]))
        rounds = [self._round(averaged, due) for averaged, due in awaited if due >= 0]
        return max(r.complete_s for r in rounds) if all(r.has_ended for r in rounds) else None

    def _ring(self, stages: Sequence[int], size_bytes: int, buckets: int) -> AllReduceRing:
        """The ring of all replicas of the stages that have these gradients."""
        positions, numbers = self.job.stage_workers, self.job.workers
        members = sorted({w for s in stages for w in positions[s]}, key=numbers.__getitem__)
        neighbours = zip(members, [*members[1:], members[0]], strict=True)
        paths = [self.network.path(numbers[a], numbers[b]) for a, b in neighbours]
        message_s, messages = max(latency_s for _, latency_s in paths), 2 * (len(members) - 1)
        return AllReduceRing(
            members=members,
            buckets=buckets,
            sent_bytes=messages / len(members) * size_bytes / buckets,
            links=Counter(link for links, _ in paths for link in links),
            latency_s=messages * message_s * (size_bytes > 0),
        )

    def _round(self, averaged: Averaged, number: int) -> AllReduceRound:
        if (averaged, number) not in self._rounds:
            members = self.rings[averaged].members
            self._rounds[averaged, number] = AllReduceRound(dict.fromkeys(members, 0), has_ended=len(members) == 1)
        return self._rounds[averaged, number]

    def _bucket_sent(self, ring: AllReduceRing, current: AllReduceRound, flow: Flow, *, is_last: bool) -> None:
        for w in ring.members if flow.size_bytes else ():
            self.recorder.averaged(w, flow)
        if is_last:
            self.network.clock.at(self.network.clock.now + ring.latency_s, partial(self._end, ring, current))

    def _end(self, ring: AllReduceRing, current: AllReduceRound) -> None:
        current.has_ended = True
        for w in ring.members:
            self.resume(w)
