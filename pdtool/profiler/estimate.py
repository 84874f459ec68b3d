"""Estimate each operator for a device that need not be present, and fit a device's factors to a measured profile.

The model runs on fake tensors, which have no storage. The device's roofline gives the time of each kernel that a node's
forward and backward would launch (`kernels`). `graph_costs` counts everything else, as for a measured profile. Fake
tensors are CPU tensors, so the kernels are the CPU's. A GPU has the same kernels except for recurrent layers, for which
we use cuDNN's kernels and stash.
"""

from __future__ import annotations

import re
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

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.device import Device, DeviceSpec, OperatorKind, Precision
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, ModelError, StaleError, UsageError
from pdtool.frontend.graph_digest import graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs
from pdtool.frontend.operators import Traced
from pdtool.frontend.tracing import trace
from pdtool.frontend.user_code import undoing_user_changes
from pdtool.profiler.execute import OnProgress, ProfiledModel, disable_inplace_modules
from pdtool.profiler.graph_costs import GraphCosts, count_stash_and_flops, make_profile, minibatch_errors
from pdtool.profiler.kernels import PRECISIONS, Kernel, KernelRecorder, recurrent_costs, roofline_s

_KINDS: tuple[tuple[OperatorKind, re.Pattern[str]], ...] = (
    ("conv", re.compile(r"[Cc]onv")),
    ("rnn", re.compile(r"LSTM|GRU|RNN|^(lstm|gru|rnn_)")),
    ("norm", re.compile(r"[Nn]orm")),
    ("embedding", re.compile(r"[Ee]mbedding")),
    ("matmul", re.compile(r"[Ll]inear|[Aa]ttention|matmul|einsum|(^|add|b)(mm|mv)$")),
)


def estimate(
    model_file: ModelFile,
    *,
    batch_size: int,
    device: DeviceSpec,
    precision: Precision | None = None,
    progress: OnProgress = lambda done, total: None,
) -> Profile:
    """Estimate the profile that the model would have on `device`, without running it.

    Args:
        batch_size: samples in one minibatch.
        precision: bf16, fp16, fp32, fp64: as if the model were cast to it; tf32: products of fp32 run in TF32; None:
            the model as it is.
        progress: called with (nodes done, nodes in all).

    Raises:
        TraceError: the model cannot be traced.
        UsageError: the device does not have the precision.
        ModelError: the user's functions fail, or depend on the values of tensors.
    """
    if precision and precision not in device.peak_flops_per_s:
        remedy = f"choose one of {', '.join(device.peak_flops_per_s)}"
        raise UsageError(f"{device.name} has no figure for {precision}", remedy)
    cast = next((dtype for dtype, name in PRECISIONS.items() if name == precision), None)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _FakeTensors(mode, cast)
    with minibatch_errors(model_file, batch_size), _without_values():
        traced = fakes.trace(model_file, batch_size)
        as_written = traced if cast is None else _FakeTensors(mode, None).trace(model_file, batch_size)
        disable_inplace_modules(traced.model)
        profiled = ProfiledModel.of(model_file, traced, batch_size, torch.device("cpu"), fakes.tensor)
        return _estimated(profiled, mode, device, precision, progress).with_graph(graph_sha256(as_written))


def calibrate_device(device: DeviceSpec, measured: Profile, path: Path | str, *, tf32: bool = False) -> DeviceSpec:
    """Fit the device's factors to a profile measured on it, by estimating the profile's model again.

    Args:
        path: path of the profile, for errors.
        tf32: products of fp32 ran in TF32.

    Raises:
        ArtifactError: the profile was not measured.
        StaleError: its model has changed since.
        UsageError: its model file lies outside the current folder.
    """
    model = measured_model(measured, path)
    plain = device.model_copy(update={"factors": {}})
    precision: Precision | None = "tf32" if tf32 else "bf16" if measured.precision == "bf16" else None
    with undoing_user_changes():
        model_file = ModelFile.load(model, digests=measured.digests)
        estimated = estimate(model_file, batch_size=measured.batch_size, device=plain, precision=precision)
    if _has_changed(model, measured, estimated):
        raise StaleError(model.source, "has changed since it was profiled", "profile it again")
    return device.model_copy(update={"factors": {**device.factors, **fit_factors(measured, estimated)}})


def measured_model(profile: Profile, path: Path | str) -> ModelRef:
    """Return the model of a measured profile; raises ArtifactError if pdtool did not measure its operators."""
    if profile.device.kind != "measured" or profile.model is None:
        remedy = "calibrate with a profile made with --device cpu or cuda"
        raise ArtifactError(path, "contains no times that pdtool measured", remedy)
    if profile.compiled:
        what = "was measured with --compile: its operators have no times of their own"
        raise ArtifactError(path, what, "calibrate with a profile made without --compile", field="compiled")
    return profile.model


def fit_factors(measured: Profile, estimated: Profile) -> dict[OperatorKind, float]:
    """Divide measured by estimated seconds for each kind of operator; leave out kinds that took no time."""
    estimated_s, measured_s = _seconds_by_kind(estimated), _seconds_by_kind(measured)
    kinds = [kind for kind, seconds in estimated_s.items() if seconds and measured_s.get(kind)]
    return {kind: measured_s[kind] / estimated_s[kind] for kind in kinds}


