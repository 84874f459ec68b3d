"""The group of all commands, `pdtool`, and the one place that turns errors into messages and exit codes.

This file and the top of each command's file import only click, so `pdtool --help` answers at once and planning never
loads torch.
"""

from __future__ import annotations

import atexit
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from pdtool import __version__
from pdtool.cli.command_line import CONTEXT_SETTINGS, install_terminal, keep_interrupts, verbosity_options
from pdtool.cli.commands.check import check
from pdtool.cli.commands.clusters import devices, import_, probe
from pdtool.cli.commands.diff import diff
from pdtool.cli.commands.emulate import emulate
from pdtool.cli.commands.project import completion, help_, init, makefile, schema
from pdtool.cli.commands.show import export, report, show
from pdtool.cli.commands.simulate import simulate
from pdtool.cli.commands.steps import codegen, partition, profile, run
from pdtool.cli.commands.train import train
from pdtool.cli.project_defaults import ProjectDefaults
from pdtool.cli.terminal import Verbosity, note, open_closed_streams, telling_what_takes_long
from pdtool.errors import PdtoolError, UsageError, refused_exit, suggestion

_SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "Commands: the four steps, and all of them at once": (profile, partition, codegen, run, train),
    "Plans, runs and profiles": (simulate, emulate, check, diff, show, report, export),
    "Clusters and devices": (probe, devices, import_),
    "Projects and shells": (init, makefile, schema, completion, help_),
}
_STEPS = ("profile", "partition", "run")
_TYPED = f"{__name__}.typed"  # in a context: the options on its command line
_EPILOG = """\b
Exit codes:
  0  done                        4  no feasible plan
  1  failed                      5  a worker died
  2  usage                       6  target metric not reached
  3  bad or stale artifact     130  interrupted

\b
Examples:
  pdtool train model.py --topology 2
  pdtool help partition
"""


class CommandGroup(click.Group):
    """A group that prints errors and exits with their codes; click itself handles usage errors and closed pipes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a program that ends with the command, even if the user's model.py has started threads."""
        open_closed_streams()
        keep_interrupts()
        try:
            return super().__call__(*args, **kwargs)
        except SystemExit as end:
            if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
                from pdtool.runtime.worker_end import end_despite_threads

                atexit._run_exitfuncs()
                end_despite_threads(int(end.code or 0))
            raise

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, which also takes -q and -v after its name."""
        cmd.params.extend(verbosity_options())
        super().add_command(cmd, name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        Verbosity.reset()
        install_terminal()
        try:
            with _usage_errors_as_ours(ctx):
                return super().parse_args(ctx, args)
        except OSError as error:  # --help and --version print here
            return _failed_output(ctx, error)

    def invoke(self, ctx: click.Context) -> Any:
        ctx.meta[_TYPED] = {word.partition("=")[0] for word in ctx.args}
        try:
            with _usage_errors_as_ours(ctx), telling_what_takes_long(lambda: ctx.invoked_subcommand or ""):
                _check_folder()
                return super().invoke(ctx)
        except PdtoolError as error:
            if Verbosity.is_verbose:
                note(traceback.format_exc())
            note(f"error: {error}")
            if isinstance(error, UsageError):
                _note_defaults(ctx, ctx.invoked_subcommand or "", str(error))
            ctx.exit(error.exit_code)
        except OSError as error:
            _failed_output(ctx, error)
        except MemoryError:
            note("error: this process found no memory; raise its limit, as with `ulimit -v unlimited`")
            ctx.exit(1)
        except KeyboardInterrupt:
            note("interrupted")
            ctx.exit(130)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            note(f"error: {refused_exit(error)}")  # of the user's code: pdtool itself exits through click
            ctx.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in order of use, not of the alphabet

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by topic."""
        for section, commands in _SECTIONS.items():
            width = formatter.width - 6 - max(len(command.name or "") for command in commands)
            with formatter.section(section):
                formatter.write_dl([(command.name or "", command.get_short_help_str(width)) for command in commands])


