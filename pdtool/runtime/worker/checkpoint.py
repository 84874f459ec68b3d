"""Checkpoints by original names, so that a run can go on under another plan. One with a checkpoint.json is complete.

    checkpoints/epoch-3/   stage-0.safetensors, ...   the components of one stage, with keys COMPONENT.NAME.ENTRY:
                                                      see stage/component.py;
                                                      a complex128 is a float64 [..., 2] that is marked as complex
                           checkpoint.json            epoch, seed, metrics, and the digest of each file

Workers write together into `.epoch-3.partial`, which is renamed when all are done. A file is data: nothing in it is
executed, and a changed file is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pdtool.artifacts.run_dir import Checkpoint, CheckpointManifest, RunDir, StoredFile
from pdtool.errors import ArtifactError, FieldError, PdtoolError, UsageError, printable
from pdtool.files import check_replaceable, quoted, replacing
from pdtool.runtime.groups import all_gather
from pdtool.runtime.stage.component import MODEL_KEY, Component

_ZIP = b"PK"  # how files of torch.save begin
_Written = dict[str, StoredFile] | None  # from a worker: the files that it has written
_STORED_AS_REAL = (torch.complex128, torch.complex32)  # with real and imaginary parts: safetensors has neither
_COMPLEX = "complex"  # the mark of such a tensor in the metadata of its file


def save(out: Path, manifest: CheckpointManifest, components: Mapping[int, Sequence[Component]], group: Any) -> None:
    """Write a checkpoint together with all workers of `group`; older ones stay as they are.

    Args:
        manifest: manifest of the checkpoint, without files.
        components: components of the stages that this worker saves, by stage number.

    Raises:
        PdtoolError: on every worker, if one could not write, or if the first one does not see all the files.
    """
    checkpoint = RunDir(out).checkpoint(manifest.epoch)
    partial = checkpoint.partial
    leader = dist.get_rank(group) == 0
    try:
        _on_all_workers(group, lambda: _make_empty(partial.path, out) if leader else None)
        written = _on_all_workers(
            group, lambda: dict(_write(partial.stage_file(s), _state(of)) for s, of in components.items())
        )
        files = {name: stored for files in written if files for name, stored in files.items()}
        complete = manifest.model_copy(update={"files": dict(sorted(files.items()))})
        _on_all_workers(group, lambda: _publish(partial, checkpoint, complete) if leader else None)
    except PdtoolError:
        if leader:
            shutil.rmtree(partial.path, ignore_errors=True)
        raise


def load(checkpoint: Path, components: Sequence[Component]) -> None:
    """Load the components, one after the other, from a checkpoint of any plan of the same model.

    Raises:
        UsageError: the checkpoint belongs to another model.
        ArtifactError: see `read`.
    """
    entries: dict[str, dict[str, Tensor]] = {f"{part.key}.{name}": {} for part in components for name in part.names}
    for key, tensor in read(checkpoint, lambda key: _owner(key, entries) is not None).items():
        owner = _owner(key, entries)
        assert owner
        entries[owner][key[len(owner) + 1 :]] = tensor
    for part in components:
        try:
            part.load_state_dict({name: entries[f"{part.key}.{name}"] for name in part.names})
        except FieldError as fault:
            what = f"{fault.field} in the model, but the checkpoint {checkpoint} has {fault}"
            raise UsageError(what, "resume from a run of the same model") from fault


def _state(components: Iterable[Component]) -> dict[str, Tensor]:
    """The tensors that some components write, by key."""
    written = ((part.key, *what) for part in components for what in part.state_dict())
    return {f"{key}.{name}.{entry}" if entry else f"{key}.{name}": tensor for key, name, entry, tensor in written}


def _owner(key: str, owners: Container[str]) -> str | None:
    """Return the COMPONENT.NAME that a key equals or begins with; at most one, as no name is a prefix of another."""
    parts = key.split(".")
    return next((owner for n in range(len(parts)) if (owner := ".".join(parts[: n + 1])) in owners), None)


def read(checkpoint: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the tensors whose key is wanted, on the CPU, without any other worker.

    Raises:
        ArtifactError: a file with one of them has changed, or its keys cannot be read; the error names the checkpoint
            before it.
    """
    state: dict[str, Tensor] = {}
    folder = Checkpoint(checkpoint)
    for name, stored in folder.manifest().files.items():
        try:
            state |= _read(checkpoint / name, stored, wanted)
        except FileNotFoundError as error:
            raise ArtifactError(checkpoint / name, "is missing", folder.remedy()) from error
        except PermissionError as error:
            remedy = f"ask its owner to run `chmod a+r {quoted(checkpoint / name)}`"
            raise ArtifactError(checkpoint / name, f"cannot be read ({error.strerror})", remedy) from error
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            what = f"is damaged ({getattr(error, 'strerror', None) or error})"
            raise ArtifactError(checkpoint / name, what, folder.remedy()) from error
    return state


