"""Run the workers of a plan on a pretend cluster, each a process in a namespace of its own.

One process, the switch, has all links and imports torch once; the workers are forked from it. If the emulating process
ends, for whatever reason, the switch ends and ends the workers. After the last one the kernel removes the links.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from pdtool.artifacts.cluster import Cluster
from pdtool.emulator.pretend_cluster import INTERFACE, PretendCluster, enter_own_network
from pdtool.errors import PdtoolError, WorkerDiedError
from pdtool.host import end_with_parent, safe_path
from pdtool.machines import rank_variables
from pdtool.processes import WorkerProcesses
from pdtool.rendezvous import GLOO_VARIABLE
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch.diagnosis import diagnose
from pdtool.runtime.launch.launcher import start_errors_explained, wait_for_workers
from pdtool.runtime.launch.worker_main import worker_main
from pdtool.runtime.ranks import RankAssignment, assign_ranks
from pdtool.runtime.status import prepare_folder
from pdtool.runtime.worker_end import record_failure

_START_TIMEOUT_S = 120
_PORT = 29500  # worker 0's port, in a namespace of its own


@contextmanager
def links_of(cluster: Cluster) -> Iterator[Callable[[RunConfig], None]]:
    """Make the links of a cluster, and yield a function that runs one plan on them to its end.

    The function takes the configuration of a run, and leaves the report in its folder. At the end of the `with` block
    all processes are gone, and with them the links.

    Args:
        cluster: with the bandwidths for the links.

    Raises:
        WorkerDiedError: a worker ended or did not answer; all others are gone.
        PdtoolError: the links cannot be made here, or a worker's own error.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # or torch warns that addresses have no names
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads cannot enter a user namespace
    with WorkerProcesses("spawn") as processes:
        environment = dict(os.environ)
        with safe_path():
            pid = processes.start(0, _switch_main, cluster, os.getpid(), environment)
        switch, pipe = processes.processes[0], processes.pipes[0]

        def wait_for(what: str, timeout_s: float | None) -> None:
            late = PdtoolError(f"{what} did not arrive within {timeout_s} s", "check whether the machine is overloaded")
            _receive(pipe, switch, timeout_s, late, f"the process that holds {what} ended with {{}}")

        def run(config: RunConfig) -> None:
            with suppress(BrokenPipeError):  # the switch has ended
                pipe.send(config)
            wait_for("the workers", None)

        try:
            wait_for("the links of the pretend cluster", _START_TIMEOUT_S)
            yield run
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _receive(pipe: Connection, process: BaseProcess, timeout_s: float | None, late: PdtoolError, ended: str) -> None:
    """Wait until a process has done its task; raises its error.

    Args:
        late: error to raise if it does not answer in time.
        ended: message if it has ended, with {} for its exit code.
    """
    if not wait([pipe, process.sentinel], timeout_s):
        raise late
    try:
        error = pipe.recv()
    except (EOFError, OSError):  # at the end of the pipe, or in the middle of an answer
        process.join()
        raise WorkerDiedError(ended.format(process.exitcode), "start it again") from None
    if error is not None:
        raise error


def _switch_main(pipe: Connection, cluster: Cluster, emulator: int, environment: Mapping[str, str]) -> None:
    """The process of the switch: make the links, then run the configurations that come through the pipe.

    Args:
        emulator: the process that started it. When that ends, it kills its group: workers, and all that they started.
        environment: that process's environment; this one's also has PYTHONSAFEPATH.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # workers, and all that these have started
    end_with_parent(emulator, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    pretend = PretendCluster(cluster)
    with suppress(EOFError, BrokenPipeError):  # this is the sign of the emulator's end
        try:
            enter_own_network()
            pretend.make_bridges()
            import torch._dynamo  # noqa: F401  # else each worker would import it with its first optimizer
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


def _run_workers(pretend: PretendCluster, config: RunConfig) -> None:
    assignments = assign_ranks(config.plan)
    prepare_folder(config.out, [assignment.rank for assignment in assignments], keep_metrics=False)
    with ExitStack() as links, WorkerProcesses("fork") as workers:
        with start_errors_explained():
            for assignment in assignments:
                pid = workers.start(assignment.rank, _worker_main, pretend, config, assignment, os.getpid())
                links.callback(pretend.remove_worker, pid)
        for assignment in assignments:  # linked once it is in its own namespace
            process, pipe = workers.processes[assignment.rank], workers.pipes[assignment.rank]
            what = f"{assignment} did not start within {_START_TIMEOUT_S} s"
            late = WorkerDiedError(what, "check whether the machine is overloaded")
            _receive(pipe, process, _START_TIMEOUT_S, late, f"{assignment} ended with {{}} as it started")
            pretend.add_worker(assignment.worker, process.pid or 0)
        for pipe in workers.pipes.values():  # all links exist: worker 0 answers
            pipe.send(None)
        reports, exit_codes = wait_for_workers(workers, config.out)
    if len(reports) < len(assignments):
        raise diagnose(config, assignments, exit_codes)


def _worker_main(
    pipe: Connection, pretend: PretendCluster, config: RunConfig, assignment: RankAssignment, switch: int
) -> None:
    """The process of a worker: enter the namespace, set up the link, and be the worker of that rank.

    Args:
        switch: the process that it was forked from; it ends with that.
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
    assignments = assign_ranks(config.plan)
    rank, workers = assignment.rank, len(assignments)  # all share the cores of this machine
    address = (pretend.address(assignments[0].worker), _PORT)
    environment = {**os.environ, **rank_variables(rank, rank, workers, workers, address), GLOO_VARIABLE: INTERFACE}
    worker_main(pipe, config, environment, os.getcwd(), switch)
