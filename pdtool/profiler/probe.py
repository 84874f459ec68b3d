"""Measure the network between the workers: the bandwidth of each level's links, an all-reduce, and a small message.

One process per worker, started by `probe`. At a level of n members, worker p of member i sends to worker p of member
i + 1 and receives from worker p of member i - 1, all at once: every member's link is full in both directions, shared
as in training.

    3x2:  0 1 | 2 3 | 4 5     level 0:  0 -> 2 -> 4 -> 0,  1 -> 3 -> 5 -> 1     level 1:  0 <-> 1,  2 <-> 3,  4 <-> 5
"""

from __future__ import annotations

import math
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pdtool.artifacts.cluster import ClusterFile, Level, LevelMeasured, NetworkMeasured
from pdtool.errors import PdtoolError, UsageError, WorkerDiedError
from pdtool.machines import LOOPBACK, Machines, rank_variables, use_loopback, worker_environment
from pdtool.processes import WorkerProcesses, describe_exit, start_fork_server
from pdtool.profiler.probe_rendezvous import Rendezvous
from pdtool.rendezvous import Notify, gather_machines

_ROUNDS = 5  # of which the median counts
_FIRST_ROUND_BYTES, _MESSAGE_BYTES = 2**20, 2**24
_PINGS = 100
OnStep = Callable[[str], None]
Transfer = Callable[[Tensor, Tensor], None]  # (to send, to receive into), of one shape


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What to measure.

    Attributes:
        sizes: sizes of the levels, the outermost first.
        device: `auto` is cuda (over NCCL) if every worker has a CUDA device of its own, else cpu (over gloo).
        timeout_s: how long one worker waits for another.
        round_s: least seconds of a round, because workers may start it a millisecond apart.
    """

    name: str
    sizes: tuple[int, ...]
    device: str = "auto"
    timeout_s: float = 60.0
    round_s: float = 0.2

    def __post_init__(self) -> None:
        if 1 in self.sizes:
            topology = "x".join(map(str, self.sizes))
            what = f"topology {topology} has a level with one member, which has no link to measure"
            others = "x".join(str(size) for size in self.sizes if size > 1)
            raise UsageError(
                what, f"pass --topology {others}" if others else "pass a --topology with two or more workers"
            )

    @property
    def workers(self) -> int:
        """Number of workers in all."""
        return math.prod(self.sizes)

    def rings(self, depth: int) -> list[list[int]]:
        """Return the ranks of the workers that are counterparts in all members of a level: `[[0, 2, 4], [1, 3, 5]]`."""
        ranks = torch.arange(self.workers).view(self.sizes)
        return ranks.movedim(depth, -1).reshape(-1, self.sizes[depth]).tolist()


def run_probe_worker(request: ProbeRequest, store: Any, on_step: OnStep) -> ClusterFile:
    """Be the worker that RANK names, in this process.

    Args:
        store: the store where all workers meet.
        on_step: called by worker 0 with the next measurement.

    Raises:
        WorkerDiedError: a worker did not answer; it says which, and in which step.
        UsageError: a worker lacks the device.
    """
    rank = int(os.environ["RANK"])
    if os.environ.get("LOCAL_WORLD_SIZE") == str(request.workers):
        use_loopback(os.environ)
    rendezvous = Rendezvous(store, rank, request.workers, request.timeout_s)
    gpu = _gpu(int(os.environ["LOCAL_RANK"]))
    properties = gpu and torch.cuda.get_device_properties(gpu)
    gpus = rendezvous.exchange(properties and (str(properties.uuid), properties.total_memory), tuple[str, int] | None)
    memory_bytes = agreed_memory_bytes(request.device, gpus)
    device = gpu if gpu and memory_bytes else torch.device("cpu")
    if memory_bytes:
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a wait ends with an error at its timeout
        torch.cuda.set_device(device)
    levels = _LevelProber(request, rendezvous, device, on_step if rank == 0 else lambda step: None).levels()
    rendezvous.leave()
    dist.destroy_process_group()
    return ClusterFile(
        name=request.name,
        levels=tuple(spec for spec, _ in levels),
        memory_bytes=memory_bytes,
        measured=NetworkMeasured(
            workers=request.workers,
            backend="nccl" if memory_bytes else "gloo",
            torch=torch.__version__,
            levels=tuple(measured for _, measured in levels),
        ),
    )


def _gpu(local_rank: int) -> torch.device | None:
    """This worker's GPU among those that it sees: all of the machine's, or only its own."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def agreed_memory_bytes(asked: str, gpus: Sequence[tuple[str, int] | None]) -> int | None:
    """Return the bytes of the smallest GPU; None if the CPU is used. All workers get the same answer.

    Args:
        asked: `auto`, `cpu` or `cuda`.
        gpus: UUID and bytes of each worker's GPU.

    Raises:
        UsageError: the user asked for GPUs, but a worker has none, or shares one.
    """
    owner: dict[str, int] = {}
    for worker, gpu in enumerate(gpus):
        other = owner.setdefault(gpu[0], worker) if gpu else None
        if other != worker and asked == "cuda":
            what = f"worker {worker} has no CUDA device of its own" + (f": it shares worker {other}'s" if gpu else "")
            raise UsageError(what, "use --device cpu, or fewer workers")
        if other != worker:
            return None
    return None if asked == "cpu" else min(memory for _, memory in filter(None, gpus))


