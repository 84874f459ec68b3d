"""Estimate each operator for a device that need not be here: the model runs on fake tensors, which have no storage.

Each kernel that a node's forward and backward would launch is priced by the roofline of the device (see kernels.py).
Everything else in the profile is counted as for a measured one, by the same code (see count.py). Fake tensors stand
on the processor, so the kernels are those of its path; they are the same but for recurrent layers, whose kernels and
stash are taken as cuDNN's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from pdtool.artifacts.device import DeviceSpec, Precision
from pdtool.artifacts.envelope import ModelRef
from pdtool.artifacts.profile import Device, Profile
from pdtool.errors import ModelError, StaleError, UsageError
from pdtool.frontend.graph_digest import graph_sha256
from pdtool.frontend.modelfile import ModelFile
from pdtool.frontend.operators import Operator, Traced
from pdtool.frontend.tracing import trace
from pdtool.profile.calibrate import fit, kind_of, measurable
from pdtool.profile.count import Subject, size_errors
from pdtool.profile.execute import differentiable, inplace_modules_off, tensors
from pdtool.profile.kernels import PRECISIONS, Kernel, Meter, backward, recurrent, recurrent_stash, seconds

Progress = Callable[[int, int], None]
Kernels = dict[str, tuple[list[Kernel], list[Kernel]]]  # node -> kernels of its forward, of its backward


def estimate(
    model_file: ModelFile,
    *,
    batch_size: int,
    device: DeviceSpec,
    precision: Precision | None = None,
    progress: Progress = lambda done, total: None,
) -> Profile:
    """The profile that the model at `batch_size` would have on `device`, estimated without running it.

    Args:
        precision: bf16, fp16, fp32, fp64: as if the model were cast to it; tf32: products of fp32 run in TF32; None:
            the model as it is.
        progress: called with (nodes done, nodes in all).

    Raises:
        TraceError: the model cannot be traced.
        UsageError: the device does not have the precision.
        ModelError: the user's functions fail, or depend on the values of tensors.
    """
    if precision and precision not in device.peak_flops_per_s:
        raise UsageError(
            f"{device.name} has no figure for {precision}", f"choose one of {', '.join(device.peak_flops_per_s)}"
        )
    cast = next((dtype for dtype, name in PRECISIONS.items() if name == precision), None)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode, cast)
    with size_errors(model_file, batch_size), _without_values():
        traced = fakes.trace(model_file, batch_size)
        as_written = traced if cast is None else _Fakes(mode, None).trace(model_file, batch_size)
        inplace_modules_off(traced.model)
        subject = Subject.of(model_file, traced, batch_size, torch.device("cpu"), fakes.tensor)
        profile = _Estimate(subject, fakes.mode, device, precision, progress).profile()
        return profile.with_graph(graph_sha256(as_written))


def calibrated(device: DeviceSpec, measured: Profile, path: Path | str, *, tf32: bool = False) -> DeviceSpec:
    """The device with factors fitted to a profile measured on it, of a model that is estimated again for that.

    Args:
        path: of the profile, for errors.
        tf32: products of fp32 ran in TF32.

    Raises:
        ArtifactError: the profile is no measured one, or not of the model as it is now.
        StaleError: its model changed.
        UsageError: its model file lies outside the current folder.
    """
    model = measurable(measured, path)
    model_file = ModelFile.load(model, digests=measured.digests)
    plain = device.model_copy(update={"factors": {}})
    estimated = estimate(model_file, batch_size=measured.batch_size, device=plain, precision="tf32" if tf32 else None)
    if _has_changed(model, measured, estimated):
        raise StaleError(model.source, "has changed since it was profiled", "profile it again")
    return device.model_copy(update={"factors": {**device.factors, **fit(measured, estimated, path)}})


def _has_changed(model: ModelRef, before: Profile, now: Profile) -> bool:
    """Compare the operator graphs of two profiles of a model, or the bytes of its file where one records no graph."""
    if before.graph_sha256 and now.graph_sha256:
        return before.graph_sha256 != now.graph_sha256
    return before.digests.get(model.source) not in (None, now.digests[model.source])


@dataclass(frozen=True)
class _Fakes:
    """Makes fake tensors, cast to a type where one is asked for."""

    mode: FakeTensorMode
    cast: torch.dtype | None

    def trace(self, model_file: ModelFile, batch_size: int) -> Traced:
        """Trace the model with fake parameters and inputs."""
        model = self.model(model_file)
        return trace(
            model, lambda n: tuple(self.tensor(t) for t in model_file.example_inputs(n)), batch_size, model_file.path
        )

    def model(self, model_file: ModelFile) -> nn.Module:
        """The model, its parameters never allocated unless its construction looks at values."""
        try:
            with self.mode:
                model = model_file.build()
        except ModelError:
            model = model_file.build()
        held = {id(t): t for t in (*model.parameters(), *model.buffers())}
        fakes = {key: self._same_kind(t) for key, t in held.items()}  # a tied parameter stays one
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    setattr(module, name, fakes[id(tensor)])
        return model

    def _same_kind(self, tensor: Tensor) -> Tensor:
        fake = self.tensor(tensor.detach())
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of the shape and type of `tensor`, without its values."""
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)
        return fake.to(self.cast) if self.cast and fake.is_floating_point() else fake


