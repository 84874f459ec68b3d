"""The process groups of a run. Every worker makes all of them, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.run.peers import Blame, gather
from pdtool.run.spec import Place
from pdtool.run.wiring import Hop


@dataclass(frozen=True)
class Groups:
    """Handles of torch.distributed process groups.

    Attributes:
        world: everyone, gloo: facts, metrics, checkpoints.
        replicas: per stage, its replicas (None when there is one).
        tied: per tied parameter of the bundle, all replicas of all stages that hold it; gloo.
        nccl: whether tensors can go from device to device; otherwise through CPU memory.
    """

    world: Any
    replicas: list[Any]
    tied: list[Any]
    nccl: bool


def ranks_of(places: Sequence[Place], stage: int) -> list[int]:
    """The ranks of a stage's replicas, in order of the replicas."""
    return [p.rank for p in sorted(places, key=lambda p: p.replica) if p.stage == stage]


def make_groups(
    plan: Plan, bundle: Bundle, places: Sequence[Place], device: torch.device, timeout_s: float, local_workers: int
) -> Groups:
    """Make all groups but those of the hops; raises PeerError when a worker does not come."""
    with Blame("the process groups were not made"):
        return _make(plan, bundle, places, device, timedelta(seconds=timeout_s), local_workers)


def make_lanes(hops: Sequence[Hop], timeout_s: float, *, nccl: bool) -> dict[int, Any]:
    """The group of each of these hops, by its number.

    gloo has one for each direction, since two ranks that send to each other on one group do it in turns. NCCL, whose
    messages have no names, has one for each hop.
    """
    timeout = timedelta(seconds=timeout_s)
    with Blame("the process groups between stages were not made"):
        if nccl:
            return {
                hop.number: dist.new_group(sorted((hop.sender, hop.receiver)), timeout=timeout, backend="nccl")
                for hop in hops
            }
        lanes = {lane: dist.new_group(timeout=timeout, backend="gloo") for lane in sorted({hop.lane for hop in hops})}
    return {hop.number: lanes[hop.lane] for hop in hops}


def _make(
    plan: Plan, bundle: Bundle, places: Sequence[Place], device: torch.device, timeout: timedelta, local_workers: int
) -> Groups:
    everyone = [place.rank for place in places]
    world = dist.new_group(everyone, timeout=timeout, backend="gloo")
    own_device = device.type == "cuda" and dist.is_nccl_available() and torch.cuda.device_count() >= local_workers
    nccl = all(gather(own_device, world, "the choice of NCCL or gloo"))
    backend = "nccl" if nccl else "gloo"
    stages = range(len(plan.stages))
    members = [ranks_of(places, s % plan.pipeline_depth) for s in stages]
    replicas = [dist.new_group(m, timeout=timeout, backend=backend) if len(m) > 1 else None for m in members]
    tied = [
        dist.new_group(sorted(r for s in t.stages for r in members[s]), timeout=timeout, backend="gloo")
        for t in bundle.tied
    ]
    return Groups(world, replicas, tied, nccl)
