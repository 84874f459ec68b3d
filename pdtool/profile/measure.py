"""Measure each operator: replay the graph node by node, forward timed, backward by autograd.grad on that node alone."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pdtool.artifacts.profile import Device, Profile
from pdtool.frontend.graph_digest import graph_sha256
from pdtool.frontend.modelfile import ModelFile
from pdtool.frontend.tracing import trace
from pdtool.profile.count import Subject, size_errors
from pdtool.profile.execute import differentiable, inplace_modules_off, tensors
from pdtool.profile.gauge import Clock, Gauge, Reading, Scratch

_FEWEST, _MOST = 3, 15  # timed rounds
_BUDGET_S = 6.0  # for all rounds, as far as _FEWEST allows
Progress = Callable[[int, int], None]
Times = dict[str, float]


def measure(
    model_file: ModelFile,
    *,
    batch_size: int,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Profile:
    """Profile the model at `batch_size` on `device` of this machine.

    The loss and the optimizer step are profiled with it: the loss as a node of its own, the step as each node's
    update_s, shared out by parameter bytes.

    Args:
        threads: CPU threads to compute with; None: PyTorch's default.
        progress: called with (rounds done, rounds in all).

    Raises:
        TraceError: the model cannot be traced.
        ModelError: a minibatch does not fit in memory, or the user's functions fail.
    """
    where = torch.device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with size_errors(model_file, batch_size):
            traced = trace(model_file.build(), model_file.example_inputs, batch_size, model_file.path)
            digest = graph_sha256(traced)
            inplace_modules_off(traced.model.to(where))
            subject = Subject.of(model_file, traced, batch_size, where)
            return _Measurement(subject, where, progress).profile().with_graph(digest)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Measurement:
    """One profile in the making."""

    subject: Subject
    device: torch.device
    progress: Progress

    def profile(self) -> Profile:
        """All of it."""
        survey = self.subject.survey()
        step_s, forwards, backwards = self._rounds()
        update_s, state_bytes = self._optimizer()
        forward, backward = self._pass(Scratch(self.device))
        scratch = {name: int(max(forward[name], backward.get(name, 0.0))) for name in forward}
        return self.subject.profile(
            Device(name=_device_name(self.device), kind="measured"),
            survey=survey,
            forwards=forwards,
            backwards=backwards,
            update_s=update_s,
            state_bytes=state_bytes,
            step_s=step_s,
            scratch=scratch,
        )

    def _rounds(self) -> tuple[float, Times, Times]:
        """Medians of (whole step, forward of each node, backward of each node).

        Whole steps and passes through the nodes take turns, so that both meet the same machine. A pass runs every node
        once, in order, so that caches are as in training; the first round is for warming up.
        """
        start, clock = time.perf_counter(), Clock(self.device)
        self._pass(clock), self._whole_step()
        count = max(_FEWEST, min(_MOST, int(_BUDGET_S / (time.perf_counter() - start))))
        steps, passes = [], []
        for done in range(count):
            self.progress(done, count)
            steps.append(self._whole_step())
            passes.append(self._pass(clock))
        self.progress(count, count)
        forwards, backwards = (
            {name: statistics.median(times[kind][name] for times in passes) for name in passes[0][kind]}
            for kind in (0, 1)
        )
        engine_s = self._engine_s()
        return statistics.median(steps), forwards, {name: max(0.0, s - engine_s) for name, s in backwards.items()}

    def _engine_s(self) -> float:
        """Seconds that a call of autograd.grad takes by itself: a whole step pays it once, a pass at every node."""
        if self.device.type == "cuda":
            return 0.0  # events time the device's work only
        x = torch.zeros(1, requires_grad=True)
        call = partial(torch.autograd.grad, x.view(1), x, torch.ones(1), retain_graph=True)
        return statistics.median(self._seconds(call) for _ in range(100))

    def _pass(self, gauge: Gauge) -> tuple[Times, Times]:
        """What every node's forward takes, in order, and then every node's backward, in reverse order."""
        subject = self.subject
        environment = subject.environment()
        replayed: list[tuple[str, list[Tensor], list[Tensor]]] = []
        forwards: dict[str, Reading] = {}
        for op in subject.computed:
            inputs = subject.run.fresh(op, environment)
            result, forwards[op.name] = gauge.of(subject.run.prepared(op, inputs))
            outputs = tensors(result)
            environment.update(zip(op.outputs, (t.detach() for t in outputs), strict=True))
            replayed.append((op.name, outputs, subject.run.sources(op, inputs)))
        if subject.with_loss:
            leaves, output = subject.loss_inputs(environment)
            loss, forwards["loss"] = gauge.of(lambda: subject.loss(output))
            replayed.append(("loss", [loss], leaves))
        backwards: dict[str, Reading] = {}
        while replayed:
            name, outputs, sources = replayed.pop()
            ends = differentiable(outputs)
            if ends and sources:
                gradients = [torch.ones_like(t) for t in ends]
                backward = partial(torch.autograd.grad, ends, sources, gradients, allow_unused=True)
                _, backwards[name] = gauge.of(backward)
        self._rest()
        return ({name: t() for name, t in forwards.items()}, {name: t() for name, t in backwards.items()})

    def _whole_step(self) -> float:
        """Seconds of forward, loss and backward of the model itself."""
        subject = self.subject
        parameters = [p for p in subject.traced.model.parameters() if p.requires_grad]

        def step() -> None:
            output = subject.traced.model(*subject.inputs)
            if subject.with_loss:
                scalars = [subject.loss(output)]
            else:
                leaves = pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
                scalars = [t.sum() for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            torch.autograd.grad(scalars, parameters, allow_unused=True)

        return self._seconds(step)

    def _seconds(self, work: Callable[[], Any]) -> float:
        _, seconds = Clock(self.device).of(work)
        self._rest()
        return seconds()

    def _rest(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _optimizer(self) -> tuple[float, float]:
        """(seconds of one step over all parameters, bytes of state for each byte of parameters)."""
        optimizer = self.subject.stepped()
        if optimizer is None:
            return 0.0, 0.0
        seconds = statistics.median(self._seconds(optimizer.step) for _ in range(_FEWEST))
        optimizer.zero_grad()
        return seconds, self.subject.state_bytes(optimizer)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"
