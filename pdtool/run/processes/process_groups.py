"""The process groups of a run. Every worker makes all of them, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pdtool.run.config import RunConfig, assign_ranks, ranks_of_stage
from pdtool.run.processes.collectives import PeerErrorContext, all_gather


@dataclass(frozen=True)
class ReplicaGroup:
    """The replicas of one stage.

    Attributes:
        ranks: in the order of the replicas.
        group: their process group, for gradients and buffers; None for one replica.
        host_group: their gloo group, for numbers that the host needs without waiting for its device.
        device: where `group` takes tensors.
        uses_nccl: whether `group` is one of NCCL, else of gloo.
    """

    stage: int
    ranks: list[int]
    group: Any
    host_group: Any
    device: torch.device
    uses_nccl: bool = False


@dataclass(frozen=True)
class ProcessGroups:
    """Handles of torch.distributed process groups.

    Attributes:
        world: all workers, gloo; for metadata, metrics and checkpoints.
        replicas: of each stage.
        tied: of each tied parameter of the bundle, all replicas of all stages that hold it; gloo.
        device: where this worker's tensors are.
        uses_nccl: whether tensors can go from device to device; otherwise they go through CPU memory.
    """

    world: Any
    replicas: list[ReplicaGroup]
    tied: list[Any]
    device: torch.device
    uses_nccl: bool


def make_process_groups(config: RunConfig, device: torch.device) -> ProcessGroups:
    """Make all groups but those of routes (messages/distributed.py).

    Args:
        device: where this worker computes.

    Raises:
        PeerError: a worker does not come.
    """
    plan, timeout = config.plan, timedelta(seconds=config.timeout_s)
    assignments = assign_ranks(plan)
    with PeerErrorContext("the process groups were not made"):
        world = dist.new_group([a.rank for a in assignments], timeout=timeout, backend="gloo")
        uses_nccl = have_own_devices(all_gather(_nccl_device(device), world, "the choice of NCCL or gloo"))
        sum_device = device if uses_nccl else torch.device("cpu")
        members = [ranks_of_stage(assignments, s % plan.pipeline_depth) for s in range(len(plan.stages))]
        host = [dist.new_group(m, timeout=timeout, backend="gloo") if len(m) > 1 else None for m in members]
        groups = [_nccl_group(m, timeout, device) if len(m) > 1 else None for m in members] if uses_nccl else host
        replicas = [ReplicaGroup(s, members[s], groups[s], host[s], sum_device, uses_nccl) for s in range(len(members))]
        tied = [
            dist.new_group(sorted(r for s in t.stages for r in members[s]), timeout=timeout, backend="gloo")
            for t in config.bundle.tied
        ]
    return ProcessGroups(world, replicas, tied, device, uses_nccl)


def have_own_devices(names: Sequence[str]) -> bool:
    """Whether every worker has a GPU of its own, which NCCL asks for.

    Args:
        names: of each worker's GPU, the same for the same one however it is numbered; "" without one.
    """
    return all(names) and len(set(names)) == len(names)


def _nccl_device(device: torch.device) -> str:
    """The UUID of this worker's GPU; "" if it has none, or NCCL is missing."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _nccl_group(ranks: list[int], timeout: timedelta, device: torch.device) -> Any:
    """NCCL's group of a stage's replicas.

    It is used once, since the first operation makes the hosts of all members wait for each other.
    """
    group = dist.new_group(ranks, timeout=timeout, backend="nccl", device_id=device)
    if dist.get_rank() in ranks:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.zeros(1, device=device).item()
    return group
