"""Communication among all workers of a run: collectives, process groups, and checks that the workers agree.

A worker that waits for another in vain raises PeerError, which names the lost worker. Every worker makes all process
groups, in the same order. When the workers meet, they check that all have the same settings and see the same run
folder.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pdtool import __version__
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.run_dir import RunDir
from pdtool.artifacts.text_formats import FormatError, read_message, write_message
from pdtool.errors import UsageError, printable
from pdtool.files import file_sha256, open_in_place
from pdtool.frontend.model_rules import TrainingOptions
from pdtool.frontend.user_code import find_source
from pdtool.frontend.user_modules import imported_digests
from pdtool.options.declaration import declared
from pdtool.options.run_options import RunOptions
from pdtool.runtime.config import RunConfig
from pdtool.runtime.out_of_memory import is_out_of_memory
from pdtool.runtime.ranks import assign_ranks
from pdtool.runtime.status import ANY_PEER, PeerError, Status

_DIGITS = 12  # characters of a digest to show
_VISIBLE_WITHIN_S = 10.0  # until another machine sees a new file; NFS caches folders for seconds
_POLL_S = 0.1
_MAX_GATHERED_BYTES, _MAX_BROADCAST_BYTES = 2**26, 2**30  # that a worker reads from another
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)  # the words of gloo, NCCL and torch's stores
_T = TypeVar("_T")


class PeerErrorContext:
    """Context of a wait for other workers, which turns errors of torch.distributed into a PeerError.

    It is a class, not a generator, because it is entered for every all-reduce.

    Args:
        what: text for the error that says what did not happen.
        peer: rank of the worker to wait for.
    """

    def __init__(self, what: str, peer: int = ANY_PEER) -> None:
        self._what, self._peer = what, peer

    def __enter__(self) -> None:
        Status.of_this_process.wait_begins(self._peer)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            Status.of_this_process.wait_ends()
        if isinstance(error, RuntimeError):
            raise peer_error(self._what, self._peer, error) from error


def peer_error(what: str, peer: int, error: RuntimeError | OSError) -> PeerError:
    """Return the error of a worker that waited for another in vain, with the reason.

    The reason is the first sentence of torch.distributed's message, without the line in its sources, or the system's.

    Args:
        what: says what did not happen.
        peer: rank of the other worker, or ANY_PEER.
        error: how the wait failed.

    Raises:
        RuntimeError, OSError: `error` itself if this worker ran out of memory, or its GPU failed, because no other one
            is to blame.
    """
    if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
        raise error
    said = (isinstance(error, OSError) and error.strerror) or str(error)
    reason = re.sub(r"^\[\S*\] ?", "", said).partition(". ")[0][:200]
    return PeerError(f"{what} ({reason})", peer=peer, is_timeout=_TIMED_OUT.search(reason) is not None)


def all_gather(value: _T, kind: type[_T], group: Any, what: str) -> list[_T]:
    """Return the `value` of every rank of `group`, in order.

    Values travel as data, because object collectives of torch.distributed would execute another worker's message.

    Args:
        kind: type of the values, as `write_message` takes it.
        what: name of the values, for an error.

    Raises:
        PeerError: a value did not come, is too long, or is not of that type.
    """
    problem = f"{what} did not arrive from every worker"
    content = write_message(value, kind)
    sizes = _gather(torch.tensor([len(content)]), group, problem)
    lengths = [_length(size, rank, what, _MAX_GATHERED_BYTES) for rank, size in enumerate(sizes)]
    gathered = _gather(_as_tensor(content, max(lengths)), group, problem)
    received = zip(gathered, lengths, strict=True)
    return [_read(tensor[:length], kind, rank, what) for rank, (tensor, length) in enumerate(received)]


def broadcast(value: _T, kind: type[_T], source: int, what: str) -> _T:
    """Return the `value` of rank `source` on every rank; see `all_gather`."""
    content = write_message(value, kind) if dist.get_rank() == source else b""
    size, problem = torch.tensor([len(content)]), f"{what} did not arrive from rank {source}"
    with PeerErrorContext(problem, source):
        dist.broadcast(size, source)
        tensor = _as_tensor(content, _length(size, source, what, _MAX_BROADCAST_BYTES))
        dist.broadcast(tensor, source)
    return _read(tensor, kind, source, what)


def _gather(own: Tensor, group: Any, problem: str) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    with PeerErrorContext(problem):
        dist.all_gather(gathered, own, group=group)
    return gathered


def _length(size: Tensor, rank: int, what: str, limit_bytes: int) -> int:
    """Read how many bytes a message has, [1]."""
    length = int(size)
    if not 0 < length <= limit_bytes:
        raise PeerError(f"{what} from rank {rank} would have {length} bytes, but the limit is {limit_bytes}", peer=rank)
    return length


def _as_tensor(content: bytes, length: int) -> Tensor:
    """Return the bytes, and zeros up to the length."""
    return torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8)


def _read(message: Tensor, kind: type[_T], rank: int, what: str) -> _T:
    try:
        return read_message(message.numpy().tobytes(), kind)
    except FormatError as error:
        remedy = "start the same pdtool on all machines, and close their ports to others (SECURITY.md)"
        problem = f"{what} from rank {rank} cannot be read; none of it was executed ({error})"
        raise PeerError(problem, remedy, peer=rank) from error


@dataclass(frozen=True)
class ReplicaGroup:
    """The replicas of one stage.

    Attributes:
        ranks: in the order of the replicas.
        group: their process group, for gradients and buffers; None for one replica.
        host_group: their gloo group, for tensors in CPU memory.
    """

    stage: int
    ranks: list[int]
    group: Any
    host_group: Any


@dataclass(frozen=True)
class ProcessGroups:
    """Handles of torch.distributed process groups.

    Attributes:
        world: all workers, gloo; for metadata, metrics and checkpoints.
        replicas: the group of each stage.
        tied: for each tied parameter of the bundle, the group of all replicas of all stages that hold it; gloo.
        device: where this worker's tensors are.
        uses_nccl: whether tensors can go from device to device; otherwise they go through CPU memory.
    """

    world: Any
    replicas: list[ReplicaGroup]
    tied: list[Any]
    device: torch.device
    uses_nccl: bool


def make_process_groups(config: RunConfig, device: torch.device) -> ProcessGroups:
    """Make all groups except those of routes (messages/distributed.py); raises PeerError.

    Args:
        device: where this worker computes.
    """
    plan, timeout = config.plan, timedelta(seconds=config.timeout_s)
    ranks = {assignment.worker: assignment.rank for assignment in assign_ranks(plan)}
    with PeerErrorContext("the process groups were not made"):
        world = dist.new_group(list(ranks.values()), timeout=timeout, backend="gloo")
        uses_nccl = have_own_devices(all_gather(_nccl_device(device), str, world, "the choice of NCCL or gloo"))
        members = [[ranks[worker] for worker in stage.workers] for stage in plan.stages]
        host = [dist.new_group(m, timeout=timeout, backend="gloo") if len(m) > 1 else None for m in members]
        groups = [_nccl_group(m, timeout, device) if len(m) > 1 else None for m in members] if uses_nccl else host
        replicas = [ReplicaGroup(s, members[s], groups[s], host[s]) for s in range(len(members))]
        tied = [
            dist.new_group(sorted(r for s in t.stages for r in members[s]), timeout=timeout, backend="gloo")
            for t in config.bundle.tied
        ]
    return ProcessGroups(world, replicas, tied, device, uses_nccl)


def have_own_devices(names: Sequence[str]) -> bool:
    """Whether every worker has a GPU of its own, which NCCL needs.

    Args:
        names: UUID of each worker's GPU; "" without one.
    """
    return all(names) and len(set(names)) == len(names)


def _nccl_device(device: torch.device) -> str:
    """The UUID of this worker's GPU; "" if it has none, or NCCL is missing."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _nccl_group(ranks: list[int], timeout: timedelta, device: torch.device) -> Any:
    """NCCL's group of a stage's replicas.

    It is used once here, because the first operation makes the hosts of all members wait for each other.
    """
    group = dist.new_group(ranks, timeout=timeout, backend="nccl", device_id=device)
    if dist.get_rank() in ranks:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.zeros(1, device=device).item()
    return group


