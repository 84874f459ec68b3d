"""What a page is about, read from files: a plan, a run with what it was planned to be, or an emulation."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.artifacts.envelope import declared_kind
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Emulation, Report
from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.files import read_text
from pdtool.run.measure.metrics_log import METRICS_FILE, read_metrics

_PLAN_FILE, _REPORT_FILE, _TRACE_FILE, _LOCK_FILE = "plan.yaml", "report.json", "trace.json", ".lock"
_EMULATION_FILE, _RUN_FILE = "emulation.json", "run.json"
_MAX_NAME = 200  # characters of a worker's name
_FLOCK = "hhqqixxxx"  # struct flock of Linux: type, whence, start, length, process


Planned = Callable[[str], tuple[Plan, Profile]]


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


@dataclass(frozen=True)
class Subject:
    """A plan, a run or an emulation.

    Attributes:
        name: as it was named on the command line.
        profile: that the plan was made from; None where it is no longer there.
        missing: why there is no plan or profile, for the reader of the page.
    """

    name: str
    plan: Plan | None = None
    profile: Profile | None = None
    run: RunRecord | None = None
    emulation: Emulation | None = None
    missing: str = ""

    @property
    def digests(self) -> tuple[str, ...]:
        """What the predictions depend on; empty where there is no plan or profile."""
        return (self.plan.plan_sha256, self.profile.content_sha256) if self.plan and self.profile else ()


def read_subject(name: str, planned: Planned) -> Subject:
    """Read a plan, the folder of a run or of an emulation, or the artifact in it (`-` is stdin, a plan).

    Args:
        planned: reads a plan and its profile, and checks that they go together.

    Raises:
        UsageError: it is none of these.
        ArtifactError: a file is damaged, or a plan's profile is missing or has changed.
    """
    path = Path(name)
    if os.path.isdir(name):
        return _read_folder(path, planned)
    if path.name in (_REPORT_FILE, METRICS_FILE, _RUN_FILE):
        return _read_folder(path.parent, planned)
    kind = declared_kind(read_text(name, may_be_pipe=True)) if name != "-" else Plan.KIND
    if kind == Emulation.KIND:
        return Subject(name, emulation=Emulation.load(path))
    if kind != Plan.KIND:
        what = f"{name} is a {kind}, no plan or run" if kind else f"{name} is no artifact of pdtool"
        raise UsageError(what, "name a plan, or the folder of a run or an emulation")
    plan, profile = planned(name)
    return Subject(name, plan=plan, profile=profile)


def _read_folder(folder: Path, planned: Planned) -> Subject:
    if (folder / _EMULATION_FILE).is_file() and not (folder / _REPORT_FILE).is_file():
        return Subject(str(folder), emulation=Emulation.load(folder / _EMULATION_FILE))
    if not any((folder / name).is_file() for name in (_REPORT_FILE, METRICS_FILE, _PLAN_FILE)):
        what = f"{folder} holds neither {_REPORT_FILE} nor {METRICS_FILE}"
        raise UsageError(what, "name a plan, or the folder of a run or an emulation")
    run = read_run(folder)
    path = _plan_path(run)
    if path is None:
        return Subject(str(folder), run=run, missing="the plan of this run was not found: nothing is predicted here")
    try:
        plan, profile = planned(str(path))
    except PdtoolError as error:
        return Subject(str(folder), run=run, missing=f"nothing is predicted here: {error}")
    return Subject(str(folder), plan=plan, profile=profile, run=run)


def read_run(folder: Path) -> RunRecord:
    """Read what a run has written so far; a report of fewer epochs than there are metrics of is an earlier one."""
    metrics = read_metrics(folder / METRICS_FILE)
    report = Report.load(folder / _REPORT_FILE) if (folder / _REPORT_FILE).is_file() else None
    if is_running(folder):
        return RunRecord(folder, RunPhase.RUNNING, None, metrics, {})
    if not report or max((line["epoch"] for line in metrics), default=0) > report.epochs:
        return RunRecord(folder, RunPhase.STOPPED, None, metrics, {})
    return RunRecord(folder, RunPhase.FINISHED, report, metrics, _read_trace(folder / _TRACE_FILE))


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of a run's folder; it is asked for the lock, which is not taken."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        if not (folder / _LOCK_FILE).is_file():  # a FIFO would be waited for
            return False
        with (folder / _LOCK_FILE).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except OSError:  # no such file, or a file system without locks
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _plan_path(run: RunRecord) -> Path | None:
    """Return the file of the plan that a run keeps, or of that of its report where it still is in plans/."""
    if (run.folder / _PLAN_FILE).is_file():
        return run.folder / _PLAN_FILE
    wanted = run.report.digests.get("plan") if run.report else None
    return next((path for path, plan in _plans_here() if wanted and plan.plan_sha256 == wanted), None)


def _plans_here() -> Iterator[tuple[Path, Plan]]:
    for path in sorted(Path("plans").glob("*.yaml")):
        with suppress(ArtifactError):
            yield path, Plan.load(path)


def _read_trace(path: Path) -> dict[str, list[TraceEvent]]:
    """Read a Chrome trace that a run wrote; {} where it is missing or damaged: the page does without."""
    try:
        return _events(json.loads(read_text(path))["traceEvents"])
    except (PdtoolError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return {}


def _events(entries: list[dict[str, Any]]) -> dict[str, list[TraceEvent]]:
    names: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    events: dict[str, list[TraceEvent]] = {}
    for entry in entries:
        pid = entry["pid"]
        if entry["name"] == "process_name":
            names[pid] = str(entry["args"]["name"])[:_MAX_NAME]
        elif entry["name"] == "thread_name":
            tracks[pid, entry["tid"]] = str(entry["args"]["name"]).split(" ")[0]
        else:
            start_s, length_s = float(entry["ts"]) / 1e6, float(entry["dur"]) / 1e6
            event = TraceEvent(tracks[pid, entry["tid"]], str(entry["name"]), str(entry["cat"]), start_s, length_s)
            events.setdefault(names[pid], []).append(event)
    return events
