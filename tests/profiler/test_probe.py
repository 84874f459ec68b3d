"""`pdtool probe`: what it measures can be planned with, and whoever does not answer is named."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples

from pdtool.artifacts.cluster import ClusterFile
from pdtool.artifacts.plan import PlanOptions
from pdtool.errors import PdtoolError, UsageError, WorkerDiedError
from pdtool.machines import Machines
from pdtool.planner.choice.make_plan import make_plan
from pdtool.profiler.probe import ProbeRequest, agreed_memory_bytes, probe

ROOT = Path(__file__).parents[2]


def request(*sizes, **options):
    return ProbeRequest(name="here", sizes=sizes, device="cpu", round_s=0.02, **options)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def checked(found: ClusterFile, *sizes: int) -> None:
    """Of this topology, and every figure is one."""
    assert [level.size for level in found.levels] == list(sizes)
    assert found.measured.workers == found.cluster().workers == math.prod(sizes)
    assert found.measured.backend == "gloo"
    for level, measured in zip(found.levels, found.measured.levels, strict=True):
        figures = (level.bandwidth_bytes_per_s, measured.pair_bytes_per_s, measured.allreduce_bytes_per_s)
        assert all(1e6 < figure < 1e12 for figure in figures)
        assert 1e-7 < level.latency_s < 1


# --- measuring --------------------------------------------------------------------------------------------------------


def test_a_level_pairs_every_worker_with_its_counterparts():
    for sizes in ((2,), (5,), (2, 2), (3, 2, 4)):
        workers = math.prod(sizes)
        for depth, size in enumerate(sizes):
            below = math.prod(sizes[depth + 1 :])
            rings = request(*sizes).rings(depth)
            assert sorted(rank for ring in rings for rank in ring) == list(range(workers))
            for ring in rings:
                assert len(ring) == size
                assert len({rank // below for rank in ring}) == size, "one in each member"
                assert len({rank // below // size for rank in ring}) == 1, "none outside"


def test_two_workers_here_give_a_file_that_partition_takes(folder):
    result = folder.pdtool("probe", "--topology", "2", "-o", "cluster.yaml", "--device", "cpu")
    assert result.stdout == ""
    assert "measured over gloo" in result.stderr
    assert "wrote cluster.yaml" in result.stderr
    found = ClusterFile.load("cluster.yaml")
    checked(found, 2)
    assert found.name == "2"
    plan = make_plan(samples.profile(), "p.json", found.cluster(), PlanOptions())
    assert plan.cluster.levels == found.levels
    assert "of the ring formula" in folder.pdtool("show", "cluster.yaml").stdout


def test_levels_are_measured_outermost_first():
    steps = []
    found = probe(request(2, 2), Machines(), steps.append)
    checked(found, 2, 2)
    assert steps[0] == "level 0 of 2x2, all links both ways at once"
    assert [step.split(",")[0] for step in steps] == sorted(step.split(",")[0] for step in steps)
    assert multiprocessing.active_children() == []


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pdtool", "probe", "--topology", "2", "--device", "cpu", *arguments]
    everything = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"} | environment
    return subprocess.Popen(command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def of_launch(kind: str) -> list[subprocess.Popen[str]]:
    """Two workers, each started by itself: as two machines do, or as torchrun does."""
    port = str(free_port())
    if kind == "machines":
        meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank")
        return [started(*meet, str(k)) for k in (0, 1)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [started(RANK=str(k), LOCAL_RANK=str(k), **address) for k in (0, 1)]


@pytest.mark.slow
@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize("kind", ["machines", "torchrun"])
def test_the_first_of_a_launch_has_the_figures(kind):
    processes = of_launch(kind)
    (text, _), (nothing, told) = (process.communicate(timeout=120) for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    checked(ClusterFile.parse(text), 2)
    assert nothing == ""
    assert "machine 0 writes the results" in told


# --- waits that are not answered --------------------------------------------------------------------------------------


def worker(rank: int) -> int:
    """Process id of a worker of the probe under way."""
    return next(p.pid for p in multiprocessing.active_children() if p.name == f"worker {rank}")


def interfering(number: signal.Signals, rank: int, at: str):
    """A callback that sends a signal to a worker when the probe reaches a step."""
    sent = []

    def on_step(step: str) -> None:
        if at in step and not sent:
            sent.append(os.kill(worker(rank), number))

    return on_step


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize(("sizes", "rank", "at"), [((2,), 1, "both ways"), ((2, 2), 3, "level 1 of 2x2, all-reduce")])
def test_a_worker_that_never_answers_is_named_when_the_time_is_over(sizes, rank, at):
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"level .* waited for worker {rank}, which did not answer") as caught:
        probe(request(*sizes, timeout_s=4.0), Machines(), interfering(signal.SIGSTOP, rank, at))
    assert caught.value.exit_code == 5
    assert time.monotonic() - start < 60
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_killed_is_named_at_once():
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match="worker 1 was killed by SIGKILL"):
        probe(request(2, timeout_s=300.0), Machines(), interfering(signal.SIGKILL, 1, "alone"))
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_that_does_not_come_is_named(rank):
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        PdtoolError, match=f"machine {1 - rank} of 2 did not (connect to|answer at) {endpoint} within 0.5 s"
    ):
        probe(request(2, timeout_s=0.5), Machines(count=2, node_rank=rank, endpoint=endpoint), lambda step: None)


# --- nonsense ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--topology", "1"], "topology 1 has a level with one member, which has no link to measure"),
        (
            ["--topology", "4x1"],
            "topology 4x1 has a level with one member, which has no link to measure; pass --topology 4",
        ),
        (
            ["--topology", "2", "-o", "model.py"],
            "model.py is not a cluster and would be overwritten; name another file",
        ),
        (["--topology", "two"], "topology 'two' is not sizes joined by x"),
        (["--topology", "2", "--timeout", "0s"], "--timeout 0s is too short for a worker to answer"),
        (
            ["--topology", "2", "--timeout", "1e-324s"],
            "--timeout 1e-324s is too short for a worker to answer; pass 0.001s or more",
        ),
        (["--topology", "2", "--timeout", "1e18s"], "time '1e18s' is too large; pass a value from 0.001ns to 30 days"),
        (["--topology", "2", "--timeout", "5x"], "time '5x' is not a number with a unit"),
        (["--topology", "2", "--name", "my/lab"], "name 'my/lab' holds a quote, a slash"),
        (["--topology", "3", "--nnodes", "2"], "3 workers cannot be divided evenly among 2 machines"),
        (["--topology", "2", "--nnodes", "2", "--node-rank", "2"], "--node-rank 2 is not one of 0 to 1"),
        (["--topology", "2", "--nnodes", "2"], "2 machines need an endpoint to meet at"),
        (["--topology", "2", "--nnodes", "2", "--rdzv-endpoint", "node0"], "endpoint 'node0' is not HOST:PORT"),
    ],
)
def test_impossible_options_exit_with_2_and_say_what_to_write(folder, arguments, match):
    Path("model.py").write_text("x = 1\n")
    stderr = folder.pdtool("probe", *arguments, code=2).stderr
    assert match in stderr
    assert ";" in stderr, "no remedy"


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PdtoolError, match=r"machine 0 cannot listen on port \d+ \(another program uses it\)"):
            probe(request(2), Machines(count=2, node_rank=0, endpoint=endpoint), lambda step: None)


def test_a_launch_of_another_size_is_a_usage_error(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="3 processes were started, but the topology has 2"):
        probe(request(2), Machines(), lambda step: None)


def test_a_launch_that_never_comes_together_ends(monkeypatch):
    port = str(free_port())
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorkerDiedError, match="the workers did not all connect"):
        probe(request(2, timeout_s=0.5), Machines(), lambda step: None)


def test_cuda_is_refused_where_a_worker_has_none():
    import torch

    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has CUDA devices for two workers")
    with pytest.raises(PdtoolError, match=r"worker [01] has no CUDA device of its own.*--device cpu") as caught:
        probe(ProbeRequest(name="x", sizes=(2,), device="cuda"), Machines(), lambda step: None)
    assert caught.value.exit_code == 2


def test_gpus_are_taken_where_each_worker_has_one_of_its_own() -> None:
    """A worker may see all GPUs of its machine, or one that is number 0 to each: UUIDs tell them apart."""
    own = [("GPU-a", 80), ("GPU-b", 40)]
    assert [agreed_memory_bytes(asked, own) for asked in ("auto", "cuda", "cpu")] == [40, 40, None]
    assert agreed_memory_bytes("auto", [("GPU-a", 80), None]) is None
    assert agreed_memory_bytes("auto", [("GPU-a", 80), ("GPU-b", 80), ("GPU-a", 80)]) is None
    with pytest.raises(UsageError, match="worker 1 has no CUDA device of its own;"):
        agreed_memory_bytes("cuda", [("GPU-a", 80), None])
    with pytest.raises(UsageError, match="worker 2 has no CUDA device of its own: it shares worker 0's;"):
        agreed_memory_bytes("cuda", [("GPU-a", 80), ("GPU-b", 80), ("GPU-a", 80)])
