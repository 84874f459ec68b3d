"""`probe`: measure the network between the workers, -> cluster.yaml."""

from __future__ import annotations

import click

from pdtool.cli import options
from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.output import write_artifact
from pdtool.cli.console.terminal import note, status


@command(
    epilog="\b\nExamples:\n  pdtool probe --topology 4 -o cluster.yaml\n"
    "  pdtool probe --topology 2x4 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29511 -o cluster.yaml"
)
@options.topology(required=True)
@options.output("File to write; - is stdout, the default.")
@click.option("--name", metavar="NAME", show_default="the topology", help="Name of the cluster.")
@options.device("Where the tensors are; auto is cuda where every worker has a CUDA device.")
@options.timeout("60s")
@options.machines
@options.as_json
def probe(
    topology: str,
    output: str | None,
    name: str | None,
    device: str,
    timeout: str,
    nnodes: int,
    node_rank: int,
    rdzv_endpoint: str,
    as_json: bool,
) -> None:
    """Measure the network between the workers of a launch.

    Starts one process per worker of this machine; on several machines, start it on each. Per level: what a member's
    link carries with all its workers sending and receiving at once, one pair alone, a small message, an all-reduce.
    """
    from pdtool.artifacts.artifact import title
    from pdtool.artifacts.cluster import parse_topology
    from pdtool.cli.console.cluster_view import cluster_view
    from pdtool.units import parse_seconds

    sizes, timeout_s = parse_topology(topology), parse_seconds(timeout)
    from pdtool.machines import Machines
    from pdtool.profiler.probe import ProbeRequest
    from pdtool.profiler.probe_launcher import probe

    request = ProbeRequest(name=title(name or topology), sizes=sizes, device=device, timeout_s=timeout_s)
    with status("starting the workers") as step:
        cluster = probe(request, Machines(nnodes, node_rank, rdzv_endpoint), step, note)
    if cluster is None:
        note("measured; the first machine has the figures")
        return
    write_artifact(cluster, output or "-", as_json=as_json, view=cluster_view(cluster))
