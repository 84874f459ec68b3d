"""The folder of a run: its files, its lock, its checkpoints, and how far it is; nothing here needs torch.

runs/NAME/run.json         what was asked for, and how it ended (RunState)
         /plan.yaml        what is trained
         /metrics.jsonl    a line for each update and each validation
         /report.json      where the time went, written at the end
         /trace.json       when each worker did what
         /checkpoints/epoch-N/checkpoint.json    a checkpoint is complete when this file is there
         /failure.txt      if it failed, what each worker was doing
         /.lock            held by the process that trains
         /.workers/        what each worker is doing, while it trains
         /.token           by which machines see that they share the folder
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from pdtool.artifacts.artifact import Artifact, FrozenModel
from pdtool.artifacts.chrome_trace import TraceEvent, read_trace
from pdtool.artifacts.fields import Bytes, Count, Digest, Label, Number
from pdtool.artifacts.metrics import METRICS_FILE, read_metrics
from pdtool.artifacts.report import Report
from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.files import check_no_link, open_in_place

RUN_FILE, PLAN_FILE, REPORT_FILE, TRACE_FILE = "run.json", "plan.yaml", "report.json", "trace.json"
EMULATION_FILE = "emulation.json"
FAILURE_FILE, TOKEN_FILE = "failure.txt", ".token"
CHECKPOINTS_FOLDER, MANIFEST_FILE = "checkpoints", "checkpoint.json"
WORKERS_FOLDER = ".workers"
UNWRITABLE = (OSError, PdtoolError)  # of a full disk, say: the record is no reason to end a run
_LOCK_FILE, _OLD_MANIFEST_FILE = ".lock", "epoch.json"
_FLOCK = struct.Struct("@hhqqi")  # struct flock of Linux: type, whence, start, length, process
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks is used without one
_TAIL_BYTES = 65_536  # of metrics.jsonl, which hold its last lines
_MAX_FIGURE = 1e18
_MAX_RUNS = 5  # that an error lists
StageFile = Annotated[str, StringConstraints(pattern=r"^stage-[0-9]{1,6}\.safetensors$")]


class StoredFile(FrozenModel):
    """A file as it was written.

    Attributes:
        bytes: its size.
    """

    bytes: Bytes
    sha256: Digest


class CheckpointManifest(Artifact):
    """`checkpoints/epoch-N/checkpoint.json`.

    Attributes:
        epoch: epochs that were trained.
        epochs: that the run was to have in all; 0: an older checkpoint, which does not say.
        seed: of the run.
        metrics: of the validation after that epoch; finite.
        validation_losses: of each epoch until then, which learning-rate schedules may depend on; finite. Older
            checkpoints have none.
        minibatches: of each epoch until then; 0 where an older pdtool trained it, which did not say. Older checkpoints
            have none.
        samples: of each epoch until then. Older checkpoints have none.
        tied: name of a parameter or buffer -> the first name of the same tensor in the model, where that is another.
            Older checkpoints have none.
        files: the safetensors files in the same folder, each with the state of one stage.
    """

    KIND: ClassVar[str] = "checkpoint"
    MAKER: ClassVar[str] = "pdtool run"

    epoch: Count
    epochs: Number = 0
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    metrics: dict[Label, Annotated[float, Field(allow_inf_nan=False)]]
    files: dict[StageFile, StoredFile]
    validation_losses: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()
    minibatches: tuple[Number, ...] = ()
    samples: tuple[Number, ...] = ()
    tied: dict[str, str] = Field(default_factory=dict)


class RunState(Artifact):
    """`runs/.../run.json`: what a run was asked for, and how it ended.

    Attributes:
        plan: name of the plan.
        epochs: that the run is to have in all.
        epochs_done: that it had when it began, of the run that it resumes.
        updates, samples: of an epoch; None until the workers have opened the training set.
        end: how it ended; None while it goes on, and where nobody could say (a power cut).
        reason: why it stopped or failed.
    """

    KIND: ClassVar[str] = "run"
    MAKER: ClassVar[str] = "pdtool run"

    plan: Label
    config: Label
    schedule: Label
    epochs: Number
    epochs_done: Number = 0
    updates: Count | None = None
    samples: Count | None = None
    end: Literal["done", "stopped", "failed"] | None = None
    reason: Annotated[str, StringConstraints(max_length=10_000)] = ""


class RunPhase(StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    STOPPED = "stopped before its end"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunRecord:
    """What a run has left in its folder so far; `events` are those of its trace, by the name of the worker."""

    folder: Path
    state: RunPhase
    report: Report | None
    metrics: list[dict[str, Any]]
    events: dict[str, list[TraceEvent]]


def read_run(folder: Path) -> RunRecord:
    """Read what a run has written so far; a report of fewer epochs than there are metrics of is an earlier one."""
    metrics = read_metrics(folder / METRICS_FILE)
    report = Report.load(folder / REPORT_FILE) if (folder / REPORT_FILE).is_file() else None
    if is_running(folder):
        return RunRecord(folder, RunPhase.RUNNING, None, metrics, {})
    if not report or max((line["epoch"] for line in metrics), default=0) > report.epochs:
        return RunRecord(folder, RunPhase.STOPPED, None, metrics, {})
    return RunRecord(folder, RunPhase.FINISHED, report, metrics, read_trace(folder / TRACE_FILE))


def last_update(folder: Path) -> dict[str, Any] | None:
    """Return the last line of metrics.jsonl about an update; None when there is none."""
    path = folder / METRICS_FILE
    if not path.is_file():  # a FIFO would be waited for, a device has no end
        return None
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")):
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("split") == "train" and _is_whole(event):
                    return event
    return None


def _is_whole(event: dict[str, Any]) -> bool:
    """Whether a line is one that a run has written, not a stranger."""
    figures = [event.get(name) for name in ("loss", "epoch", "step")] + [event.get("samples_per_s", 0)]
    return all(
        isinstance(figure, (int, float)) and not isinstance(figure, bool) and abs(figure) < _MAX_FIGURE
        for figure in figures
    )


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run's folder, by their epoch."""
    return {
        epoch: path
        for path in folder.glob(f"{CHECKPOINTS_FOLDER}/epoch-*")
        if (epoch := _epoch(path)) is not None and (path / MANIFEST_FILE).is_file()
    }


