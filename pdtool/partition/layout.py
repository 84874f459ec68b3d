"""Where a pipeline may lie in a cluster: on all of it, on a smaller block, or as several copies on blocks side by side.

copies of 1x4 in 4x4   | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 |      each is one server's own pipeline
copies of 1x2 in 2x4   | 0 0 1 1 | 2 2 3 3 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from pdtool.cluster import Cluster
from pdtool.partition.cost import units_of

_MOST_THINNED = 64  # workers of a cluster in which blocks that leave out some of each member are looked at
MOST_WORKERS = 256  # in one copy: the search looks at every place for every stage


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Blocks of a cluster, one for each copy.

    Attributes:
        sizes: members of each level in one block.
        grid: blocks side by side at each level.
        workers: of one block that may be used, the first ones.
    """

    cluster: Cluster
    sizes: tuple[int, ...]
    grid: tuple[int, ...]
    workers: int

    @classmethod
    def of(cls, cluster: Cluster, workers: int | None = None) -> Layout:
        """One copy on all of a cluster, or on its first workers."""
        sizes = tuple(level.size for level in cluster.levels)
        used = cluster.workers if workers is None else workers
        return cls(cluster=cluster, sizes=sizes, grid=(1,) * len(sizes), workers=used)

    @property
    def copies(self) -> int:
        """How many blocks there are."""
        return math.prod(self.grid)

    @cached_property
    def block(self) -> Cluster:
        """The first block as a cluster of its own."""
        levels = zip(self.cluster.levels, self.sizes, strict=True)
        return replace(self.cluster, levels=tuple(replace(level, size=size) for level, size in levels))

    def place(self, copy: int, worker: int) -> int:
        """The number in the cluster of a worker of a copy."""
        place = 0
        for size, blocks, below in reversed(list(zip(self.sizes, self.grid, self.cluster.below, strict=True))):
            place += (copy % blocks * size + worker % size) * below
            copy, worker = copy // blocks, worker // size
        return place

    @property
    def spread(self) -> list[int]:
        """Members of each level that the copies lie on, one worker of each."""
        return units_of(self.cluster, [self.place(copy, 0) for copy in range(self.copies)])


def layouts(cluster: Cluster, workers: int) -> list[Layout]:
    """All blocks and numbers of copies worth looking at with at most `workers` workers, the small blocks first.

    One copy: the whole, and for each level all smaller blocks of what lies below it, so that a larger cluster has all
    that a smaller one has. Several: as many as there is room for, for each size of block that leaves most room; where
    there are too many workers for one copy on all of them, for a half, a quarter, an eighth ... of each level only.
    """
    whole = tuple(level.size for level in cluster.levels)
    one = (1,) * len(whole)
    found = {(whole, one)}
    for depth, size in enumerate(whole):
        ones = one[: depth + 1]
        if depth and cluster.workers <= _MOST_THINNED:
            found |= {((*whole[:depth], fewer, *whole[depth + 1 :]), one) for fewer in range(1, size)}
        found.add(((*ones, *whole[depth + 1 :]), one))
        halves = [2**n for n in range(size.bit_length())]
        for blocks in {size // (size // few) for few in (range(1, size + 1) if workers <= MOST_WORKERS else halves)}:
            grid = (*whole[:depth], blocks, *one[depth + 1 :])
            found.add(((*one[:depth], size // blocks, *whole[depth + 1 :]), grid))
    made = []
    for sizes, grid in found:
        used = min(math.prod(sizes), workers // math.prod(grid))
        if used and (used == math.prod(sizes) > 1 or grid == one):
            made.append(Layout(cluster=cluster, sizes=sizes, grid=grid, workers=used))
    return sorted(made, key=lambda v: (v.workers, v.copies, v.sizes))
