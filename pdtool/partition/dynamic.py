"""The best pace of a pipeline by dynamic programming over (cut, workers), from the last stage to the first.

PipeDream, SOSP'19, section 3.1: A(j, m) = min over i, m' of max(A(i, m - m'), 2 a_i / B, T(i+1..j, m')), on cuts of a
DAG instead of prefixes of a chain, and from the back: then the workers that follow a stage are known, and with them its
minibatches in flight and its memory. Stages take contiguous workers in order, so the links they share are known too.

    i, j: cuts before and after a stage    a: its first worker    r: its replicas    q: those of the stage before it
    V[i, a, q]: best pace of all stages from cut i on, on workers a .. U-1, with the border before them

Complexity: O(c² U³) for c cuts and U workers, less what the bound prunes; all but the loop over i is numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtool.partition.cost import Rules, units_between
from pdtool.partition.tables import Tables

Array = NDArray[Any]
_SLACK = 1 + 1e-9  # sums taken in another order differ in the last digits


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
    """The recurrence on workers 0 .. U-1, all of them used.

    Args:
        rules: costs; U is the number of its workers.
        straight: one replica per stage.
        bound: paces above it are not looked for.
        least_memory: minimise the largest memory of a stage instead, whatever the limit, and no pace.
        layers: V for at most 0, 1, ... stages, as far as they were asked for.
    """

    tables: Tables
    rules: Rules
    straight: bool = False
    bound: float = np.inf
    least_memory: bool = False
    layers: list[Array] = field(default_factory=list)

    @property
    def workers(self) -> int:
        """U."""
        return len(self.rules.workers)

    def factor(self, stages: int) -> float:
        """What turns a pace into the time per minibatch."""
        return 1.0 if self.least_memory else self.rules.bubble(stages)

    @cached_property
    def free(self) -> Array:
        """V for any number of stages."""
        values = self._base()
        self._sweep(values, values)
        return values

    def layer(self, stages: int) -> Array:
        """V for at most `stages` stages."""
        if not self.layers:
            self.layers.append(self._base())
        while len(self.layers) <= stages:
            values = self._base()
            self._sweep(self.layers[-1], values)
            self.layers.append(values)
        return self.layers[stages]

    def exactly(self, stages: int) -> list[Array]:
        """V for exactly 0, 1, ... `stages` stages, each cut allowed where it would stand."""
        layers = [self._base()]
        for left in range(1, stages + 1):
            values = np.full_like(layers[0], np.inf)
            border = stages - left
            rows = self.tables.space.allowed(border, stages) if border else np.arange(len(values)) == 0
            self._sweep(layers[-1], values, rows)
            layers.append(values)
        return layers

    def trace(self, layers: list[Array]) -> list[Piece]:
        """The stages whose pace is layers[-1][0, 0, 0]; layers[-2] was its source, and so on; one layer: its own."""
        pieces: list[Piece] = []
        cut = first = before = 0
        while first < self.workers:
            source = layers[max(0, len(layers) - 2 - len(pieces))]
            entries = self.entries[cut]
            paces = self._paces(entries, source)
            if before:
                pace = self._border[entries.first, entries.replicas, before]
                paces = np.maximum(paces, self.rules.transfer_s(entries.crossing, pace))
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
        """Put one stage before each of `source`; source and target may be the same array."""
        for i in reversed(range(len(target) - 1)):
            entries = self.entries[i]
            if not len(entries.end) or (rows is not None and not rows[i]):
                continue
            paces = self._paces(entries, source)
            if i == 0:
                target[0, 0, 0] = paces.min()
                continue
            keep = paces <= self.bound
            first, replicas = entries.first[keep], entries.replicas[keep]
            if not len(first):
                continue
            transfers = self.rules.transfer_s(entries.crossing[keep, None], self._border[first, replicas, 1:])
            bordered = np.maximum(paces[keep, None], transfers)
            starts = np.flatnonzero(np.diff(first, prepend=-1))
            target[i, first[starts], 1:] = np.minimum.reduceat(bordered, starts, axis=0)

    def _paces(self, entries: _Entries, source: Array) -> Array:
        following = source[entries.end, entries.first + entries.replicas, entries.replicas]
        paces: Array = np.maximum(entries.alone, following)
        return paces

    @cached_property
    def entries(self) -> list[_Entries]:
        """For each cut but the last, the stages that may begin there."""
        return [self._entries(i) for i in range(len(self.tables.space.inside) - 1)]

    def _entries(self, i: int) -> _Entries:
        """Leaves out what cannot be part of a plan within the bound: by its own pace or memory, or because the work
        before or after it is too much for the workers there."""
        ends, load = self.tables.rows[i]
        work = self.tables.forward_backward_s
        first, replicas = self._slots(i)
        possible = (ends == len(work) - 1)[:, None] == (first + replicas == self.workers)
        possible &= work[i] <= first * self.bound * _SLACK if self._bounded else True
        left = (self.workers - first - replicas) * self.bound * _SLACK if self._bounded else np.inf
        possible &= (work[-1] - work[ends])[:, None] <= left
        slot, end = np.nonzero(possible.T)
        picked = type(load)(**{name: column[end] for name, column in vars(load).items()})
        first, replicas = first[slot], replicas[slot]
        in_flight = self.rules.in_flight(replicas, self.workers - first)
        memory = self.rules.memory_bytes(picked, in_flight)
        if self.least_memory:
            return _Entries(ends[end], first, replicas, memory, np.zeros(len(end)))
        units = units_between(self.rules.cluster, first, first + replicas)
        alone = np.maximum(
            self.rules.compute_s(picked, replicas), self.rules.allreduce_s(picked, replicas, units)
        )  # fmt: skip
        limit = self.rules.cluster.memory_bytes or np.inf
        keep = (memory <= limit) & (alone <= self.bound)
        crossing = (picked.received_bytes + picked.returned_bytes)[keep]
        return _Entries(ends[end][keep], first[keep], replicas[keep], alone[keep], crossing)

    @property
    def _bounded(self) -> bool:
        return bool(np.isfinite(self.bound)) and not self.least_memory

    def _slots(self, i: int) -> tuple[Array, Array]:
        """First worker and replicas of every stage that may begin at cut i, ordered by first worker."""
        most = 1 if self.straight else self.workers
        pairs = [
            (a, r)
            for a in ([0] if i == 0 else range(1, self.workers))
            for r in range(1, min(most, self.workers - a) + 1)
        ]
        first, replicas = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return first, replicas

    @cached_property
    def _border(self) -> Array:
        """[a, r, q] seconds per byte over the border before worker a; 0 where no such stages are."""
        size = self.workers + 1
        a, r, q = np.indices((size, size, size))
        real = (r >= 1) & (a + r <= self.workers) & (q >= 1) & (q <= a)
        a, r, q = (np.where(real, x, 1) for x in (a, r, q))
        cluster = self.rules.cluster
        pace = self.rules.border_pace(
            units_between(cluster, a - q, a), units_between(cluster, a, a + r), units_between(cluster, a - q, a + r)
        )
        return np.asarray(np.where(real, pace, 0.0))
