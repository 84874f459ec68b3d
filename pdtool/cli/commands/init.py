"""`init`: write what a project with pdtool begins with."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.terminal import note

STARTER = Path(__file__).parent.parent / "starter"
_FILES = {  # in the user's folder -> the text that it begins with
    "model.py": "model.py.in",
    "pdtool.toml": "pdtool.toml.in",
    "Makefile": "Makefile.in",
    ".github/workflows/pdtool.yml": "workflow.yml",
}


@command(epilog="\b\nExamples:\n  pdtool init\n  pdtool init myproject")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".", required=False)
@click.option("--force", is_flag=True, help="Replace files that are there.")
def init(folder: Path, force: bool) -> None:
    """Write a model.py that trains as it is, and files around it.

    Into FOLDER, by default the current one: model.py with every function explained, pdtool.toml with defaults of the
    commands, a Makefile, and a job for GitHub Actions. Files that are there are kept.
    """
    from pdtool.files import write_atomically

    for name, starter in _FILES.items():
        path = folder / name
        if path.exists() and not force:
            note(f"kept {path}, which was there (--force replaces it)")
            continue
        write_atomically(path, (STARTER / starter).read_text(encoding="utf-8"))
        note(f"wrote {path}")
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    note(f"next: {where}pdtool train model.py")
