"""Instruments that measure a piece of work on a device: its seconds, or its scratch memory; and what loading costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch

from pdtool import host as process_memory
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.user_code import is_stream

Work = Callable[[], Any]
_LOADED, _LOADING_BUDGET_S = 6, 3.0  # minibatches, the first of which is for warming up
Reading = Callable[[], float]  # to be called once the device has finished
Timer = Callable[[str, Work], tuple[Any, Reading]]  # (name of the work, work) -> (its result, its seconds)
_MAX_SPIN_S = 1.0
_MARGIN_S = 20e-6  # of a spin: recording two events
_CALIBRATION_CYCLES = 10_000_000


def timer_of(device: torch.device) -> Timer:
    """Return what times work on a device."""
    return CudaTimer() if device.type == "cuda" else time_on_host


def time_on_host(name: str, work: Work) -> tuple[Any, Reading]:
    """Do `work`; return its result and its seconds by the performance counter."""
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return result, lambda: seconds


class CudaTimer:
    """Times the kernels of work on the current CUDA device, by events around them.

    The device must find all kernels queued when it comes to the first event, or else it waits for the host between
    them, and what is measured of small operators is how long their launches take:

        host    spin, begin, launch launch launch, end
        device  |------- spin -------|begin|kernel|kernel|kernel|end|

    So a kernel that spins goes first, for twice the time that the host has needed to queue work of that name. It is
    short of that in two cases: at the first time, which is for warming up; and where the host cannot run ahead, since
    the work itself waits for the device, or has more kernels than fit into the device's queue (about a thousand).

    Attributes:
        launch_s: by name, the shortest time in which the host queued the work; a longer one may hold the spin itself.
    """

    def __init__(self) -> None:
        self._cycles_per_s = _spin_cycles_per_s()
        self.launch_s: dict[str, float] = {}

    def __call__(self, name: str, work: Work) -> tuple[Any, Reading]:
        """Do `work`; return its result and the seconds of its kernels."""
        begin, end = _timing_event(), _timing_event()
        known_s = self.launch_s.get(name)
        if known_s is not None:
            _spin(int(min(_MAX_SPIN_S, 2 * known_s + _MARGIN_S) * self._cycles_per_s))
        begin.record()
        start = time.perf_counter()
        result = work()
        launch_s = time.perf_counter() - start
        end.record()
        self.launch_s[name] = launch_s if known_s is None else min(known_s, launch_s)
        return result, lambda: float(begin.elapsed_time(end)) / 1e3


def _spin_cycles_per_s() -> float:
    """Measure how fast the spin kernel counts: the fastest of several, since an idle device raises its clock slowly."""
    seconds = []
    for _ in range(5):
        begin, end = _timing_event(), _timing_event()
        begin.record()
        _spin(_CALIBRATION_CYCLES)
        end.record()
        torch.cuda.synchronize()
        seconds.append(float(begin.elapsed_time(end)) / 1e3)
    return _CALIBRATION_CYCLES / min(seconds)


def _spin(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_scratch_bytes(device: torch.device, work: Callable[[], Any]) -> tuple[Any, Reading]:
    """Do `work`; return its result and the bytes held at its peak and no more at its end: what it needs besides those.

    The reading is 0 where the system does not say. On a CPU resident pages count, which includes what libraries such
    as oneDNN take for themselves, past torch's allocator.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        peak = torch.cuda.max_memory_allocated(device)
        held: int | None = torch.cuda.memory_allocated(device)
    else:
        process_memory.trim_heap()  # pages that the work takes again become resident again
        process_memory.reset_peak()
        result = work()
        peak = process_memory.peak_resident_bytes() or 0
        process_memory.trim_heap()  # what it has freed
        held = process_memory.resident_bytes()
    scratch_bytes = 0 if held is None else max(0, peak - held)
    return result, lambda: float(scratch_bytes)


def measure_loading_s(model_file: ModelFile, batch_size: int) -> float | None:
    """Return the median seconds of loading a minibatch with one thread, as a loader worker does.

    None without dataset(), and of a stream that ends before a minibatch is full.

    Raises:
        ModelError: the dataset or one of its samples cannot be read.
    """
    if not model_file.has("dataset"):
        return None
    minibatches = _loaded_minibatches(model_file, batch_size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: list[float] = []
    try:
        while len(seconds) < _LOADED and sum(seconds) < _LOADING_BUDGET_S:
            start = time.perf_counter()
            if next(minibatches, None) is None:
                break
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds[1:] or seconds) if seconds else None


def _loaded_minibatches(model_file: ModelFile, batch_size: int) -> Iterator[object]:
    """Load minibatches of the training set: as they come from a stream, which may end, or else in random order."""
    data, name = model_file.dataset("train"), "dataset('train')"
    if is_stream(data):
        stream = model_file.stream(data, name)
        while len(samples := list(islice(stream, batch_size))) == batch_size:
            yield model_file.collate(samples, range(batch_size), name)
        return
    order = torch.randperm(model_file.samples(data, name) or 0, generator=torch.Generator().manual_seed(0)).tolist()
    numbers = cycle(order)
    while indices := list(islice(numbers, batch_size)):
        yield model_file.collate(model_file.read(data, indices, name), indices, name)
