"""No schedule makes workers wait for each other in a circle under the rules of NCCL (docs/waiting.md).

They are held to the rules twice: a machine runs what the hosts of all workers do (reference/nccl_rules.py), and real
worker processes train on a stand-in for NCCL that enforces them (reference/nccl_stand_in.py), where every forward,
backward and step synchronises the device, as any kernel may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import harness
import pytest
from harness import CONV1, CONV2, CONV3, CONV4, SKIP3, TIED3, perceptron
from reference import nccl_stand_in
from reference.nccl_rules import DeadlockError, Job

from pdtool.artifacts.cluster import Cluster, Level
from pdtool.artifacts.plan import Plan, Stage
from pdtool.runtime.groups import have_own_devices
from pdtool.runtime.messages.open_channels import can_use_nccl
from pdtool.runtime.messages.routes import Route
from pdtool.schedule import SCHEDULES, ExecutionConfig, PipelineShape

SHAPES = {
    "straight 2": (1, 1),
    "straight 3": (1, 1, 1),
    "straight 4": (1,) * 4,
    "straight 8": (1,) * 8,
    "2-1": (2, 1),
    "1-2": (1, 2),
    "3-1": (3, 1),
    "15-1": (15, 1),
    "2-2": (2, 2),
    "2-3-1": (2, 3, 1),
    "4-1-2": (4, 1, 2),
    "1-3-1-2": (1, 3, 1, 2),
    "2-2-2-2": (2,) * 4,
}
MESSAGES = ("neighbours", "skips", "tied")


def plan_of(schedule: str, shape: PipelineShape) -> Plan:
    """What `can_use_nccl` looks at."""
    depth = shape.pipeline_depth
    return Plan(
        name="p",
        model=None,
        profile="none",
        batch_size=1,
        schedule=schedule,
        chunks=shape.chunks,
        cluster=Cluster(levels=(Level(size=sum(shape.replicas[:depth]), bandwidth_bytes_per_s=1e9),)),
        stages=tuple(Stage(nodes=("n",), replicas=r, workers=tuple(range(r)), in_flight=1) for r in shape.replicas),
    )


def job(schedule: str, replicas: Sequence[int], messages: str, **changed: Any) -> Job:
    """The job that pdtool makes of a schedule, unless it is changed."""
    shape = ExecutionConfig.of_schedule(schedule, 6, 2 if SCHEDULES[schedule].chunked else 1).shape(replicas)
    last = len(shape.replicas) - 1
    if messages == "tied":  # stages that share a parameter update together
        every = math.lcm(*shape.update_every)
        shape = replace(shape, update_every=(every,) * len(shape.replicas))
    plan = plan_of(schedule, shape)
    settings: dict[str, Any] = {
        "skips": [(a, last) for a in range(last - 1)] if messages == "skips" else [],
        "tied": [(0, last)] if messages == "tied" else [],
        "by_nccl": lambda route: can_use_nccl(route, plan),
        "sums_in_backward": lambda stage: stage == 0,
    }
    return Job(schedule=schedule, shape=shape, **settings | changed)


def jobs() -> list[Any]:
    """Every schedule, for every shape that it can have."""
    return [
        pytest.param(schedule, replicas, messages, id=f"{schedule} {name} {messages}")
        for schedule in SCHEDULES
        for name, replicas in SHAPES.items()
        for messages in MESSAGES
        if len(set(replicas)) == 1 or not SCHEDULES[schedule].equal_replicas
    ]


def synchronising(workers: int) -> Iterator[Callable[[int], bool]]:
    """Which devices are synchronised, wherever they may be: all, those of some workers, each now and then."""
    yield lambda worker: True
    for chosen in range(2**workers - 1) if workers <= 3 else (0,):
        yield lambda worker, chosen=chosen: bool(chosen >> worker & 1)
    random = Random(workers)
    for _ in range(2 if workers <= 8 else 0):
        yield lambda worker: random.random() < 0.3


CUDA_IPC: dict[str, Callable[[Route], bool]] = {
    "NCCL": lambda route: False,
    "CUDA IPC": lambda route: True,
    "CUDA IPC between two of a machine": lambda route: route.sender // 2 == route.receiver // 2,
}


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("by_ipc", CUDA_IPC)
@pytest.mark.parametrize(("schedule", "replicas", "messages"), jobs())
def test_no_schedule_waits_in_a_circle(schedule: str, replicas: Sequence[int], messages: str, by_ipc: str) -> None:
    for synchronises in synchronising(sum(replicas)):
        job(schedule, replicas, messages, by_ipc=CUDA_IPC[by_ipc], synchronises=synchronises).check()


@pytest.mark.parametrize(
    ("schedule", "replicas", "messages", "changed"),
    [
        ("1f1b", (1, 1), "neighbours", {"receives_ahead": 1}),
        ("gpipe", (1, 1, 1), "neighbours", {"receives_ahead": 2}),
        ("1f1b", (1, 1, 1), "skips", {"by_nccl": lambda route: True}),
        ("interleaved", (1, 1), "neighbours", {"by_nccl": lambda route: True}),
        ("1f1b", (3, 1), "neighbours", {"by_nccl": lambda route: True}),
        ("1f1b", (2, 3, 1), "neighbours", {"sums_in_backward": lambda stage: True}),
        ("1f1b", (2, 3, 1), "neighbours", {"sums_in_backward": lambda stage: True, "by_ipc": lambda route: True}),
    ],
    ids=["ahead", "ahead with a flush", "skips", "interleaved", "replicas", "sums in the backward", "CUDA IPC"],
)
def test_what_would_wait_in_a_circle_is_found(
    schedule: str, replicas: Sequence[int], messages: str, changed: dict[str, Any]
) -> None:
    with pytest.raises(DeadlockError, match=r"rank \d+ waits for \[\d+.*\n.*rank \d+ waits for \["):
        job(schedule, replicas, messages, **changed).check()


def test_two_workers_that_both_post_a_receive_first_are_found() -> None:
    """As a pipeline did before: its communicators were made by the first message, and each end posts its receive."""
    with pytest.raises(DeadlockError, match=r"rank 0 waits for \[1\]: in the start it begins minibatch 0 on route"):
        job("1f1b", (1, 1), "neighbours", receives_ahead=2, is_warm=False).check()


def test_nccl_is_taken_where_each_worker_has_a_device_of_its_own() -> None:
    assert have_own_devices(["GPU-1", "GPU-2", "GPU-3"])
    assert not have_own_devices(["GPU-1", "GPU-2", "GPU-1"]), "two tasks on one GPU"
    assert not have_own_devices(["GPU-1", ""]), "a worker without one"


RUNS = [
    (CONV2, (1, 1), {}),
    (CONV3, (1, 1, 1), {}),
    (CONV3, (1, 1, 1), {"schedule": "1f1b-flush", "microbatches": 4}),
    (CONV3, (1, 1, 1), {"schedule": "gpipe", "microbatches": 4}),
    (CONV3, (1, 1, 1), {"schedule": "2bw"}),
    (CONV4, (1,) * 4, {}),
    (perceptron(8), (1,) * 8, {}),
    (CONV4, (1, 1), {"schedule": "interleaved", "chunks": 2, "microbatches": 4, "steps": 4}),
    (CONV3, (1, 1, 1), {"schedule": "zb-h1", "microbatches": 4}),
    (CONV2, (2, 1), {}),
    (CONV2, (1, 2), {}),
    (CONV2, (2, 2), {"schedule": "zb-h1", "microbatches": 4}),
    (CONV2, (2, 2), {"schedule": "gpipe", "microbatches": 4}),
    (CONV3, (1, 3, 1), {}),
    (CONV1, (3,), {}),
    (SKIP3, (1, 1, 1), {}),
    (SKIP3, (2, 1, 2), {"schedule": "1f1b-flush", "microbatches": 4}),
    (TIED3, (1, 1, 1), {}),
]


@pytest.mark.rows_of_the_day(days=6)
@pytest.mark.parametrize(("toy", "replicas", "settings"), RUNS)
def test_real_workers_train_the_same_under_the_rules(
    tmp_path: Path, toy: harness.Toy, replicas: Sequence[int], settings: dict[str, Any]
) -> None:
    first, second = (harness.job(tmp_path / name, toy, replicas, **settings) for name in ("gloo", "nccl"))
    expected = harness.weights(harness.run(first))
    harness.assert_same(harness.weights(harness.run(second, nccl_stand_in.install)), expected)


@pytest.mark.parametrize(
    ("toy", "prepare", "said"),
    [
        (SKIP3, nccl_stand_in.install_with_all_routes, r"the device does not come to an end: isend \d on group"),
        (CONV2, nccl_stand_in.install_with_receives_ahead, r"end: irecv 1 on group|irecv 0 on group .* does not end"),
    ],
    ids=["skips", "receives ahead"],
)
def test_real_workers_that_would_wait_in_a_circle_are_found(
    tmp_path: Path, toy: harness.Toy, prepare: Any, said: str
) -> None:
    """By the stand-in itself, on the worker where it ends the wait first; a run that fails otherwise is none."""
    with pytest.raises(AssertionError, match=said):
        harness.run(harness.job(tmp_path, toy), prepare)
