"""The load of every stage that a space allows, as arrays: `cost.loads` for all pairs of cuts at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Profile
from pdtool.partition.cost import Load
from pdtool.partition.space import Space

Array = NDArray[Any]


@dataclass(frozen=True)
class Tables:
    """Loads of the stages between the cuts of `space`; c: cuts, j: the cuts that a stage may end at."""

    profile: Profile
    space: Space
    _coarse: dict[int, Tables] = field(default_factory=dict)

    def coarse(self, cuts: int) -> Tables:
        """Those of so many cuts along one order of the operators; itself where there are no more."""
        inside = self.space.inside
        if len(inside) > cuts and cuts not in self._coarse:
            last = inside.shape[1] - inside[:, ::-1].argmax(axis=1)
            chain = np.flatnonzero(inside.sum(axis=1) == np.where(inside.any(axis=1), last, 0))
            some = chain[np.unique(np.linspace(0, len(chain) - 1, cuts).astype(int))]
            self._coarse[cuts] = Tables(self.profile, replace(self.space, inside=inside[some]))
        return self._coarse.get(cuts, self)

    @cached_property
    def forward_backward_s(self) -> Array:
        """[c] seconds of all that lies inside each cut."""
        return self._forward_s + self._backward_s

    @cached_property
    def rows(self) -> list[tuple[Array, Load]]:
        """For each cut that a stage may begin at: the cuts where it may end [j], and its load then, each field [j]."""
        return [self._row(i, np.flatnonzero(ends)) for i, ends in enumerate(self.space.contains)]

    def _row(self, i: int, ends: Array) -> tuple[Array, Load]:
        received = np.zeros(len(ends))
        returned = np.zeros(len(ends))
        for producer in np.flatnonzero(self._crossing[i]):
            taken = self._taken[ends, producer] > self._taken[i, producer]
            received += taken * self._sent[0][producer]
            returned += taken * self._sent[1][producer]
        parameters = self._parameters[ends] - self._parameters[i]
        tied = np.zeros(len(ends))
        for shared, users in self._shared:
            here = users[ends] - users[i]
            parameters = parameters - shared * np.maximum(here - 1, 0)
            tied += shared * ((here > 0) & (here < users[-1]))
        return ends, Load(
            forward_s=self._forward_s[ends] - self._forward_s[i],
            backward_s=self._backward_s[ends] - self._backward_s[i],
            update_s=self._update_s[ends] - self._update_s[i],
            parameter_bytes=parameters,
            tied_bytes=tied,
            stash_bytes=self._stash[ends] - self._stash[i],
            working_bytes=self._working(i, ends),
            received_bytes=received,
            returned_bytes=returned,
            entering_bytes=np.full(len(ends), self._border[i]),
        )

    def _working(self, i: int, ends: Array) -> Array:
        """[j] the largest of the blocks between cut i and each end: the first found where they stand by size."""
        size, order = self._needs
        held = self.space.inside[np.ix_(ends, order)] & ~self.space.inside[i, order]
        return np.asarray(size[order][held.argmax(axis=1)])

    def _inside(self, values: list[float] | list[int]) -> Array:
        """[c] sum of one value per node over the nodes inside each cut."""
        total = np.zeros(len(self.space.blocks))
        for node, value in zip(self.profile.nodes, values, strict=True):
            total[self._block_of[node.name]] += value
        return self.space.inside @ total

    @cached_property
    def _block_of(self) -> dict[str, int]:
        return {name: b for b, block in enumerate(self.space.blocks) for name in block}

    @cached_property
    def _forward_s(self) -> Array:
        return self._inside([node.forward_s for node in self.profile.nodes])

    @cached_property
    def _backward_s(self) -> Array:
        return self._inside([node.backward_s for node in self.profile.nodes])

    @cached_property
    def _needs(self) -> tuple[Array, Array]:
        """[blocks] working bytes, and the blocks in falling order of them."""
        size = np.array([max(self.profile.working_bytes[name] for name in block) for block in self.space.blocks], float)
        return size, np.argsort(-size, kind="stable")

    @cached_property
    def _border(self) -> Array:
        """[c] bytes that cross each cut."""
        made = [self.profile.by_name[name].op != "input" for name, _ in self._producers]
        return np.asarray(self._crossing @ (self._sent[0] * made))

    @cached_property
    def _update_s(self) -> Array:
        return self._inside([node.update_s for node in self.profile.nodes])

    @cached_property
    def _parameters(self) -> Array:
        return self._inside([node.parameter_bytes for node in self.profile.nodes])

    @cached_property
    def _stash(self) -> Array:
        return self._inside([node.stash_bytes for node in self.profile.nodes])

    @cached_property
    def _shared(self) -> list[tuple[int, Array]]:
        """For each shared parameter its bytes and [c] how many of its users lie inside each cut."""
        return [
            (shared.bytes, self._inside([int(node.name in shared.nodes) for node in self.profile.nodes]))
            for shared in self.profile.shared
        ]

    @cached_property
    def _producers(self) -> list[tuple[str, list[int]]]:
        """Nodes whose output leaves their block, and the blocks that take it."""
        takers = (
            (name, sorted({self._block_of[taker] for taker in takers} - {self._block_of[name]}))
            for name, takers in self.profile.graph.consumers.items()
        )
        return [(name, blocks) for name, blocks in takers if blocks]

    @cached_property
    def _sent(self) -> Array:
        """[2, producers] bytes forward and bytes of gradient backward."""
        nodes = [self.profile.by_name[name] for name, _ in self._producers]
        return np.array([[n.output_bytes for n in nodes], [n.gradient_bytes for n in nodes]], dtype=float)

    @cached_property
    def _taken(self) -> Array:
        """[c, producers] how many of the blocks that take a producer's output lie inside each cut."""
        columns = [self.space.inside[:, blocks].sum(axis=1) for _, blocks in self._producers]
        return np.array(columns, dtype=np.int32).reshape(len(columns), len(self.space.inside)).T

    @cached_property
    def _crossing(self) -> Array:
        """[c, producers] whether a producer is inside a cut and something outside takes its output."""
        homes = np.array([self._block_of[name] for name, _ in self._producers], dtype=np.int64)
        return np.asarray(self.space.inside[:, homes] & (self._taken < self._taken[-1]))
