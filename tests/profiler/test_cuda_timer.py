"""Times on a CUDA device are those of its kernels, on a device that is simulated: a host that launches, and a queue.

host    launch (1 ms)  launch  launch  ...
device          kernel (10 us)  kernel  kernel  ...
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import samples
import torch

from pdtool.cli.artifact_views import _coverage_warnings
from pdtool.profiler.measure import CudaTimer

LAUNCH_S, KERNEL_S, CYCLES_PER_S = 1e-3, 10e-6, 1.5e9


@dataclass
class Device:
    """A device with one queue, and the host that fills it, on one clock in seconds."""

    host_s: float = 0.0
    free_s: float = 0.0  # when the last kernel of the queue ends

    def queue(self, kernel_s: float) -> None:
        self.free_s = max(self.free_s, self.host_s) + kernel_s

    def launch(self, kernels: int) -> str:
        for _ in range(kernels):
            self.host_s += LAUNCH_S
            self.queue(KERNEL_S)
        return "result"

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.free_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            device.queue(0.0)
            self.at_s = device.free_s

        def elapsed_time(self, other: Event) -> float:
            return (other.at_s - self.at_s) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: device.queue(cycles / CYCLES_PER_S), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: device.host_s)
    return device


def test_launches_are_not_measured_once_the_timer_knows_how_long_they_take(device: Device) -> None:
    timer = CudaTimer()
    result, first = timer("conv", lambda: device.launch(5))
    assert result == "result"
    assert first() > 4 * LAUNCH_S, "the device waited for the host"
    device.synchronize()
    for _ in range(3):
        _, seconds = timer("conv", lambda: device.launch(5))
        device.synchronize()
        assert seconds() == pytest.approx(5 * KERNEL_S)


def test_the_time_of_the_launches_is_known(device: Device) -> None:
    timer = CudaTimer()
    for _ in range(3):
        timer("whole step", lambda: device.launch(5))
        device.synchronize()
    assert timer.launch_s["whole step"] == pytest.approx(5 * LAUNCH_S)


def test_a_host_that_is_slower_than_its_device_is_told() -> None:
    profile = samples.profile().model_copy(update={"step_s": 2e-3, "coverage": 1.0})
    assert not list(_coverage_warnings(profile.model_copy(update={"launch_s": 1e-3})))
    [warning] = _coverage_warnings(profile.model_copy(update={"launch_s": 5e-3}))
    assert "the kernels of a step take 2 ms, but the host needs 5 ms to launch them" in warning


def test_each_work_gets_the_spin_that_it_needs(device: Device) -> None:
    timer = CudaTimer()
    for name, kernels in (("conv", 500), ("relu", 1)):
        timer(name, lambda count=kernels: device.launch(count))
        device.synchronize()
    start_s = device.host_s
    _, seconds = timer("relu", lambda: device.launch(1))
    device.synchronize()
    assert device.host_s - start_s < 3 * LAUNCH_S, "relu does not wait as long as conv must"
    assert seconds() == pytest.approx(KERNEL_S)


def test_work_that_waits_for_the_device_does_not_lengthen_the_spin_each_time(device: Device) -> None:
    def work() -> None:
        device.launch(1)
        device.synchronize()

    timer, lengths_s = CudaTimer(), []
    for _ in range(6):
        start_s = device.host_s
        timer("nonzero", work)
        device.synchronize()
        lengths_s.append(device.host_s - start_s)
    assert max(lengths_s) < 5 * LAUNCH_S
