"""What a worker is doing, in a small memory-mapped file: it can still be read after the worker was killed."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdtool.errors import PdtoolError
from pdtool.run.spec import Place

SIZE = 128
ROOM = 4096  # bytes, of a failure
FOLDER = ".workers"
OWN = -2


class Status:
    """One worker's status; writing it costs about a microsecond."""

    def __init__(self, out: Path, place: Place) -> None:
        self.place = place
        path = _path(out, place.rank, "status")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)
        _path(out, place.rank, "failure").write_bytes(b" " * ROOM)  # for when the disk is full
        self.at("starting")

    def at(self, text: str) -> None:
        """Say what begins now: `1F7 of epoch 2`."""
        self._memory[:] = f"{os.getpid()} {text}".encode()[:SIZE].ljust(SIZE, b"\0")


@dataclass(frozen=True)
class Failure:
    """How a worker ended, in its own words.

    Attributes:
        exit_code: of the error it raised.
        peer: OWN: its own error; otherwise it waited in vain for this rank (-1: for one of several).
    """

    what: str
    remedy: str
    exit_code: int
    peer: int = OWN


def write_failure(out: Path, rank: int, failure: Failure) -> None:
    """Leave a failure where `read_failure` finds it, in the room that was kept for it."""
    path = _path(out, rank, "failure")
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(json.dumps(asdict(failure)).encode().ljust(ROOM))


def read_failure(out: Path, rank: int) -> Failure | None:
    """What the worker said when it failed; None when it said nothing."""
    try:
        return Failure(**json.loads(_path(out, rank, "failure").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def read_status(out: Path, rank: int) -> str:
    """What the worker was last doing."""
    return _status(out, rank).partition(" ")[2]


def read_pid(out: Path, rank: int) -> int:
    """The worker's process; raises ProcessLookupError when it has not come so far."""
    pid = _status(out, rank).partition(" ")[0]
    if not pid.isdigit():
        raise ProcessLookupError(f"rank {rank} has not started")
    return int(pid)


def _status(out: Path, rank: int) -> str:
    try:
        return _path(out, rank, "status").read_bytes().rstrip(b"\0").decode(errors="replace") or "? starting"
    except OSError:
        return "? starting"


def clear(out: Path, ranks: Sequence[int], *, fresh: bool) -> None:
    """Remove what an earlier run in this folder left of these ranks (`fresh`: its metrics too).

    Raises:
        PdtoolError: the folder cannot be written.
    """
    try:
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            for kind in ("status", "failure"):
                _path(out, rank, kind).unlink(missing_ok=True)
        if fresh:
            (out / "metrics.jsonl").unlink(missing_ok=True)
    except OSError as error:
        raise PdtoolError(f"{out} cannot be written ({error.strerror})", "name another folder with -o") from error


def _path(out: Path, rank: int, kind: str) -> Path:
    return out / FOLDER / f"{rank}.{kind}"
