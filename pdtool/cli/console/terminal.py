"""Notes and progress on stderr, tables on stdout or stderr, data on stdout.

All that pdtool prints goes through here, and nothing of it is obeyed by the terminal or read as markup.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import click

from pdtool.cli.command_line.verbosity import Verbosity
from pdtool.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

OnProgress = Callable[[int, int], None]  # called with (done, total)
_NEVER_QUIET = ("error: ", "warning: ", "interrupted")
_COLUMNS = 80  # of a table where no terminal and no COLUMNS says how wide it is


def note(text: str) -> None:
    """Print a line on stderr, with -q only errors and warnings.

    Where nobody reads it any more, as behind `2>&1 | head`, the work goes on.
    """
    if Verbosity.is_quiet and not text.startswith(_NEVER_QUIET):
        return
    with suppress(BrokenPipeError):
        click.echo(printable(text), err=True)


def write_stdout(text: str) -> None:
    """Print data on stdout; into a pipe or a file exactly as it is."""
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


def console(*, err: bool) -> Console:
    """Return a rich console on stderr or stdout, as wide as it is; without colours when that is no terminal."""
    from pdtool.cli.console.table import PlainConsole

    stream = sys.stderr if err else sys.stdout
    return PlainConsole(file=stream, width=None if stream.isatty() else _columns(), highlight=False)


def _columns() -> int:
    """Return the width of tables that go into a file or a pipe: COLUMNS, where it is set."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() and int(asked) else _COLUMNS


def show(*parts: RenderableType, err: bool = True) -> None:
    """Print tables and lines of text; into a file without the spaces that fill a terminal's lines."""
    from rich.text import Text

    target = console(err=err)
    with target.capture() as capture:
        for part in parts:
            target.print(part, soft_wrap=isinstance(part, (str, Text)), crop=False)
    text = capture.get()
    if not target.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    with suppress(BrokenPipeError) if err else nullcontext():
        click.echo(text, err=err, nl=False)


def is_progress_shown() -> bool:
    """Return whether people look at stderr, and did not ask for quiet."""
    return sys.stderr.isatty() and not Verbosity.is_quiet


@contextmanager
def progress(label: str) -> Iterator[OnProgress]:
    """Show a progress bar while a part works; show nothing with -q, and when stderr is no terminal."""
    if not is_progress_shown():
        yield lambda done, total: None
        return
    from rich.progress import Progress

    with Progress(console=console(err=True), transient=True) as bar:
        task = bar.add_task(_description(label), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def status(label: str) -> Iterator[Callable[[str], None]]:
    """Show the step that a part is at on one line; show nothing with -q, and when stderr is no terminal."""
    if not is_progress_shown():
        yield lambda step: None
        return
    from rich.text import Text

    with console(err=True).status(Text(printable(label))) as line:
        yield lambda step: line.update(Text(printable(step)))


def _description(text: str) -> str:
    """Write a text for a progress bar, which reads markup."""
    from rich.markup import escape

    return escape(printable(text))
