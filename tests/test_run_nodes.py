"""Several machines, and torchrun: real processes on this one that meet as machines do."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from harness import CONV2

from pdtool.machines import Machines
from pdtool.run import checkpoint
from pdtool.run.config import RunConfig

SCRIPT = """
import pickle, sys
from pathlib import Path
from pdtool.errors import PdtoolError
from pdtool.run.processes.launcher import launch
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    ended = [process.communicate(timeout=120) for process in processes]
    return [(p.returncode, out, errors) for p, (out, errors) in zip(processes, ended, strict=True)]


def machines(script: Path, spec: RunConfig) -> list[subprocess.Popen[str]]:
    """The spec on two machines."""
    endpoint = f"127.0.0.1:{free_port()}"
    processes = []
    for k in (0, 1):
        path = script.with_name(f"spec-{k}")
        path.write_bytes(pickle.dumps(replace(spec, machines=Machines(2, k, endpoint))))
        processes.append(start([sys.executable, str(script), str(path)]))
    return processes


def exported(spec: RunConfig) -> dict[str, torch.Tensor]:
    checkpoint.export(spec.out, spec.out / "model.pt")
    return torch.load(spec.out / "model.pt", weights_only=True)  # type: ignore[no-any-return]


def trained_the_same(spec: RunConfig, alone: RunConfig) -> None:
    """Bit for bit what `alone` trains, with its processes all on this machine."""
    harness.run(alone)
    state, expected = exported(spec), exported(alone)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_two_machines_train_what_one_machine_trains(tmp_path: Path, script: Path) -> None:
    """2-2 on a 2x2 cluster, so that the border lies between the machines."""
    spec, alone = (harness.job(tmp_path / name, CONV2, (2, 2)) for name in ("two", "one"))
    for code, out, errors in end(machines(script, spec)):
        assert code == 0, errors
        assert "2-2" in out
    trained_the_same(spec, alone)


@pytest.mark.slow
def test_torchrun_trains_what_the_command_trains(tmp_path: Path, script: Path) -> None:
    """Each of its processes imports torch: no more of them than a pipeline needs."""
    spec, alone = (harness.job(tmp_path / name, CONV2, (1, 1)) for name in ("torchrun", "one"))
    (tmp_path / "spec").write_bytes(pickle.dumps(spec))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    [(code, out, errors)] = end([start([*torchrun, str(script), str(tmp_path / "spec")])])
    assert code == 0, errors
    assert "1-1" in out
    trained_the_same(spec, alone)


def test_a_worker_that_dies_ends_the_run_on_all_machines(tmp_path: Path, script: Path) -> None:
    spec = harness.job(tmp_path, harness.faulty("os.kill(os.getpid(), 9) if self.n == 2 else 0"), (1, 1, 2))
    for code, _, errors in end(machines(script, spec)):
        assert code == 5, errors
        assert "rank 1 (stage 1, replica 0)" in errors
