"""Where a run stands that has not finished: how far it is, its last checkpoint, how it ended, and how to go on.

All of it is read from the run's folder, while it runs or later; neither torch nor a worker is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdtool.artifacts.run_dir import CheckpointManifest, RunState, _checkpoints, is_locked, last_update
from pdtool.cli.console.training_progress import validated
from pdtool.errors import ArtifactError


def run_view(state: RunState, folder: Path | None) -> Iterator[str]:
    """Say where a run stands.

    Args:
        folder: of the run; None where only its record is known.
    """
    resumed = f", resumed after epoch {state.epochs_done}" if state.epochs_done else ""
    yield f"{state.plan}: {state.config}, schedule {state.schedule}, {state.epochs} epoch(s) in all{resumed}"
    if folder is None:
        yield _end(state, is_running=False)
        return
    is_running = state.end is None and is_locked(folder)
    yield _end(state, is_running=is_running)
    if update := last_update(folder):
        yield _place(state, update)
    checkpoints = _checkpoints(folder)
    yield _last_checkpoint(checkpoints)
    if not is_running and state.end != "done":
        yield f"{'go on' if checkpoints else 'start it again'} with {_command(state, folder, bool(checkpoints))}"


def resumed_line(folder: Path) -> Iterator[str]:
    """Say of a finished run that it had gone on from another, which its report does not tell."""
    with suppress(ArtifactError):
        state = RunState.load(folder / "run.json")
        if state.end == "done" and state.epochs_done:
            yield f"resumed after epoch {state.epochs_done}: what was measured is of the epochs since"


def _end(state: RunState, *, is_running: bool) -> str:
    if is_running:
        return "it is running"
    match state.end:
        case "done":
            return "it has finished"
        case "stopped":
            return f"it was stopped by {state.reason}" if state.reason else "it was stopped"
        case "failed":
            return f"it failed: {state.reason}"
    return "it ended without a word: it was killed, or its machine went down"


def _place(state: RunState, update: dict[str, Any]) -> str:
    total = f"/{state.updates * state.epochs}" if state.updates else ""
    rate = update.get("samples_per_s")
    figures = [f"training loss {update['loss']:.4f}"] + ([f"{rate:.4g} samples/s"] if rate else [])
    return f"last update: {update['step']}{total}, in epoch {update['epoch']}/{state.epochs}: {', '.join(figures)}"


def _last_checkpoint(checkpoints: dict[int, Path]) -> str:
    if not checkpoints:
        return "no checkpoint: the first is written after the first epoch"
    epoch = max(checkpoints)
    try:
        manifest = CheckpointManifest.load(checkpoints[epoch] / "checkpoint.json")
    except ArtifactError as error:
        return f"last checkpoint: epoch {epoch}, which is damaged ({error.what})"
    return f"last checkpoint: epoch {epoch}, {validated(manifest.metrics)}"


def _command(state: RunState, folder: Path, resumes: bool) -> str:
    plan = f"plans/{state.plan}.yaml"
    named = plan if os.path.isfile(plan) else "PLAN"
    return f"`pdtool run {named} -o {folder}{' --resume' if resumes else ''} --epochs {state.epochs}`"
