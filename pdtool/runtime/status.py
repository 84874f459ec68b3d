"""What a worker is doing, in a small memory-mapped file that can be read even after the worker was killed.

And how it failed: its error travels to the launcher as the name of its class and its fields.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pdtool import host
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import ArtifactError, PdtoolError, WorkerDiedError, revived
from pdtool.files import check_no_link, open_in_place

ANY_PEER, NOBODY = -1, -2  # in place of a peer's rank
_STATUS = struct.Struct("<iqdi136s")  # fields of LastStatus: pid, oom_kills, since_s, waits_for, text
_FAILURE_BYTES = 4096


class Status:
    """The status of one worker; setting it takes about a microsecond.

    Attributes:
        of_this_process: the status of this process's worker; in other processes, one that nobody reads.
    """

    of_this_process: ClassVar[Status]

    def __init__(self, memory: mmap.mmap | bytearray, pid: int = 0, oom_kills: int = 0) -> None:
        self._memory, self._of_process = memory, (pid, oom_kills)
        self.set("the start")

    @classmethod
    def begin(cls, out: Path, rank: int) -> None:
        """Make this process the worker of a rank, with a status in the run's folder."""
        _make_files(out, rank)
        with open_in_place(RunDir(out).worker_file(rank, "status")) as file:
            memory = mmap.mmap(file.fileno(), _STATUS.size)
        cls.of_this_process = cls(memory, os.getpid(), host.oom_kills() or 0)

    def set(self, text: str) -> None:
        """Set what begins now: `1F7 of epoch 2`."""
        self._waits, self._text = 0, text.encode()
        self.waits_for(NOBODY)

    def waits_for(self, peer: int) -> None:
        """Set whom it waits for: a rank, ANY_PEER or NOBODY."""
        _STATUS.pack_into(self._memory, 0, *self._of_process, time.time(), peer, self._text)

    def wait_begins(self, peer: int = ANY_PEER) -> None:
        """Begin a wait for a rank or for one of several; a nested wait is part of the outer one."""
        self._waits += 1
        if self._waits == 1 or peer != ANY_PEER:
            self.waits_for(peer)

    def wait_ends(self) -> None:
        """End a wait: it goes on to compute. This is not called after an error."""
        self._waits -= 1
        if self._waits <= 0:
            self.waits_for(NOBODY)


Status.of_this_process = Status(bytearray(_STATUS.size))


@dataclass(frozen=True)
class LastStatus:
    """What a worker was last doing.

    Attributes:
        pid: id of its process; 0 if it has not started.
        since_s: when it began that, or last began or ended a wait in it; in time.time, which machines nearly share.
        waits_for: the rank that it waited for, ANY_PEER or NOBODY.
        oom_kills: how many processes of its machine the kernel had killed because memory ran out when it started.
    """

    text: str = "the start"
    pid: int = 0
    since_s: float = 0.0
    waits_for: int = NOBODY
    oom_kills: int = 0

    @property
    def is_waiting(self) -> bool:
        """Whether it was waiting for another worker."""
        return self.waits_for != NOBODY


class PeerError(WorkerDiedError):
    """A worker waited in vain for another.

    Attributes:
        peer: rank of the other, or ANY_PEER if it can be one of several.
        is_timeout: whether the other did not answer in time; otherwise it closed its connection.
    """

    def __init__(self, what: str, remedy: str = "", *, peer: int = ANY_PEER, is_timeout: bool = False) -> None:
        super().__init__(what, remedy)
        self.peer, self.is_timeout = peer, is_timeout


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker ended, in its own words.

    Attributes:
        error: the error that it raised: a PeerError if it waited in vain.
        at_s: when, in seconds of time.time.
        stopped: ranks of its machine whose processes were stopped then (SIGSTOP).
        gone: ranks of its machine whose processes had ended then.
        traceback: traceback of the error; "" for none.
    """

    error: PdtoolError
    at_s: float = 0.0
    stopped: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    traceback: str = ""

    @property
    def peer(self) -> int | None:
        """The rank that it waited for in vain, or ANY_PEER; None: the error is its own."""
        return self.error.peer if isinstance(self.error, PeerError) else None

    @property
    def is_timeout(self) -> bool:
        """Whether it gave up waiting."""
        return isinstance(self.error, PeerError) and self.error.is_timeout


def write_failure(out: Path, rank: int, failure: WorkerFailure) -> None:
    """Write a failure for `read_failure`, into the bytes reserved for it; then its traceback."""
    error, path = failure.error, RunDir(out).worker_file(rank, "failure")
    raised = [type(error).__name__, error.what, error.remedy, error.fields]
    text = json.dumps([raised, failure.at_s, failure.stopped, failure.gone], default=str)
    with suppress(OSError, ArtifactError), open_in_place(path) as file:  # it may be gone
        file.write(text.encode().ljust(_FAILURE_BYTES))
        file.write(b"\n" + failure.traceback.encode(errors="backslashreplace"))


def read_failure(out: Path, rank: int) -> WorkerFailure | None:
    """Return the failure that the worker wrote; None if it wrote nothing."""
    try:
        path = RunDir(out).worker_file(rank, "failure")
        text, _, traceback = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        raised, at_s, stopped, gone = json.loads(text)
        return WorkerFailure(revived(*raised), at_s, stopped, gone, traceback)
    except (OSError, ValueError, TypeError):
        return None


def read_status(out: Path, rank: int) -> LastStatus:
    """Return what the worker was last doing."""
    try:
        content = RunDir(out).worker_file(rank, "status").read_bytes()
        pid, oom_kills, since_s, waits_for, text = _STATUS.unpack_from(content)
    except (OSError, struct.error):
        return LastStatus()
    return LastStatus(text.rstrip(b"\0").decode(errors="replace") or "the start", pid, since_s, waits_for, oom_kills)


def process_state(pid: int) -> str:
    """Return Linux's letter for the state of a process of this machine: T is stopped, Z or "" has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def prepare_folder(out: Path, ranks: Sequence[int], *, keep_metrics: bool) -> None:
    """Make the run's folder with the files of these ranks, so that workers can report their end even on a full disk.
    Remove such files, and metrics, of an earlier run.

    Raises:
        ArtifactError: a link in the folder leads elsewhere.
        PdtoolError: the folder cannot be written.
    """
    run_dir = RunDir(out)
    try:
        run_dir.check_written()
        run_dir.failure_file.unlink(missing_ok=True)
        for rank in ranks:
            _make_files(out, rank)
        if not keep_metrics:
            run_dir.metrics_file.unlink(missing_ok=True)
    except OSError as error:
        raise PdtoolError(f"{out} cannot be written ({error.strerror})", "name another folder with -o") from error


def _make_files(out: Path, rank: int) -> None:
    """Make the files of a worker, blank and in their final size."""
    run_dir = RunDir(out)
    check_no_link(run_dir.workers, is_folder=True)
    run_dir.workers.mkdir(parents=True, exist_ok=True)
    for kind, content in (("status", bytes(_STATUS.size)), ("failure", b" " * _FAILURE_BYTES)):
        with open_in_place(run_dir.worker_file(rank, kind)) as file:
            file.truncate(0)
            file.write(content)
