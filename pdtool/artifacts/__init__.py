"""The files that the parts of pdtool exchange: one class per kind decides how it is read, checked and written.

Other folders import a kind from its module (`plan`, `profile`, `cluster`, `device`, `bundle`, `report`, `run_dir`), its
parts from `artifact`, `metrics` or `chrome_trace`, and read a file of any kind with `load_any`.
"""

from __future__ import annotations

import os
from pathlib import Path

from pdtool.artifacts.artifact import Artifact, declared_kind
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.cluster import ClusterFile
from pdtool.artifacts.device import Devices
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Emulation, Report
from pdtool.artifacts.run_dir import CheckpointManifest, RunState
from pdtool.errors import ArtifactError
from pdtool.files import read_text

_CLASSES: dict[str, type[Artifact]] = {
    c.KIND: c for c in (Profile, Devices, ClusterFile, Plan, Bundle, Report, RunState, CheckpointManifest, Emulation)
}
_IN_FOLDERS = ("report.json", "run.json", "emulation.json", "bundle.yaml", "checkpoint.json")


def artifact_class(kind: str, path: Path | str = "") -> type[Artifact]:
    """Return the class of a kind; raises ArtifactError, which names `path`, for an unknown one."""
    if kind not in _CLASSES:
        raise ArtifactError(
            path, f"is of the unknown kind {kind!r}", f"known are {', '.join(_CLASSES)}", field="format"
        )
    return _CLASSES[kind]


def load_any(file: str) -> Artifact:
    """Read an artifact of any kind from a file (`-` is stdin), or that which a folder holds.

    Raises:
        ArtifactError: there is none, or it is damaged.
    """
    path = Path(file)
    is_folder = os.path.isdir(path)  # unlike Path.is_dir(), it takes any text
    if is_folder:
        candidates = [path / name for name in _IN_FOLDERS if (path / name).is_file()]
        if not candidates:
            raise ArtifactError(path, f"holds none of {', '.join(_IN_FOLDERS)}", "name a file, or a finished run")
        path = candidates[0]
    text = read_text(path, may_be_pipe=not is_folder)
    kind = declared_kind(text)
    if not kind:
        raise ArtifactError(
            path,
            "is no artifact of pdtool (no format field)",
            "name a profile, cluster, plan, bundle, report, emulation or checkpoint",
        )
    return artifact_class(kind, path).parse(text, path)