def operator_kind(op: str) -> OperatorKind:
    """Return the kind of an operator, whose operators share a factor: `conv` for Conv2d."""
    return next((kind for kind, pattern in _KINDS if pattern.search(op)), "elementwise")


def _has_changed(model: ModelRef, before: Profile, now: Profile) -> bool:
    """Compare the operator graphs of two profiles of a model, or the bytes of its file if one records no graph."""
    if before.graph_sha256 and now.graph_sha256:
        return before.graph_sha256 != now.graph_sha256
    return before.digests.get(model.source) not in (None, now.digests[model.source])


def _seconds_by_kind(profile: Profile) -> dict[OperatorKind, float]:
    sums: dict[OperatorKind, float] = {"update": sum(node.update_s for node in profile.nodes)}
    for node in profile.nodes:
        kind = operator_kind(node.op)
        sums[kind] = sums.get(kind, 0.0) + node.forward_s + node.backward_s
    return sums


@dataclass(frozen=True)
class _FakeTensors:
    """Makes fake tensors, cast to `cast` if that is given."""

    mode: FakeTensorMode
    cast: torch.dtype | None

    def trace(self, model_file: ModelFile, batch_size: int) -> Traced:
        """Trace the model with fake parameters and inputs."""

        def example(size: int) -> ModelInputs:
            return model_file.example_inputs(size).map(self.tensor)

        return trace(self.model(model_file), example, batch_size, model_file.path, model_file.hints.opaque)

    def model(self, model_file: ModelFile) -> nn.Module:
        """Build the model; its parameters are allocated only if its construction reads values."""
        try:
            with self.mode:
                model = model_file.build()
        except ModelError:
            model = model_file.build()
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        fakes = {key: self._same_kind(t) for key, t in tensors.items()}  # tied parameters stay tied
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    setattr(module, name, fakes[id(tensor)])
        return model

    def _same_kind(self, tensor: Tensor) -> Tensor:
        fake = self.tensor(tensor.detach())
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def tensor(self, tensor: Tensor) -> Tensor:
        """Make a fake tensor of the shape and type of `tensor`."""
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)
        return fake.to(self.cast) if self.cast and fake.is_floating_point() else fake


def _estimated(
    model: ProfiledModel, mode: FakeTensorMode, device: DeviceSpec, precision: Precision | None, progress: OnProgress
) -> Profile:
    """Estimate all nodes and the optimizer step."""

    def seconds(kernels: list[Kernel], kind: OperatorKind = "elementwise", launch_s: float = device.launch_s) -> float:
        factor = device.factors.get(kind, 1.0)
        return factor * roofline_s(kernels, device, tf32=precision == "tf32", launch_s=launch_s)

    with mode:
        stash_bytes, saved_by, flops = count_stash_and_flops(model)
        forward, backward = model.replay(lambda _, work: _recorded(work), progress)
    kinds: dict[str, OperatorKind] = {"loss": "elementwise"}
    for op in model.computed:
        kinds[op.name] = operator_kind(op.op)
        module = model.traced.model.get_submodule(op.module) if op.is_module else None
        if isinstance(module, nn.RNNBase):  # as in cuDNN
            inputs = op.values[0].meta(model.batch)
            forward[op.name], backward[op.name], stash_bytes[op.name] = recurrent_costs(module, inputs)
            saved_by = {name: saver for name, saver in saved_by.items() if saver != op.name}
    # outside the mode: an optimizer may read its step count; without launches: it is fused over all parameters
    update_s, state_bytes, _ = model.update(lambda step: (seconds(_recorded(step)[1], "update", launch_s=0.0), 0.0))
    costs = GraphCosts(
        forward_s={name: seconds(kernels, kinds[name]) for name, kernels in forward.items()},
        backward_s={name: seconds(kernels, kinds[name]) for name, kernels in backward.items()},
        stash_bytes=stash_bytes,
        saved_by=saved_by,
        flops=flops,
        update_s=update_s,
        optimizer_state_bytes=state_bytes,
    )
    name = ", ".join([device.name, *filter(None, [precision]), *["calibrated"] * bool(device.factors)])
    return make_profile(
        model,
        Device(name=name, kind="estimated", memory_bytes=device.memory_bytes),
        costs,
        precision=precision or "fp32",
        reserved_bytes=device.reserved_bytes,
    )


def _recorded(work: Callable[[], Any]) -> tuple[Any, list[Kernel]]:
    """Do `work`; return its result and the kernels that it launched."""
    with KernelRecorder() as recorder:
        result = work()
    return result, recorder.kernels


@contextmanager
def _without_values() -> Iterator[None]:
    """Explain the error of a function that reads tensor values, which an estimate does not have."""
    try:
        yield
    except (ModelError, RuntimeError) as error:
        cause = error.__cause__ or error
        if not isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)):
            raise
        what = f"{getattr(error, 'what', error)}: it depends on the values of tensors, which an estimate does not have"
        raise ModelError(what, "measure it with --device cpu or --device cuda") from error