def latest(folder: Path) -> Path:
    """Return the last complete checkpoint of a run's folder, or the folder itself if it is one; raises UsageError."""
    if (folder / MANIFEST_FILE).is_file():
        return folder
    checkpoints = complete_checkpoints(folder)
    if not checkpoints:
        if (folder / _OLD_MANIFEST_FILE).is_file() or any(
            folder.glob(f"{CHECKPOINTS_FOLDER}/epoch-*/{_OLD_MANIFEST_FILE}")
        ):
            raise UsageError(
                f"the checkpoints in {folder} are of an older pdtool, whose files could hold code",
                "export them with the pdtool that wrote them",
            )
        if not folder.is_dir():
            fault = "is no folder" if folder.exists() else "is not there"
            raise UsageError(f"{folder} {fault}", f"name the folder of a run{_runs_beside(folder)}")
        what = f"{folder} holds no complete checkpoint"
        raise UsageError(what, "name the folder of a run that has one: the first is written after the first epoch")
    return checkpoints[max(checkpoints)]


def _runs_beside(folder: Path) -> str:
    """Return `: runs/a, runs/b`, the newest runs beside a folder that is not there; "" when there are none."""
    runs = {path.parent for path in folder.parent.glob(f"*/{CHECKPOINTS_FOLDER}") if complete_checkpoints(path.parent)}
    newest = sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:_MAX_RUNS]
    return f": {', '.join(map(str, newest))}" if newest else ""


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """Return what checkpoint.json says.

    Raises:
        ArtifactError: it is missing, damaged, or of another epoch than its folder; the checkpoint before it is named.
    """
    path = checkpoint / MANIFEST_FILE
    try:
        manifest = CheckpointManifest.load(path)
    except ArtifactError as error:
        reason = error.what.removeprefix(f"{path}: ")
        raise ArtifactError(path, f"is damaged ({reason})", checkpoint_remedy(checkpoint)) from error
    if _epoch(checkpoint) not in (None, manifest.epoch):
        what = f"is of epoch {manifest.epoch}, and stands in a folder of another epoch"
        raise ArtifactError(path, what, f"name the folder epoch-{manifest.epoch}, or remove it")
    return manifest


def checkpoint_remedy(checkpoint: Path) -> str:
    """What to do when a checkpoint is damaged."""
    last, complete = _epoch(checkpoint), complete_checkpoints(checkpoint.parent.parent)
    earlier = [epoch for epoch in complete if last and epoch < last]
    if earlier:
        return f"go on from the one before it, in another folder: with --resume {complete[max(earlier)]} and without -o"
    return "there is none before it in this run: train again, in another folder"


def _epoch(checkpoint: Path) -> int | None:
    """The epoch that the folder's name tells; None for another name."""
    match = re.fullmatch(r"epoch-([0-9]+)", checkpoint.name)
    return int(match[1]) if match else None


def update_record(out: Path, **changes: Any) -> None:
    """Change fields of the record in a run's folder, as far as it is there and can be written."""
    path = out / RUN_FILE
    with suppress(*UNWRITABLE):
        RunState.load(path).model_copy(update=changes).save(path)


def put_report_aside(out: Path, epochs_done: int) -> None:
    """Keep the report of the run that is resumed in this folder under another name: it is not that of this run."""
    with suppress(OSError):
        os.replace(out / REPORT_FILE, out / f"report.epoch-{epochs_done}.json")


def check_written(out: Path) -> None:
    """Check that what a run writes stays in its folder, which may be a stranger's.

    Raises:
        ArtifactError: a file or folder that the run writes is a link, or no regular file or folder.
    """
    files = (_LOCK_FILE, TOKEN_FILE, RUN_FILE, PLAN_FILE, METRICS_FILE, REPORT_FILE, TRACE_FILE)
    for name in (*files, EMULATION_FILE, FAILURE_FILE):
        check_no_link(out / name)
    for name in (CHECKPOINTS_FOLDER, WORKERS_FOLDER):
        check_no_link(out / name, is_folder=True)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder `out` and hold it for one run; the system takes the lock back when this process ends.

    Raises:
        UsageError: another run holds it.
        ArtifactError: a link in it leads elsewhere.
        PdtoolError: the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_written(out)
        file = open_in_place(out / _LOCK_FILE)
    except OSError as error:
        raise PdtoolError(f"{out} cannot be written ({error.strerror})", "name another folder with -o") from error
    with file:
        _lock(file.fileno(), out)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not kept by a forked process
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            remedy = "wait for it, or name another folder with -o"
            raise UsageError(f"{out} is in use by a run ({holder})", remedy) from None
        if error.errno not in _NO_LOCKS:
            raise PdtoolError(f"{out} cannot be locked ({error.strerror})", "name another folder with -o") from error


def is_running(folder: Path) -> bool:
    """Return whether a process holds the lock of a run's folder; it is asked for the lock, which is not taken."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        if not (folder / _LOCK_FILE).is_file():  # a FIFO would be waited for
            return False
        with (folder / _LOCK_FILE).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except OSError:  # no such file, or a file system without locks
        return False
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
