"""Gradients averaged over workers, round by round: ring all-reduces on shared links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdtool.partition.simulator.job import Job, Tied
from pdtool.partition.simulator.links import Clock, Flow, Link, Links
from pdtool.partition.simulator.simulation import Unrecorded

PIECE_BYTES, MOST_PIECES = 25_000_000, 8  # the runtime's pieces are of this size, however many


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Workers that average something once a round; each sends to the next, the last to the first.

    Attributes:
        members: positions of their lists, in order of their numbers in the cluster: few rings cross the same link.
        pieces: parts of equal size, sent one after the other, each as soon as all members have it.
    """

    members: Sequence[int]
    size_bytes: int
    pieces: int
    links: Counter[Link]
    latency_s: float

    @property
    def each_bytes(self) -> float:
        """That a member sends for one piece (Patarasuk and Yuan, JPDC 2009)."""
        n = len(self.members)
        return 2 * (n - 1) / n * self.size_bytes / self.pieces


@dataclass
class Round:
    """One round of a ring.

    Attributes:
        ready: pieces that each member has.
        started, done: pieces.
        complete_s: when the last member had its last piece.
        ended: whether all members have the average.
    """

    ready: dict[int, int]
    started: int = 0
    done: int = 0
    complete_s: float = 0.0
    ended: bool = False


@dataclass
class Averages:
    """All averages of a job: of each stage over its replicas, of each tied parameter over those of all its stages.

    Attributes:
        homes: of each stage, the positions of its workers' lists.
        go_on: called with each worker that may have waited for an average.
    """

    job: Job
    homes: Sequence[Sequence[int]]
    links: Links
    clock: Clock
    record: Unrecorded
    go_on: Callable[[int], None]
    _rings: dict[Tied | int, Ring] = field(default_factory=dict)
    _rounds: dict[tuple[Tied | int, int], Round] = field(default_factory=dict)

    def pieces(self, stage: int) -> int:
        """In which the gradients of a stage are sent."""
        return self._ring(stage).pieces

    def offer(self, who: Tied | int, number: int, w: int, pieces: int) -> None:
        """Worker `w` has so many pieces of round `number` ready: start those that all members have."""
        ring, of = self._ring(who), self._round(who, number)
        if of.ended:  # one worker alone
            return
        of.ready[w] = max(of.ready[w], pieces)
        common = min(of.ready.values())
        if common == ring.pieces and of.started < common:
            of.complete_s = self.clock.now
        while of.started < common:
            of.started += 1
            ended = partial(self._sent, ring, of)
            self.links.send(Flow(channel=who, size_bytes=ring.each_bytes, links=ring.links, ended=ended))

    def ready(self, stage: int, number: int, w: int) -> float | None:
        """Worker `w` wants to do update `number`: when the last member had all it waits for; None: not averaged yet."""
        waits: list[tuple[Tied | int, int]] = [(stage, number)]
        self.offer(stage, number, w, self.pieces(stage))
        for tied in self.job.tied:
            if stage in tied.stages:
                self.offer(tied, number, w, 1)
                waits.append((tied, number - tied.lags[tied.stages.index(stage)]))
        rounds = [self._round(who, due) for who, due in waits if due >= 0]
        return max(r.complete_s for r in rounds) if all(r.ended for r in rounds) else None

    def _ring(self, who: Tied | int) -> Ring:
        if who not in self._rings:
            stages = (who,) if isinstance(who, int) else who.stages
            size = self.job.stages[who].averaged_bytes if isinstance(who, int) else who.size_bytes
            members = sorted({w for s in stages for w in self.homes[s]}, key=self.job.workers.__getitem__)
            ways = [
                self.links.path(self.job.workers[a], self.job.workers[b])
                for a, b in zip(members, [*members[1:], members[0]], strict=True)
            ]
            pieces = min(MOST_PIECES, max(1, math.ceil(size / PIECE_BYTES))) if isinstance(who, int) else 1
            latency = 2 * (len(members) - 1) * max(late for _, late in ways) * (size > 0)
            links = Counter(link for way, _ in ways for link in way)
            self._rings[who] = Ring(members=members, size_bytes=size, pieces=pieces, links=links, latency_s=latency)
        return self._rings[who]

    def _round(self, who: Tied | int, number: int) -> Round:
        if (who, number) not in self._rounds:
            members = self._ring(who).members
            self._rounds[who, number] = Round(dict.fromkeys(members, 0), ended=len(members) == 1)
        return self._rounds[who, number]

    def _sent(self, ring: Ring, of: Round, flow: Flow) -> None:
        of.done += 1
        for w in ring.members if flow.size_bytes else ():
            self.record.averaged(w, flow)
        if of.done == ring.pieces:
            self.clock.at(self.clock.now + ring.latency_s, partial(self._finish, ring, of))

    def _finish(self, ring: Ring, of: Round) -> None:
        of.ended = True
        for w in ring.members:
            self.go_on(w)
