"""The command line itself: options in sections of `--help`, -q and -v, Ctrl-C, and where the API's notes go."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pdtool.api.console import Listener, OnEvent, install
from pdtool.cli.click_options import CommandOption, prefer_typed
from pdtool.cli.terminal import Verbosity, console, note, progress, show, status
from pdtool.errors import UsageError
from pdtool.options.declaration import SECTIONS

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import Artifact

_FEW = 9  # up to this many options need no groups
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
_LATER_S = 0.05  # when the object is gone, or the import done
_FLAGS = {
    ("-q", "--quiet"): "Print only results, warnings and errors.",
    ("-v", "--verbose"): "Also print what is loaded and searched, and tracebacks of errors.",
}


class SectionedCommand(click.Command):
    """A command whose help groups many options by topic; options without a section stand at the top."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for param in (each for each in self.params if isinstance(each, click.Argument)):
            given = ctx.params.get(param.name or "")
            if "" in (given if isinstance(given, tuple) else (given,)):
                raise UsageError(
                    "an argument is empty", "name a file or folder, or set the shell variable that you passed"
                )
        prefer_typed(ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        if len(params) <= _FEW:
            super().format_options(ctx, formatter)
            return
        rows: dict[str, list[tuple[str, str]]] = {section: [] for section in ("Options", *SECTIONS)}
        for param in params:
            if record := _as_given(param, ctx).get_help_record(ctx):
                rows[getattr(param, "section", "Output")].append(record)  # --help is click's own and has no section
        for section, records in rows.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)


def _as_given(param: click.Option, ctx: click.Context) -> click.Option:
    """Return the option, or a copy that shows the project's default."""
    if param.name not in (ctx.default_map or {}):
        return param
    shown = copy(param)
    shown.show_default = True
    return shown


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], SectionedCommand]:
    """Define a command of pdtool, as `click.command` does; its help is the same with and without the group."""
    return click.command(name, cls=SectionedCommand, context_settings=CONTEXT_SETTINGS, **settings)


def keep_interrupts() -> None:
    """Repeat a signal a moment later if its exception was lost.

    While torch is imported it waits until that is done: torch's C code would drop the exception, or abort.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            _send_later(int(getattr(unraisable.exc_value, "number", signal.SIGINT)))  # that of a run has one
        else:
            before(unraisable)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if any(map(_is_import_of_torch, (f for f, _ in walk_stack(frame)))):
            _send_later(number)
        else:
            signal.default_int_handler(number, frame)

    sys.unraisablehook = hook
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def _send_later(number: int) -> None:
    """Send a signal to the thread that handles it, even if that waits."""
    timer = threading.Timer(_LATER_S, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True
    timer.start()


def _is_import_of_torch(frame: FrameType) -> bool:
    """Whether the frame executes a module of torch, or of numpy, which torch imports."""
    name = str(frame.f_globals.get("__name__"))  # the globals of exec() have none
    return frame.f_code.co_name == "<module>" and name.partition(".")[0] in ("torch", "numpy")


def verbosity_options() -> Sequence[click.Option]:
    """Make the options `-q` and `-v`, which stand before or after the name of a command."""
    settings: dict[str, Any] = {"section": "Output", "is_flag": True, "expose_value": False, "callback": _take}
    return [CommandOption(names, help=text, **settings) for names, text in _FLAGS.items()]


def _take(ctx: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    if not is_given or ctx.resilient_parsing:
        return
    setattr(Verbosity, f"is_{parameter.name}", True)
    if Verbosity.is_verbose:
        _print_log()


def _print_log() -> None:
    """Print the lines of pdtool's logger on stderr, each once."""
    import logging

    class _Printed(logging.Handler):
        def emit(self, record: Any) -> None:
            if Verbosity.is_verbose:  # the next command of this process may not be verbose
                note(record.getMessage())

    logger = logging.getLogger("pdtool")
    if not logger.handlers:
        logger.addHandler(_Printed())
    logger.setLevel(logging.DEBUG)


class Terminal(Listener):
    """Shows the API's messages like a command: with bars on a terminal, with lines elsewhere."""

    note, progress, status = staticmethod(note), staticmethod(progress), staticmethod(status)

    def show(self, artifact: Artifact, folder: Path | None) -> None:
        from pdtool.cli.view import view

        show(*view(artifact, folder, console(err=False).width), err=False)

    def training(self, out: Path, epochs: int, log_every: int | None) -> AbstractContextManager[OnEvent]:
        from pdtool.cli.run_view import training_progress

        return training_progress(out, epochs, log_every)


def install_terminal() -> None:
    """Show the API's messages on this process's stderr."""
    install(Terminal())
