"""Sums by gloo of what is on a GPU: the worker goes on while a thread waits; here with a GPU that is only told of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pdtool.runtime.stage.tied_parameters import HostAllReduce

WAIT_S = 10.0


class Gpu:
    """Its copies are complete when `go_on` is set; a sum doubles the tensor, as if two workers had the same."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.sums: list[list[float]] = []
        self.error: RuntimeError | None = None

    def all_reduce(self, tensor: Tensor, group: Any) -> None:
        if self.error:
            raise self.error
        self.sums.append(tensor.tolist())
        tensor.mul_(2)


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.waited = False

    def wait_stream(self, other: object) -> None:
        self.waited = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu, empty = Gpu(), torch.empty

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "the thread must not spin on a core that computes"

        def record(self, stream: Stream) -> None:
            assert stream.waited, "the copy comes after the kernels that compute the tensor"

        def synchronize(self) -> None:
            assert gpu.go_on.wait(WAIT_S)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    monkeypatch.setattr(dist, "all_reduce", gpu.all_reduce)
    yield gpu
    gpu.go_on.set()


def test_the_worker_goes_on_while_a_thread_sums_in_order(gpu: Gpu) -> None:
    sums = HostAllReduce("group", torch.device("cuda"))
    waits = [sums.start(torch.tensor([float(i), 1.0])) for i in range(3)]
    assert gpu.sums == [], "nothing is summed before it is copied"
    gpu.go_on.set()
    assert [wait().tolist() for wait in waits] == [[0.0, 2.0], [2.0, 2.0], [4.0, 2.0]]
    assert gpu.sums == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]


def test_a_lost_worker_is_told_to_the_one_that_waits(gpu: Gpu) -> None:
    gpu.error = RuntimeError("Connection closed by peer")
    gpu.go_on.set()
    wait = HostAllReduce("group", torch.device("cuda")).start(torch.ones(2))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait()
