"""Start the processes that probe the network, on this machine or as part of several, and say who failed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pdtool.artifacts.cluster_file import ClusterFile
from pdtool.errors import PdtoolError, UsageError, WorkerDiedError
from pdtool.profile.probe import OnStep, Request, probe_here

_PATIENCE_S = 0.5  # after a failure: the one that the others follow from may still be on its way
_ERRORS = {2: UsageError, 5: WorkerDiedError}  # an error crosses the process border as its text and exit code


@dataclass(frozen=True, kw_only=True)
class Machines:
    """`count` machines with equal shares of the workers, of which this is number `own`; machine 0 is at `endpoint`."""

    count: int = 1
    own: int = 0
    endpoint: str = ""

    def ranks(self, workers: int) -> range:
        """The workers of this machine; raises UsageError."""
        if workers % self.count or not 0 <= self.own < self.count:
            raise UsageError(
                f"machine {self.own} of {self.count} cannot have its share of {workers} workers",
                "give --nnodes that divides them and --node-rank from 0",
            )
        if self.count > 1 and not all(self.address):
            raise UsageError(
                f"{self.count} machines need a place to meet", "give --rdzv-endpoint HOST:PORT of machine 0"
            )
        each = workers // self.count
        return range(self.own * each, (self.own + 1) * each)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the store, port 0 to be chosen."""
        host, _, port = self.endpoint.rpartition(":") if self.count > 1 else ("127.0.0.1", "", "0")
        return host, int(port) if port.isdigit() else 0


def probe(request: Request, machines: Machines, on_step: OnStep) -> ClusterFile | None:
    """Measure; None on machines and workers that are not the first, which have no figures to report.

    Inside torchrun this process is one of the workers already.

    Raises:
        WorkerDiedError: a worker died, or another waited for it in vain.
        UsageError: the workers cannot be shared among the machines, or lack the device.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return _joined(request, os.environ, on_step)
    ranks = machines.ranks(request.workers)
    host, port = machines.address
    if machines.own == 0:
        store = _store(request, host, port, master=True)
        port = store.port
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    processes, pipes = [], {}
    try:
        for rank in ranks:
            pipe, theirs = context.Pipe(duplex=False)
            arguments = (request, host, port, rank, rank - ranks[0], machines.count == 1, theirs)
            process = context.Process(target=_work, args=arguments, name=f"worker {rank}", daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[pipe] = rank
        return _outcome(pipes, dict(zip(ranks, processes, strict=True)), on_step)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _outcome(pipes: Mapping[Connection, int], processes: Mapping[int, Any], on_step: OnStep) -> ClusterFile | None:
    """Listen to the workers until all have ended, or one has failed."""
    listening = dict(pipes)
    found: ClusterFile | None = None
    done: set[int] = set()
    failure: PdtoolError | None = None
    end = float("inf")
    while listening and time.monotonic() < end:
        for pipe in wait(list(listening), None if failure is None else _PATIENCE_S):
            assert isinstance(pipe, Connection)
            rank = listening[pipe]
            try:
                kind, content = pipe.recv()
            except EOFError:
                del listening[pipe]
                if rank not in done:
                    processes[rank].join()
                    code = processes[rank].exitcode
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    raise WorkerDiedError(f"worker {rank} {how}", "see what it said on stderr") from None
                continue
            if kind == "step":
                on_step(content)
                continue
            done.add(rank)
            if kind == "found":
                found = found or content
            elif failure is None:
                what, remedy, exit_code = content
                failure = _ERRORS.get(exit_code, PdtoolError)(what, remedy)
                end = time.monotonic() + _PATIENCE_S
    if failure:
        raise failure
    return found


def _work(request: Request, host: str, port: int, rank: int, local: int, alone: bool, pipe: Connection) -> None:
    """The process of one worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    try:
        store = _store(request, host, port, master=False)
        found = probe_here(request, store, rank, local, alone=alone, on_step=lambda step: pipe.send(("step", step)))
        pipe.send(("found", found if rank == 0 else None))
    except PdtoolError as error:
        pipe.send(("failed", (error.what, error.remedy, error.exit_code)))


def _store(request: Request, host: str, port: int, *, master: bool) -> Any:
    """The store where all meet; it lives in the process that started the workers of machine 0."""
    limit = timedelta(seconds=2 * request.timeout_s)
    try:
        return dist.TCPStore(host, port, is_master=master, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        if master:
            raise UsageError(f"nobody can meet at {host}:{port} ({error})", "name a free port of machine 0") from error
        raise WorkerDiedError(
            f"machine 0 did not answer at {host}:{port}", "start it, too, and see that this one can reach it"
        ) from error


def _joined(request: Request, environment: Mapping[str, str], on_step: OnStep) -> ClusterFile | None:
    """Be one of the workers that torchrun started."""
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world != request.workers:
        raise UsageError(f"{world} processes were started, the topology has {request.workers}", "start one per worker")
    try:
        limit = timedelta(seconds=2 * request.timeout_s)
        store, _, _ = next(rendezvous("env://", rank, world, timeout=limit))
    except RuntimeError as error:
        raise WorkerDiedError("the workers did not come together", "see that all of them are started") from error
    local = int(environment.get("LOCAL_RANK", "0"))
    alone = environment.get("LOCAL_WORLD_SIZE") == str(world)
    found = probe_here(request, PrefixStore("probe", store), rank, local, alone=alone, on_step=on_step)
    return found if rank == 0 else None
