"""What a page is about, read from files: a plan, a run with what it was planned to be, or an emulation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pdtool.artifacts.artifact import declared_kind
from pdtool.artifacts.metrics import METRICS_FILE
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Emulation
from pdtool.artifacts.run_dir import _EMULATION_FILE, _PLAN_FILE, _REPORT_FILE, _RUN_FILE, RunRecord, read_run
from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.files import read_text
from pdtool.reports.page import Subject

Planned = Callable[[str], tuple[Plan, Profile]]


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
