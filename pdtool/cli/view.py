"""What people see of any artifact: as `pdtool show` prints it on a terminal, and as HTML in a notebook."""

from __future__ import annotations

import io
from pathlib import Path

from pdtool.artifacts.artifact import Artifact
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.cluster import ClusterFile
from pdtool.artifacts.device import Devices
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Emulation, Report
from pdtool.artifacts.run_dir import CheckpointManifest, RunState
from pdtool.cli.artifact_views import bundle_view, cluster_view, devices_view, plan_view, profile_table, timeline
from pdtool.cli.run_view import checkpoint_view, emulation_view, report_view, resumed_line, run_view
from pdtool.cli.table import Lines, PlainConsole

_NOTEBOOK_WIDTH = 120  # characters
_HTML = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'


def view(artifact: Artifact, folder: Path | None, width: int) -> Lines:
    """Return the tables and lines that show an artifact.

    Args:
        folder: where it stands, which tells more of a run; None: unknown.
        width: of drawings, in characters.
    """
    match artifact:
        case Profile():
            return [profile_table(artifact)]
        case Devices():
            return devices_view(artifact)
        case ClusterFile():
            return cluster_view(artifact)
        case Plan():
            return [*plan_view(artifact), "", timeline(artifact, width)]
        case Bundle():
            return bundle_view(artifact)
        case Report():
            return [*report_view(artifact), *(resumed_line(folder) if folder else ())]
        case RunState():
            return run_view(artifact, folder)
        case Emulation():
            return emulation_view(artifact)
        case CheckpointManifest():
            return checkpoint_view(artifact)
        case _:
            raise AssertionError(artifact.KIND)


def html(artifact: Artifact) -> str:
    """Return the view of an artifact as an element of HTML."""
    console = PlainConsole(file=io.StringIO(), width=_NOTEBOOK_WIDTH, record=True, highlight=False, _environ={})
    for part in view(artifact, None, _NOTEBOOK_WIDTH):
        console.print(part, soft_wrap=isinstance(part, str), crop=False)
    return console.export_html(inline_styles=True, code_format=_HTML)