class _LevelProber:
    """Measures all levels, as one of the workers."""

    def __init__(self, request: ProbeRequest, rendezvous: Rendezvous, device: torch.device, on_step: OnStep) -> None:
        self.request, self.rendezvous, self.device, self.on_step = request, rendezvous, device, on_step
        self.timeout = timedelta(seconds=request.timeout_s)
        self.is_cuda = device.type == "cuda"

    def levels(self) -> list[tuple[Level, LevelMeasured]]:
        """Measure all levels, the outermost first."""
        all_workers = range(self.request.workers)
        with self.rendezvous.waiting_for(all_workers, "set GLOO_SOCKET_IFNAME to the network card that they share"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.is_cuda else "gloo",
                store=PrefixStore("groups", self.rendezvous.store),
                rank=self.rendezvous.rank,
                world_size=self.request.workers,
                timeout=self.timeout,
            )
            groups = [self._group(rings) for rings in map(self.request.rings, range(len(self.request.sizes)))]
        return [self._level(depth, group) for depth, group in enumerate(groups)]

    def _group(self, rings: list[list[int]]) -> Any:
        """The group of this worker's ring at a level; every worker makes all of them, in the same order."""
        backend = "nccl" if self.is_cuda else "gloo"
        group, _ = dist.new_subgroups_by_enumeration(rings, timeout=self.timeout, backend=backend)  # type: ignore[no-untyped-call]
        return group

    def _level(self, depth: int, group: Any) -> tuple[Level, LevelMeasured]:
        rank, rings = self.rendezvous.rank, self.request.rings(depth)
        ring = next(ring for ring in rings if rank in ring)
        size, place = len(ring), ring.index(rank)
        workers_per_member = math.prod(self.request.sizes[depth + 1 :])
        pair = rings[0][:2]
        other = pair[1 - pair.index(rank)] if rank in pair else None
        self._begin(depth, "all links both ways at once")
        around_ring = partial(self._exchange, ring[(place + 1) % size], ring[place - 1])
        link_rate = workers_per_member * self._rate(around_ring)
        self._begin(depth, f"workers {pair[0]} and {pair[1]} alone")
        pair_rate = self._rate(partial(self._exchange, other, other))
        self._begin(depth, f"latency between workers {pair[0]} and {pair[1]}")
        latency_s = self._latency_s(other)
        self._begin(depth, "all-reduce")
        share = 2 * (size - 1) / size  # of the bytes, that each member of a ring sends
        allreduce_rate = workers_per_member * share * self._rate(partial(self._all_reduce, group, ring))
        return (
            Level(size=size, bandwidth_bytes_per_s=_rounded(link_rate), latency_s=_rounded(latency_s)),
            LevelMeasured(pair_bytes_per_s=_rounded(pair_rate), allreduce_bytes_per_s=_rounded(allreduce_rate)),
        )

    def _begin(self, depth: int, what: str) -> None:
        self.rendezvous.step = f"level {depth} of {'x'.join(map(str, self.request.sizes))}, {what}"
        self.on_step(self.rendezvous.step)

    def _rate(self, transfer: Transfer) -> float:
        """Bytes per second at the slowest worker. Rounds grow until they last long enough; then several are counted."""
        total_bytes = _FIRST_ROUND_BYTES
        self._round_s(transfer, total_bytes)  # to warm up
        while (seconds := self._round_s(transfer, total_bytes)) < self.request.round_s:
            growth = 1.2 * self.request.round_s / seconds
            total_bytes = int(total_bytes * min(16.0, growth)) // 4 * 4
        return total_bytes / statistics.median(self._round_s(transfer, total_bytes) for _ in range(_ROUNDS))

    def _round_s(self, transfer: Transfer, total_bytes: int) -> float:
        """Seconds of the slowest worker for `total_bytes`, in messages of a common size."""
        size = min(total_bytes, _MESSAGE_BYTES) // 4
        out, into = (torch.zeros(size, device=self.device) for _ in range(2))
        messages, rest = divmod(total_bytes // 4, size)
        self._start_together()
        start_s = time.perf_counter()
        for count in [size] * messages + [rest] * (rest > 0):
            transfer(out[:count], into[:count])
        return float(max(self.rendezvous.exchange(time.perf_counter() - start_s, float)))

    def _start_together(self) -> None:
        """Wait until all workers are here, so that they start at the same time."""
        self.rendezvous.exchange()
        with self.rendezvous.waiting_for(range(self.request.workers)):
            dist.all_reduce(torch.zeros(1))

    def _exchange(self, to: int | None, source: int | None, out: Tensor, into: Tensor) -> None:
        """Send both ways at once: gloo needs the receive posted first, NCCL needs the two in one batch."""
        if to is None or source is None:
            return  # this worker only waits for those that do
        with self.rendezvous.waiting_for((source, to)):
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, source), dist.P2POp(dist.isend, out, to)]):
                self._finish(work)

    def _all_reduce(self, group: Any, ring: Sequence[int], out: Tensor, into: Tensor) -> None:
        with self.rendezvous.waiting_for(ring):
            self._finish(dist.all_reduce(out, group=group, async_op=True))

    def _latency_s(self, other: int | None) -> float:
        """Seconds of a small message one way: half the median of many round trips. A worker without an `other`
        starts together with the rest, and measures nothing."""
        self._start_together()
        times = [0.0]
        if other is not None:
            there_and_back = (dist.isend, dist.irecv) if self.rendezvous.rank < other else (dist.irecv, dist.isend)
            message = torch.zeros(1, device=self.device)
            with self.rendezvous.waiting_for([other]):
                times = [self._ping_s(there_and_back, message, other) for _ in range(_PINGS)]
        return float(max(self.rendezvous.exchange(statistics.median(times) / 2, float)))

    def _ping_s(self, there_and_back: tuple[Any, Any], message: Tensor, other: int) -> float:
        start_s = time.perf_counter()
        for operation in there_and_back:
            self._finish(operation(message, other))
        return time.perf_counter() - start_s

    def _finish(self, work: Any) -> None:
        work.wait(self.timeout)
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def _rounded(value: float) -> float:
    """Round to the significant digits of a measurement."""
    return float(f"{value:.4g}")


