"""Show artifacts, draw plans, runs and emulations as one HTML page, and write a run's weights as one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdtool.api import console
from pdtool.api.caller import unchanged_caller
from pdtool.api.console import note, status
from pdtool.api.inputs import as_it_is, path_text, planned
from pdtool.artifacts import load_any
from pdtool.artifacts.artifact import Artifact, declared_kind
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.report import Emulation
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import PdtoolError, UsageError
from pdtool.files import check_replaceable, read_text, write_atomically
from pdtool.reports.page import GENERATOR, Subject, page

if TYPE_CHECKING:
    from pdtool.planner.choice.comparison import SimulatedPlan

_MAX_SUBJECTS = 4


@unchanged_caller()
def show(what: Artifact | Path | str) -> None:
    """Print an artifact for people, on stdout.

    Args:
        what: the artifact, the path of its file, or the folder of a bundle, a run or a checkpoint.

    Raises:
        ArtifactError: there is none, or it is damaged; or an edited plan cannot be executed, or its profile is missing.
    """
    shown(what if isinstance(what, Artifact) else path_text(what))


def shown(what: Artifact | str, show: Callable[[Artifact, Path | None], None] = console.show) -> None:
    """Print an artifact, or that of a file or folder (`-` is stdin); raises as `show` does.

    Args:
        show: prints it, in the form that is asked for; called with the artifact and its folder, None if unknown.
    """
    path = None if isinstance(what, Artifact) or what == "-" else Path(what)
    artifact = what if isinstance(what, Artifact) else load_any(what)
    artifact, fault = as_it_is(artifact, str(path or "-"))
    show(artifact, path if path is None or path.is_dir() else path.parent)
    if fault:
        raise fault


@unchanged_caller()
def report(*what: Path | str, output: Path | str = "report.html") -> Path:
    """Draw plans, runs and emulations side by side on one HTML page.

    Args:
        what: paths of plans, or folders of runs and emulations; at most four.
        output: the page to write.

    Returns:
        The path of the page.

    Raises:
        UsageError: one of them is none of these, or the existing output file is not such a page.
        ArtifactError: a file is damaged, or a plan's profile is missing or has changed.
    """
    names, path = tuple(map(path_text, what)), Path(path_text(output))
    if "-" in (*names, str(path)):
        raise UsageError("- means stdin or stdout only on the command line", "name a file")
    check_page(names, path)
    write_atomically(path, page_of(names, {})[0])
    return path


def check_page(names: Sequence[str], path: Path) -> None:
    """Check that a page can show so many, and that no other file would be overwritten; raises UsageError."""
    if not names:
        raise UsageError("no plan or run is named", "name one, such as plans/mnist-2.yaml or runs/mnist-2")
    if len(names) > _MAX_SUBJECTS:
        raise UsageError(f"{len(names)} plans and runs are too many for one page", f"name at most {_MAX_SUBJECTS}")
    if str(path) != "-":
        check_replaceable(path, "a page of pdtool", lambda head: GENERATOR.encode() in head)


def page_of(names: Sequence[str], simulations: dict[str, SimulatedPlan]) -> tuple[str, list[Subject]]:
    """Return the page of some plans and runs, and its subjects.

    Args:
        simulations: cache of simulations, for callers that make the page again and again.
    """
    subjects = [read_subject(name) for name in names]
    with status("simulating"):
        return page(subjects, simulations), subjects


@unchanged_caller()
def export(run_dir: Path | str, output: Path | str = "model.pt") -> Path:
    """Write a run's last checkpoint as one ordinary state_dict, for torch.load.

    Args:
        run_dir: folder of the run, or of one of its checkpoints.
        output: file to write.

    Returns:
        The path of the file.

    Raises:
        UsageError: there is no complete checkpoint.
        ArtifactError: the checkpoint is damaged.
    """
    from pdtool.runtime.worker.checkpoint import export as write  # loads torch

    path = Path(path_text(output))
    checkpoint = write(Path(path_text(run_dir)), path)
    if str(path) != "-":
        note(f"wrote {path} from {checkpoint}")
    return path


def read_subject(name: str) -> Subject:
    """Read a plan, the folder of a run or of an emulation, or the artifact in it (`-` is stdin, a plan).

    Raises:
        UsageError: it is none of these.
        ArtifactError: a file is damaged, or a plan's profile is missing or has changed.
    """
    path = Path(name)
    if os.path.isdir(name):
        return _read_folder(RunDir(path))
    beside = RunDir(path.parent)
    if path in (beside.report_file, beside.metrics_file, beside.state_file):
        return _read_folder(beside)
    kind = declared_kind(read_text(name, may_be_pipe=True)) if name != "-" else Plan.KIND
    if kind == Emulation.KIND:
        return Subject(name, emulation=Emulation.load(path))
    if kind != Plan.KIND:
        what = f"{name} is a {kind}, not a plan or run" if kind else f"{name} is not an artifact of pdtool"
        raise UsageError(what, "name a plan, or the folder of a run or an emulation")
    plan, profile = planned(name)
    return Subject(name, plan=plan, profile=profile)


def _read_folder(folder: RunDir) -> Subject:
    name = str(folder.path)
    if folder.emulation_file.is_file() and not folder.report_file.is_file():
        return Subject(name, emulation=Emulation.load(folder.emulation_file))
    if not any(path.is_file() for path in (folder.report_file, folder.metrics_file, folder.plan_file)):
        what = f"{name} holds neither {folder.report_file.name} nor {folder.metrics_file.name}"
        raise UsageError(what, "name a plan, or the folder of a run or an emulation")
    run = folder.read()
    if not folder.plan_file.is_file():
        return Subject(name, run=run, missing="the plan of this run was not found, so it cannot be simulated here")
    try:
        plan, profile = planned(str(folder.plan_file))
    except PdtoolError as error:
        return Subject(name, run=run, missing=f"the plan cannot be simulated here: {error}")
    return Subject(name, plan=plan, profile=profile, run=run)
