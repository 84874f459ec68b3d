"""Clusters and devices: `probe` measures a network, `devices` lists data sheets, `import` reads published profiles."""

from __future__ import annotations

from pathlib import Path

import click

from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_json, show, status, write_artifact
from pdtool.options.plan_options import PartitionOptions, ProfileOptions
from pdtool.options.run_options import LaunchOptions, RunOptions
from pdtool.options.values import Count, Text, timeout


@command(epilog="\b\nExamples:\n  pdtool devices\n  pdtool devices h100 --json")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@options.as_json
def devices(names: tuple[str, ...], as_json: bool) -> None:
    """Print the devices that `profile --device` estimates for.

    Prints the memory and rates of each, and the data sheet that they come from. NAME is a device of the table, or your
    own YAML file.
    """
    from pdtool.artifacts.device import TABLE, Devices, find_device
    from pdtool.cli.artifact_views import devices_view

    table = Devices.load(TABLE)
    if names:
        table = Devices(devices={_key(name): find_device(name) for name in names})
    if as_json:
        print_json(table)
    else:
        show(*devices_view(table), err=False)


def _key(name: str) -> str:
    """Return `lab` for the user's file `lab.yaml`; names of the table stay unchanged."""
    return Path(name).stem.lower().replace("_", "-")


@command(
    "import",
    epilog="\b\nExamples:\n  pdtool import vgg16.graph.txt\n"
    "  pdtool import profiles/gnmt/graph.txt --name gnmt8 --batch-size 32 -o -",
)
@click.argument("graph")
@options.output_file("File to write; - is stdout.  [default: profiles/NAME.json]")
@options.option_of(
    ProfileOptions,
    "batch_size",
    value=Count(unset="from the sizes in GRAPH, or else 128"),
    help="Samples in the measured minibatch.",
)
@options.option("--name", metavar="NAME", show_default="that of the file or its folder", help="Name of the profile.")
@options.as_json
def import_(graph: str, output: str | None, batch_size: int | None, name: str | None, as_json: bool) -> None:
    """Convert PipeDream's published GRAPH into a profile.

    GRAPH is a graph.txt; - is stdin. It comes without a model: you can plan with it, but not run the plan.
    """
    from pdtool.api.inputs import file_name
    from pdtool.cli.artifact_views import profile_table
    from pdtool.files import read_text
    from pdtool.profiler.pipedream_import import read_pipedream_profile

    text = read_text(graph, "name a graph.txt of PipeDream's profiler", may_be_pipe=True)
    path = "stdin" if graph == "-" else graph
    profile, batch_source = read_pipedream_profile(text, path, name=name or _name(graph), batch_size=batch_size)
    lines = ["the file has no optimizer times. Of what is saved for the backward, it has only the operators' outputs"]
    if batch_source:
        lines.insert(0, f"minibatch of {profile.batch_size}, {batch_source}; name another with --batch-size")
    path = output or f"profiles/{file_name(profile.name)}.json"
    write_artifact(profile, path, as_json=as_json, view=[profile_table(profile, largest=12), *lines])


def _name(path: str) -> str:
    """Return `vgg16` for vgg16.graph.txt and for vgg16/graph.txt."""
    if path == "-":
        return "imported"
    stem = Path(path).name.removesuffix(".txt").removesuffix("graph").rstrip(".")
    return stem or Path(path).resolve().parent.name or "imported"


@command(
    epilog="\b\nExamples:\n  pdtool probe --topology 4 -o cluster.yaml\n"
    "  pdtool probe --topology 2x4 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29511 -o cluster.yaml"
)
@options.option_of(PartitionOptions, "topology", required=True)
@options.output_file("File to write; - is stdout.  [default: -]")
@options.option("--name", metavar="NAME", show_default="the topology", help="Name of the cluster.")
@options.option_of(RunOptions, "device", help="Device of the tensors. auto is cuda if every worker has a CUDA device.")
@options.option_of(RunOptions, "timeout_s", value=Text(timeout, default="60s"))
@options.options_of(LaunchOptions)
@options.as_json
def probe(
    topology: str,
    output: str | None,
    name: str | None,
    device: str,
    timeout_s: float,
    asked: LaunchOptions,
    as_json: bool,
) -> None:
    """Measure the network between workers.

    Starts one process per worker of this machine. On several machines, start it on each. At each level it measures four
    things: the bandwidth of a server's or worker's link while all its workers send and receive, the bandwidth of one
    pair of workers alone, the latency of a small message, and an all-reduce.
    """
    from pdtool.artifacts.artifact import title
    from pdtool.artifacts.cluster import ClusterFile, parse_topology
    from pdtool.cli.artifact_views import cluster_view

    if output and output != "-" and asked.node_rank == 0:
        ClusterFile.check_target(Path(output))  # now, not after measuring
    sizes = parse_topology(topology)  # before torch is imported
    from pdtool.profiler.probe import ProbeRequest, probe

    request = ProbeRequest(name=title(name or topology), sizes=sizes, device=device, timeout_s=timeout_s)
    with status("starting the workers") as step:
        cluster = probe(request, asked.machines, step, note)
    if cluster is None:
        note("done; machine 0 writes the results")
        return
    write_artifact(cluster, output or "-", as_json=as_json, view=cluster_view(cluster))
