"""`makefile`: where the rules stand that a user's own Makefile can include."""

from __future__ import annotations

from pathlib import Path

from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.terminal import write_stdout

RULES = Path(__file__).parent.parent / "starter" / "pdtool.mk"


@command(
    epilog="\b\nExamples:\n  pdtool makefile\n  pdtool makefile -v\n"
    "\n\b\nIn a shell, and in a Makefile of your own:\n"
    "  make -f $(pdtool makefile) plans/mymodel-2.yaml\n  include $(shell pdtool makefile)"
)
def makefile() -> None:
    """Print the path of make's rules for any model.py.

    They make profiles/NAME.json, plans/NAME-TOPOLOGY.yaml, its stage files and its run from NAME.py, where that has
    changed. Their variables stand at the top of the file.
    """
    write_stdout(f"{RULES}\n")
