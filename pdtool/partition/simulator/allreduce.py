"""Gradients averaged over workers, round by round: ring all-reduces on shared links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdtool.partition.simulator.job import SimulationJob, TiedGroup
from pdtool.partition.simulator.network import EventQueue, Flow, Link, Network
from pdtool.partition.simulator.recorder import NullRecorder

Averaged = TiedGroup | int  # the gradients of a group of tied parameters, or of a stage


@dataclass(frozen=True, kw_only=True)
class AllReduceRing:
    """Workers that average gradients once a round; each sends to the next, the last to the first.

    Attributes:
        members: positions of their lists, in order of their numbers in the cluster: so the fewest links are crossed.
        buckets: parts of equal size, sent one after the other, each as soon as all members have it.
        latency_s: of all the messages of one bucket, one after the other.
    """

    members: Sequence[int]
    size_bytes: int
    buckets: int
    links: Counter[Link]
    latency_s: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that each member sends for one bucket (Patarasuk and Yuan, JPDC 2009)."""
        n = len(self.members)
        return 2 * (n - 1) / n * self.size_bytes / self.buckets


@dataclass
class AllReduceRound:
    """One round of a ring.

    Attributes:
        ready: buckets that each member has.
        started, done: buckets.
        complete_s: when the last member had its last bucket.
        has_ended: whether all members have the average.
    """

    ready: dict[int, int]
    started: int = 0
    done: int = 0
    complete_s: float = 0.0
    has_ended: bool = False


@dataclass
class GradientAllReduces:
    """All averages of a job: of each stage over its replicas, of each tied parameter over those of all its stages.

    Attributes:
        stage_workers: of each stage, the positions of its workers' lists.
        resume: called with each worker that may have waited for an average.
    """

    job: SimulationJob
    stage_workers: Sequence[Sequence[int]]
    network: Network
    clock: EventQueue
    recorder: NullRecorder
    resume: Callable[[int], None]
    _rings: dict[Averaged, AllReduceRing] = field(default_factory=dict)
    _rounds: dict[tuple[Averaged, int], AllReduceRound] = field(default_factory=dict)

    def offer(self, averaged: Averaged, number: int, w: int, buckets: int) -> None:
        """Worker `w` has so many buckets of round `number` ready: start those that all members have."""
        ring, current = self._ring(averaged), self._round(averaged, number)
        if current.has_ended:  # a ring of one worker
            return
        current.ready[w] = max(current.ready[w], buckets)
        ready_everywhere = min(current.ready.values())
        if ready_everywhere == ring.buckets and current.started < ready_everywhere:
            current.complete_s = self.clock.now
        while current.started < ready_everywhere:
            current.started += 1
            ended = partial(self._bucket_sent, ring, current)
            self.network.send(Flow(channel=averaged, size_bytes=ring.sent_bytes, links=ring.links, ended=ended))

    def ready(self, stage: int, number: int, w: int) -> float | None:
        """Worker `w` wants to do update `number`: return when the last member had all it waits for; None: the average
        is not there yet."""
        awaited: list[tuple[Averaged, int]] = [(stage, number)]
        self.offer(stage, number, w, self._ring(stage).buckets)
        for tied in self.job.tied:
            if stage in tied.stages:
                self.offer(tied, number, w, 1)
                awaited.append((tied, number - tied.lags[tied.stages.index(stage)]))
        rounds = [self._round(averaged, due) for averaged, due in awaited if due >= 0]
        return max(r.complete_s for r in rounds) if all(r.has_ended for r in rounds) else None

    def _ring(self, averaged: Averaged) -> AllReduceRing:
        if averaged not in self._rings:
            stages, size_bytes, buckets = self._gradients(averaged)
            members = sorted({w for s in stages for w in self.stage_workers[s]}, key=self.job.workers.__getitem__)
            neighbours = zip(members, [*members[1:], members[0]], strict=True)
            paths = [self.network.path(self.job.workers[a], self.job.workers[b]) for a, b in neighbours]
            message_s = max(latency_s for _, latency_s in paths)
            self._rings[averaged] = AllReduceRing(
                members=members,
                size_bytes=size_bytes,
                buckets=buckets,
                links=Counter(link for links, _ in paths for link in links),
                latency_s=2 * (len(members) - 1) * message_s * (size_bytes > 0),
            )
        return self._rings[averaged]

    def _gradients(self, averaged: Averaged) -> tuple[Sequence[int], int, int]:
        """(stages that have them, bytes, buckets)."""
        if isinstance(averaged, TiedGroup):
            return averaged.stages, averaged.size_bytes, 1
        work = self.job.stages[averaged]
        return (averaged,), work.averaged_bytes, len(work.buckets_ready)

    def _round(self, averaged: Averaged, number: int) -> AllReduceRound:
        if (averaged, number) not in self._rounds:
            members = self._ring(averaged).members
            self._rounds[averaged, number] = AllReduceRound(dict.fromkeys(members, 0), has_ended=len(members) == 1)
        return self._rounds[averaged, number]

    def _bucket_sent(self, ring: AllReduceRing, current: AllReduceRound, flow: Flow) -> None:
        current.done += 1
        for w in ring.members if flow.size_bytes else ():
            self.recorder.averaged(w, flow)
        if current.done == ring.buckets:
            self.clock.at(self.clock.now + ring.latency_s, partial(self._end, ring, current))

    def _end(self, ring: AllReduceRing, current: AllReduceRound) -> None:
        current.has_ended = True
        for w in ring.members:
            self.resume(w)
