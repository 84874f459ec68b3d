"""Run the workers of a plan on a pretend cluster, each a process in a namespace of its own.

One process, the switch, has all links and imports torch once; the workers are forked from it. Whatever ends the process
that was asked to emulate ends the switch, and that the workers; with the last of them the kernel removes the links.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, cast

from pdtool.artifacts.cluster import Cluster
from pdtool.emulator.pretend_cluster import INTERFACE, PretendCluster, check_tools, enter_own_network
from pdtool.errors import PdtoolError, WorkerDiedError
from pdtool.host import end_with_parent, safe_path
from pdtool.rendezvous import GLOO_VARIABLE
from pdtool.runtime.config import RankAssignment, RunConfig, assign_ranks
from pdtool.runtime.launch.diagnosis import diagnose
from pdtool.runtime.launch.worker_main import worker_main
from pdtool.runtime.status import prepare_folder, read_failure
from pdtool.runtime.worker_end import record_failure

_START_TIMEOUT_S = 120.0
_GRACE_S = 2.0  # for workers to end after one has failed
_PORT = "29500"  # of worker 0, in a namespace where nobody else is
_fork = multiprocessing.get_context("fork")


class Emulator:
    """Workers on a pretend cluster, one run after the other.

    Args:
        cluster: with the bandwidths that the links are to have.

    Raises:
        PdtoolError: the links cannot be made here.
    """

    def __init__(self, cluster: Cluster) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # or torch warns that addresses have no names
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads cannot enter a user namespace
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe_of_switch = context.Pipe()
        arguments = (pipe_of_switch, cluster, os.getpid(), dict(os.environ))
        self._switch = context.Process(target=_switch_main, args=arguments, name="switch")
        with safe_path():
            self._switch.start()
        pipe_of_switch.close()
        try:
            self._receive("the links of the pretend cluster", _START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, config: RunConfig) -> None:
        """Run a plan to its end; its report is then in `config.out`.

        Raises:
            WorkerDiedError: a worker ended or did not answer; all others are gone.
            PdtoolError: what a worker found wrong.
        """
        self._pipe.send(config)
        self._receive("the workers", None)

    def close(self) -> None:
        """End all processes, and with them the links."""
        if self._switch.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._switch.pid, signal.SIGKILL)
            self._switch.kill()
        self._switch.join()
        self._pipe.close()

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _receive(self, what: str, timeout_s: float | None) -> None:
        """Wait until the switch has done what it was asked for; raises what it raised."""
        if not wait([self._pipe, self._switch.sentinel], timeout_s):
            raise PdtoolError(f"{what} did not come within {timeout_s:g} s", "see whether the machine is overloaded")
        try:
            error = self._pipe.recv()
        except EOFError:
            self._switch.join()
            what = f"the process that holds {what} ended with {self._switch.exitcode}"
            raise WorkerDiedError(what, "start it again") from None
        if error is not None:
            raise error


def _switch_main(pipe: Connection, cluster: Cluster, emulator: int, environment: Mapping[str, str]) -> None:
    """The process of the switch: make the links, then run what comes through the pipe.

    Args:
        emulator: the process that started it, at whose end it kills its group: workers, and what these have started.
        environment: of that process; that of this one has PYTHONSAFEPATH besides.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.setpgrp()
    signal.signal(signal.SIGTERM, _kill_group)
    end_with_parent(emulator, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    pretend = PretendCluster(cluster)
    with suppress(EOFError, BrokenPipeError):  # that is how the emulator's end is seen
        try:
            check_tools()
            enter_own_network()
            pretend.make_bridges()
            import torch._dynamo  # noqa: F401  # which each worker would import with its first optimizer
        except PdtoolError as error:
            pipe.send(error)
            return
        pipe.send(None)
        while True:
            config = pipe.recv()
            try:
                _run_workers(pretend, config)
                pipe.send(None)
            except PdtoolError as error:
                pipe.send(error)


def _kill_group(number: int, frame: FrameType | None) -> None:
    """Kill this process, the workers, and all that these have started."""
    os.killpg(0, signal.SIGKILL)


@dataclass(frozen=True)
class _WorkerProcess:
    """A worker's process; `pipe` tells it when its link is there."""

    assignment: RankAssignment
    process: BaseProcess
    pipe: Connection


def _run_workers(pretend: PretendCluster, config: RunConfig) -> None:
    assignments = assign_ranks(config.plan)
    prepare_folder(config.out, [assignment.rank for assignment in assignments], keep_metrics=False)
    with _started(pretend, config, assignments) as workers:
        for worker in workers:
            _connect(pretend, worker)
        for worker in workers:  # all links are there: worker 0 answers
            worker.pipe.send(None)
        _wait(workers, config)
        exit_codes = {worker.assignment.rank: worker.process.exitcode or 0 for worker in workers}
    if any(exit_codes.values()):
        raise diagnose(config, assignments, {rank: code for rank, code in exit_codes.items() if code})


@contextmanager
def _started(
    pretend: PretendCluster, config: RunConfig, assignments: list[RankAssignment]
) -> Iterator[list[_WorkerProcess]]:
    """Start the workers; in the end all of them are gone, and their links with them."""
    workers: list[_WorkerProcess] = []
    try:
        for assignment in assignments:
            own, theirs = _fork.Pipe()
            arguments = (pretend, config, assignment, theirs, os.getpid())
            process = _fork.Process(target=_worker_main, args=arguments, name=f"worker-{assignment.rank}")
            process.start()
            theirs.close()
            workers.append(_WorkerProcess(assignment, process, own))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
            pretend.remove_worker(worker.process.pid or 0)


def _connect(pretend: PretendCluster, worker: _WorkerProcess) -> None:
    """Link a worker once it is in its own namespace; raises PdtoolError."""
    if not worker.pipe.poll(_START_TIMEOUT_S):
        what = f"{worker.assignment} did not start within {_START_TIMEOUT_S:g} s"
        raise WorkerDiedError(what, "see whether the machine is overloaded")
    try:
        error = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        what = f"{worker.assignment} ended with {worker.process.exitcode} as it started"
        raise WorkerDiedError(what, "start it again") from None
    if error is not None:
        raise error
    pretend.add_worker(worker.assignment.worker, worker.process.pid or 0)


def _wait(workers: list[_WorkerProcess], config: RunConfig) -> None:
    """Wait until all have ended, or one has failed and the others had a little time to say how they end."""
    running = {worker.process.sentinel: worker for worker in workers}
    until_s = float("inf")
    while running and time.monotonic() < until_s:
        for sentinel in wait(list(running), 0.2):
            running.pop(cast(int, sentinel)).process.join()
        failed = any(worker.process.exitcode for worker in workers)
        if until_s == float("inf") and (failed or any(read_failure(config.out, w.assignment.rank) for w in workers)):
            until_s = time.monotonic() + _GRACE_S


def _worker_main(
    pretend: PretendCluster, config: RunConfig, assignment: RankAssignment, pipe: Connection, switch: int
) -> None:
    """The process of a worker: enter the namespace and the link, and be the worker of that rank.

    Args:
        switch: the process that it was forked from, and ends with.
    """
    end_with_parent(switch)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        enter_own_network()
        pipe.send(None)
        pipe.recv()
        pretend.enter(assignment.worker)
    except PdtoolError as error:
        with suppress(OSError):
            pipe.send(error)
        sys.exit(record_failure(config.out, assignment.rank, error))
    os.environ.update(_environment(pretend, assignment, assign_ranks(config.plan)))
    worker_main(config, os.environ, os.getcwd(), switch)


def _environment(
    pretend: PretendCluster, assignment: RankAssignment, assignments: list[RankAssignment]
) -> Mapping[str, Any]:
    """The variables that torch elastic would set."""
    return {
        "RANK": str(assignment.rank),
        "WORLD_SIZE": str(len(assignments)),
        "LOCAL_RANK": str(assignment.rank),
        "LOCAL_WORLD_SIZE": str(len(assignments)),  # they share the cores of this machine
        "MASTER_ADDR": pretend.address(assignments[0].worker),
        "MASTER_PORT": _PORT,
        GLOO_VARIABLE: INTERFACE,
    }
