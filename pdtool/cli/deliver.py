"""Where an artifact goes: to its file, to stdout, or to both when its JSON is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdtool.cli.console import note

if TYPE_CHECKING:
    from pdtool.artifacts.envelope import Artifact


def deliver(artifact: Artifact, path: str, *, as_json: bool) -> None:
    """Write `path` (`-` is stdout) and say so on stderr; `as_json` prints the artifact on stdout as well."""
    if path != "-":
        artifact.save(path)
        note(f"wrote {path}")
    if as_json:
        print_json(artifact)
    elif path == "-":
        click.echo(artifact.dump(), nl=False)


def deliver_text(text: str, path: Path, hint: str = "") -> None:
    """The same for what is no artifact; `hint` says what to do with the file."""
    from pdtool.artifacts.envelope import write_atomically

    if str(path) == "-":
        click.echo(text, nl=False)
        return
    write_atomically(path, text)
    note(f"wrote {path}{hint}")


def print_json(artifact: Artifact) -> None:
    """The artifact itself on stdout: with its digest where its file has one too."""
    text = artifact.dump()
    click.echo(
        text if text.startswith("{") else artifact.model_dump_json(indent=1, exclude={"sha256"}) + "\n", nl=False
    )
