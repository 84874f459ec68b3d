"""The search space of one profile: its cuts, and the load of every stage between two of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pdtool.artifacts.profile import Profile
from pdtool.partition.search.cuts import CutSpace
from pdtool.partition.stage_loads import Array, StageLoad, StageLoadTable


@dataclass(frozen=True)
class SearchSpace:
    """The stages between the cuts of a profile; c: cuts, j: the cuts that a stage may end at."""

    profile: Profile
    cuts: CutSpace
    _coarser: dict[int, SearchSpace] = field(default_factory=dict)

    @property
    def cut_count(self) -> int:
        """c: number of cuts."""
        return len(self.cuts.inside)

    @cached_property
    def _table(self) -> StageLoadTable:
        return StageLoadTable(self.profile, self.cuts.blocks, self.cuts.inside)

    @property
    def forward_backward_s(self) -> Array:
        """[c] seconds of all that lies inside each cut."""
        return self._table.forward_backward_s

    @cached_property
    def stages_from(self) -> list[tuple[Array, StageLoad]]:
        """For each cut that a stage may begin at: the cuts where it may end [j], and its load then, each field [j]."""
        ends = [np.flatnonzero(row) for row in self.cuts.contains]
        return [(row, self._table.stages_from(i, row)) for i, row in enumerate(ends)]

    def coarser(self, max_cuts: int) -> SearchSpace:
        """Return the space of at most `max_cuts` cuts along one order of the operators; itself where it has no more."""
        inside = self.cuts.inside
        if len(inside) > max_cuts and max_cuts not in self._coarser:
            last = inside.shape[1] - inside[:, ::-1].argmax(axis=1)
            chain = np.flatnonzero(inside.sum(axis=1) == np.where(inside.any(axis=1), last, 0))
            chosen = chain[np.unique(np.linspace(0, len(chain) - 1, max_cuts).astype(int))]
            self._coarser[max_cuts] = SearchSpace(self.profile, replace(self.cuts, inside=inside[chosen]))
        return self._coarser.get(max_cuts, self)
