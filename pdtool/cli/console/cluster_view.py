"""Clusters: their levels as a table, with what `pdtool probe` measured at each."""

from __future__ import annotations

from pdtool.artifacts.cluster import ClusterFile
from pdtool.cli.console.table import Lines, table
from pdtool.units import format_bytes, format_rate, format_seconds


def cluster_view(cluster: ClusterFile) -> Lines:
    """List the levels, outermost first."""
    columns = ["level", "size", "bandwidth", "latency"]
    rows: list[list[object]] = [
        [depth, level.size, format_rate(level.bandwidth_bytes_per_s), format_seconds(level.latency_s)]
        for depth, level in enumerate(cluster.levels)
    ]
    title = f"{cluster.name}: {cluster.cluster().workers} workers"
    if cluster.memory_bytes:
        title += f" of {format_bytes(cluster.memory_bytes)}"
    if network := cluster.measured:
        title += f", measured over {network.backend} (torch {network.torch})"
        columns += ["one pair alone", "all-reduce", "of the ring formula"]
        for row, level, measured in zip(rows, cluster.levels, network.levels, strict=True):
            share = measured.allreduce_bytes_per_s / level.bandwidth_bytes_per_s
            row += [*map(format_rate, (measured.pair_bytes_per_s, measured.allreduce_bytes_per_s)), f"{share:.0%}"]
    yield table(columns, rows, title=title, drop=("of the ring formula", "one pair alone"))
    yield "bandwidth: of one member's link to the others of its level, each way at once, shared by its workers"
