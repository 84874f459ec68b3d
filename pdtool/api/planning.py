"""The memory that each worker may use: what `--memory` gives, or else that of the device that was profiled."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdtool.cli.terminal import note
from pdtool.errors import ArtifactError, UsageError
from pdtool.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from pdtool.artifacts.cluster import Cluster
    from pdtool.artifacts.plan import Plan
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


_OUTER_BANDWIDTH, _INNER_BANDWIDTH = "10Gbit/s", "12GB/s"  # a common network card; PCI Express 3.0 x16


def plan_for(
    path: str, *, strategy: str, straight: bool, memory: str | None, global_batch_size: int | None, **settings: Any
) -> Plan:
    """Plan the profile in `path` (`-` is stdin), with the values of the command's options.

    Raises:
        UsageError: the options make no sense together or on this cluster.
        ArtifactError: the profile or the cluster's file cannot be read.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    from pdtool.api.inputs import path_of_profile
    from pdtool.artifacts.profile import Profile
    from pdtool.planner.choice.make_plan import make_plan
    from pdtool.planner.choice.strategies import of_global_batch_size, strategy_options

    cluster = _cluster(*(settings.pop(name) for name in ("cluster", "topology", "bandwidth", "latency")))
    if straight and strategy not in ("auto", "straight"):
        raise UsageError(f"--straight together with --strategy {strategy}", "give one of them")
    strategy = "straight" if straight else strategy
    profiled = Profile.load(path, may_be_pipe=True)
    if global_batch_size:
        settings |= of_global_batch_size(global_batch_size, profiled.batch_size, strategy, **settings)
    search_options = strategy_options(strategy, cluster, **settings)
    cluster = with_worker_memory(cluster, profiled, memory)
    return make_plan(profiled, path_of_profile(profiled, path), cluster, search_options)


def keep_edits(path: str) -> None:
    """Raise UsageError where a plan that someone has edited, or written comments into, would be overwritten."""
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.text_formats import has_comments
    from pdtool.files import read_text

    if path == "-" or not Path(path).is_file():
        return
    try:
        text = read_text(path)
        was_edited = Plan.parse(text, path).edited or has_comments(text)
    except ArtifactError:  # another file, which is refused, or one that nobody can use
        return
    if was_edited:
        raise UsageError(f"{path} was edited by hand, and would be overwritten", "give another -o, or delete it first")


def _cluster(file: str | None, topology: str | None, bandwidth: str | None, latency: str | None) -> Cluster:
    """Read the cluster from `file`, or make it of the figures given; raises UsageError for both and for neither."""
    from pdtool.artifacts.cluster import ClusterFile, make_cluster, parse_topology
    from pdtool.units import parse_bandwidth, parse_seconds

    if file:
        if figures := topology or bandwidth or latency:
            raise UsageError(f"--cluster {file} together with {figures!r}", "give the file or the figures, not both")
        return ClusterFile.load(file, may_be_pipe=True).cluster()
    if topology is None:
        raise UsageError("no cluster is given", "give --topology 4x4, or --cluster cluster.yaml from `pdtool probe`")
    sizes = parse_topology(topology)
    if bandwidth is None:
        bandwidth = ",".join([_OUTER_BANDWIDTH, *[_INNER_BANDWIDTH] * (len(sizes) - 1)])
        note(f"no --bandwidth given: assuming {bandwidth}")
    bandwidths = [parse_bandwidth(text) for text in bandwidth.split(",")]
    latencies = [parse_seconds(text) for text in latency.split(",")] if latency else None
    return make_cluster(sizes, bandwidths, latencies=latencies)


def _replicas(text: str | None) -> tuple[int, ...] | None:
    """Read `15-1`; raises UsageError."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,17}(-[1-9][0-9]{0,17})*", text):  # the cluster is the limit, or the digits are
        raise UsageError(
            f"--replicas {text!r:.80} is no number of workers for each stage", "write 15-1 for 15 workers and then one"
        )
    return tuple(map(int, text.split("-")))


def _share(text: str) -> float:
    """Read `3%` or `0.03`; raises UsageError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"--simplest {text!r} is not a share below 100%", "write 3% or 0.03")
    return value
