"""Where a pipeline may lie in a cluster: on all of it, on a smaller block, or as several copies on blocks side by side.

copies of 1x4 in 4x4   | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 |      each is one server's own pipeline
copies of 1x2 in 2x4   | 0 0 1 1 | 2 2 3 3 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from pdtool.artifacts.cluster import Cluster
from pdtool.partition.cost.formulas import members_of

MAX_WORKERS_PER_COPY = 256  # the search looks at every worker as the first one of every stage
# In larger clusters, blocks that leave out some of the devices of every server are not looked at.
_MAX_WORKERS_WITH_PARTIAL_BLOCKS = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Blocks of a cluster, one for each copy of the pipeline.

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
    def whole(cls, cluster: Cluster, workers: int | None = None) -> Layout:
        """Return one copy on all of a cluster, or on its first workers."""
        sizes = tuple(level.size for level in cluster.levels)
        used = cluster.workers if workers is None else workers
        return cls(cluster=cluster, sizes=sizes, grid=(1,) * len(sizes), workers=used)

    @property
    def copies(self) -> int:
        """Number of blocks."""
        return math.prod(self.grid)

    @cached_property
    def block(self) -> Cluster:
        """The first block as a cluster of its own."""
        levels = zip(self.cluster.levels, self.sizes, strict=True)
        return replace(self.cluster, levels=tuple(replace(level, size=size) for level, size in levels))

    def worker(self, copy: int, position: int) -> int:
        """Return the number in the cluster of the worker at a position in the block of a copy."""
        number = 0
        for size, blocks, below in reversed(list(zip(self.sizes, self.grid, self.cluster.below, strict=True))):
            number += (copy % blocks * size + position % size) * below
            copy, position = copy // blocks, position // size
        return number

    @property
    def copy_members(self) -> list[int]:
        """Members of each level that the copies lie on, one worker of each."""
        return members_of(self.cluster, [self.worker(copy, 0) for copy in range(self.copies)])


def layouts(cluster: Cluster, workers: int) -> list[Layout]:
    """Return all blocks and numbers of copies worth searching with at most `workers` workers, small blocks first.

    One copy: the whole, and for each level all smaller blocks of what lies below it, so that a larger cluster has all
    that a smaller one has. Several: as many as there is room for, for each size of block that leaves most room; where
    there are too many workers for one copy on all of them, for a half, a quarter, an eighth ... of each level only.
    """
    whole = tuple(level.size for level in cluster.levels)
    one_block = (1,) * len(whole)
    shapes = {(whole, one_block)}
    for depth, size in enumerate(whole):
        one_member = one_block[: depth + 1]
        if depth and cluster.workers <= _MAX_WORKERS_WITH_PARTIAL_BLOCKS:
            shapes |= {((*whole[:depth], part, *whole[depth + 1 :]), one_block) for part in range(1, size)}
        shapes.add(((*one_member, *whole[depth + 1 :]), one_block))
        parts = range(1, size + 1) if workers <= MAX_WORKERS_PER_COPY else [2**n for n in range(size.bit_length())]
        for blocks in {size // (size // part) for part in parts}:
            grid = (*whole[:depth], blocks, *one_block[depth + 1 :])
            shapes.add(((*one_block[:depth], size // blocks, *whole[depth + 1 :]), grid))
    found = []
    for sizes, grid in shapes:
        used = min(math.prod(sizes), workers // math.prod(grid))
        if used and (used == math.prod(sizes) > 1 or grid == one_block):
            found.append(Layout(cluster=cluster, sizes=sizes, grid=grid, workers=used))
    return sorted(found, key=lambda layout: (layout.workers, layout.copies, layout.sizes))
