"""Views: `show` prints an artifact, `report` draws pages of HTML, `export` writes a run's weights."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdtool.cli import click_options as options
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_json, write_stdout
from pdtool.errors import PdtoolError, UsageError, with_article

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import Artifact
    from pdtool.planner.choice.comparison import SimulatedPlan
    from pdtool.reports.page import Subject

_WATCH_S = 2.0  # between two looks at a run
_GRAPH_WIDTH = 1200  # pixels


@command(epilog="\b\nExamples:\n  pdtool export runs/mnist-2\n  pdtool export runs/mnist-2 -o mnist.pt")
@click.argument("run_dir")
@options.output_file("File to write for torch.load; - is stdout.  [default: model.pt]")
def export(run_dir: str, output: str | None) -> None:
    """Write RUN_DIR's last checkpoint as one ordinary state_dict."""
    from pdtool.api.reporting import export as write

    write(run_dir, output or "model.pt")


@command(
    epilog="\b\nExamples:\n  pdtool report plans/vgg16-4x4.yaml -o vgg16.html\n"
    "  pdtool report runs/mnist-2 runs/mnist-2.2 --watch"
)
@click.argument("what", nargs=-1, metavar="[PLAN|RUN]...")
@options.output_file("Page to write; - is stdout.  [default: report.html]")
@click.option("--watch", is_flag=True, help="Update the page during a run, until the run ends.")
def report(what: tuple[str, ...], output: str | None, watch: bool) -> None:
    """Draw plans, runs and emulations as one HTML page.

    The page needs no server. It shows several plans and runs side by side.
    """
    from pdtool.api.inputs import given_or_only
    from pdtool.api.reporting import check_page

    names = what or (given_or_only("plan", None),)
    path = Path(output or "report.html")
    if watch and str(path) == "-":
        raise UsageError("--watch rewrites the page, so it needs a file instead of -o -", "name it with -o")
    if names.count("-") > (0 if watch else 1):
        raise UsageError("stdin can be read only once", "name a file in place of -")
    check_page(names, path)
    subjects = _write(names, path, {})
    if str(path) != "-":
        note(f"wrote {path}; open it in a browser")
    if watch:
        _watch(names, path, subjects)


def _write(names: tuple[str, ...], path: Path, simulations: dict[str, SimulatedPlan]) -> list[Subject]:
    """Write the page to `path` or stdout; `simulations` caches simulations."""
    from pdtool.api.reporting import page_of
    from pdtool.files import write_atomically

    text, subjects = page_of(names, simulations)
    if str(path) == "-":
        write_stdout(text)
    else:
        write_atomically(path, text)
    return subjects


def _watch(names: tuple[str, ...], path: Path, subjects: list[Subject]) -> None:
    """Write the page again and again while a run goes on; Ctrl-C ends this, not the run.

    Raises:
        PdtoolError: a watched run was removed.
    """
    from pdtool.reports.page import is_unfinished

    simulations: dict[str, SimulatedPlan] = {}
    while any(map(is_unfinished, subjects)):
        time.sleep(_WATCH_S)
        try:
            subjects = _write(names, path, simulations)
        except (PdtoolError, OSError) as error:
            if gone := [name for name in names if not os.path.exists(name)]:
                raise PdtoolError(f"{gone[0]} was removed and is no longer watched; {path} is unchanged") from error
            raise
    note("all runs have ended; no longer watching")


@command(
    epilog="\b\nExamples:\n  pdtool show runs/mnist-2 --json\n  pdtool show plans/mnist-2.yaml --graph -o graph.svg"
)
@click.argument("file")
@click.option("--graph", is_flag=True, help="Draw the operators and stages of a plan instead.")
@options.output_file(
    "With --graph: FILE.svg draws the modules. Any other file gets all operators in DOT, for Graphviz."
)
@options.as_json
def show(file: str, graph: bool, output: str | None, as_json: bool) -> None:
    """Print a file or folder of pdtool in a readable form.

    For an edited plan, it computes the figures of the edited version. If the edited plan cannot be executed, the exit
    code is 3.
    """
    if output and not graph:
        raise UsageError(f"-o {output} needs --graph", "redirect the output, or add --graph")
    if graph:
        from pdtool.artifacts import load_any

        _draw_graph(load_any(file), file, output)
        return
    from pdtool.api.reporting import shown

    if as_json:
        shown(file, lambda artifact, folder: print_json(artifact))
    else:
        shown(file)


def _draw_graph(artifact: Artifact, file: str, output: str | None) -> None:
    """Draw the graph of a plan to `output` or stdout; raises UsageError for anything but a plan."""
    from pdtool.api.inputs import profile_of
    from pdtool.artifacts.plan import Plan
    from pdtool.cli.terminal import write_text
    from pdtool.reports.graph_drawing import dot, graph_drawing

    if not isinstance(artifact, Plan):
        raise UsageError(f"{file} is {with_article(artifact.KIND)}, but --graph draws plans", "name a plan")
    profile = profile_of(artifact, file)
    path = Path(output or "-")
    if path.suffix == ".svg":
        title = f"{artifact.name}: {artifact.config}"
        write_text(graph_drawing(artifact, profile, _GRAPH_WIDTH, title).standalone(), path)
    else:
        write_text(dot(artifact, profile), path)
