"""`completion`: the script by which a shell completes pdtool's commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.terminal import write_stdout


@command(
    epilog="\b\nExamples:\n  pdtool completion bash >> ~/.bashrc\n"
    "  pdtool completion fish > ~/.config/fish/completions/pdtool.fish"
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes pdtool's commands in SHELL."""
    completion_class = get_completion_class(shell)
    assert completion_class  # the choices are click's own
    write_stdout(completion_class(ctx.find_root().command, {}, "pdtool", "_PDTOOL_COMPLETE").source() + "\n")