def probe(
    request: ProbeRequest, machines: Machines, on_step: OnStep, notify: Notify = lambda line: None
) -> ClusterFile | None:
    """Measure the network; None except on the first machine or worker, since others have no figures to report.

    Inside torchrun or srun this process is already one of the workers.

    Args:
        notify: called with a line that says which machine this one waits for.

    Raises:
        PdtoolError: a machine does not come in time, or does not belong to this launch.
        WorkerDiedError: a worker died, or another waited for it in vain.
        UsageError: the workers cannot be shared among the machines, or lack the device.
    """
    environment = worker_environment(os.environ, machines.endpoint)
    is_launcher = machines.count > 1 and "RANK" not in os.environ  # srun may have started these, one on each machine
    if environment and not is_launcher:
        return _probe_as_worker(request, environment, on_step)
    node_workers = machines.node_workers(request.workers)
    gather_machines(machines, request.timeout_s, notify)
    return _launch(request, machines, node_workers, on_step)


def _launch(request: ProbeRequest, machines: Machines, node_workers: range, on_step: OnStep) -> ClusterFile | None:
    """Start the workers of this machine, and wait for them."""
    address = machines.rendezvous_address
    if machines.node_rank == 0:
        store = _connect_store(request, address, is_master=True)
        address = (address[0], store.port)
    start_fork_server(("torch", __name__))
    cluster: ClusterFile | None = None
    failures: dict[int, PdtoolError] = {}
    with WorkerProcesses("forkserver") as workers:
        for rank in node_workers:
            variables = rank_variables(rank, rank - node_workers[0], request.workers, len(node_workers), address)
            workers.start(rank, _worker_main, request, address, variables)
        for rank, message in workers.listen():
            if isinstance(message, str):  # the step that begins
                on_step(message)
            elif isinstance(message, PdtoolError):
                failures[rank] = message
            else:
                cluster = message
        exit_codes = workers.exit_codes
    for rank, code in exit_codes.items():
        if code and rank not in failures:
            raise WorkerDiedError(f"worker {rank} {describe_exit(code)}", "see its messages on stderr")
    for failure in failures.values():  # the others follow from the first
        raise failure
    return cluster


