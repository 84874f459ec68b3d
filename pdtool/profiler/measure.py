"""Measure each operator: replay the graph node by node, and time each forward, and each backward by autograd.grad.

Segments of a model under torch.compile are measured in the same way, and divided among operators (`compiled`). The
instruments follow below: seconds on a CPU or a GPU, scratch memory, and the time of loading a minibatch.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from pdtool import host
from pdtool.artifacts.device import RESERVED_BYTES, Device
from pdtool.artifacts.profile import Profile
from pdtool.errors import UsageError
from pdtool.frontend.compute_mode import RunPrecision, check_autocast
from pdtool.frontend.graph_digest import graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import tensors_in
from pdtool.frontend.tracing import trace_file
from pdtool.frontend.user_code import is_stream
from pdtool.profiler.compiled import OnNote, apportion, compile_model
from pdtool.profiler.execute import OnProgress, ProfiledModel, Work, disable_inplace_modules
from pdtool.profiler.graph_costs import GraphCosts, count_stash_and_flops, make_profile, minibatch_errors
from pdtool.units import counted

Reading = Callable[[], float]  # to be called once the device has finished
Timer = Callable[[str, Work], tuple[Any, Reading]]  # (name of the work, work) -> (its result, its seconds)
Readings = dict[str, float]  # by node: seconds, or bytes
_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
_BUDGET_S = 4.0  # for all rounds, if _MIN_ROUNDS allows
_AGREE = 0.05  # by which two rounds may differ if there is no third
_LOADED, _LOADING_BUDGET_S = 6, 3.0  # minibatches; the first is for warming up
# Memory of a process that has imported torch: 200 to 265 MB, and up to 365 MB if torch is built for CUDA, even without
# a GPU. It is not measured anew for each profile, because then plans of the same options would differ.
_PROCESS_BYTES, _PROCESS_BYTES_WITH_CUDA = 2**28, 3 * 2**27
_WHOLE_STEP = "whole step"  # no operator has a name with a space
_MAX_SPIN_S = 1.0
_MARGIN_S = 20e-6  # of a spin: recording two events
_CALIBRATION_CYCLES = 10_000_000


def measure(
    model_file: ModelFile,
    *,
    batch_size: int,
    device: str = "cpu",
    threads: int | None = None,
    precision: RunPrecision = "fp32",
    compiled: bool = False,
    progress: OnProgress = lambda done, total: None,
    note: OnNote = lambda text: None,
) -> Profile:
    """Profile the model at `batch_size` on `device` of this machine.

    It includes the loss, as a node of its own, and the optimizer step, as each node's update_s in proportion to its
    parameter bytes.

    Args:
        batch_size: samples in one minibatch.
        threads: CPU threads to compute with; None: PyTorch's default.
        precision: precision of the run.
        compiled: whether the run will put its stages through torch.compile.
        progress: called with (rounds done, rounds in all); during compilation, with (passes done, passes in all).
        note: called with a line for the user.

    Raises:
        TraceError: the model cannot be traced.
        UsageError: there is no such device, or the model switches autocast off, so that bf16 is impossible.
        ModelError: a minibatch does not fit in memory, or the user's functions or torch.compile fail.
    """
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        what = "--device cuda: torch finds no CUDA device here"
        raise UsageError(what, "measure with --device cpu, or estimate for a device by its name, such as --device v100")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)

    def measured() -> Profile:  # a function, so that its tensors are gone at the end
        traced = trace_file(model_file, model_file.build(), batch_size)
        check_autocast(precision, traced.autocast_off)
        digest = graph_sha256(traced)
        disable_inplace_modules(traced.model.to(where))
        profiled = ProfiledModel.of(model_file, traced, batch_size, where, precision=precision)
        return _Measurement(profiled, where, progress).profile(compiled, note).with_graph(digest)

    try:
        with minibatch_errors(model_file, batch_size):
            return measured()
    finally:
        torch.set_num_threads(before)
        if where.type == "cuda":  # for the workers that this process may start
            gc.collect()
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class _StepTimes:
    """Median seconds of the whole step, of launching its kernels (0 on a CPU), and of each forward and backward."""

    step_s: float
    launch_s: float
    forward_s: Readings
    backward_s: Readings


@dataclass(frozen=True)
class _Measurement:
    """The measurement of one profile."""

    model: ProfiledModel
    device: torch.device
    progress: OnProgress

    def profile(self, compiled: bool, note: OnNote) -> Profile:
        """Measure all nodes, the whole step and the optimizer step; with `compiled`, the memory as without it."""
        stash_bytes, saved_by, flops = count_stash_and_flops(self.model)
        with host.freed_memory(host.return_freed_memory):
            forward, backward = self._pass(lambda _, work: measure_scratch_bytes(self.device, work))
        with host.freed_memory(host.keep_freed_memory):
            times = self._times()
            times, segments = self._compiled_times(times, note) if compiled else (times, ())
            update_s, state_bytes, step_scratch_bytes = self.model.update(self._optimizer_step)
            loss_is_a_sum = self.model.with_loss and self.model.loss_is_a_sum()
        if loss_is_a_sum:
            note(
                "loss() sums over the samples of a minibatch, but updates average over them: let loss() return the mean"
            )
        costs = GraphCosts(
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            stash_bytes=stash_bytes,
            saved_by=saved_by,
            flops=flops,
            scratch_bytes={name: int(max(forward[name], backward.get(name, 0.0))) for name in forward},
            update_s=update_s,
            optimizer_state_bytes=state_bytes,
            step_s=times.step_s,
        )
        return make_profile(
            self.model,
            _measured_device(self.device),
            costs,
            precision=self.model.run.precision,
            compiled=compiled,
            segments=segments,
            reserved_bytes=_reserved_bytes(self.device),
            launch_s=times.launch_s,
            step_scratch_bytes=step_scratch_bytes,
        )

    def _compiled_times(self, one_by_one: _StepTimes, note: OnNote) -> tuple[_StepTimes, tuple[tuple[str, ...], ...]]:
        """Time the compiled model, and divide the times of its segments; also return the nodes of each segment."""
        seconds = {name: s + one_by_one.backward_s.get(name, 0.0) for name, s in one_by_one.forward_s.items()}
        compiled = compile_model(self.model, seconds, note, self.progress)
        times = replace(self, model=compiled.model)._times()
        shared = _StepTimes(
            step_s=times.step_s if compiled.is_whole else 0.0,
            launch_s=times.launch_s if compiled.is_whole else 0.0,
            forward_s=apportion(times.forward_s, compiled.segments, one_by_one.forward_s),
            backward_s=apportion(times.backward_s, compiled.segments, one_by_one.backward_s),
        )
        return shared, tuple(map(tuple, compiled.segments.values()))

    def _times(self) -> _StepTimes:
        """Time the whole step, each node's forward and each node's backward.

        Whole steps and passes through the nodes take turns, so that both run under the same conditions. A pass runs
        every node once, in order, so that caches are as in training. The first pass is for warming up: it takes the
        memory that the others find. If two rounds take longer than the budget and agree, there is no third.
        """
        start = time.perf_counter()
        self._pass(self._timer)
        round_s = 2 * (time.perf_counter() - start)
        if self.device.type == "cuda":
            self._whole_step()  # the timer learns how long its launches take
        count = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(_BUDGET_S / round_s)))
        steps: list[float] = []
        passes: list[tuple[Readings, Readings]] = []
        while len(steps) < count and not (time.perf_counter() - start > _BUDGET_S and _agree(steps, passes)):
            self.progress(len(steps), count)
            steps.append(self._whole_step())
            passes.append(self._pass(self._timer))
        self.progress(count, count)
        forwards, backwards = (
            {name: statistics.median(times[kind][name] for times in passes) for name in passes[0][kind]}
            for kind in (0, 1)
        )
        engine_s = self._engine_s()
        launch_s = self._timer.launch_s[_WHOLE_STEP] if isinstance(self._timer, CudaTimer) else 0.0
        backwards = {name: max(0.0, seconds - engine_s) for name, seconds in backwards.items()}
        return _StepTimes(statistics.median(steps), launch_s, forwards, backwards)

    def _engine_s(self) -> float:
        """Measure the seconds of an empty autograd.grad: a whole step has one, a pass has one at every node."""
        if self.device.type == "cuda":
            return 0.0  # events time the device's work only
        x = torch.zeros(1, requires_grad=True)
        call = partial(torch.autograd.grad, x.view(1), x, torch.ones(1), retain_graph=True)
        return statistics.median(self._seconds("empty backward", call) for _ in range(100))

    def _pass(self, measure: Timer) -> tuple[Readings, Readings]:
        """Read every node's forward and every node's backward."""
        forward, backward = self.model.replay(measure)
        self._synchronize()
        return {name: read() for name, read in forward.items()}, {name: read() for name, read in backward.items()}

    def _whole_step(self) -> float:
        """Measure the seconds of forward, loss and backward of the model itself."""
        return self._seconds(_WHOLE_STEP, self.model.train_step)

    @cached_property
    def _timer(self) -> Timer:
        """The same timer for nodes and whole steps, because they are compared."""
        return CudaTimer() if self.device.type == "cuda" else time_on_host

    def _seconds(self, name: str, work: Work) -> float:
        _, seconds = self._timer(name, work)
        self._synchronize()
        return seconds()

    def _synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _optimizer_step(self, step: Work) -> tuple[float, float]:
        """Measure the seconds of one step over all parameters and, on a GPU, its scratch memory."""
        seconds = statistics.median(self._seconds("optimizer step", step) for _ in range(_MIN_ROUNDS))
        return seconds, measure_scratch_bytes(self.device, step)[1]() if self.device.type == "cuda" else 0.0


def _agree(steps: Sequence[float], passes: Sequence[tuple[Readings, Readings]]) -> bool:
    """Whether at least two whole steps took as long as each other, and all forwards and backwards of as many passes."""
    sums = [sum(forward.values()) + sum(backward.values()) for forward, backward in passes]
    return len(steps) > 1 and all(max(times) <= min(times) * (1 + _AGREE) for times in (steps, sums))


def _reserved_bytes(device: torch.device) -> int:
    """Return the memory that is not left for tensors: see Profile."""
    if device.type == "cuda":
        return RESERVED_BYTES
    return _PROCESS_BYTES_WITH_CUDA if torch.version.cuda or torch.version.hip else _PROCESS_BYTES


def _measured_device(device: torch.device) -> Device:
    """Return the name and total memory of a GPU, or of the machine for a CPU; None for unknown memory."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return Device(name=gpu.name, kind="measured", memory_bytes=int(gpu.total_memory))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    name = f"{names[0] if names else platform.machine()}, {counted(threads, 'thread')}"
    return Device(name=name, kind="measured", memory_bytes=host.machine_bytes())


