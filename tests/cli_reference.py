"""Write docs/cli.md (or another file), the reference of commands, from the commands themselves: `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from pdtool.cli.commands.app import main

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
_WIDTH = 80
_HEAD = """\
# Commands

`make docs` writes this page from the commands. `pdtool help COMMAND` prints the same.

- Without a path, a command takes the only file in `profiles/` or `plans/`. If there are several, it lists them.
- `-` is stdin or stdout. `--json` prints the artifact on stdout. Messages go to stderr.
- Rates, sizes and times have units: `10Gbit/s`, `12GB/s`, `16GiB`, `50us`.
- Put your project's default options into a [pdtool.toml](ci.md#in-your-repository).
- [Exit codes](ci.md#exit-codes) tell scripts what happened.

"""


def reference() -> str:
    """Return the whole page."""
    return _HEAD + "\n".join(_sections())


def _sections() -> Iterator[str]:
    group = click.Context(main, info_name="pdtool", terminal_width=_WIDTH, **main.context_settings)
    yield _section("pdtool", main.get_help(group))
    for name in main.list_commands(group):
        command = main.commands[name]
        with click.Context(command, info_name=name, parent=group, terminal_width=_WIDTH) as context:
            yield _section(f"pdtool {name}", command.get_help(context))


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    Path(*sys.argv[1:] or [PAGE]).write_text(reference(), encoding="utf-8")