def export(run_dir: Path, out: Path) -> Path:
    """Write the model of a run's last checkpoint as one ordinary state_dict, for `torch.load`; returns the checkpoint.

    Tied names share one tensor in it, as in the state_dict of the model.

    Args:
        out: the file; `-` is stdout.

    Raises:
        UsageError: the run has no checkpoint, or a file that is not torch's would be overwritten.
        ArtifactError: its last checkpoint is damaged.
        PdtoolError: the file could not be written; an older file stays.
    """
    if str(out) != "-":
        check_replaceable(out, "one of torch.save", lambda head: head.startswith(_ZIP))
    checkpoint = RunDir(run_dir).latest_checkpoint()
    prefix = f"{MODEL_KEY}."
    saved = read(checkpoint.path, lambda key: key.startswith(prefix))
    state = _tied({key.removeprefix(prefix): value for key, value in saved.items()}, checkpoint.manifest().tied)
    if str(out) == "-":
        _save_to_stdout(state)
        return checkpoint.path
    try:
        with replacing(out) as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch's error if the disk is full
        raise PdtoolError(f"{out} could not be written ({error})", "free some space or use another folder") from error
    return checkpoint.path


def _save_to_stdout(state: Mapping[str, Tensor]) -> None:
    """Do torch.save through memory: if nobody reads a pipe, torch itself would say that the disk is full."""
    written = io.BytesIO()
    torch.save(state, written)
    sys.stdout.buffer.write(written.getbuffer())
    sys.stdout.buffer.flush()


def _tied(state: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the same state with tied names sharing one tensor, so that torch.save stores it once.

    Args:
        tied: name -> another name of the same tensor. If the values differ, both keep their own.
    """
    shared = dict(state)
    for name, first in tied.items():
        value, other = state.get(name), state.get(first)
        if value is not None and other is not None and value.dtype == other.dtype and torch.equal(value, other):
            shared[name] = other
    return shared


def _on_all_workers(group: Any, step: Callable[[], _Written]) -> list[_Written]:
    """Run a step on every worker and return all results, in order; if it fails on one it fails on all."""
    failure, result = "", None
    try:
        result = step()
    except (OSError, ValueError, RuntimeError, SafetensorError, PdtoolError) as error:
        failure = printable(" ".join(str(error).split()))[-300:] or type(error).__name__
    outcomes = all_gather((failure, result), tuple[str, _Written], group, "word of the checkpoint")
    failures = [failure for failure, _ in outcomes if failure]
    if failures:
        what = f"the checkpoint could not be written ({failures[0]})"
        raise PdtoolError(what, "make sure that the folder can be written and its disk is not full")
    return [result for _, result in outcomes]


def _make_empty(partial: Path, out: Path) -> None:
    if not out.is_dir():
        raise FileNotFoundError(f"the run's folder {out} was removed")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write(path: Path, state: Mapping[str, Tensor]) -> tuple[str, StoredFile]:
    """Write the state of a stage and return its file's description, by name."""
    separate = _separate(state)
    complex_keys = [key for key, value in separate.items() if value.dtype in _STORED_AS_REAL]
    stored = separate | {key: torch.view_as_real(separate[key]) for key in complex_keys}
    marks = dict.fromkeys(complex_keys, _COMPLEX) or None  # {} would make a file that cannot be read
    save_file(stored, path, metadata=marks)
    with suppress(OSError):  # as any new file, by the umask: safetensors lets only its owner read
        path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.name, _describe(path)


def _separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU, each with memory of its own, because safetensors stores no shared memory."""
    seen: set[int] = set()
    separate = {}
    for key, value in state.items():
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = tensor.untyped_storage()
        is_shared = storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen
        separate[key] = tensor.clone() if is_shared else tensor
        seen.add(storage.data_ptr())
    return separate


def _describe(path: Path) -> StoredFile:
    with path.open("rb") as file:
        return StoredFile(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _publish(partial: Checkpoint, checkpoint: Checkpoint, manifest: CheckpointManifest) -> None:
    """Check that all files are here, and make the checkpoint complete."""
    folder = checkpoint.path
    for name, stored in manifest.files.items():
        path = partial.path / name
        if not path.is_file() or path.stat().st_size != stored.bytes:
            what = f"{path}, which another worker wrote, is not there: do all machines share {folder}?"
            raise FileNotFoundError(what)
    manifest.save(partial.manifest_file)
    _sync(partial.path)
    if folder.exists():
        shutil.rmtree(folder)  # from an earlier run in this folder that got this far
    os.replace(partial.path, folder)
    _sync(folder.parent)
    RunDir(folder.parent.parent).update_state(epochs_done=manifest.epoch)


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk, so that they are there after a power failure."""
    with suppress(OSError):  # some network file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: Path, stored: StoredFile, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The wanted tensors of one file; raises OSError, ValueError, RuntimeError or SafetensorError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a FIFO would block
        raise ValueError("it is not a regular file")
    if status.st_size != stored.bytes:
        raise ValueError(f"it has {status.st_size} bytes but was written with {stored.bytes}")
    path.open("rb").close()  # of a file that may not be read, safetensors says that there is none
    with safe_open(path, framework="pt") as file:
        keys = [key for key in file.keys() if wanted(key)]  # noqa: SIM118
        if keys and _describe(path) != stored:
            raise ValueError("its content has changed since it was written")
        kinds = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in keys}
    return {key: torch.view_as_complex(t) if kinds.get(key) == _COMPLEX else t for key, t in tensors.items()}
