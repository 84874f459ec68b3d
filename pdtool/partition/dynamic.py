"""The best pace of a pipeline by dynamic programming over (cut, workers), from the last stage to the first.

PipeDream, SOSP'19, section 3.1: A(j, m) = min over i, m' of max(A(i, m - m'), 2 a_i / B, T(i+1..j, m')), on cuts of a
DAG instead of prefixes of a chain, and from the back: then the workers that follow a stage are known, and with them its
minibatches in flight and its memory. Stages take contiguous workers in order, so the links they share are known too.

    i, j: cuts before and after a stage    a: its first worker    r: its replicas    q: those of the stage before it
    V[i, a, q]: best pace of all stages from cut i on, on workers a .. U-1, with the border before them
    V[0, a, 0]: of a whole plan that leaves the first a workers idle

Complexity: O(c² U²) stages for c cuts and U workers, less what the bound prunes, and U times that where a border may be
the slowest part; all but the loop over i is numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtool.partition.cost import SLACK, Load, Rules, shares, units_between
from pdtool.partition.tables import Tables

Array = NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """One stage: the cuts around it, its first worker, its replicas."""

    before: int
    after: int
    first: int
    replicas: int


@dataclass(frozen=True)
class _Entries:
    """The stages that begin at one cut and may be part of a plan, ordered by first worker: one element each."""

    end: Array
    first: Array
    replicas: Array
    alone: Array  # pace of the stage without its borders; or its memory
    crossing: Array  # bytes over the border before it


@dataclass
class Dynamic:
    """The recurrence on workers 0 .. U-1 of one copy of the pipeline.

    Args:
        workers: U.
        straight: one replica per stage.
        bound: paces above it are not looked for.
        least_memory: minimise the largest memory of a stage instead, whatever the limit, and no pace.
        entries: for each cut but the last, from the last to the first, the stages that may begin there.
        layers: V for at most 0, 1, ... stages, as far as they were asked for.
    """

    tables: Tables
    rules: Rules
    workers: int
    straight: bool = False
    bound: float = np.inf
    least_memory: bool = False
    entries: dict[int, _Entries] = field(default_factory=dict)
    layers: list[Array] = field(default_factory=list)

    @cached_property
    def free(self) -> Array:
        """V for any number of stages."""
        values = self._base()
        alive = np.zeros(len(values), dtype=bool)  # cuts after which there is something within the bound
        alive[-1] = True
        for i in reversed(range(len(values) - 1)):
            self.entries[i] = self._entries(i, values, alive)
            self._put_before(i, values, values)
            alive[i] = len(self.entries[i].end) > 0
        self._forget_unreached()
        return values

    def _forget_unreached(self) -> None:
        """Leave out the stages that nothing within the bound comes before; the layers then go faster."""
        reached = np.zeros((len(self.tables.space.inside), self.workers + 1), dtype=bool)
        reached[0] = True
        for i in sorted(self.entries):
            entries = self.entries[i]
            kept = reached[i, entries.first]
            self.entries[i] = _Entries(*(column[kept] for column in vars(entries).values()))
            reached[entries.end[kept], (entries.first + entries.replicas)[kept]] = True

    def layer(self, stages: int) -> Array:
        """V for at most `stages` stages."""
        _ = self.free
        if not self.layers:
            self.layers.append(self._base())
        while len(self.layers) <= stages:
            values = self._base()
            self._sweep(self.layers[-1], values)
            self.layers.append(values)
        return self.layers[stages]

    def exactly(self, stages: int) -> list[Array]:
        """V for exactly 0, 1, ... `stages` stages, each cut allowed where it would stand."""
        _ = self.free
        layers = [self._base()]
        for left in range(1, stages + 1):
            values = np.full_like(layers[0], np.inf)
            border = stages - left
            rows = self.tables.space.allowed(border, stages) if border else np.arange(len(values)) == 0
            self._sweep(layers[-1], values, rows)
            layers.append(values)
        return layers

    def start(self, values: Array) -> int:
        """The first worker of the best whole plan; ties: the fewest workers."""
        whole = values[0, : self.workers, 0]
        if self.straight or self.rules.all_workers:
            return 0
        return int(np.flatnonzero(whole <= whole.min())[-1])

    def pace(self, values: Array) -> float:
        """Of the best whole plan."""
        return float(values[0, self.start(values), 0])

    def trace(self, layers: list[Array]) -> list[Piece]:
        """The stages of the best whole plan of layers[-1]; layers[-2] was its source, and so on; one layer: its own."""
        pieces: list[Piece] = []
        cut = before = 0
        first = self.start(layers[-1])
        while first < self.workers:
            source = layers[max(0, len(layers) - 2 - len(pieces))]
            entries = self.entries[cut]
            paces = self._paces(entries, source)
            if before:
                paces = np.maximum(
                    paces, entries.crossing * self._border[self._place(entries.first), entries.replicas, before]
                )
            paces = np.where(entries.first == first, paces, np.inf)
            best = np.flatnonzero(paces <= paces.min())
            chosen = max(best, key=lambda e: (entries.end[e], entries.replicas[e]))  # ties: the fewest stages
            pieces.append(Piece(cut, int(entries.end[chosen]), first, int(entries.replicas[chosen])))
            cut, before = pieces[-1].after, pieces[-1].replicas
            first += before
        return pieces

    def _base(self) -> Array:
        """No stage: all cuts done and all workers used."""
        values = np.full((len(self.tables.space.inside), self.workers + 1, self.workers + 1), np.inf)
        values[-1, self.workers] = 0.0
        return values

    def _sweep(self, source: Array, target: Array, rows: Array | None = None) -> None:
        """Put one stage before each of `source`, to begin at the cuts `rows`."""
        for i in self.entries:
            if len(self.entries[i].end) and (rows is None or rows[i]):
                self._put_before(i, source, target)

    def _put_before(self, i: int, source: Array, target: Array) -> None:
        """The stages that begin at cut i; source and target may be the same array."""
        entries = self.entries[i]
        paces = self._paces(entries, source)
        keep = np.flatnonzero(paces <= self.bound)
        if i == 0:
            np.minimum.at(target[0, :, 0], entries.first[keep], paces[keep])
            return
        first, replicas, crossing = (x[keep] for x in (entries.first, entries.replicas, entries.crossing))
        slow = crossing > 0
        if slow.any():
            slow = crossing * self._slowest_border[self._place(first), replicas] > paces[keep]
        free = keep[~slow]  # whatever stands before them, the border is not what holds them up
        np.minimum.at(target[i, :, 1], entries.first[free], paces[free])
        target[i, :, 2:] = target[i, :, 1:2]
        if slow.any():
            some = _undominated(first * (self.workers + 1) + replicas, paces[keep], crossing, np.flatnonzero(slow))
            first, replicas, crossing = first[some], replicas[some], crossing[some, None]
            bordered = np.maximum(paces[keep[some], None], crossing * self._border[self._place(first), replicas, 1:])
            starts = np.flatnonzero(np.diff(first, prepend=-1))
            best = np.minimum.reduceat(bordered, starts, axis=0)
            target[i, first[starts], 1:] = np.minimum(target[i, first[starts], 1:], best)

    def _paces(self, entries: _Entries, source: Array) -> Array:
        following = source[entries.end, entries.first + entries.replicas, entries.replicas]
        paces: Array = np.maximum(entries.alone, following)
        return paces

    def _entries(self, i: int, values: Array, alive: Array) -> _Entries:
        """Leaves out what cannot be part of a plan within the bound: by its own pace or memory, because the work before
        it is too much for the workers there, or for what `values` say of all that may follow it."""
        rules = self.rules
        ends, load = self.tables.rows[i]
        first, replicas, slot, end = self._possible(i, np.flatnonzero(alive[ends]))
        follows = values[ends[end], (first + replicas)[slot], replicas[slot]] <= self.bound
        slot, end = slot[follows], end[follows]
        picked = _picked(load, end)
        first, replicas = first[slot], replicas[slot]
        flight = rules.in_flight(replicas, self.workers - first)
        if self.least_memory:
            memory = rules.memory_bytes(picked, flight, rules.may_recompute)
            return _Entries(ends[end], first, replicas, memory, np.zeros(len(end)))
        recompute = rules.recomputes(picked, flight)
        computing = rules.compute_s(picked, replicas, recompute)
        averaging = rules.allreduce_s(picked, replicas, units_between(rules.cluster, first, first + replicas))
        alone = rules.stage_s(picked, replicas, computing, averaging)
        limit = rules.cluster.memory_bytes
        keep = alone <= self.bound
        if limit is not None:
            keep &= rules.memory_bytes(picked, flight, recompute) <= limit
        crossing = rules.transfer_s(picked, 1.0)
        return _Entries(ends[end][keep], first[keep], replicas[keep], alone[keep], crossing[keep])

    def _possible(self, i: int, some: Array) -> tuple[Array, Array, Array, Array]:
        """Slots (first worker, replicas) and the pairs of one of them and one of `some` ends that the bound allows."""
        work, (ends, load) = self.tables.forward_backward_s, self.tables.rows[i]
        first, replicas = self._slots if i else self._first_slots
        after = self.workers - first - replicas
        pairs = (ends[some] == len(work) - 1)[:, None] == (after == 0)
        if np.isfinite(self.bound) and not self.least_memory:
            most = self.bound * self.rules.copies * SLACK  # work of one worker
            kept = (work[i] <= first * most) & (work[-1] - work[i] <= (self.workers - first) * most)
            first, replicas, after, pairs = first[kept], replicas[kept], after[kept], pairs[:, kept]
            pairs &= (work[-1] - work[ends[some]])[:, None] <= after * most
            pairs &= (self._at_best(_picked(load, some[:, None])) <= self.bound)[:, replicas - 1]
        slot, end = np.nonzero(pairs.T)
        return first, replicas, slot, some[end]

    def _at_best(self, load: Load) -> Array:
        """[end, replicas - 1] pace of a stage on the first workers: nowhere does its ring cross fewer links."""
        replicas = np.arange(1, self.workers + 1)
        averaging = self.rules.allreduce_s(load, replicas, units_between(self.rules.cluster, 0, replicas))
        paces: Array = self.rules.stage_s(load, replicas, self.rules.compute_s(load, replicas), averaging)
        return paces

    @cached_property
    def _slots(self) -> tuple[Array, Array]:
        """First worker and replicas of every stage but the first, ordered by first worker."""
        return self._slots_from(range(1, self.workers))

    @cached_property
    def _first_slots(self) -> tuple[Array, Array]:
        """Of every first stage."""
        return self._slots_from(range(self.workers))

    def _slots_from(self, begin: range) -> tuple[Array, Array]:
        most = 1 if self.straight else self.workers
        pairs = [(a, r) for a in begin for r in range(1, min(most, self.workers - a) + 1)]
        first, replicas = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return first, replicas

    @cached_property
    def _border(self) -> Array:
        """[place, r, q] seconds per byte over the border before a worker; see `_place`."""
        size = self.workers
        reach = self._period * (size // self._period + 1)  # workers on each side of the border, in whole members
        worker = np.arange(2 * reach)
        paces = np.zeros((self._period, size + 1, size + 1))
        q, r = np.arange(1, size + 1)[None, :, None], np.arange(1, size + 1)[:, None, None]
        for place in range(self._period):
            a = reach + place
            before = shares(self.rules.cluster, (a - q <= worker) & (worker < a))
            after = shares(self.rules.cluster, (a <= worker) & (worker < a + r))
            # no worker is on both sides: at the level of workers one link of each side says all
            before[-1], after[-1] = np.concatenate([1 / q, 0 * q], axis=2), np.concatenate([0 * r, 1 / r], axis=2)
            paces[place, 1:, 1:] = self.rules.border_pace(before, after, (q[..., 0], r[..., 0], q[..., 0] == place))
        return paces

    @property
    def _period(self) -> int:
        """Workers after which borders repeat: those of one outermost member; all, where the first stage is apart."""
        return self.rules.cluster.workers if self.rules.all_workers else self.rules.cluster.below[0]

    @cached_property
    def _slowest_border(self) -> Array:
        """[place, r] whatever stands before it."""
        slowest: Array = self._border.max(axis=2)
        return slowest

    def _place(self, first: Array) -> Array:
        """Where a worker stands among those that borders differ for."""
        return first % self._period


def _picked(load: Load, some: Array) -> Load:
    """Those of many."""
    return Load(**{name: column[some] for name, column in vars(load).items()})


def _undominated(slots: Array, paces: Array, crossing: Array, some: Array) -> Array:
    """Those of `some` than which no other in the same slot has a better pace and fewer bytes before it, by slot."""
    order = some[np.lexsort((crossing[some], paces[some], slots[some]))]
    group = np.cumsum(np.diff(slots[order], prepend=-1) != 0)
    falling = crossing[order] - group * (crossing.max() + 1.0)  # each slot lies below all before it
    least = np.minimum.accumulate(falling)
    kept: Array = order[np.concatenate([[True], falling[1:] < least[:-1]])]
    return kept
