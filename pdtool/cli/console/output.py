"""Write what a command made: to its file, to stdout, or to both when its JSON is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdtool.cli.console.terminal import note, show, write_stdout

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import Artifact
    from pdtool.cli.console.table import Lines


_BEGIN_CHARACTERS = 7  # of drawings, graphs and traces, which tell these from other files


def write_artifact(artifact: Artifact, path: str, *, as_json: bool, view: Lines = ()) -> None:
    """Write an artifact to `path` (`-` is stdout), then print what it shows and name the file on stderr.

    The file comes first: who reads what is printed, as `| head` does, may stop reading.

    Args:
        as_json: print the artifact's JSON on stdout as well.
        view: the artifact for people.
    """
    if path != "-":
        artifact.save(path)
    show(*view)
    if path != "-":
        note(f"wrote {path}")
    if as_json:
        print_json(artifact)
    elif path == "-":
        write_stdout(artifact.dump())


def write_text(text: str, path: Path, hint: str = "") -> None:
    """Write a text that is no artifact to `path` (`-` is stdout); `hint` says what to do with the file.

    Raises:
        UsageError: a file is there that begins otherwise, a plan or a model.py by mistake.
        PdtoolError: the file could not be written.
    """
    from pdtool.files import check_replaceable, write_atomically

    if str(path) == "-":
        write_stdout(text)
        return
    begin = text[:_BEGIN_CHARACTERS].encode()
    check_replaceable(path, "an earlier one", lambda head: head.startswith(begin))
    write_atomically(path, text)
    note(f"wrote {path}{hint}")


def print_json(artifact: Artifact) -> None:
    """Print an artifact's JSON on stdout; a kind whose file has a digest is printed with it."""
    from pdtool.artifacts.text_formats import write_json

    text = artifact.dump()
    write_stdout(text if text.startswith("{") else write_json(artifact.model_dump(mode="json", exclude={"sha256"})))
