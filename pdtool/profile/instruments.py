"""Instruments that measure a piece of work on a device: its seconds, or its scratch memory; and what loading costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from pdtool import process_memory
from pdtool.frontend.modelfile import ModelFile

_LOADED, _LOADING_BUDGET_S = 6, 3.0  # minibatches, the first of which is for warming up
Reading = Callable[[], float]  # to be called once the device has finished
Instrument = Callable[[torch.device, Callable[[], Any]], tuple[Any, Reading]]  # (device, work) -> (result, reading)


def measure_seconds(device: torch.device, work: Callable[[], Any]) -> tuple[Any, Reading]:
    """Do `work`; return its result and its seconds: by CUDA events on a GPU, by the performance counter on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        return result, lambda: seconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    result = work()
    end.record()
    return result, lambda: float(begin.elapsed_time(end)) / 1e3


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
    """Return the median seconds of loading a minibatch with one thread, as a loader worker does; None without dataset.

    The minibatches hold samples in random order, as those of training do.

    Raises:
        ModelError: the dataset or one of its samples cannot be read.
    """
    if not model_file.has("dataset"):
        return None
    name = "dataset('train')"
    data = model_file.dataset("train")
    samples = model_file.samples(data, name)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0)).tolist()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: list[float] = []
    try:
        while len(seconds) < _LOADED and sum(seconds) < _LOADING_BUDGET_S:
            first = len(seconds) * batch_size
            indices = [order[k % samples] for k in range(first, first + batch_size)]
            start = time.perf_counter()
            model_file.collate(data, indices, name)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds[1:] or seconds)
