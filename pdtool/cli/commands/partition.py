"""`partition`: plan a profile for a cluster, profiles/NAME.json -> plans/NAME-4x4.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdtool.cli import options
from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.output import write_artifact
from pdtool.cli.console.terminal import note
from pdtool.cli.worker_memory import with_worker_memory
from pdtool.errors import ArtifactError, UsageError
from pdtool.schedule import SCHEDULES, STRATEGIES

if TYPE_CHECKING:
    from pdtool.artifacts.cluster import Cluster
    from pdtool.artifacts.plan import Plan

_OUTER_BANDWIDTH, _INNER_BANDWIDTH = "10Gbit/s", "12GB/s"  # a common network card; PCI Express 3.0 x16


@command(
    epilog="\b\nExamples:\n  pdtool partition --topology 3\n"
    "  pdtool partition profiles/vgg16.json --topology 4x4 --bandwidth 10Gbit/s,12GB/s --memory 16GB"
)
@click.argument("profile", required=False)
@options.topology(required=False)
@click.option("--cluster", metavar="FILE", help="The same and all bandwidths, as `pdtool probe` writes them.")
@click.option(
    "--bandwidth",
    metavar="RATE,...",
    show_default=f"{_OUTER_BANDWIDTH} outside, {_INNER_BANDWIDTH} at inner levels",
    help="Each way, of one link per level in bit/s or B/s, the outermost first, as 10Gbit/s,12GB/s.",
)
@click.option("--latency", metavar="TIME,...", show_default="0s", help="Of one message per level, as 50us,5us.")
@click.option(
    "--memory",
    metavar="SIZE",
    show_default="that of the device profiled",
    help="Of each device, as 16GB or 16GiB; none: no limit.",
)
@options.count("--workers", help="Number of workers to use.", unset="all of the topology")
@click.option(
    "--replicas",
    callback=lambda ctx, parameter, text: _replicas(text),
    metavar="R-R-R",
    show_default="whatever is fastest",
    help="Workers of each stage, as 15-1: find where to cut the model into exactly these stages.",
)
@options.choice(
    "--strategy",
    choices=tuple(STRATEGIES),
    help="The fastest plan of any kind (auto), or the best of one kind, to compare it with.",
)
@click.option("--straight", is_flag=True, help="The same as --strategy straight.")
@options.schedule([*SCHEDULES, "auto"], unset="1f1b, or what --strategy has")
@options.microbatches("4 with a flushing --schedule, as many as workers with --strategy gpipe")
@options.count(
    "--global-batch-size",
    help="Samples in one update: the same as --microbatches, times the profiled minibatch; with 1f1b-flush unless "
    "another flushing --schedule is given.",
    unset="what --microbatches makes",
)
@options.count(
    "--chunks", help="Stages on each worker with --schedule interleaved.", default=2, within=click.IntRange(2, 100)
)
@click.option("--recompute/--no-recompute", default=True, help="Let stages that lack memory run their forward twice.")
@options.choice(
    "--cost",
    "cost_model",
    choices=("ours", "pipedream", "pipedream-free"),
    help="Whose formulas; those of PipeDream's optimizer, with or without the traffic of activations, to compare.",
)
@click.option(
    "--simplest",
    default="3%",
    callback=lambda ctx, parameter, text: _share(text),
    metavar="SHARE",
    help="Prefer fewer stages, and borders between modules, as long as the plan is at most this much slower than the "
    "fastest.",
)
@options.count(
    "--cuts",
    "max_cuts",
    help="Places to cut a branchy graph that are searched at most; more take longer (the square) and miss less.",
    default=1200,
    within=click.IntRange(100, 100_000),
)
@options.as_json
@options.output("File to write; - is stdout.  [default: plans/NAME-TOPOLOGY.yaml]")
def partition(profile: str | None, output: str | None, as_json: bool, **settings: Any) -> None:
    """Divide PROFILE's model into stages for the fastest pipeline."""
    from pdtool.cli.console.plan_view import plan_view

    plan = plan_for(options.candidate("profile", profile), **settings)
    path = output or f"plans/{options.file_name(plan.name)}.yaml"
    keep_edits(path)
    write_artifact(plan, path, as_json=as_json, view=plan_view(plan))


def plan_for(
    path: str, *, strategy: str, straight: bool, memory: str | None, global_batch_size: int | None, **settings: Any
) -> Plan:
    """Plan the profile in `path` (`-` is stdin), with the values of the command's options.

    Raises:
        UsageError: the options make no sense together or on this cluster.
        ArtifactError: the profile or the cluster's file cannot be read.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    from pdtool.artifacts.profile import Profile
    from pdtool.cli.inputs import path_of_profile
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
