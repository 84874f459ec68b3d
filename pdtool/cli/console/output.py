"""Write what a command made: to its file, to stdout, or to both when its JSON is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdtool.cli.console.terminal import note

if TYPE_CHECKING:
    from pdtool.artifacts.envelope import Artifact


def write_artifact(artifact: Artifact, path: str, *, as_json: bool) -> None:
    """Write an artifact to `path` (`-` is stdout) and name the file on stderr.

    Args:
        as_json: print the artifact's JSON on stdout as well.
    """
    if path != "-":
        artifact.save(path)
        note(f"wrote {path}")
    if as_json:
        print_json(artifact)
    elif path == "-":
        click.echo(artifact.dump(), nl=False)


def write_text(text: str, path: Path, hint: str = "") -> None:
    """Write a text that is no artifact to `path` (`-` is stdout); `hint` says what to do with the file."""
    from pdtool.artifacts.envelope import write_atomically

    if str(path) == "-":
        click.echo(text, nl=False)
        return
    write_atomically(path, text)
    note(f"wrote {path}{hint}")


def print_json(artifact: Artifact) -> None:
    """Print an artifact's JSON on stdout; a kind whose file has a digest is printed with it."""
    text = artifact.dump()
    click.echo(
        text if text.startswith("{") else artifact.model_dump_json(indent=1, exclude={"sha256"}) + "\n", nl=False
    )