def _worker_main(
    pipe: Connection, request: ProbeRequest, address: tuple[str, int], variables: Mapping[str, str]
) -> None:
    """The process of one worker: sends each step that begins, and at the end its measurement or a PdtoolError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    os.environ.update(variables)
    try:
        store = _connect_store(request, address, is_master=False)
        cluster = run_probe_worker(request, store, on_step=pipe.send)
    except PdtoolError as error:
        pipe.send(error)
        sys.exit(error.exit_code)
    if variables["RANK"] == "0":
        pipe.send(cluster)


def _connect_store(request: ProbeRequest, address: tuple[str, int], *, is_master: bool) -> Any:
    """The store through which all workers meet; it lives in the process that started the workers of machine 0."""
    host, port = address
    options: dict[str, Any] = {"timeout": timedelta(seconds=2 * request.timeout_s)}
    try:
        if is_master and host == LOOPBACK:  # by itself the store would listen on all interfaces
            listening = socket.create_server((host, port))
            port = listening.getsockname()[1]
            options["master_listen_fd"] = listening.detach()
        return dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False, **options)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        if is_master:
            what = f"workers cannot meet at {host}:{port} ({error})"
            raise UsageError(what, "name a free port of machine 0") from error
        what = f"machine 0 did not answer at {host}:{port}"
        raise WorkerDiedError(what, "start it too, and check that this one can reach it") from error


def _probe_as_worker(request: ProbeRequest, environment: Mapping[str, str], on_step: OnStep) -> ClusterFile | None:
    """Be one of the workers that torchrun or srun started."""
    os.environ.update(environment)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world_size != request.workers:
        what = f"{world_size} processes were started, but the topology has {request.workers}"
        raise UsageError(what, "start one per worker")
    try:
        timeout = timedelta(seconds=2 * request.timeout_s)
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    except RuntimeError as error:
        raise WorkerDiedError("the workers did not all connect", "check that all of them are started") from error
    cluster = run_probe_worker(request, PrefixStore("probe", store), on_step)
    return cluster if rank == 0 else None
