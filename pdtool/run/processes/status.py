"""What a worker is doing, in a small memory-mapped file: it can still be read after the worker was killed."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pdtool.errors import PdtoolError
from pdtool.run.config import RankAssignment
from pdtool.run.measure.metrics_log import METRICS_FILE

WORKERS_FOLDER = ".workers"
OWN_ERROR = -2
_STATUS_BYTES = 128
_FAILURE_BYTES = 4096


class Status:
    """The status of one worker; setting it takes about a microsecond."""

    def __init__(self, out: Path, assignment: RankAssignment) -> None:
        path = _path(out, assignment.rank, "status")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(_STATUS_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _STATUS_BYTES)
        _path(out, assignment.rank, "failure").write_bytes(b" " * _FAILURE_BYTES)  # for when the disk is full
        self.set("starting")

    def set(self, text: str) -> None:
        """Say what begins now: `1F7 of epoch 2`."""
        self._memory[:] = f"{os.getpid()} {text}".encode()[:_STATUS_BYTES].ljust(_STATUS_BYTES, b"\0")


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker ended, in its own words.

    Attributes:
        exit_code: of the error that it raised.
        peer: OWN_ERROR, or the rank that it waited for in vain (ANY_PEER: one of several).
    """

    what: str
    remedy: str
    exit_code: int
    peer: int = OWN_ERROR


def write_failure(out: Path, rank: int, failure: WorkerFailure) -> None:
    """Write a failure where `read_failure` reads it, into the bytes that were reserved for it."""
    path = _path(out, rank, "failure")
    with suppress(OSError), path.open("r+b" if path.exists() else "wb") as file:  # the folder may be gone
        file.write(json.dumps(asdict(failure)).encode().ljust(_FAILURE_BYTES))


def read_failure(out: Path, rank: int) -> WorkerFailure | None:
    """Return what the worker wrote when it failed; None when it wrote nothing."""
    try:
        return WorkerFailure(**json.loads(_path(out, rank, "failure").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def read_status(out: Path, rank: int) -> str:
    """Return what the worker was last doing."""
    return _read_status_file(out, rank).partition(" ")[2]


def read_pid(out: Path, rank: int) -> int:
    """Return the worker's process id; raises ProcessLookupError when it has not started."""
    pid = _read_status_file(out, rank).partition(" ")[0]
    if not pid.isdigit():
        raise ProcessLookupError(f"rank {rank} has not started")
    return int(pid)


def _read_status_file(out: Path, rank: int) -> str:
    try:
        return _path(out, rank, "status").read_bytes().rstrip(b"\0").decode(errors="replace") or "? starting"
    except OSError:
        return "? starting"


def prepare_folder(out: Path, ranks: Sequence[int], *, keep_metrics: bool) -> None:
    """Make the run's folder, and remove what an earlier run left there of these ranks, and of metrics.

    Raises:
        PdtoolError: the folder cannot be written.
    """
    try:
        (out / WORKERS_FOLDER).mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            for kind in ("status", "failure"):
                _path(out, rank, kind).unlink(missing_ok=True)
        if not keep_metrics:
            (out / METRICS_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise PdtoolError(f"{out} cannot be written ({error.strerror})", "name another folder with -o") from error


def _path(out: Path, rank: int, kind: str) -> Path:
    return out / WORKERS_FOLDER / f"{rank}.{kind}"
