"""Views of any artifact for people: on a terminal (`pdtool show`), and as HTML in a notebook."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdtool.artifacts.artifact import Artifact
from pdtool.cli.artifact_views import bundle_view, cluster_view, devices_view, plan_view, profile_table, timeline
from pdtool.cli.run_view import checkpoint_view, emulation_view, report_view, run_view
from pdtool.cli.table import Lines, PlainConsole

_NOTEBOOK_WIDTH = 120  # characters
_HTML = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'


def view(artifact: Artifact, folder: Path | None, width: int) -> Lines:
    """Return the tables and lines that show an artifact.

    Args:
        folder: its folder, which has more about a run; None: unknown.
        width: width of drawings, in characters.
    """
    views: dict[str, Callable[[Any], Lines]] = {
        "profile": lambda profile: [profile_table(profile)],
        "device": devices_view,
        "cluster": cluster_view,
        "plan": lambda plan: [*plan_view(plan), "", timeline(plan, width)],
        "bundle": bundle_view,
        "report": report_view,
        "run": lambda state: run_view(state, folder),
        "emulation": emulation_view,
        "checkpoint": checkpoint_view,
    }
    return views[artifact.KIND](artifact)


def html(artifact: Artifact) -> str:
    """Return the view of an artifact as an element of HTML."""
    console = PlainConsole(file=io.StringIO(), width=_NOTEBOOK_WIDTH, record=True, highlight=False, _environ={})
    for part in view(artifact, None, _NOTEBOOK_WIDTH):
        console.print(part, soft_wrap=isinstance(part, str), crop=False)
    return console.export_html(inline_styles=True, code_format=_HTML)