def _check_folder() -> None:
    """Check that the current folder exists: without it, torch ends the process when it is imported."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the current folder cannot be read ({error.strerror})", "go to one that exists") from error


def _failed_output(ctx: click.Context, error: OSError) -> NoReturn:
    if isinstance(error, BrokenPipeError):
        raise error
    note(f"error: {error.filename or 'the output'} failed: {error.strerror or error}")
    ctx.exit(1)


def _note_defaults(ctx: click.Context, command: str, error: str) -> None:
    """Name the options in an error that come from a project's defaults for a command, or for a step of `train`."""
    defaults, typed = ctx.find_object(ProjectDefaults), ctx.meta.get(_TYPED, ())
    for name in (command, *(_STEPS if command == "train" else ())):
        if defaults and name in main.commands and (sentence := defaults.sentence(main.commands[name], error, typed)):
            note(sentence)


@contextmanager
def _usage_errors_as_ours(ctx: click.Context) -> Iterator[None]:
    """Print click's usage errors like our own, in one line, with typed control characters made visible."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        note(f"error: {_usage_error(error)}")
        _note_defaults(ctx, (error.ctx and error.ctx.info_name) or "", error.format_message())
        ctx.exit(error.exit_code)


def _usage_error(error: click.UsageError) -> str:
    """Write `no such option '--epoch'; did you mean --epochs? See `pdtool run --help``, with any click."""
    typed, known = _misspelt(error)
    message = error.format_message().rstrip(".").replace("is not a valid integer range", "is not a whole number")
    if message.startswith("No such "):  # click's own suggestion follows, for commands only since 8.4
        message = f"No such {'option' if isinstance(error, click.NoSuchOption) else 'command'} {typed!r}"
    text = message[:1].lower() + message[1:]
    command = error.ctx.command_path if error.ctx else "pdtool"
    if typed == "--config":
        return f"{text}; it goes before the command, as in `{command.replace(' ', ' --config FILE ', 1)}`"
    if typed == "--batch-size" and command.endswith((" partition", " codegen", " run")):
        return f"{text}: the minibatch size is that of the profile, so pass it to `pdtool profile`, and partition again"
    if near := suggestion(typed, known):
        text += f"; {near}"
    return f"{text}{' See' if text.endswith('?') else '; see'} `{command} --help`"


def _misspelt(error: click.UsageError) -> tuple[str, Iterable[str]]:
    """Return the unknown name in a click error, and the known names; none for other errors."""
    if isinstance(error, click.NoSuchOption) and error.ctx:
        params = error.ctx.command.get_params(error.ctx)
        return error.option_name, [name for param in params for name in param.opts if name.startswith("--")]
    if error.message.startswith("No such command"):
        return error.message.partition("'")[2].rstrip(".'"), main.commands
    if isinstance(error, click.BadParameter) and error.param and isinstance(error.param.type, click.Choice):
        return error.message[1:].partition("' is not")[0], map(str, error.param.type.choices)
    return "", ()


@click.group(cls=CommandGroup, params=[*verbosity_options()], epilog=_EPILOG, context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, "-V", "--version", prog_name="pdtool", message="%(prog)s %(version)s")
@click.option(
    "--config",
    metavar="FILE",
    show_default="pdtool.toml, or [tool.pdtool] in pyproject.toml",
    help="Read default options from FILE, with one table per command, such as [partition] with topology = '4x4'.",
)
@click.pass_context
def main(ctx: click.Context, config: str | None) -> None:
    """Turn an ordinary PyTorch model into a pipeline-parallel training job.

    The four steps are profile, partition, codegen and run. Each reads and writes files that you can open. train runs
    all four, and skips steps that are up to date.
    """
    defaults = ProjectDefaults.load(config, main.commands)
    if defaults.path and Verbosity.is_verbose:
        note(f"read {defaults.path}, which gives defaults for {', '.join(defaults.tables)}")
    ctx.obj, ctx.default_map = defaults, defaults.tables


for _commands in _SECTIONS.values():
    for _command in _commands:
        main.add_command(_command)
