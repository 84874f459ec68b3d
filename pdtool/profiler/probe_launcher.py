"""Start the processes that probe the network, on this machine or as part of several, and say which one failed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pdtool.artifacts.cluster import ClusterFile
from pdtool.errors import PdtoolError, UsageError, WorkerDiedError
from pdtool.machines import Machines, worker_environment
from pdtool.profiler.probe import OnStep, ProbeRequest, ProbeWorker, run_probe_worker
from pdtool.rendezvous import Notify, gather_machines

_GRACE_S = 0.5  # after a failure: the one that the others follow from may still be on its way


def probe(
    request: ProbeRequest, machines: Machines, on_step: OnStep, notify: Notify = lambda line: None
) -> ClusterFile | None:
    """Measure the network; None on machines and workers that are not the first, which have no figures to report.

    Inside torchrun or srun this process is one of the workers already.

    Args:
        notify: called with a line that says for which machine this one waits.

    Raises:
        PdtoolError: a machine does not come in time, or does not belong to this launch.
        WorkerDiedError: a worker died, or another waited for it in vain.
        UsageError: the workers cannot be shared among the machines, or lack the device.
    """
    environment = worker_environment(os.environ, machines.endpoint)
    is_launcher = machines.count > 1 and "RANK" not in os.environ  # which srun may have started, one on each machine
    if environment and not is_launcher:
        return _probe_as_worker(request, environment, on_step)
    node_workers = machines.node_workers(request.workers)
    gather_machines(machines, request.timeout_s, notify)
    return _launch(request, machines, node_workers, on_step)


def _launch(request: ProbeRequest, machines: Machines, node_workers: range, on_step: OnStep) -> ClusterFile | None:
    """Start the workers of this machine, and wait for them."""
    host, port = machines.rendezvous_address
    if machines.node_rank == 0:
        store = _connect_store(request, host, port, is_master=True)
        port = store.port
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    processes, pipes = [], {}
    try:
        for rank in node_workers:
            pipe, worker_pipe = context.Pipe(duplex=False)
            worker = ProbeWorker(rank, rank - node_workers[0], is_one_machine=machines.count == 1)
            arguments = (request, host, port, worker, worker_pipe)
            process = context.Process(target=_worker_main, args=arguments, name=f"worker {rank}", daemon=True)
            process.start()
            worker_pipe.close()
            processes.append(process)
            pipes[pipe] = rank
        return _wait_for_workers(pipes, dict(zip(node_workers, processes, strict=True)), on_step)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait_for_workers(
    pipes: Mapping[Connection, int], processes: Mapping[int, Any], on_step: OnStep
) -> ClusterFile | None:
    """Listen to the workers until all have ended, or one has failed."""
    listening = dict(pipes)
    cluster: ClusterFile | None = None
    ended: set[int] = set()
    failure: PdtoolError | None = None
    deadline_s = float("inf")
    while listening and time.monotonic() < deadline_s:
        for pipe in wait(list(listening), None if failure is None else _GRACE_S):
            assert isinstance(pipe, Connection)
            rank = listening[pipe]
            try:
                message = pipe.recv()
            except EOFError:
                del listening[pipe]
                if rank not in ended:
                    raise _death(rank, processes[rank]) from None
                continue
            if isinstance(message, str):  # the step that begins
                on_step(message)
                continue
            ended.add(rank)
            if not isinstance(message, PdtoolError):
                cluster = cluster or message
            elif failure is None:
                failure, deadline_s = message, time.monotonic() + _GRACE_S
    if failure:
        raise failure
    return cluster


def _death(rank: int, process: Any) -> WorkerDiedError:
    process.join()
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return WorkerDiedError(f"worker {rank} {how}", "see what it said on stderr")


def _worker_main(request: ProbeRequest, host: str, port: int, worker: ProbeWorker, pipe: Connection) -> None:
    """The process of one worker: sends each step that begins, and at the end the cluster, None or a PdtoolError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    try:
        store = _connect_store(request, host, port, is_master=False)
        cluster = run_probe_worker(request, store, worker, on_step=pipe.send)
        pipe.send(cluster if worker.rank == 0 else None)
    except PdtoolError as error:
        pipe.send(error)


def _connect_store(request: ProbeRequest, host: str, port: int, *, is_master: bool) -> Any:
    """The store through which all workers meet; it lives in the process that started the workers of machine 0."""
    timeout = timedelta(seconds=2 * request.timeout_s)
    try:
        return dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        if is_master:
            raise UsageError(f"nobody can meet at {host}:{port} ({error})", "name a free port of machine 0") from error
        raise WorkerDiedError(
            f"machine 0 did not answer at {host}:{port}", "start it, too, and see that this one can reach it"
        ) from error


def _probe_as_worker(request: ProbeRequest, environment: Mapping[str, str], on_step: OnStep) -> ClusterFile | None:
    """Be one of the workers that torchrun or srun started."""
    os.environ.update(environment)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world_size != request.workers:
        what = f"{world_size} processes were started, the topology has {request.workers}"
        raise UsageError(what, "start one per worker")
    try:
        timeout = timedelta(seconds=2 * request.timeout_s)
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    except RuntimeError as error:
        raise WorkerDiedError("the workers did not come together", "see that all of them are started") from error
    is_one_machine = environment.get("LOCAL_WORLD_SIZE") == str(world_size)
    worker = ProbeWorker(rank, int(environment["LOCAL_RANK"]), is_one_machine)
    cluster = run_probe_worker(request, PrefixStore("probe", store), worker, on_step=on_step)
    return cluster if rank == 0 else None