def run_settings(config: RunConfig) -> dict[str, str]:
    """Return the settings that must be the same on all machines, by the user's name for each."""
    settings = {
        option.flag: str(getattr(config.plan if option.of_plan else config, name))
        for name, option in declared(RunOptions).items()
        if option.same
    }
    changed = " ".join(f"{key}={value}" for key, value in sorted(config.model.settings.items()))
    settings["--set"] = printable(changed) or "none"
    digests = {
        "the plan": config.plan.plan_sha256,
        Bundle.FILE: config.bundle.content_sha256,
        "the model's file": file_sha256(find_source(config.model.source)),
    }
    if config.resume:
        digests["--resume"] = RunDir(config.resume).latest_checkpoint().manifest().content_sha256
    versions = {"pdtool's version": __version__, "torch's version": torch.__version__.partition("+")[0]}
    return settings | {name: digest[:_DIGITS] for name, digest in digests.items()} | versions


def user_code_settings(training: TrainingOptions) -> dict[str, str]:
    """Return what must be the same of the user's code, as far as this worker has executed it."""
    files = {f"the file of module {name}": digest[:_DIGITS] for name, digest in imported_digests().items()}
    return files | {name.upper(): str(value) for name, value in vars(training).items()}


def check_agreement(own_settings: Mapping[str, str], group: object, missing: str | None = "none") -> None:
    """Compare the settings of all workers of `group`; all call it together.

    Args:
        own_settings: those of this worker.
        missing: see describe_differences.

    Raises:
        UsageError: on every worker, if they differ; it says which settings, and the value on each machine.
        PeerError: a worker does not come.
    """
    machine = os.environ.get("GROUP_RANK")
    place = f"rank {dist.get_rank()}" if machine is None else f"machine {machine}"
    own = (f"{place} ({socket.gethostname()})", dict(own_settings))
    settings = all_gather(own, tuple[str, dict[str, str]], group, "the settings of the run")
    differences = describe_differences(settings, missing)
    if differences:
        what = f"the workers got different settings: {'; '.join(differences)}"
        remedy = (
            "run the same command with the same files on every machine, and with the same environment variables if "
            "model.py reads any; only --node-rank may differ"
        )
        if any("'s version" in difference for difference in differences):
            remedy = "install the same versions of pdtool and torch on every machine"
        raise UsageError(what, remedy)


