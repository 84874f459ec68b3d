"""`import`: a profile published by PipeDream -> profiles/NAME.json."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pdtool.cli import options
from pdtool.cli.console import note, show
from pdtool.cli.deliver import deliver
from pdtool.errors import ArtifactError


@click.command(
    "import",
    epilog="\b\nExamples:\n  pdtool import vgg16.graph.txt\n"
    "  pdtool import profiles/gnmt/graph.txt --name gnmt8 --batch-size 32 -o -",
)
@click.argument("graph")
@options.output("File to write; - is stdout.  [default: profiles/NAME.json]")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="what the sizes in GRAPH tell, or else 128",
    help="Samples in the minibatch it was measured at.",
)
@click.option("--name", metavar="NAME", show_default="that of the file or its folder", help="Name of the profile.")
@options.as_json
def import_(graph: str, output: str | None, batch_size: int | None, name: str | None, as_json: bool) -> None:
    """Write PipeDream's published profile GRAPH as one of pdtool's.

    GRAPH is a graph.txt; - is stdin. There is no model behind it: it can be planned for, but not run.
    """
    from pdtool.cli.render import profile_table
    from pdtool.profile.published import read_published

    path = "stdin" if graph == "-" else graph
    found = read_published(_text(graph), path, name=name or _name(graph), batch_size=batch_size)
    show(profile_table(found.profile, largest=12))
    if found.batch_from:
        note(f"minibatch of {found.profile.batch_size}, {found.batch_from}; name another with --batch-size")
    note("the file knows no optimizer step, and of what a backward keeps only the operators' outputs")
    deliver(found.profile, output or f"profiles/{options.file_name(found.profile.name)}.json", as_json=as_json)


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ArtifactError(path, f"cannot be read ({reason})", "name a graph.txt of PipeDream's profiler") from error


def _name(path: str) -> str:
    """`vgg16` for vgg16.graph.txt and for vgg16/graph.txt."""
    if path == "-":
        return "imported"
    own = Path(path).name.removesuffix(".txt").removesuffix("graph").rstrip(".")
    return own or Path(path).resolve().parent.name or "imported"
