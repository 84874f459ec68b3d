"""The files that the parts of pdtool exchange: one class per kind decides how it is read, checked and written.

Other folders import a kind from its module (`plan`, `profile`, `cluster`, `device`, `bundle`, `report`, `run_dir`), its
parts from `artifact`, `metrics` or `chrome_trace`, and read a file of any kind with `load_any`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdtool.errors import ArtifactError

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import Artifact

_MOST_LISTED = 8  # files of a folder, in an error


def artifact_class(kind: str, path: Path | str = "") -> type[Artifact]:
    """Return the class of a kind; raises ArtifactError, which names `path`, for an unknown one."""
    # Imported here, because one artifact does not need the others, and pydantic takes time for each class.
    from pdtool.artifacts.bundle import Bundle
    from pdtool.artifacts.cluster import ClusterFile
    from pdtool.artifacts.device import Devices
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile
    from pdtool.artifacts.report import Emulation, Report
    from pdtool.artifacts.run_dir import CheckpointManifest, RunState

    kinds = (Profile, Devices, ClusterFile, Plan, Bundle, Report, RunState, CheckpointManifest, Emulation)
    classes: dict[str, type[Artifact]] = {artifact.KIND: artifact for artifact in kinds}
    if kind not in classes:
        what = f"has the unknown kind {kind!r}"
        raise ArtifactError(path, what, f"it must be one of {', '.join(classes)}", field="format")
    return classes[kind]


def load_any(file: str) -> Artifact:
    """Read an artifact of any kind from a file (`-` is stdin), or from its folder; raises ArtifactError."""
    from pdtool.artifacts.artifact import declared_kind
    from pdtool.artifacts.bundle import Bundle
    from pdtool.artifacts.run_dir import Checkpoint, RunDir
    from pdtool.files import read_text

    path = Path(file)
    is_folder = os.path.isdir(path)  # unlike Path.is_dir(), it takes any text
    if is_folder:
        names = (*RunDir.ARTIFACTS, Bundle.FILE, Checkpoint.MANIFEST)
        held = [path / name for name in names if (path / name).is_file()]
        if not held:
            inside = sorted(each.name for each in path.iterdir() if each.suffix in (".yaml", ".json"))
            remedy = (
                f"name a file in it: {', '.join(inside[:_MOST_LISTED])}"
                if inside
                else "name a file, or the folder of a run"
            )
            raise ArtifactError(path, f"contains none of {', '.join(names)}", remedy)
        path = held[0]
    text = read_text(path, may_be_pipe=not is_folder)
    kind = declared_kind(text)
    if not kind:
        is_trace = path.name == RunDir(path.parent).trace_file.name
        remedy = "name a profile, cluster, plan, bundle, report, emulation or checkpoint"
        what = "is not an artifact of pdtool (it has no format field)"
        raise ArtifactError(path, what, "open it in https://ui.perfetto.dev" if is_trace else remedy)
    return artifact_class(kind, path).parse(text, path)
