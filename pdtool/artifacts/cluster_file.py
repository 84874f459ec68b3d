"""The artifact ClusterFile: the workers, the links between them, and what `pdtool probe` measured on those."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pdtool.artifacts.envelope import FrozenModel, YamlArtifact
from pdtool.artifacts.fields import Count, Label, PositiveBytes, Rate, Seconds, Title
from pdtool.cluster import MAX_WORKERS, Cluster, Level
from pdtool.errors import FieldError

_MAX_LEVELS = 10


class LevelSpec(FrozenModel):
    """One level of the cluster: its members, bytes per second each way, seconds of latency."""

    size: Count
    bandwidth_bytes_per_s: Rate
    latency_s: Seconds = 0.0


Levels = Annotated[tuple[LevelSpec, ...], Field(min_length=1, max_length=_MAX_LEVELS)]


def check_levels(field: str, levels: Levels) -> int:
    """Return the number of workers; raises FieldError, which names `field`, when these are too many to plan for."""
    workers = math.prod(level.size for level in levels)
    if workers > MAX_WORKERS:
        raise FieldError(field, f"{workers} workers: at most {MAX_WORKERS}")
    return workers


class ClusterSpec(FrozenModel):
    """The cluster that a plan is made for; levels outermost first."""

    levels: Levels
    memory_bytes: PositiveBytes | None = None

    def cluster(self) -> Cluster:
        """Return the value that planning computes with."""
        levels = tuple(Level(**level.model_dump()) for level in self.levels)
        return Cluster(levels=levels, memory_bytes=self.memory_bytes)

    @classmethod
    def of(cls, value: Cluster) -> ClusterSpec:
        """Make the artifact of a value that planning computes with."""
        levels = tuple(LevelSpec(**asdict(level)) for level in value.levels)
        return cls(levels=levels, memory_bytes=value.memory_bytes)


class LevelMeasured(FrozenModel):
    """What was measured at one level besides its bandwidth and latency, in bytes per second each way.

    Attributes:
        pair_bytes_per_s: one pair of workers alone, both ways at once.
        allreduce_bytes_per_s: what a member's link carries while its workers all-reduce, each with its counterparts in
            the other members, all at once; by the ring formula it equals the level's bandwidth.
    """

    pair_bytes_per_s: Rate
    allreduce_bytes_per_s: Rate


class NetworkMeasured(FrozenModel):
    """How the figures were measured: with how many workers, over which backend of which torch version."""

    workers: Count
    backend: Literal["gloo", "nccl"]
    torch: Label
    levels: tuple[LevelMeasured, ...]


class ClusterFile(YamlArtifact):
    """`cluster.yaml`, written by hand or by `pdtool probe`; read by `pdtool partition --cluster`.

    Attributes:
        levels: outermost first. The bandwidth is that of one member's link to the others of its level, shared by all
            workers inside it, each way.
        memory_bytes: of each device; None: not limited.
        measured: absent when the figures were written by hand.
    """

    KIND: ClassVar[str] = "cluster"
    MAKER: ClassVar[str] = "pdtool probe"
    SEALED: ClassVar[bool] = False

    format: Literal["pdtool/cluster/1"] = "pdtool/cluster/1"
    name: Title
    levels: Levels
    memory_bytes: PositiveBytes | None = None
    measured: NetworkMeasured | None = None

    def check(self) -> None:
        workers = check_levels("levels", self.levels)
        if self.measured and self.measured.workers != workers:
            raise FieldError("measured.workers", f"{self.measured.workers}, but the levels have {workers}")
        if self.measured and len(self.measured.levels) != len(self.levels):
            raise FieldError("measured.levels", f"{len(self.measured.levels)} of them for {len(self.levels)} level(s)")

    def cluster(self) -> Cluster:
        """Return the value that planning computes with."""
        return ClusterSpec(levels=self.levels, memory_bytes=self.memory_bytes).cluster()
