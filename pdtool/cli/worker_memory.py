"""The memory that each worker may use: what `--memory` gives, or else that of the device that was profiled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdtool.cli.console.terminal import note
from pdtool.errors import UsageError
from pdtool.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from pdtool.artifacts.cluster import Cluster
    from pdtool.artifacts.profile import Profile

NO_LIMIT = "none"  # what --memory takes besides a size


def with_worker_memory(cluster: Cluster, profile: Profile, given: str | None) -> Cluster:
    """Return the cluster with the memory that the tensors of one worker can have, and tell where the figure is from.

    Args:
        given: of `--memory`, a size or NO_LIMIT; None: that of the cluster's file, or else of the profiled device.

    Raises:
        UsageError: the size cannot be read, or the reserve of a GPU leaves nothing of it.
    """
    if given == NO_LIMIT:
        return replace(cluster, memory_bytes=None)
    if given:
        memory_bytes: int | None = parse_bytes(given)
    else:
        memory_bytes = cluster.memory_bytes or _profiled_bytes(cluster, profile)
    if memory_bytes is not None and profile.reserved_bytes:
        memory_bytes = _less_reserve(memory_bytes, profile.reserved_bytes)
    return replace(cluster, memory_bytes=memory_bytes)


def _profiled_bytes(cluster: Cluster, profile: Profile) -> int | None:
    """Return the memory of the profiled device, or a worker's share of the memory of a machine whose CPU was profiled.

    The workers of one member of the innermost level are taken to be on one machine, so a single level is one machine.
    """
    device = profile.device
    if device.memory_bytes is None:
        note("no --memory given, and the profile does not say how much its device has: planning without a limit")
        return None
    remedy = f"(--memory {NO_LIMIT}: no limit)"
    if not profile.is_measured_on_cpu:
        note(f"no --memory given: planning for the {format_bytes(device.memory_bytes)} of {device.name} {remedy}")
        return device.memory_bytes
    sharing = cluster.levels[-1].size
    share_bytes = max(1, device.memory_bytes // sharing)
    of_all = f", the machine's {format_bytes(device.memory_bytes)} shared by {sharing}" if sharing > 1 else ""
    note(f"no --memory given: planning for {format_bytes(share_bytes)} a worker{of_all} {remedy}")
    return share_bytes


def _less_reserve(memory_bytes: int, reserved_bytes: int) -> int:
    """Subtract what no tensor gets; raises UsageError where nothing is left."""
    whole, reserved = format_bytes(memory_bytes), format_bytes(reserved_bytes)
    purpose = "CUDA's context, communicators and workspaces"
    if memory_bytes <= reserved_bytes:
        raise UsageError(f"{whole} of memory, of which {reserved} are for {purpose}", "give the memory of a device")
    note(f"of {whole} of memory {reserved} are left for {purpose}")
    return memory_bytes - reserved_bytes
