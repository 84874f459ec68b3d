"""Clusters: nested levels of workers, the link that two workers share, and the artifact ClusterFile.

`4x4` is four servers of four devices. Workers are numbered with the innermost level fastest:

    level 0 (4 servers)   |  0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15 |
    level 1 (4 devices)      \\__level 1__/
                          \\_________________ level 0 (between servers) __________/
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pdtool.artifacts.artifact import STRICT, FrozenModel, YamlArtifact
from pdtool.artifacts.fields import MAX_WORKERS, Count, Label, PositiveBytes, Rate, Seconds, Title
from pdtool.errors import FieldError, UsageError
from pdtool.units import counted

_MAX_LEVELS = 10


@dataclass(frozen=True, kw_only=True)
class Level:
    """`size` members at this level, joined by links of one bandwidth (bytes/s, each direction) and latency (s)."""

    __pydantic_config__ = STRICT

    size: Count
    bandwidth_bytes_per_s: Rate
    latency_s: Seconds = 0.0

    def time_s(self, size_bytes: Any, messages: Any = 1) -> Any:
        """Return the seconds that a link takes; numbers or arrays.

        Args:
            size_bytes: bytes of all messages together.
            messages: number of messages, one after the other; 0: a stream, whose messages overlap.
        """
        return size_bytes / self.bandwidth_bytes_per_s + messages * self.latency_s


Levels = Annotated[tuple[Level, ...], Field(min_length=1, max_length=_MAX_LEVELS)]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Levels, outermost first, and the memory of each device in bytes (None: not limited).

    Planning computes with it. Artifacts contain it, and check it.
    """

    __pydantic_config__ = STRICT

    levels: Levels
    memory_bytes: PositiveBytes | None = None

    @property
    def workers(self) -> int:
        """Number of workers: the product of the level sizes."""
        return math.prod(level.size for level in self.levels)

    @cached_property
    def below(self) -> tuple[int, ...]:
        """Workers in one member of each level."""
        sizes = [level.size for level in self.levels]
        return tuple(math.prod(sizes[depth + 1 :]) for depth in range(len(sizes)))

    def slower(self, factor: float) -> Cluster:
        """Return the cluster with links that take `factor` times as long for each byte."""
        levels = (replace(each, bandwidth_bytes_per_s=each.bandwidth_bytes_per_s / factor) for each in self.levels)
        return replace(self, levels=tuple(levels))

    @property
    def topology(self) -> str:
        """The sizes of the levels, as `4x4`."""
        return "x".join(str(level.size) for level in self.levels)

    def link(self, a: int, b: int) -> Level | None:
        """Return the slowest link on the way from worker `a` to worker `b`; None when they are the same."""
        crossed = (level for level, below in zip(self.levels, self.below, strict=True) if a // below != b // below)
        return min(crossed, key=lambda level: level.bandwidth_bytes_per_s, default=None)


def parse_topology(text: str) -> tuple[int, ...]:
    """Read `4x4` (outermost level first); raises UsageError."""
    if not re.fullmatch(r"[0-9]{1,30}(x[0-9]{1,30}){0,9}", text):
        raise UsageError(f"topology {text!r:.80} is not sizes joined by x", "write 4 or 2x8, the outermost level first")
    sizes = tuple(int(part) for part in text.split("x"))
    if 0 in sizes or math.prod(sizes) > MAX_WORKERS:
        raise UsageError(f"topology {text!r} has {math.prod(sizes)} workers", f"pass between 1 and {MAX_WORKERS}")
    return sizes


def make_cluster(
    sizes: Sequence[int],
    bandwidths: Sequence[float],
    *,
    latencies: Sequence[float] | None = None,
    memory_bytes: int | None = None,
) -> Cluster:
    """Join sizes, bandwidths (bytes/s) and latencies (s) of levels, the outermost first; raises UsageError."""
    latencies = latencies or [0.0] * len(sizes)
    levels = f"topology {'x'.join(map(str, sizes))} has {counted(len(sizes), 'level')}"
    for what, values in (("--bandwidth", bandwidths), ("--latency", latencies)):
        if len(values) != len(sizes):
            remedy = "pass one for each level, the outermost first"
            raise UsageError(f"{what} has {counted(len(values), 'value')}, but {levels}", remedy)
    figures = zip(sizes, bandwidths, latencies, strict=True)
    return Cluster(
        levels=tuple(Level(size=n, bandwidth_bytes_per_s=b, latency_s=t) for n, b, t in figures),
        memory_bytes=memory_bytes,
    )


def check_levels(field: str, levels: Levels) -> int:
    """Return the number of workers; raises FieldError, which names `field`, if there are too many to plan for."""
    workers = math.prod(level.size for level in levels)
    if workers > MAX_WORKERS:
        raise FieldError(field, f"{workers} workers are too many; the limit is {MAX_WORKERS}")
    return workers


class LevelMeasured(FrozenModel):
    """Further measurements at one level, besides its bandwidth and latency, in bytes per second each way.

    Attributes:
        pair_bytes_per_s: one pair of workers alone, both ways at once.
        allreduce_bytes_per_s: rate on a member's link while all its workers all-reduce at once, each with its
            counterparts in the other members; by the ring formula it equals the level's bandwidth.
    """

    pair_bytes_per_s: Rate
    allreduce_bytes_per_s: Rate


class NetworkMeasured(FrozenModel):
    """How the figures were measured: the number of workers, the backend, and the version of torch."""

    workers: Count
    backend: Literal["gloo", "nccl"]
    torch: Label
    levels: tuple[LevelMeasured, ...]


class ClusterFile(YamlArtifact):
    """`cluster.yaml`, written by hand or by `pdtool probe`; read by `pdtool partition --cluster`.

    Attributes:
        levels: outermost first. The bandwidth is that of one member's link to the others of its level, each way; all
            workers inside the member share it.
        memory_bytes: memory of each device; None: no limit.
        measured: absent if the figures were written by hand.
    """

    KIND: ClassVar[str] = "cluster"
    MAKER: ClassVar[str] = "pdtool probe"
    SEALED: ClassVar[bool] = False

    name: Title
    levels: Levels
    memory_bytes: PositiveBytes | None = None
    measured: NetworkMeasured | None = None

    def check(self) -> None:
        workers = check_levels("levels", self.levels)
        if self.measured and self.measured.workers != workers:
            raise FieldError("measured.workers", f"{self.measured.workers}, but the levels have {workers}")
        if self.measured and len(self.measured.levels) != len(self.levels):
            what = f"{len(self.measured.levels)}, but the cluster has {counted(len(self.levels), 'level')}"
            raise FieldError("measured.levels", what)

    def cluster(self) -> Cluster:
        """Return the cluster for planning."""
        return Cluster(levels=self.levels, memory_bytes=self.memory_bytes)
