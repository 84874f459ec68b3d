"""The process groups of a run. Every worker makes all of them, in the same order."""

from __future__ import annotations

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
        group: their process group; None for one replica.
        device: where numbers are summed.
    """

    stage: int
    ranks: list[int]
    group: Any
    device: torch.device


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


def make_process_groups(config: RunConfig, device: torch.device, local_workers: int) -> ProcessGroups:
    """Make all groups but those of routes (messages/distributed.py).

    Args:
        device: where this worker computes.
        local_workers: number of workers on this machine.

    Raises:
        PeerError: a worker does not come.
    """
    plan, timeout = config.plan, timedelta(seconds=config.timeout_s)
    assignments = assign_ranks(plan)
    with PeerErrorContext("the process groups were not made"):
        world = dist.new_group([a.rank for a in assignments], timeout=timeout, backend="gloo")
        has_devices = device.type == "cuda" and torch.cuda.device_count() >= local_workers
        uses_nccl = all(all_gather(has_devices and dist.is_nccl_available(), world, "the choice of NCCL or gloo"))
        backend = "nccl" if uses_nccl else "gloo"
        sum_device = device if uses_nccl else torch.device("cpu")
        members = [ranks_of_stage(assignments, s % plan.pipeline_depth) for s in range(len(plan.stages))]
        groups = [dist.new_group(m, timeout=timeout, backend=backend) if len(m) > 1 else None for m in members]
        replicas = [ReplicaGroup(s, members[s], group, sum_device) for s, group in enumerate(groups)]
        tied = [
            dist.new_group(sorted(r for s in t.stages for r in members[s]), timeout=timeout, backend="gloo")
            for t in config.bundle.tied
        ]
    return ProcessGroups(world, replicas, tied, device, uses_nccl)
