"""Measure each operator: replay the graph node by node, forward timed, backward by autograd.grad on that node alone.

Of a model that goes through torch.compile segments are measured in the same way, and shared out (see compiled/).
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from pdtool import host as process_memory
from pdtool.artifacts.device import RESERVED_BYTES, Device
from pdtool.artifacts.profile import Profile
from pdtool.errors import UsageError
from pdtool.frontend.compute_mode import RunPrecision, check_autocast
from pdtool.frontend.graph_digest import graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.tracing import trace_file
from pdtool.profile.compiled.compile_model import OnNote, compile_model
from pdtool.profile.compiled.segments import apportion
from pdtool.profile.execute import OnProgress, ProfiledModel, disable_inplace_modules
from pdtool.profile.graph_costs import GraphCosts, count_stash_and_flops, make_profile, minibatch_errors
from pdtool.profile.instruments import CudaTimer, Timer, Work, measure_scratch_bytes, timer_of

_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
_BUDGET_S = 6.0  # for all rounds, as far as _MIN_ROUNDS allows
_WHOLE_STEP = "whole step"  # no operator has a name with a space
Readings = dict[str, float]  # by node: seconds, or bytes


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

    The loss and the optimizer step are profiled with it: the loss as a node of its own, the step as each node's
    update_s, shared out by parameter bytes.

    Args:
        batch_size: samples in one minibatch.
        threads: CPU threads to compute with; None: PyTorch's default.
        precision: what a run is to compute in.
        compiled: whether a run is to put its stages through torch.compile.
        progress: called with (rounds done, rounds in all), and of compiling with (passes done, passes in all).
        note: called with a line for the user.

    Raises:
        TraceError: the model cannot be traced.
        UsageError: there is no such device; or the model switches autocast off, and cannot be computed in bf16.
        ModelError: a minibatch does not fit in memory, the user's functions fail, or torch.compile does.
    """
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        what = "--device cuda: torch finds no CUDA device here"
        raise UsageError(what, "measure with --device cpu, or estimate for a device by its name, as --device v100")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with minibatch_errors(model_file, batch_size):
            traced = trace_file(model_file, model_file.build(), batch_size)
            check_autocast(precision, traced.autocast_off)
            digest = graph_sha256(traced)
            disable_inplace_modules(traced.model.to(where))
            profiled = ProfiledModel.of(model_file, traced, batch_size, where, precision=precision)
            measurement = _Measurement(profiled, where, progress)
            return measurement.profile(compiled, note).with_graph(digest)
    finally:
        torch.set_num_threads(before)


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
        stash_bytes, flops = count_stash_and_flops(self.model)
        times = self._times()
        times, segments = self._compiled_times(times, note) if compiled else (times, ())
        update_s, state_bytes = self._optimizer()
        forward, backward = self._pass(lambda _, work: measure_scratch_bytes(self.device, work))
        costs = GraphCosts(
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            stash_bytes=stash_bytes,
            flops=flops,
            scratch_bytes={name: int(max(forward[name], backward.get(name, 0.0))) for name in forward},
            update_s=update_s,
            optimizer_state_bytes=state_bytes,
            step_s=times.step_s,
        )
        device = Device(name=_device_name(self.device), kind="measured", memory_bytes=_memory_bytes(self.device))
        told = {
            "precision": self.model.run.precision,
            "compiled": compiled,
            "segments": segments,
            "reserved_bytes": RESERVED_BYTES if self.device.type == "cuda" else 0,
            "launch_s": times.launch_s,
        }
        return make_profile(self.model, device, costs).model_copy(update=told)

    def _compiled_times(self, one_by_one: _StepTimes, note: OnNote) -> tuple[_StepTimes, tuple[tuple[str, ...], ...]]:
        """Time the model compiled, and share out what its segments take; return the nodes of each segment, too."""
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

        Whole steps and passes through the nodes take turns, so that both meet the same machine. A pass runs every node
        once, in order, so that caches are as in training; the first round is for warming up.
        """
        start = time.perf_counter()
        self._pass(self._timer), self._whole_step()
        count = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(_BUDGET_S / (time.perf_counter() - start))))
        steps, passes = [], []
        for done in range(count):
            self.progress(done, count)
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
        """Measure the seconds of an empty autograd.grad: a whole step pays them once, a pass at every node."""
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
        """The same for nodes and whole steps, which are compared."""
        return timer_of(self.device)

    def _seconds(self, name: str, work: Work) -> float:
        _, seconds = self._timer(name, work)
        self._synchronize()
        return seconds()

    def _synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _optimizer(self) -> tuple[float, float]:
        """Return the seconds of one step over all parameters, and the bytes of state per byte of parameters."""
        optimizer = self.model.stepped_optimizer()
        if optimizer is None:
            return 0.0, 0.0
        seconds = statistics.median(self._seconds("optimizer step", optimizer.step) for _ in range(_MIN_ROUNDS))
        optimizer.zero_grad()
        return seconds, self.model.state_bytes_per_parameter_byte(optimizer)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def _memory_bytes(device: torch.device) -> int | None:
    """Return all the memory of a GPU, or of the machine for a CPU; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return process_memory.machine_bytes()
