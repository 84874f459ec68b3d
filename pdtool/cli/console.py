"""What a person sees: notes and progress on stderr, tables wherever they belong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Progress = Callable[[int, int], None]
_WIDTH_OF_A_FILE = 160  # columns when the reader is no terminal: tables keep their names whole


def note(text: str) -> None:
    """One line to the person at the terminal, on stderr."""
    click.echo(text, err=True)


def console(*, err: bool) -> Console:
    """A rich console on stderr or stdout; wide and without colours when that is no terminal."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _WIDTH_OF_A_FILE, highlight=False)


def show(*parts: RenderableType, err: bool = True) -> None:
    """Print tables and lines of text; into a file without the spaces that fill a terminal's lines."""
    target = console(err=err)
    with target.capture() as captured:
        for part in parts:
            target.print(part, markup=False, soft_wrap=True) if isinstance(part, str) else target.print(part)
    text = captured.get()
    if not target.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    click.echo(text, err=err, nl=False)


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """A progress bar while a part works, called with (done, total); nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import Progress as Bar

    with Bar(console=console(err=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def status(label: str) -> Iterator[Callable[[str], None]]:
    """A line that says which step a part is at; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    with console(err=True).status(label) as line:
        yield line.update
