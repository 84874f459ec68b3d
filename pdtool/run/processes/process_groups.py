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
class ProcessGroups:
    """Handles of torch.distributed process groups.

    Attributes:
        world: all workers, gloo; for facts, metrics and checkpoints.
        replicas: of each stage, its replicas; None when there is one.
        tied: of each tied parameter of the bundle, all replicas of all stages that hold it; gloo.
        uses_nccl: whether tensors can go from device to device; otherwise they go through CPU memory.
    """

    world: Any
    replicas: list[Any]
    tied: list[Any]
    uses_nccl: bool


def make_process_groups(config: RunConfig, device: torch.device, local_workers: int) -> ProcessGroups:
    """Make all groups but those of routes (messages/distributed.py).

    Args:
        device: where this worker computes.
        local_workers: number of workers on this machine.

    Raises:
        PeerError: a worker does not come.
    """
    with PeerErrorContext("the process groups were not made"):
        return _make(config, device, local_workers)


def _make(config: RunConfig, device: torch.device, local_workers: int) -> ProcessGroups:
    plan, timeout = config.plan, timedelta(seconds=config.timeout_s)
    assignments = assign_ranks(plan)
    world = dist.new_group([a.rank for a in assignments], timeout=timeout, backend="gloo")
    has_own_device = device.type == "cuda" and dist.is_nccl_available() and torch.cuda.device_count() >= local_workers
    uses_nccl = all(all_gather(has_own_device, world, "the choice of NCCL or gloo"))
    backend = "nccl" if uses_nccl else "gloo"
    members = [ranks_of_stage(assignments, s % plan.pipeline_depth) for s in range(len(plan.stages))]
    replicas = [dist.new_group(m, timeout=timeout, backend=backend) if len(m) > 1 else None for m in members]
    tied = [
        dist.new_group(sorted(r for s in t.stages for r in members[s]), timeout=timeout, backend="gloo")
        for t in config.bundle.tied
    ]
    return ProcessGroups(world, replicas, tied, uses_nccl)
