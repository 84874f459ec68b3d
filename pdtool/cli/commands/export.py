"""`export`: write a run's last checkpoint as one ordinary state_dict."""

from __future__ import annotations

from pathlib import Path

import click

from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.terminal import note


@command(epilog="\b\nExamples:\n  pdtool export runs/digits-3\n  pdtool export runs/digits-3 -o digits.pt")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("model.pt"),
    metavar="FILE",
    help="File to write, for torch.load; - is stdout.",
)
def export(run_dir: Path, output: Path) -> None:
    """Write RUN_DIR's last checkpoint as one ordinary state_dict."""
    from pdtool.runtime.worker.checkpoint import export as write

    checkpoint = write(run_dir, output)
    note(f"wrote {output} from {checkpoint}")
