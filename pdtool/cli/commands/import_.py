"""`import`: convert a profile published by PipeDream, graph.txt -> profiles/NAME.json."""

from __future__ import annotations

from pathlib import Path

import click

from pdtool.cli import options
from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.output import write_artifact


@command(
    "import",
    epilog="\b\nExamples:\n  pdtool import vgg16.graph.txt\n"
    "  pdtool import profiles/gnmt/graph.txt --name gnmt8 --batch-size 32 -o -",
)
@click.argument("graph")
@options.output("File to write; - is stdout.  [default: profiles/NAME.json]")
@options.count(
    "--batch-size",
    help="Samples in the minibatch it was measured at.",
    unset="what the sizes in GRAPH tell, or else 128",
)
@click.option("--name", metavar="NAME", show_default="that of the file or its folder", help="Name of the profile.")
@options.as_json
def import_(graph: str, output: str | None, batch_size: int | None, name: str | None, as_json: bool) -> None:
    """Write PipeDream's published profile GRAPH as one of pdtool's.

    GRAPH is a graph.txt; - is stdin. There is no model behind it: it can be planned for, but not run.
    """
    from pdtool.cli.console.profile_view import profile_table
    from pdtool.files import read_text
    from pdtool.profiler.pipedream_import import read_pipedream_profile

    text = read_text(graph, "name a graph.txt of PipeDream's profiler", may_be_pipe=True)
    path = "stdin" if graph == "-" else graph
    profile, batch_source = read_pipedream_profile(text, path, name=name or _name(graph), batch_size=batch_size)
    lines = ["the file knows no optimizer step, and of what a backward keeps only the operators' outputs"]
    if batch_source:
        lines.insert(0, f"minibatch of {profile.batch_size}, {batch_source}; name another with --batch-size")
    path = output or f"profiles/{options.file_name(profile.name)}.json"
    write_artifact(profile, path, as_json=as_json, view=[profile_table(profile, largest=12), *lines])


def _name(path: str) -> str:
    """Return `vgg16` for vgg16.graph.txt and for vgg16/graph.txt."""
    if path == "-":
        return "imported"
    stem = Path(path).name.removesuffix(".txt").removesuffix("graph").rstrip(".")
    return stem or Path(path).resolve().parent.name or "imported"