@dataclass(frozen=True)
class _Estimate:
    """One profile in the making."""

    subject: Subject
    mode: FakeTensorMode
    device: DeviceSpec
    precision: Precision | None
    progress: Progress

    def profile(self) -> Profile:
        """All of it."""
        with self.mode:
            stash, flops = self.subject.survey()
            kernels = self._kernels(stash)
        kinds = {op.name: kind_of(op.op) for op in self.subject.computed}
        update, state_bytes = self._update()  # outside the mode: an optimizer may read its step count
        details = [self.device.name, *([self.precision] if self.precision else [])]
        return self.subject.profile(
            Device(name=", ".join(details + ["calibrated"] * bool(self.device.factors)), kind="estimated"),
            forwards={name: self._seconds(f, kinds.get(name)) for name, (f, _) in kernels.items()},
            backwards={name: self._seconds(b, kinds.get(name)) for name, (_, b) in kernels.items()},
            update_s=self._seconds(update, "update", launch_s=0.0),  # fused over all parameters
            state_bytes=state_bytes,
            step_s=0.0,
            survey=(stash, flops),
        )

    def _seconds(self, kernels: list[Kernel], kind: Any, launch_s: float | None = None) -> float:
        launch_s = self.device.launch_s if launch_s is None else launch_s
        factor = self.device.factors.get(kind or "elementwise", 1.0)
        return factor * seconds(kernels, self.device, tf32=self.precision == "tf32", launch_s=launch_s)

    def _kernels(self, stash: dict[str, int]) -> Kernels:
        """What each node launches; sets in `stash` what a recurrent one keeps."""
        subject, run = self.subject, self.subject.run
        environment = subject.environment()
        kernels: Kernels = {}
        for done, op in enumerate(subject.computed):
            self.progress(done, len(subject.computed))
            inputs = run.fresh(op, environment)
            forward, outputs = _metered(run.prepared(op, inputs))
            environment.update(zip(op.outputs, (t.detach() for t in outputs), strict=True))
            if module := self._recurrent(op):
                first = inputs[op.values[0]]
                forward = list(recurrent(module, first))
                kernels[op.name] = forward, backward(forward)
                stash[op.name] = recurrent_stash(module, first)
            else:
                kernels[op.name] = forward, _gradient(outputs, run.sources(op, inputs))
        if subject.with_loss:
            leaves, output = subject.loss_inputs(environment)
            forward, outputs = _metered(lambda: subject.loss(output))
            kernels["loss"] = (forward, _gradient(outputs, leaves))
        self.progress(len(subject.computed), len(subject.computed))
        return kernels

    def _recurrent(self, op: Operator) -> nn.RNNBase | None:
        module = None if op.target else self.subject.traced.model.get_submodule(op.module)
        return module if isinstance(module, nn.RNNBase) else None

    def _update(self) -> tuple[list[Kernel], float]:
        """(kernels of an optimizer step in steady state, bytes of state for each byte of parameters)."""
        optimizer = self.subject.stepped()
        if optimizer is None:
            return [], 0.0
        kernels, _ = _metered(optimizer.step)
        return kernels, self.subject.state_bytes(optimizer)


def _metered(work: Callable[[], Any]) -> tuple[list[Kernel], list[Tensor]]:
    """(kernels, tensors returned)."""
    with Meter() as meter:
        result = work()
    return meter.kernels, tensors(result)


def _gradient(outputs: list[Tensor], sources: list[Tensor]) -> list[Kernel]:
    """Kernels of the backward from `outputs` to `sources`."""
    ends = differentiable(outputs)
    if not ends or not sources:
        return []
    ones = [torch.ones_like(t) for t in ends]
    kernels, _ = _metered(lambda: torch.autograd.grad(ends, sources, ones, allow_unused=True))
    return kernels


@contextmanager
def _without_values() -> Iterator[None]:
    """Say why a function that looks into its tensors cannot be estimated."""
    try:
        yield
    except (ModelError, RuntimeError) as error:
        cause = error.__cause__ or error
        if not isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)):
            raise
        raise ModelError(
            f"{getattr(error, 'what', error)}: it depends on the values of tensors, which an estimate does not have",
            "measure it with --device cpu or --device cuda",
        ) from error
