"""`devices`: the devices that a profile can be estimated for."""

from __future__ import annotations

import click

from pdtool.cli import options
from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.output import print_json
from pdtool.cli.console.terminal import show


@command(epilog="\b\nExamples:\n  pdtool devices\n  pdtool devices h100 --json")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@options.as_json
def devices(names: tuple[str, ...], as_json: bool) -> None:
    """Print the devices that `profile --device` estimates for.

    Each with its memory, its rates and the data sheet that they come from. NAME is one of the table, or a YAML file of
    your own.
    """
    from pdtool.artifacts.device import TABLE, Devices, find_device
    from pdtool.cli.console.profile_view import devices_view

    table = Devices.load(TABLE)
    if names:
        table = Devices(devices={_key(name): find_device(name) for name in names})
    if as_json:
        print_json(table)
    else:
        show(*devices_view(table), err=False)


def _key(name: str) -> str:
    """`lab` for `lab.yaml`, a file of the user's; names of the table are keys as they are."""
    from pathlib import Path

    return Path(name).stem.lower().replace("_", "-")
