"""Start a Python script on each worker of a pretend cluster, with the variables that torchrun sets.

    python on_pretend_cluster.py 2 100Mbit/s script.py ARGUMENTS

gives two workers, each behind a link of 100 Mbit/s. Nothing of it is left when this process ends, however it does.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

from pdtool.artifacts.cluster import make_cluster
from pdtool.emulator.pretend_cluster import INTERFACE, PretendCluster, check_tools, enter_own_network
from pdtool.host import end_with_parent
from pdtool.rendezvous import GLOO_VARIABLE
from pdtool.units import parse_bandwidth

_POLL_S = 0.1
_fork = multiprocessing.get_context("fork")


def main() -> None:
    """Start the workers, and end with the exit code of the first that fails, or 0."""
    workers, bandwidth, *command = sys.argv[1:]
    check_tools()
    enter_own_network()
    pretend = PretendCluster(make_cluster((int(workers),), (parse_bandwidth(bandwidth),)))
    pretend.make_bridges()
    processes, pipes = [], []
    for rank in range(int(workers)):
        pipe, theirs = _fork.Pipe()
        process = _fork.Process(target=_be_worker, args=(pretend, rank, int(workers), theirs, command), daemon=True)
        process.start()
        theirs.close()
        pipe.recv()  # it is in its own namespace
        pretend.add_worker(rank, process.pid or 0)
        processes.append(process)
        pipes.append(pipe)
    for pipe in pipes:  # all links are there
        pipe.send(None)
    exit_codes = [None]  # sentinels are of no use: they close as the script begins
    while None in exit_codes and not any(exit_codes):
        time.sleep(_POLL_S)
        exit_codes = [process.exitcode for process in processes]
    sys.exit(next(filter(None, exit_codes), 0))  # and with this process the workers that are left


def _be_worker(pretend: PretendCluster, rank: int, world_size: int, pipe: Connection, command: list[str]) -> None:
    """Enter the worker's namespace, set up its link, and become the script."""
    end_with_parent()
    enter_own_network()
    pipe.send(None)
    pipe.recv()
    pretend.enter(rank)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": pretend.address(0),
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or torch warns that addresses have no names
        GLOO_VARIABLE: INTERFACE,
    }
    os.execve(sys.executable, [sys.executable, *command], {**os.environ, **variables})


if __name__ == "__main__":
    main()
