"""`show`: any artifact, as tables or as a graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdtool.cli import options
from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console import terminal
from pdtool.cli.console.output import print_json
from pdtool.errors import UsageError, with_article

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import Artifact
    from pdtool.cli.console.table import Lines

_GRAPH_WIDTH = 1200  # pixels


@command(
    epilog="\b\nExamples:\n  pdtool show runs/digits-3 --json\n  pdtool show plans/digits-3.yaml --graph -o graph.svg"
)
@click.argument("file")
@click.option("--graph", is_flag=True, help="Draw a plan's operators and stages instead.")
@options.output("With --graph, FILE.svg: a drawing of the modules; any other: all operators in DOT, for Graphviz.")
@options.as_json
def show(file: str, graph: bool, output: str | None, as_json: bool) -> None:
    """Print FILE, any artifact or its folder, for people.

    The figures of a plan that was edited by hand are computed for what it says now. One that cannot be executed is not
    shown, and the exit code is 3.
    """
    from pdtool.artifacts import load_any
    from pdtool.cli.plans.edited_plan import as_it_is

    if output and not graph:
        raise UsageError(f"-o {output} without --graph", "redirect the output, or add --graph")
    artifact = load_any(file)
    if graph:
        _draw_graph(artifact, file, output)
        return
    artifact, fault = as_it_is(artifact, file)
    if as_json:
        print_json(artifact)
    else:
        terminal.show(*_view(artifact, _folder_of(file)), err=False)
    if fault:
        raise fault


def _folder_of(file: str) -> Path | None:
    """The folder that an artifact stands in; None for stdin."""
    return None if file == "-" else Path(file) if Path(file).is_dir() else Path(file).parent


def _view(artifact: Artifact, folder: Path | None = None) -> Lines:
    from pdtool.artifacts.bundle import Bundle
    from pdtool.artifacts.cluster import ClusterFile
    from pdtool.artifacts.device import Devices
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile
    from pdtool.artifacts.report import Emulation, Report
    from pdtool.artifacts.run_dir import CheckpointManifest, RunState
    from pdtool.cli.console.bundle_view import bundle_view
    from pdtool.cli.console.cluster_view import cluster_view
    from pdtool.cli.console.plan_view import plan_view, timeline
    from pdtool.cli.console.profile_view import devices_view, profile_table
    from pdtool.cli.console.report_view import checkpoint_view, emulation_view, report_view
    from pdtool.cli.console.run_standing import resumed_line, run_view

    match artifact:
        case Profile():
            return [profile_table(artifact)]
        case Devices():
            return devices_view(artifact)
        case ClusterFile():
            return cluster_view(artifact)
        case Plan():
            return [*plan_view(artifact), "", timeline(artifact, terminal.console(err=False).width)]
        case Bundle():
            return bundle_view(artifact)
        case Report():
            return [*report_view(artifact), *(resumed_line(folder) if folder else ())]
        case RunState():
            return run_view(artifact, folder)
        case Emulation():
            return emulation_view(artifact)
        case CheckpointManifest():
            return checkpoint_view(artifact)
        case _:
            raise AssertionError(artifact.KIND)


def _draw_graph(artifact: Artifact, file: str, output: str | None) -> None:
    """Draw the graph of a plan to `output` or stdout; raises UsageError for what is no plan."""
    from pdtool.artifacts.plan import Plan
    from pdtool.cli.console.output import write_text
    from pdtool.cli.inputs import profile_of
    from pdtool.reports.graph_drawing import dot, graph_drawing

    if not isinstance(artifact, Plan):
        raise UsageError(f"{file} is {with_article(artifact.KIND)}, and --graph draws plans", "name a plan")
    profile = profile_of(artifact, file)
    path = Path(output or "-")
    if path.suffix == ".svg":
        title = f"{artifact.name}: {artifact.config}"
        write_text(graph_drawing(artifact, profile, _GRAPH_WIDTH, title).standalone(), path)
    else:
        write_text(dot(artifact, profile), path)
