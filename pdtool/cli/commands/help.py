"""`help`: what `--help` prints."""

from __future__ import annotations

import difflib

import click

from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.terminal import write_stdout
from pdtool.errors import UsageError


@command("help", epilog="\b\nExamples:\n  pdtool help\n  pdtool help partition")
@click.argument("name", required=False, metavar="[COMMAND]")
@click.pass_context
def help_(ctx: click.Context, name: str | None) -> None:
    """Print how COMMAND is used, or list all commands."""
    root = ctx.find_root()
    group = root.command
    assert isinstance(group, click.Group)
    if name is None:
        write_stdout(group.get_help(root) + "\n")
        return
    if name not in group.commands:
        close = difflib.get_close_matches(name, group.commands, n=1)
        remedy = f"did you mean {close[0]}?" if close else "`pdtool help` lists the commands"
        raise UsageError(f"there is no command {name!r:.80}", remedy)
    with click.Context(group.commands[name], info_name=name, parent=root) as sub:
        write_stdout(group.commands[name].get_help(sub) + "\n")
