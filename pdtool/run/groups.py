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
from pdtool.run.wiring import Wire


@dataclass(frozen=True)
class Groups:
    """Handles of torch.distributed process groups.

    Attributes:
        world: everyone, gloo: facts, metrics, checkpoints.
        replicas: per stage, its replicas (None when there is one).
        tied: per tied parameter of the bundle, all replicas of all stages that hold it; gloo.
        nccl: whether tensors go from device to device; otherwise gloo carries them through CPU memory.
        lanes: "forward" and "backward" -> group of (sender, receiver); gloo has one for all.
    """

    world: Any
    replicas: list[Any]
    tied: list[Any]
    nccl: bool
    lanes: dict[str, dict[tuple[int, int], Any] | Any]

    def lane(self, name: str, sender: int, receiver: int) -> Any:
        """The group for messages in one direction."""
        return self.lanes[name][sender, receiver] if self.nccl else self.lanes[name]


def ranks_of(places: Sequence[Place], stage: int) -> list[int]:
    """The ranks of a stage's replicas, in order of the replicas."""
    return [p.rank for p in sorted(places, key=lambda p: p.replica) if p.stage == stage]


def make_groups(
    plan: Plan, bundle: Bundle, places: Sequence[Place], wires: Sequence[Wire], device: torch.device,
    timeout_s: float, local_workers: int,
) -> Groups:  # fmt: skip
    """Make all groups; raises PeerError when a worker does not come."""
    with Blame("the process groups were not made"):
        return _make(plan, bundle, places, wires, device, timedelta(seconds=timeout_s), local_workers)


def _make(
    plan: Plan, bundle: Bundle, places: Sequence[Place], wires: Sequence[Wire], device: torch.device,
    timeout: timedelta, local_workers: int,
) -> Groups:  # fmt: skip
    everyone = [place.rank for place in places]
    world = dist.new_group(everyone, timeout=timeout, backend="gloo")
    own_device = device.type == "cuda" and dist.is_nccl_available() and torch.cuda.device_count() >= local_workers
    nccl = all(gather(own_device, world, "the choice of NCCL or gloo"))
    backend = "nccl" if nccl else "gloo"
    stages = range(len(plan.stages))
    members = [ranks_of(places, s % plan.places) for s in stages]
    replicas = [dist.new_group(m, timeout=timeout, backend=backend) if len(m) > 1 else None for m in members]
    tied = [
        dist.new_group(sorted(r for s in t.stages for r in members[s]), timeout=timeout, backend="gloo")
        for t in bundle.tied
    ]
    lanes: dict[str, Any] = {}
    for name in ("forward", "backward"):
        if not nccl:
            lanes[name] = dist.new_group(everyone, timeout=timeout, backend="gloo")
            continue
        pairs = sorted({(a, b) for w in wires for a in members[w.source] for b in members[w.destination]})
        pairs = pairs if name == "forward" else [(b, a) for a, b in pairs]
        lanes[name] = {pair: dist.new_group(sorted(pair), timeout=timeout, backend="nccl") for pair in pairs}
    return Groups(world, replicas, tied, nccl, lanes)
