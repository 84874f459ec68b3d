"""The options of how much pdtool says: `-q` leaves results and errors, `-v` adds what is loaded, and tracebacks.

What lower packages do they tell to Python's logger `pdtool`; nobody hears it but with `-v`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from pdtool.cli.command_line.verbosity import Verbosity
from pdtool.cli.console.terminal import note

_FLAGS = {
    "quiet": ("-q", "--quiet", "Print results, warnings and errors only."),
    "verbose": ("-v", "--verbose", "Print what is loaded and searched, and tracebacks of errors, too."),
}


def verbosity_options() -> Sequence[click.Option]:
    """Make the options `-q` and `-v`, which stand before or after the name of a command."""
    return [
        click.Option((short, long, name), is_flag=True, expose_value=False, callback=_take, help=text)
        for name, (short, long, text) in _FLAGS.items()
    ]


def _take(ctx: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    if not is_given or ctx.resilient_parsing:
        return
    setattr(Verbosity, f"is_{parameter.name}", True)
    if Verbosity.is_verbose:
        _print_log()


def _print_log() -> None:
    """Print what pdtool's logger hears on stderr, each line once."""
    import logging

    class _Printed(logging.Handler):
        def emit(self, record: Any) -> None:
            if Verbosity.is_verbose:  # the next command of this process may not be
                note(record.getMessage())

    logger = logging.getLogger("pdtool")
    if not logger.handlers:
        logger.addHandler(_Printed())
    logger.setLevel(logging.DEBUG)
