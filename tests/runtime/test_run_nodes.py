"""Several machines, and torchrun: real processes on this one that meet as machines do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from conftest import Folder
from harness import CONV1, CONV2, CONV3
from launches import Launch, end, free_port, machines
from torch.distributed import TCPStore

from pdtool.artifacts.report import Report
from pdtool.machines import Machines
from pdtool.rendezvous import gather_machines
from pdtool.runtime.config import RunConfig
from pdtool.runtime.worker import checkpoint

# As torchrun starts it: `pdtool run` without its command line.
SCRIPT = """
import pickle, sys
from pathlib import Path
from pdtool.errors import PdtoolError
from pdtool.runtime.launch.launcher import launch

if __name__ == "__main__":
    try:
        print(launch(pickle.loads(Path(sys.argv[1]).read_bytes())).config)
    except PdtoolError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])} | variables
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def exported(spec: RunConfig) -> dict[str, torch.Tensor]:
    checkpoint.export(spec.out, spec.out / "model.pt")
    return torch.load(spec.out / "model.pt", weights_only=True)  # type: ignore[no-any-return]


def trained_the_same(spec: RunConfig, alone: RunConfig) -> None:
    """Bit for bit what `alone` trains, with its processes all on this machine."""
    harness.run(alone)
    state, expected = exported(spec), exported(alone)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_two_machines_train_what_one_machine_trains(tmp_path: Path) -> None:
    """2-2 on a 2x2 cluster, so that the border lies between the machines."""
    spec, alone = (harness.job(tmp_path / name, CONV2, (2, 2)) for name in ("two", "one"))
    for code, out, errors in end(machines(tmp_path, spec, spec)):
        assert code == 0, errors
        assert "2-2" in out
    trained_the_same(spec, alone)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.slow
def test_torchrun_trains_what_the_command_trains(road: Folder) -> None:
    """As docs/clusters.md calls it. Each of its processes imports torch: no more of them than a pipeline needs."""
    road.pdtool("codegen")
    command = ["run", "plans/model-2.yaml", "--steps", "4", "-o"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    launch = [*torchrun, *rendezvous, "-m", "pdtool", *command, "runs/torchrun"]
    code, out, errors = ended(start(launch, GLOO_SOCKET_IFNAME="lo"))
    assert code == 0, out + errors
    assert Report.load("runs/torchrun/report.json").config == "1-1"
    road.pdtool(*command, "runs/alone")
    states = []
    for name in ("torchrun", "alone"):
        road.pdtool("export", f"runs/{name}", "-o", f"{name}.pt")
        states.append(torch.load(f"{name}.pt", weights_only=True))
    state, expected = states
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_worker_that_dies_ends_the_run_on_all_machines(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, harness.faulty("os.kill(os.getpid(), 9) if self.n == 2 else 0"), (1, 1, 2))
    for code, _, errors in end(machines(tmp_path, spec, spec)):
        assert code == 5, errors
        assert "rank 1 (stage 1, replica 0)" in errors


def test_a_machine_that_does_not_come_is_named_within_the_timeout(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV2, timeout_s=4.0, machines=Machines(2, 0, f"127.0.0.1:{free_port()}"))
    begin = time.monotonic()
    code, _, errors = Launch(spec, tmp_path).end()
    assert code == 5
    assert f"waiting for machine 1 of 2 at {spec.machines.endpoint}, for 4 s at most" in errors
    assert f"machine 1 of 2 did not connect to {spec.machines.endpoint} within 4 s; start it with" in errors
    assert time.monotonic() - begin < 30
    assert not spec.out.exists(), "nothing in it would be worth reading"


def test_a_machine_that_fails_while_the_other_waits_for_it(tmp_path: Path) -> None:
    """Machine 1 finds its bundle stale before it meets anybody."""
    spec = harness.job(tmp_path / "a", CONV2, timeout_s=4.0, machines=Machines(2, 0, f"127.0.0.1:{free_port()}"))
    stale = replace(
        spec, bundle=harness.job(tmp_path / "b", CONV3).bundle, machines=replace(spec.machines, node_rank=1)
    )
    (_, _, waited), (code, _, errors) = end([Launch(spec, tmp_path), Launch(stale, tmp_path)])
    assert (code, "it has 3 stages, but the plan has 2" in errors) == (3, True)
    assert "machine 1 of 2 did not connect" in waited


def test_a_machine_that_is_gone_after_it_has_come(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV2, timeout_s=3.0, machines=Machines(2, 0, f"127.0.0.1:{free_port()}"))
    first = Launch(spec, tmp_path)
    gather_machines(replace(spec.machines, node_rank=1), 60.0)
    begin = time.monotonic()
    code, _, errors = first.end()
    assert (code, time.monotonic() - begin < 60) == (5, True)
    assert "rank 1 (stage 1, replica 0) did not answer for 3 s; it left no record here; if it" in errors


class Malicious:
    """Its pickle touches a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("said", ["pickle", b"\xff" * 64])
def test_a_stranger_who_says_what_no_machine_says_executes_nothing(tmp_path: Path, said: Any) -> None:
    """It has come in the place of machine 1, and gives its address to gloo."""
    spec = harness.job(tmp_path, CONV2, timeout_s=5.0, machines=Machines(2, 0, f"127.0.0.1:{free_port()}"))
    first = Launch(spec, tmp_path)
    gather_machines(replace(spec.machines, node_rank=1), 60.0)
    host, port = spec.machines.rendezvous_address
    store = TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=30))
    said = pickle.dumps(Malicious(tmp_path / "executed")) if said == "pickle" else said
    store.set("default_pg/0//cpu//0/1", said)
    code, _, errors = first.end()
    assert code == 5, errors
    assert not (tmp_path / "executed").exists()


def test_workers_of_several_machines_that_gloo_does_not_let_meet(tmp_path: Path, script: Path) -> None:
    """As torchrun starts them; nobody else is there, and the interface that is set is loopback."""
    (tmp_path / "spec").write_bytes(pickle.dumps(harness.job(tmp_path, CONV2, timeout_s=1.0)))
    worker = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code, _, errors = ended(start([sys.executable, str(script), str(tmp_path / "spec")], **worker, **address))
    assert code == 5
    assert (
        "not all of the 2 workers connected: are all started? gloo listens at 127.0.0.1: set GLOO_SOCKET_IFNAME to"
        in errors
    )


def test_a_worker_of_torchrun_ends_with_it(tmp_path: Path, script: Path) -> None:
    spec = harness.job(tmp_path, replace(CONV1, model=CONV1.model + ENDLESS))
    (tmp_path / "spec").write_bytes(pickle.dumps(spec))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    agent = start([*torchrun, str(script), str(tmp_path / "spec")])
    pid_file = tmp_path / "worker.pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    agent.kill()
    agent.communicate(timeout=60)
    wait_until(lambda: has_ended(int(pid_file.read_text())))


ENDLESS = """
import os, pathlib, time
_dataset = dataset
def dataset(split):
    pathlib.Path(__file__).with_name("worker.pid").write_text(str(os.getpid()))
    time.sleep(600)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
