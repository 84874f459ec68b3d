"""The output of commands: notes and bars on stderr, tables and data on stdout, and files.

`Verbosity` says how much to print: with `-q` only results and errors, with `-v` more than usual.
"""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from pdtool.api.console import OnProgress, OnStep
from pdtool.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pdtool.artifacts.artifact import Artifact
    from pdtool.cli.table import Lines

_NEVER_QUIET = ("error: ", "warning: ", "interrupted")
_LAST_STANDARD = 2  # number of stderr
_TICK_S = 2.5  # after twice this time without a line, one says what takes so long
_bars: list[Console] = []  # which show a bar now
_doing: list[str] = []  # the current steps, the innermost last
_COLUMNS = 80  # width of a table without a terminal or COLUMNS
_BEGIN_CHARACTERS = 7  # first bytes of drawings, graphs and traces, to tell them from other files


class Verbosity:
    """The requested verbosity, and how much was printed; one command runs in a process."""

    is_quiet = False
    is_verbose = False
    notes = 0

    @classmethod
    def reset(cls) -> None:
        """Reset to the usual verbosity for a new command line."""
        cls.is_quiet = cls.is_verbose = False


def open_closed_streams() -> None:
    """Open closed standard streams (as by `2>&-`) on /dev/null: nothing is read, and output is lost.

    Otherwise the next opened file would take their place, and messages for stderr would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def note(text: str) -> None:
    """Print a line on stderr, above a bar if there is one; with -q only errors and warnings.

    If nobody reads it any more, as after `2>&1 | head`, or its disk is full, the work goes on.
    """
    if Verbosity.is_quiet and not text.startswith(_NEVER_QUIET):
        return
    Verbosity.notes += 1
    text = printable(text)
    with suppress(OSError):
        if _bars:
            _bars[-1].print(_at_words(text), soft_wrap=True)
        else:
            click.echo(_at_words(text) if _is_terminal(sys.stderr) else text, err=True)


def _at_words(text: str) -> str:
    """Break the lines of a text between words where the terminal would break them anywhere."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        columns = _COLUMNS
    fill = partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if len(line) <= columns else fill(line) for line in text.split("\n"))


@contextmanager
def telling_what_takes_long(command: Callable[[], str]) -> Iterator[None]:
    """Print the current step if nothing was printed for about five seconds, then after 10, 20, 40 and so on.

    This is for logs, which show no bar.

    Args:
        command: returns the name of the step, unless a `status` or `progress` has one.
    """
    if _is_terminal(sys.stderr):
        yield
        return
    ended = threading.Event()

    def tell() -> None:
        silent, known = 0, Verbosity.notes
        since = "the last line" if known else "the start"
        while not ended.wait(_TICK_S):
            silent += 1
            if Verbosity.notes != known:
                silent, since = 0, "the last line"
            if silent > 1 and silent & (silent - 1) == 0:
                what = _doing[-1] if _doing else command()
                note(f"{what}: still running, {silent * _TICK_S:.0f} s after {since}")
            known = Verbosity.notes

    thread = threading.Thread(target=tell, daemon=True)
    with suppress(RuntimeError):  # the limit of processes (`ulimit -u`) is reached: only this line is missing then
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident:
            thread.join()


@contextmanager
def above(bar: Console) -> Iterator[None]:
    """Print notes above what a console shows at its bottom."""
    _bars.append(bar)
    try:
        yield
    finally:
        _bars.pop()


def write_stdout(text: str) -> None:
    """Print data on stdout; unchanged into a pipe or a file."""
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


def console(*, err: bool) -> Console:
    """Return a rich console on stderr or stdout, of the terminal's width; without colours if it is not a terminal."""
    from pdtool.cli.table import PlainConsole

    stream = sys.stderr if err else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = (int(columns) if columns.isdecimal() else 0) or _COLUMNS
    return PlainConsole(file=stream, width=None if stream.isatty() else width, highlight=False)


def show(*parts: RenderableType, err: bool = True) -> None:
    """Print tables and lines of text; into a file without trailing spaces."""
    from rich.text import Text

    target = console(err=err)
    with suppress(OSError) if err else nullcontext():
        with target.capture() as capture:  # which flushes the stream
            for part in parts:
                words = _at_words(part) if isinstance(part, str) and target.is_terminal else part
                target.print(words, soft_wrap=isinstance(part, (str, Text)), crop=False)
        text = capture.get()
        if not target.is_terminal:
            text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        click.echo(text, err=err, nl=False)


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether people look at a stream; a service may have none."""
    return stream is not None and stream.isatty()


def is_progress_shown() -> bool:
    """Return whether people look at stderr, and did not ask for quiet."""
    return _is_terminal(sys.stderr) and not Verbosity.is_quiet


@contextmanager
def progress(label: str) -> Iterator[OnProgress]:
    """Show a progress bar during a step; show nothing with -q, and if stderr is not a terminal."""
    if not is_progress_shown():
        with doing(label):
            yield lambda done, total: None
        return
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=console(err=True), transient=True) as bar, above(bar.console):
        task = bar.add_task(escape(printable(label)), total=None)  # it reads markup
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def doing(label: str) -> Iterator[OnStep]:
    """Record the current step for `telling_what_takes_long`."""
    _doing.append(label)
    try:
        yield lambda step: _doing.__setitem__(-1, step)
    finally:
        _doing.pop()


@contextmanager
def status(label: str) -> Iterator[OnStep]:
    """Show the current step on one line; show nothing with -q, and if stderr is not a terminal."""
    if not is_progress_shown():
        with doing(label) as tell:
            yield tell
        return
    from rich.text import Text

    bottom = console(err=True)
    with bottom.status(Text(printable(label))) as line, above(bottom):
        yield lambda step: line.update(Text(printable(step)))


def write_artifact(artifact: Artifact, path: str, *, as_json: bool, view: Lines = (), is_named: bool = False) -> None:
    """Write an artifact to `path` (`-` is stdout), then print its view and name the file on stderr.

    The file comes first, because a reader of the output, such as `| head`, may stop reading.

    Args:
        as_json: print the artifact's JSON on stdout as well.
        view: the artifact for people.
        is_named: whether the user named the file; then with -q nothing is shown, because the file is the result.
    """
    if path != "-":
        artifact.save(path)
    if not (is_named and Verbosity.is_quiet):
        show(*view)
    if path != "-":
        note(f"wrote {path}")
    if as_json:
        print_json(artifact)
    elif path == "-":
        write_stdout(artifact.dump())


def write_text(text: str, path: Path, hint: str = "") -> None:
    """Write a text other than an artifact to `path` (`-` is stdout); `hint` says what to do with the file.

    Raises:
        UsageError: a file of another sort is there, such as a plan or a model.py by mistake.
        PdtoolError: the file could not be written.
    """
    from pdtool.files import check_replaceable, write_atomically

    if str(path) == "-":
        write_stdout(text)
        return
    begin = text[:_BEGIN_CHARACTERS].encode()
    check_replaceable(path, "a file of this kind", lambda head: head.startswith(begin))
    write_atomically(path, text)
    note(f"wrote {path}{hint}")


def print_data(data: Any, indent: int = 1) -> None:
    """Print data other than an artifact as JSON on stdout."""
    import json

    write_stdout(json.dumps(data, indent=indent) + "\n")


def print_json(artifact: Artifact) -> None:
    """Print an artifact's JSON on stdout, with a digest if its file has one."""
    from pdtool.artifacts.text_formats import write_json

    text = artifact.dump()
    write_stdout(text if text.startswith("{") else write_json(artifact.model_dump(mode="json", exclude={"sha256"})))
