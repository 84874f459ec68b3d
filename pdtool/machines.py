"""The machines of a launch: which workers each machine starts, and which machine this process is on.

The workers of a cluster are divided evenly among the machines, in order. All workers meet at machine 0. Inside torchrun
or srun nothing is launched, because the process is already one of the workers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial

from pdtool.errors import UsageError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # of torch, for each worker
_SLURM_PORTS = range(10_000, 30_000)  # below the ports of outgoing connections
LOOPBACK = "127.0.0.1"
_ENDPOINT = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%]+)\]|(?P<host>[\w.-]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_MAX_PORT = 2**16 - 1


def check_even_shares(workers: int, machines: int) -> None:
    """Raise UsageError if so many machines cannot have equal shares of the workers."""
    if workers % machines:
        what = f"the cluster's {workers} workers cannot be divided evenly among {machines} machines"
        raise UsageError(what, f"pass an --nnodes that divides {workers}")


@dataclass(frozen=True)
class Machines:
    """The machines of a launch.

    Attributes:
        count: number of machines (--nnodes).
        node_rank: number of this machine, from 0.
        endpoint: `host:port` on machine 0 (--rdzv-endpoint); "" with one machine.
    """

    count: int = 1
    node_rank: int = 0
    endpoint: str = ""

    def check_rank(self) -> None:
        """Raise UsageError if this machine's number is out of range."""
        if not 0 <= self.node_rank < self.count:
            raise UsageError(
                f"--node-rank {self.node_rank} is not one of 0 to {self.count - 1}", "number the machines from 0"
            )

    def node_workers(self, workers: int) -> range:
        """Return the numbers of the workers that this machine starts.

        Args:
            workers: number of workers in the cluster.

        Raises:
            UsageError: the workers cannot be divided evenly, this machine's number is out of range, or the endpoint is
                missing or malformed.
        """
        self.check_rank()
        check_even_shares(workers, self.count)
        if self.count > 1:
            if not self.endpoint:
                what = f"{self.count} machines need an endpoint to meet at"
                raise UsageError(what, "pass --rdzv-endpoint HOST:PORT of machine 0")
            parse_endpoint(self.endpoint)
        share = workers // self.count
        return range(self.node_rank * share, (self.node_rank + 1) * share)

    @property
    def flags(self) -> str:
        """The options of this machine's command, with a space before them; "" with one machine."""
        if self.count == 1:
            return ""
        return f" --nnodes {self.count} --node-rank {self.node_rank} --rdzv-endpoint {self.endpoint}"

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """(host, port) of the store on machine 0; port 0 stands for any free port."""
        return parse_endpoint(self.endpoint) if self.count > 1 else (LOOPBACK, 0)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read `node0:29500` or `[fd00::1]:29500` as host and port; raises UsageError."""
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= _MAX_PORT:
        what = f"endpoint {text!r} is not HOST:PORT with a port from 1 to {_MAX_PORT}"
        raise UsageError(what, "pass the host name or address of machine 0 and a free port there, such as node0:29500")
    return match["host"] or match["ipv6"], int(match["port"])


def rank_variables(
    rank: int, local_rank: int, workers: int, local_workers: int, address: tuple[str, int]
) -> dict[str, str]:
    """Return torch's environment variables of a worker.

    Args:
        local_rank, local_workers: its number on its machine, and how many are there.
        address: (host, port) of worker 0.
    """
    numbers = dict(zip(RANK_VARIABLES, map(str, (rank, workers, local_rank, local_workers)), strict=True))
    return numbers | {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}


def worker_environment(environment: Mapping[str, str], endpoint: str = "") -> dict[str, str]:
    """Return torch's environment variables of this process's worker; empty if it is not a worker.

    Args:
        environment: this process's environment; torchrun sets RANK in it and srun sets SLURM_PROCID.
        endpoint: `host:port` where the workers meet; by default from torchrun or SLURM.

    Raises:
        UsageError: a variable is missing or not a number, or the numbers contradict each other.
    """
    number = partial(_number, environment)
    if _of_torchrun(environment):
        rank, workers = number("RANK"), number("WORLD_SIZE")
        local_rank, local_workers = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
        address: tuple[str, int] = environment["MASTER_ADDR"], number("MASTER_PORT")
    elif _of_srun(environment):
        rank, workers = number("SLURM_PROCID"), _srun_tasks(environment)
        local_rank, local_workers = number("SLURM_LOCALID", 0), _slurm_tasks_here(environment)
        address = environment.get("SLURM_LAUNCH_NODE_IPADDR", "localhost"), _slurm_port(environment)
        if endpoint:
            address = parse_endpoint(endpoint)
    else:
        return {}
    if rank >= workers:
        what = (
            f"this process has rank {rank}, but the ranks of {workers} workers are 0 to {workers - 1} "
            "(RANK and WORLD_SIZE, or SLURM_PROCID and SLURM_NTASKS)"
        )
        raise UsageError(what, "start the workers with torchrun or srun, which number them from 0")
    if not address[0] or not 0 < address[1] <= _MAX_PORT:
        named = f"MASTER_ADDR {address[0]!r:.80} and MASTER_PORT {address[1]}"
        what = f"{named} are not a host and a port from 1 to {_MAX_PORT}"
        raise UsageError(what, "start the workers with torchrun or srun")
    return rank_variables(rank, local_rank, workers, local_workers, address)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the whole number in a variable; raises UsageError."""
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        is_set = f"is {text!r:.80}, not a whole number" if name in environment else "is not set"
        raise UsageError(f"the environment variable {name} {is_set}", "start the workers with torchrun or srun")
    return int(text)


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Return the tasks on this node: SLURM lists those of all nodes, as `2(x3),1`."""
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed, re.ASCII)
    tasks = [int(each) for each, times in found for _ in range(int(times or 1))]
    node = _number(environment, "SLURM_NODEID", 0)
    return tasks[node] if node < len(tasks) else _number(environment, "SLURM_NTASKS_PER_NODE", 1)


def _slurm_port(environment: Mapping[str, str]) -> int:
    """Choose the port of a job step from its numbers, which all its tasks know and other jobs on the node do not share.

    Args:
        environment: with SLURM_JOB_ID and SLURM_STEP_ID.
    """
    step = f"{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"
    return _SLURM_PORTS[zlib.crc32(step.encode()) % len(_SLURM_PORTS)]


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or srun started this process as one of several workers."""
    return _of_torchrun(environment) or _of_srun(environment)


def _of_torchrun(environment: Mapping[str, str]) -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys()


def _of_srun(environment: Mapping[str, str]) -> bool:
    """Whether it is one of several tasks of a job step: a batch script of SLURM is none, and starts all workers."""
    return "SLURM_STEP_ID" in environment and _srun_tasks(environment) > 1


def _srun_tasks(environment: Mapping[str, str]) -> int:
    """Return the tasks of a job step: SLURM_NTASKS is the job's in a shell of salloc, which is a step of one task."""
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return _number(environment, name, 1)


def is_first_worker(environment: Mapping[str, str]) -> bool:
    """Whether this process reports to the user: it launched the workers, or is the first of them."""
    return not is_worker(environment) or environment.get("RANK", environment.get("SLURM_PROCID", "0")) == "0"


def use_loopback(environment: MutableMapping[str, str]) -> None:
    """Make gloo use the loopback interface, unless another is set, because all workers are on this machine."""
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
