"""Which workers a machine starts, and whether this process is one of them already."""

from __future__ import annotations

import pytest

from pdtool.errors import UsageError
from pdtool.machines import Machines, is_first_worker, is_worker, parse_endpoint, use_loopback, worker_environment

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def test_each_worker_is_started_by_one_machine() -> None:
    assert Machines().node_workers(3) == range(3)
    halves = [Machines(2, k, "node0:29500").node_workers(8) for k in (0, 1)]
    assert halves == [range(4), range(4, 8)]


@pytest.mark.parametrize(
    ("machines", "workers", "message"),
    [
        (Machines(3, 0, "h:1"), 4, "workers cannot be divided evenly among 3 machines; pass an --nnodes"),
        (Machines(2, 2, "h:1"), 4, "--node-rank 2 is not one of 0 to 1"),
        (Machines(2, 0, ""), 4, "2 machines need an endpoint to meet at; pass --rdzv-endpoint HOST:PORT"),
        (Machines(2, 0, "node0"), 4, "endpoint 'node0' is not HOST:PORT"),
        (Machines(2, 0, "node0:x"), 4, "endpoint 'node0:x' is not HOST:PORT"),
    ],
)
def test_machines_that_cannot_share_the_workers(machines: Machines, workers: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        machines.node_workers(workers)


MALFORMED = ["node0", "node0:", "node0:0", "node0:99999", "node0:-1", ":29500", " :29500", "a b:29500", "fd00::1:29500"]


@pytest.mark.parametrize("endpoint", MALFORMED)
@pytest.mark.parametrize("command", [["probe", "--topology", "2"], ["run", "no-such-plan.yaml"]])
def test_a_malformed_endpoint_is_refused_before_anything_is_read(folder, command: list[str], endpoint: str) -> None:
    result = folder.pdtool(*command, "--nnodes", "2", "--rdzv-endpoint", endpoint, code=2)
    assert f"endpoint {endpoint!r} is not HOST:PORT with a port from 1 to 65535" in result.stderr
    assert "no-such-plan" not in result.stderr


def test_an_endpoint_is_a_name_or_an_address_and_a_port() -> None:
    for text, address in {
        "node-0.rack_1:29500": ("node-0.rack_1", 29500),
        "10.0.0.1:1": ("10.0.0.1", 1),
        "[fd00::1]:65535": ("fd00::1", 65535),
    }.items():
        assert parse_endpoint(text) == address


def test_machines_meet_at_the_endpoint_and_one_machine_at_a_port_of_its_own() -> None:
    assert Machines(2, 1, "node0:29500").rendezvous_address == ("node0", 29500)
    assert Machines().rendezvous_address == ("127.0.0.1", 0)


def test_inside_torchrun_or_srun_the_process_is_a_worker() -> None:
    assert worker_environment(TORCHRUN) == {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}
    assert (
        worker_environment(SLURM, "head:29400").items()
        >= {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29400"}.items()
    )
    ipv6 = worker_environment(SLURM, "[fd00::1]:29400")
    assert (ipv6["MASTER_ADDR"], ipv6["MASTER_PORT"]) == ("fd00::1", "29400")
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}  # not a task
    assert worker_environment(script) == {}
    assert not is_worker(script)
    assert worker_environment({}) == {}
    assert [is_worker(e) for e in (TORCHRUN, SLURM, {})] == [True, True, False]
    assert [is_first_worker(e) for e in (TORCHRUN, SLURM, {}, {**TORCHRUN, "RANK": "0"})] == [False, False, True, True]
    left_over = {"RANK": "1"}, {"SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}  # one process that starts all workers
    assert all(map(is_first_worker, left_over))
    shell = {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}  # of salloc: the job has four tasks, the shell's step one
    assert worker_environment(shell) == {}


def test_slurm_lists_the_tasks_of_all_nodes() -> None:
    """Without --ntasks-per-node each worker took itself for the only one of its machine, and all of its cores."""
    for listed, tasks in {"2(x3),1": [2, 2, 2, 1], "4": [4], "1,2(x2)": [1, 2, 2]}.items():
        for node, count in enumerate(tasks):
            step = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": listed, "SLURM_NODEID": str(node)}
            assert worker_environment(step)["LOCAL_WORLD_SIZE"] == str(count)
    assert worker_environment({**SLURM, "SLURM_NTASKS_PER_NODE": "2"})["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({**TORCHRUN, "RANK": "zero"}, "variable RANK is 'zero', not a whole number; start the workers with torchrun"),
        (
            {**TORCHRUN, "MASTER_PORT": "99999"},
            "MASTER_ADDR 'a' and MASTER_PORT 99999 are not a host and a port from 1",
        ),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR '' and MASTER_PORT 1 are not a host"),
        ({**TORCHRUN, "RANK": "2"}, r"this process has rank 2, but the ranks of 2 workers are 0 to 1 \(RANK"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, "variable SLURM_PROCID is not set; start"),
        ({**SLURM, "SLURM_NTASKS": "many"}, "variable SLURM_NTASKS is 'many', not a whole number"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(environment: dict[str, str], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        worker_environment(environment)


def test_jobs_that_share_a_node_meet_at_different_ports() -> None:
    """All tasks of a step know it; it was one port for everyone."""
    jobs = [{**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("811", "812") for step in ("0", "1")]
    ports = [worker_environment(job)["MASTER_PORT"] for job in jobs]
    assert len(set(ports)) == 4
    assert ports[0] == worker_environment({**jobs[0], "SLURM_PROCID": "0"})["MASTER_PORT"]
    assert all(10_000 <= int(port) < 30_000 for port in ports)


def test_an_interface_that_is_set_is_kept() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth1"}
    use_loopback(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth1"}
