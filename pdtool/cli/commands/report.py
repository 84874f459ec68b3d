"""`report`: what a plan or a run is, as one HTML file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdtool.cli import options
from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.terminal import note, status, write_stdout
from pdtool.errors import PdtoolError, UsageError

if TYPE_CHECKING:
    from pdtool.planner.choice.comparison import SimulatedPlan
    from pdtool.reports.page import Subject

_MAX_SUBJECTS = 4
_WATCH_S = 2.0  # between two looks at a run


@command(
    epilog="\b\nExamples:\n  pdtool report plans/vgg16-4x4.yaml -o vgg16.html\n"
    "  pdtool report runs/digits-3 runs/digits-3.2 --watch"
)
@click.argument("what", nargs=-1, metavar="[PLAN|RUN]...")
@options.output("The page to write, report.html if not given; - is stdout.")
@click.option("--watch", is_flag=True, help="Write the page again as a run goes on, until it ends.")
def report(what: tuple[str, ...], output: str | None, watch: bool) -> None:
    """Draw plans, runs and emulations as one HTML page.

    It needs no server; several plans and runs stand beside each other on it.
    """
    names = what or (options.candidate("plan", None),)
    if len(names) > _MAX_SUBJECTS:
        raise UsageError(f"{len(names)} plans and runs on one page", f"name at most {_MAX_SUBJECTS}")
    path = Path(output or "report.html")
    if watch and str(path) == "-":
        raise UsageError("--watch -o -: a page that is written again needs a file", "name it with -o")
    if names.count("-") > (0 if watch else 1):
        raise UsageError("stdin can be read once only", "name a file in place of -")
    _check_target(path)
    subjects = _write(names, path, {})
    if str(path) != "-":
        note(f"wrote {path}; open it in a browser")
    if watch:
        _watch(names, path, subjects)


def _write(names: tuple[str, ...], path: Path, simulations: dict[str, SimulatedPlan]) -> list[Subject]:
    """Write the page; simulations are taken from `simulations`, and new ones put there."""
    from pdtool.cli.inputs import planned
    from pdtool.files import write_atomically
    from pdtool.report.subjects import read_subject
    from pdtool.reports.page import page

    subjects = [read_subject(name, planned) for name in names]
    with status("simulating"):
        text = page(subjects, simulations)
    if str(path) == "-":
        write_stdout(text)
    else:
        write_atomically(path, text)
    return subjects


def _watch(names: tuple[str, ...], path: Path, subjects: list[Subject]) -> None:
    """Write the page again and again while a run goes on; Ctrl-C ends that, not the run.

    Raises:
        PdtoolError: what is watched was removed.
    """
    from pdtool.reports.page import is_unfinished

    simulations: dict[str, SimulatedPlan] = {}
    while any(map(is_unfinished, subjects)):
        time.sleep(_WATCH_S)
        try:
            subjects = _write(names, path, simulations)
        except (PdtoolError, OSError) as error:
            if gone := [name for name in names if not os.path.exists(name)]:
                raise PdtoolError(f"{gone[0]} was removed, and is watched no more; {path} stays as it was") from error
            raise
    note("no run is going on")


def _check_target(path: Path) -> None:
    """Check that no other file than such a page would be overwritten; raises UsageError."""
    from pdtool.files import check_replaceable
    from pdtool.reports.page import GENERATOR

    if str(path) != "-":
        check_replaceable(path, "a page of pdtool", lambda head: GENERATOR.encode() in head)
