"""The folder of a run: its files, its lock, its checkpoints, and its progress; nothing here needs torch.

runs/NAME/run.json         its options, and how it ended (RunState)
         /plan.yaml        the plan
         /metrics.jsonl    a line for each update and each validation
         /report.json      where the time went, written at the end
         /trace.json       when each worker did what
         /checkpoints/epoch-N/checkpoint.json    a checkpoint is complete when this file is there
         /failure.txt      if it failed, what each worker was doing
         /.lock            held by the process that trains
         /.workers/        what each worker is doing, while it trains
         /.token           shows the machines that they share the folder
         /stages/          its own copy of the stage files
         /emulation.json   for an emulation, the measurements of all its plans, whose runs are folders beside it
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from pdtool.artifacts.artifact import Artifact, FrozenModel
from pdtool.artifacts.chrome_trace import WorkerTrace, read_trace
from pdtool.artifacts.fields import Bytes, Count, Digest, Label, Number
from pdtool.artifacts.metrics import MetricsLine, read_metrics
from pdtool.artifacts.report import Report
from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.files import check_no_link, open_in_place, quoted
from pdtool.machines import Machines
from pdtool.options.target import Target
from pdtool.units import counted, format_metric

UNWRITABLE = (OSError, PdtoolError)  # of a full disk, say: a failed record must not end a run
_FLOCK = struct.Struct("@hhqqi")  # struct flock of Linux: type, whence, start, length, process
_HELD_HERE: set[str] = set()  # folders that this process has locked: to close their lock file again would unlock them
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # on a file system without locks, go on without one
_MAX_RUNS = 5  # that an error lists
StageFile = Annotated[str, StringConstraints(pattern=r"^stage-[0-9]{1,6}\.safetensors$")]


class StoredFile(FrozenModel):
    """A file in its original state.

    Attributes:
        bytes: its size.
    """

    bytes: Bytes
    sha256: Digest


class CheckpointManifest(Artifact):
    """`checkpoints/epoch-N/checkpoint.json`.

    Attributes:
        epoch: epochs trained so far.
        epochs: total epochs of the run; 0: an older checkpoint, which lacks it.
        seed: seed of the run.
        metrics: metrics of the validation after that epoch; finite.
        validation_losses: one for each epoch so far, because learning-rate schedules may depend on them; finite. Older
            checkpoints have none.
        minibatches: minibatches of each epoch so far; 0 if an older pdtool, which did not record them, trained it.
            Older checkpoints have none.
        samples: samples of each epoch so far. Older checkpoints have none.
        tied: name of a parameter or buffer -> the first name of the same tensor in the model, if it differs. Older
            checkpoints have none.
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
    """`runs/.../run.json`: the options of a run, and how it ended.

    Attributes:
        plan: name of the plan.
        plan_path: path of the plan; "" if an earlier pdtool, which did not record it, trained it.
        folder: where the paths of its plan and its model begin, from its own folder. Older files lack it.
        epochs: total epochs of the run.
        epochs_done: epochs with a complete checkpoint.
        resumed_after: epochs of the resumed run when this one began.
        asked: its options, by the names of RunOptions, in their form on the command line. An earlier pdtool did not
            record them.
        updates, samples: updates and samples of an epoch; None until the workers have opened the training set.
        updates_before: updates of the resumed run, whose epochs may have had another number. Older files lack them.
        end: how it ended; None while it goes on, and if nobody could record it (a power cut).
        reason: why it stopped or failed.
    """

    KIND: ClassVar[str] = "run"
    MAKER: ClassVar[str] = "pdtool run"
    VERSION: ClassVar[int] = 2

    plan: Label
    plan_path: str = ""
    folder: str = ""
    config: Label
    schedule: Label
    epochs: Number
    epochs_done: Number = 0
    resumed_after: Number = 0
    asked: dict[Label, str | int | float | bool | tuple[str, ...]] = Field(default_factory=dict)
    updates: Count | None = None
    samples: Count | None = None
    updates_before: Number | None = None
    end: Literal["done", "stopped", "failed"] | None = None
    reason: Annotated[str, StringConstraints(max_length=10_000)] = ""

    @classmethod
    def upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:
        if version == 1 and "epochs_done" in content:  # there it meant the epochs of the run before
            return content | {"resumed_after": content["epochs_done"]}
        return content

    @property
    def total_updates(self) -> int | None:
        """Updates in all epochs, including those of the resumed run; None until they are known."""
        if self.updates is None:
            return None
        before = self.updates * self.resumed_after if self.updates_before is None else self.updates_before
        return before + self.updates * (self.epochs - self.resumed_after)

    @classmethod
    def _rewritable(cls, path: Path | str, what: str, *, or_else: str = "", field: str = "") -> ArtifactError:
        remedy = f"to continue the run without it, name its plan: `pdtool run PLAN -o {Path(path).parent} --resume`"
        return ArtifactError(path, what, remedy, field=field)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder so far.

    Attributes:
        report: None unless it has finished.
        workers: workers of its trace, by rank.
    """

    is_running: bool
    report: Report | None
    metrics: list[MetricsLine]
    workers: list[WorkerTrace]

    @property
    def phase(self) -> str:
        """Its state, in words."""
        return "running" if self.is_running else "finished" if self.report else "stopped before its end"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run: the folder at `path`, which is complete if its manifest exists."""

    MANIFEST: ClassVar[str] = "checkpoint.json"

    path: Path

    @property
    def manifest_file(self) -> Path:
        """Epoch, seed, metrics, and the digest of each file."""
        return self.path / self.MANIFEST

    @property
    def partial(self) -> Checkpoint:
        """The folder in which workers write it together, until it is complete."""
        return Checkpoint(self.path.with_name(f".{self.path.name}.partial"))

    def stage_file(self, stage: int) -> Path:
        """Return the path of a stage's file."""
        return self.path / f"stage-{stage}.safetensors"

    @property
    def is_complete(self) -> bool:
        """Whether all of it was written."""
        return self.manifest_file.is_file()

    @property
    def epoch(self) -> int | None:
        """The epoch in the folder's name; None for another name."""
        match = re.fullmatch(r"epoch-([0-9]+)", self.path.name)
        return int(match[1]) if match else None

    def manifest(self) -> CheckpointManifest:
        """Read the manifest.

        Raises:
            ArtifactError: it is missing, damaged, or of a different epoch than its folder; the error names the
                checkpoint before it.
        """
        path = self.manifest_file
        try:
            manifest = CheckpointManifest.load(path)
        except ArtifactError as error:
            reason = ": ".join(filter(None, (error.field, error.fault)))
            raise ArtifactError(path, f"is damaged ({reason})", self.remedy()) from error
        if self.epoch not in (None, manifest.epoch):
            what = f"is of epoch {manifest.epoch}, but its folder is of another epoch"
            raise ArtifactError(path, what, f"rename the folder to epoch-{manifest.epoch}, or remove it")
        return manifest

    def remedy(self) -> str:
        """Return the remedy if it is damaged."""
        complete = RunDir(self.path.parent.parent).checkpoints()
        earlier = [epoch for epoch in complete if self.epoch and epoch < self.epoch]
        if earlier:
            before = complete[max(earlier)].path
            return f"continue in a new folder from the checkpoint before it: `pdtool run --resume {quoted(before)}`"
        return "this run has no earlier checkpoint: train again in another folder"


