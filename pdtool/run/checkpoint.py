"""Checkpoints by original names, so that a run goes on under another plan; a folder that exists is complete.

    checkpoints/epoch-3/   .metadata, __0_0.distcp, ...   torch.distributed.checkpoint: `model.NAME`,
                                                          `optimizer.PARAMETER.KEY`
                           epoch.json                     epoch, seed, metrics

Workers write together into `.epoch-3.partial`, which is renamed when all are done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from pdtool.artifacts.envelope import replacing
from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.run.processes.collectives import all_gather

_FOLDER = "checkpoints"
_FACTS_FILE = "epoch.json"
_REMOVE = "remove this checkpoint, and the one before it is taken"


def save(out: Path, epoch: int, state: Mapping[str, Tensor], metadata: Mapping[str, Any], group: Any) -> Path:
    """Write the checkpoint of `epoch` together with all workers of `group`; older ones stay as they are.

    Args:
        state: this worker's part: key -> tensor of any shape.
        metadata: what epoch.json holds besides the epoch: `seed` and `metrics`.

    Returns:
        The folder of the checkpoint.

    Raises:
        PdtoolError: on every worker, when one could not write.
    """
    folder = out / _FOLDER / f"epoch-{epoch}"
    partial = folder.with_name(f".epoch-{epoch}.partial")
    leader = dist.get_rank(group) == 0
    try:
        _on_all_workers(group, lambda: _make_empty(partial) if leader else None)
        writer = FileSystemWriter(partial, single_file_per_rank=True)
        _on_all_workers(group, lambda: dcp_save(dict(state), storage_writer=writer, process_group=group))
        _on_all_workers(group, lambda: _publish(partial, folder, {"epoch": epoch, **metadata}) if leader else None)
    except PdtoolError:
        if leader:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run's folder, by their epoch."""
    return {
        int(m[1]): path
        for path in folder.glob(f"{_FOLDER}/epoch-*")
        if (m := re.fullmatch(r"epoch-([0-9]+)", path.name)) and (path / _FACTS_FILE).is_file()
    }


def latest(folder: Path) -> Path:
    """Return the last complete checkpoint of a run's folder, or the folder itself if it is one; raises UsageError."""
    if (folder / _FACTS_FILE).is_file():
        return folder
    checkpoints = complete_checkpoints(folder)
    if not checkpoints:
        raise UsageError(f"{folder} holds no complete checkpoint", "name the folder of a run, or run without --resume")
    return checkpoints[max(checkpoints)]


def read_metadata(checkpoint: Path) -> dict[str, Any]:
    """Return what epoch.json holds: `epoch`, `seed`, `metrics`; raises ArtifactError."""
    try:
        content = json.loads((checkpoint / _FACTS_FILE).read_text(encoding="utf-8"))
        return {"epoch": int(content["epoch"]), "seed": int(content["seed"]), "metrics": dict(content["metrics"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(checkpoint / _FACTS_FILE, f"is damaged ({error})", _REMOVE) from error


def load(checkpoint: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the tensors whose key is wanted, on the CPU, without any other worker; raises ArtifactError."""
    try:
        reader = FileSystemReader(checkpoint)
        described = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in described.items()
            if wanted(key) and isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist says so
            dcp_load(state, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise ArtifactError(checkpoint, f"is damaged ({_reason(error)})", _REMOVE) from error
    return state


def export(run_dir: Path, out: Path) -> Path:
    """Write the model of a run's last checkpoint as one ordinary state_dict, for `torch.load`; returns the checkpoint.

    Args:
        out: the file; `-` is stdout.

    Raises:
        UsageError: the run has no checkpoint.
        PdtoolError: the file could not be written; an older one stays.
    """
    checkpoint = latest(run_dir)
    state = load(checkpoint, lambda key: key.startswith("model."))
    try:
        with nullcontext(sys.stdout.buffer) if str(out) == "-" else replacing(out) as file:
            torch.save({key.removeprefix("model."): value for key, value in state.items()}, file)
    except RuntimeError as error:  # of torch, when the disk is full
        raise PdtoolError(f"{out} could not be written ({error})", "free some space or name another place") from error
    return checkpoint


def _on_all_workers(group: Any, step: Callable[[], object]) -> None:
    """Run a step on every worker; when it fails on one it fails on all."""
    failure = ""
    try:
        step()
    except (Exception, CheckpointException) as error:
        failure = _reason(error)
    failures = all_gather(failure, group, "word of the checkpoint")
    if any(failures):
        raise PdtoolError(
            f"the checkpoint could not be written ({next(f for f in failures if f)})",
            "free some space or name another folder with -o; the checkpoints before it are whole",
        )


def _reason(error: BaseException) -> str:
    """The error in a line; torch's own lists those of all workers, each with its traceback."""
    causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    cause = causes[0][0] if causes else error
    return " ".join(str(cause).split())[-300:] or type(cause).__name__


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _publish(partial: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    with (partial / _FACTS_FILE).open("w", encoding="utf-8") as file:
        json.dump(metadata, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)  # of an earlier run in this folder that went this far
    os.replace(partial, folder)