def time_on_host(name: str, work: Work) -> tuple[Any, Reading]:
    """Do `work`; return its result and its seconds by the performance counter."""
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return result, lambda: seconds


class CudaTimer:
    """Times the kernels of work on the current CUDA device, by events around them.

    All kernels must be queued when the device reaches the first event. Otherwise it waits for the host between them,
    and small operators would be measured by their launches:

        host    spin, begin, launch launch launch, end
        device  |------- spin -------|begin|kernel|kernel|kernel|end|

    So a kernel that spins goes first, for twice the time that the host has needed to queue work of that name. That is
    too short in two cases: the first time, which is for warming up; and if the host cannot run ahead, because the work
    itself waits for the device or has more kernels than fit into the device's queue (about a thousand).

    Attributes:
        launch_s: by name, the shortest time in which the host queued the work; a longer one may include the spin.
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
    """Measure how fast the spin kernel counts: the fastest of several, because an idle device raises its clock
    slowly."""
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


def measure_scratch_bytes(device: torch.device, work: Work) -> tuple[Any, Reading]:
    """Do `work`; return its result and its scratch: the bytes held at its peak, less those that are held anyway.

    The base is the larger of two: the bytes held before plus the result, or the bytes held afterwards. A backward frees
    its forward's stash, which is counted separately, so after a backward the first is larger. The reading is 0 if the
    system does not report memory. On a CPU resident pages count, which includes memory that libraries such as oneDNN
    take past torch's allocator; `host.return_freed_memory` excludes pages of freed tensors.
    """
    held = torch.cuda.memory_allocated if device.type == "cuda" else _held_on_host
    before = held(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        host.reset_peak()
    result = work()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host.peak_resident_bytes() or 0
    storages = [leaf.untyped_storage() for leaf in tensors_in(result)]
    left = before + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    scratch_bytes = max(0, peak - max(held(device), left)) if before else 0
    return result, lambda: float(scratch_bytes)


def _held_on_host(device: torch.device) -> int:
    host.trim_heap()  # memory of freed tensors that glibc keeps is also resident
    return host.resident_bytes() or 0


def measure_loading_s(model_file: ModelFile, batch_size: int) -> float | None:
    """Return the median seconds of loading a minibatch with one thread, as a loader worker does.

    None without dataset(), and for a stream that ends before a minibatch is full.

    Raises:
        ModelError: a sample cannot be read, or minibatches differ in shape, as if padded to their longest sample.
    """
    if not model_file.has("dataset"):
        return None
    minibatches = _loaded_minibatches(model_file, batch_size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: list[float] = []
    shapes: list[list[int]] = []
    try:
        while len(seconds) < _LOADED and sum(seconds) < _LOADING_BUDGET_S:
            start = time.perf_counter()
            minibatch = next(minibatches, None)
            if minibatch is None:
                break
            seconds.append(time.perf_counter() - start)
            before, shapes = shapes, [[*tensor.shape] for tensor in tensors_in(minibatch) if not tensor.is_nested]
            if different := next((pair for pair in zip(before, shapes, strict=False) if pair[0] != pair[1]), None):
                sizes = " and ".join(map(str, different))
                what = f"two minibatches of {batch_size} samples have tensors of shape {sizes} in the same place, but"
                raise model_file.error(f"{what} in a run only the number of samples may vary: pad to a fixed length")
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds[1:] or seconds) if seconds else None


def _loaded_minibatches(model_file: ModelFile, batch_size: int) -> Iterator[object]:
    """Load minibatches of the training set: in order from a stream, which may end, or else in random order."""
    data, name = model_file.training_set(), "dataset('train')"
    if is_stream(data):
        stream = model_file.stream(data, name)
        while len(samples := list(islice(stream, batch_size))) == batch_size:
            yield model_file.collate(samples, range(batch_size), name)
        return
    order = torch.randperm(model_file.samples(data, name) or 0, generator=torch.Generator().manual_seed(0)).tolist()
    numbers = cycle(order)
    while indices := list(islice(numbers, batch_size)):
        yield model_file.collate(model_file.read(data, indices, name), indices, name)