class RunDir:
    """The folder of a run, or of an emulation, which holds the runs of its plans.

    Attributes:
        path: path of the folder.
        state_file, plan_file, metrics_file, report_file, trace_file, emulation_file, failure_file, token_file: see
            above.
        workers: folder of the workers' states.
        stages: folder of its stage files.
        checkpoints_folder: folder of all checkpoints, complete or not.
    """

    ARTIFACTS = ("report.json", "run.json", "emulation.json")  # the first that exists stands for the folder

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report_file, self.state_file, self.emulation_file = (path / name for name in self.ARTIFACTS)
        self.plan_file, self.trace_file = path / "plan.yaml", path / "trace.json"
        self.metrics_file, self.failure_file = path / "metrics.jsonl", path / "failure.txt"
        self.token_file, self._lock_file = path / ".token", path / ".lock"
        self.workers, self.stages, self.checkpoints_folder = path / ".workers", path / "stages", path / "checkpoints"

    @property
    def results(self) -> list[str]:
        """The names of what a run has written for its user."""
        files = (self.report_file, self.metrics_file, self.trace_file, self.checkpoints_folder)
        return [path.name + "/" * path.is_dir() for path in files if path.exists()]

    @property
    def is_empty(self) -> bool:
        """Whether the folder contains nothing, or is missing."""
        return not any(self.path.glob("*"))

    def worker_file(self, rank: int, kind: str) -> Path:
        """Return the file in which a worker keeps its `status` or its `failure`."""
        return self.workers / f"{rank}.{kind}"

    def emulated(self, plan: str) -> RunDir:
        """Return the run of one of an emulation's plans, by its name there."""
        return RunDir(self.path / plan.replace(" ", "-"))

    def check_written(self) -> None:
        """Check that a run's writes stay in its folder, which may be a stranger's.

        Raises:
            ArtifactError: a file or folder that the run writes is a link, or not a regular file or folder.
        """
        folders = (self.checkpoints_folder, self.workers, self.stages)
        for path in (self._lock_file, self.token_file, self.workers, self.emulation_file, *self._written):
            check_no_link(path, is_folder=path in folders)

    @property
    def _written(self) -> tuple[Path, ...]:
        """Files and folders that a run writes for its user."""
        files = (self.state_file, self.plan_file, self.metrics_file, self.report_file, self.trace_file)
        return (*files, self.failure_file, self.checkpoints_folder, self.stages)

    @contextmanager
    def held(self, hint: str = "") -> Iterator[None]:
        """Make the folder and lock it for one run; the system releases the lock when this process ends.

        Args:
            hint: ends the remedy if another run has locked it.

        Raises:
            UsageError: another run has locked it.
            ArtifactError: a link in it leads elsewhere.
            PdtoolError: the folder cannot be written.
        """
        folder = os.path.realpath(self.path)
        if folder in _HELD_HERE:
            raise _in_use(self.path, "this process", hint)
        with ExitStack() as held:
            _HELD_HERE.add(folder)
            held.callback(_HELD_HERE.discard, folder)
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.check_written()
                file = held.enter_context(open_in_place(self._lock_file))
                _lock(file.fileno(), self.path, hint)
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            except OSError as error:
                what = f"{self.path} cannot be written ({error.strerror})"
                raise PdtoolError(what, "name another folder with -o") from error
            yield

    def is_running(self) -> bool:
        """Return whether a process has locked the folder, without taking the lock."""
        if os.path.realpath(self.path) in _HELD_HERE:
            return True
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            if not self._lock_file.is_file():  # a FIFO would block
                return False
            with self._lock_file.open("rb") as file:
                answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        except OSError:  # no such file, or a file system without locks
            return False
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def state(self) -> RunState | None:
        """Return the run's options and how it ended; None if that is not recorded, or damaged."""
        with suppress(PdtoolError):
            return RunState.load(self.state_file)
        return None

    def update_state(self, **changes: Any) -> None:
        """Change fields of the state, if it exists and can be written."""
        with suppress(*UNWRITABLE):
            if state := self.state():
                state.model_copy(update=changes).save(self.state_file)

    def record_end(self, end: Literal["done", "stopped", "failed"], reason: str = "") -> bool:
        """Record how the run ended; return False if that is recorded already, and stays.

        An end by a signal passes through the calling program, which may raise something else.
        """
        state = self.state()
        if state and state.end:
            return False
        self.update_state(end=end, reason=reason)
        return True

    def resume_command(self, machines: Machines | None = None) -> str:
        """Return the command that continues the run, or starts it again if it has no checkpoint yet.

        Args:
            machines: those of the launch, if known.
        """
        return f"pdtool run -o {quoted(self.path)} --resume{machines.flags if machines else ''}"

    def put_report_aside(self, epochs_done: int) -> None:
        """Rename the report of the resumed run in this folder, because it does not belong to this run."""
        with suppress(OSError):
            os.replace(self.report_file, self.path / f"report.epoch-{epochs_done}.json")

    def read(self) -> RunRecord:
        """Read the run's folder; a report with fewer epochs than the metrics belongs to an earlier run.

        Raises:
            ArtifactError: a file is damaged.
        """
        metrics, is_running = read_metrics(self.metrics_file), self.is_running()
        report = Report.load(self.report_file) if self.report_file.is_file() else None
        if report and (is_running or max((line.epoch for line in metrics), default=0) > report.epochs):
            report = None
        return RunRecord(is_running, report, metrics, read_trace(self.trace_file) if report else [])

    def checkpoint(self, epoch: int) -> Checkpoint:
        """Return the checkpoint after an epoch, which may not exist."""
        return Checkpoint(self.checkpoints_folder / f"epoch-{epoch}")

    def checkpoints(self) -> dict[int, Checkpoint]:
        """Return the complete checkpoints, by their epoch."""
        found = map(Checkpoint, self.checkpoints_folder.glob("epoch-*"))
        return {each.epoch: each for each in found if each.epoch is not None and each.is_complete}

    def latest_checkpoint(self) -> Checkpoint:
        """Return the last complete checkpoint, or the folder itself if it is one; raises UsageError."""
        folder, checkpoints = self.path, self.checkpoints()
        latest = checkpoints[max(checkpoints)] if checkpoints else Checkpoint(folder)
        if latest.is_complete:
            return latest
        if not folder.is_dir():
            fault = "is not a folder" if folder.exists() else "is not there"
            raise UsageError(f"{folder} {fault}", f"name the folder of a run{self._runs_beside()}")
        what = f"{folder} contains no complete checkpoint"
        raise UsageError(
            what, "name the folder of a run that has finished an epoch, after which it writes its first checkpoint"
        )

    def check_unfinished(self, epochs: int, target: Target | None) -> int:
        """Check that there is something left to train, and return the epochs that are trained; raises UsageError.

        Args:
            epochs: that are asked for, including those that are trained.
        """
        manifest = self.latest_checkpoint().manifest()
        done = manifest.epoch
        if done >= epochs:
            raise UsageError(f"{self.path} has already trained its {counted(done, 'epoch')}", "pass a larger --epochs")
        if target and target.metric in manifest.metrics and target.is_reached(manifest.metrics):
            reached = f"{target.metric} is {format_metric(manifest.metrics[target.metric])} after epoch {done}"
            raise UsageError(
                f"{self.path} has already reached --target '{target}': {reached}",
                "pass another --target, or --target none",
            )
        return done

    def check_no_other_run(self, resumed: Path | None) -> None:
        """Check that a run may write here.

        Raises:
            UsageError: the folder contains checkpoints of another run than the resumed one, or something else under a
                name that a run writes.
        """
        if resumed and resumed.resolve() == self.path.resolve():
            return
        if self.checkpoints():
            what = f"{self.path} already contains a run"
            raise UsageError(what, "continue it with --resume, or name another folder with -o")
        if self.state() is None and (found := next(filter(os.path.lexists, self._written), None)):
            what = f"{self.path} is not the folder of a run, but contains {found.name}, which a run would replace"
            raise UsageError(what, "name another folder with -o")

    def _runs_beside(self) -> str:
        """Return `: runs/a, runs/b`, the newest runs beside a missing folder; "" if there are none."""
        runs = [path for path in self.path.parent.glob("*") if RunDir(path).checkpoints()]
        newest = sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:_MAX_RUNS]
        return f": {', '.join(map(str, newest))}" if newest else ""


def _in_use(out: Path, holder: str, hint: str) -> UsageError:
    return UsageError(f"{out} is in use by a run ({holder})", f"wait for it, or name another folder with -o{hint}")


def _lock(descriptor: int, out: Path, hint: str) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not kept by a forked process
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise _in_use(out, holder, hint) from None
        if error.errno not in _NO_LOCKS:
            raise PdtoolError(f"{out} cannot be locked ({error.strerror})", "name another folder with -o") from error