def describe_differences(workers: Sequence[tuple[str, Mapping[str, str]]], missing: str | None = "none") -> list[str]:
    """Say for each setting that differs which value each place has.

    Args:
        workers: place and settings of each.
        missing: value of a missing setting; None: it differs from no other.
    """
    names = dict.fromkeys(name for _, settings in workers for name in settings)
    differences = []
    for name in names:
        places: dict[str, dict[str, None]] = {}
        for place, settings in workers:
            value = settings.get(name, missing)
            if value is not None:
                places.setdefault(value, {})[place] = None
        if len(places) > 1:
            values = ", ".join(f"{value} on {' and '.join(where)}" for value, where in places.items())
            differences.append(f"{name} is {values}")
    return differences


def check_shared(out: Path, group: Any, timeout_s: float) -> None:
    """Check that all workers of `group` share a folder: each must see a file that the first one writes.

    Args:
        timeout_s: how long workers wait for each other.

    Raises:
        UsageError: on every worker, if one does not see it; it names ranks and machines.
        PeerError: a worker is lost.
    """
    token, path = "", RunDir(out).token_file
    if dist.get_rank(group) == 0:
        token = secrets.token_hex(16)
        with open_in_place(path) as file:
            file.truncate(0)
            file.write(token.encode())
    token = broadcast(token, str, 0, "the token of the run's folder")
    limit_s = min(_VISIBLE_WITHIN_S, timeout_s / 2)
    own = (_comes_to_hold(path, token, limit_s), socket.gethostname())
    seen = all_gather(own, tuple[bool, str], group, "word of the run's folder")
    blind = {f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees}
    if blind:
        raise UsageError(
            f"{out} is not one folder for all workers: files that rank 0 on {seen[0][1]} writes there are not seen by "
            f"{', '.join(sorted(blind))}",
            "use -o to name a folder that all machines share",
        )


def _comes_to_hold(path: Path, text: str, limit_s: float) -> bool:
    """Whether a file holds a text, now or within the limit."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        with suppress(OSError):
            if path.read_bytes() == text.encode():
                return True
        time.sleep(_POLL_S)
    return False
