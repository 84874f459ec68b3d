"""Trace a model: run torch.export until it takes the model, in training and in evaluation mode.

Each call of a leaf module (`leaf_modules`) is a single operator. Code between them becomes ATen operators. The two
modes differ where code depends on `self.training`. A module that torch.export cannot see through becomes opaque, which
means a single operator, and the model is traced again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.export import ShapesCollection
from torch.nn.parameter import is_lazy

from pdtool.errors import ModelError, PartialWriteError, TraceError, describe_error
from pdtool.frontend.by_mode import asks_for_mode, merge_modes
from pdtool.frontend.exporting import exported, forget_last_export, keeps_no_fake_tensor
from pdtool.frontend.graph_reader import GraphReader
from pdtool.frontend.leaf_calls import OWN_MODULE, RECORDED_SIZES, calls, record_calls, single_operators, unchanged
from pdtool.frontend.leaf_modules import is_leaf
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs
from pdtool.frontend.model_rules import unknown_module_remedy
from pdtool.frontend.opaque_modules import FixedSize, failing_module, fixed_sizes, modules_using_data, without_inner
from pdtool.frontend.operator_builder import operators_sharing_state
from pdtool.frontend.operators import Traced, named_state, names_over_parameters, registered_state
from pdtool.frontend.user_code import user_line

_NOT_SPARSE = "use a dense one, or its indices and values in two tensors with index_add or scatter_add"
_HOOKED, _HINTED = "it has a backward hook", "HINTS"  # why a module is opaque


def trace(
    model: nn.Module, example: Callable[[int], Any], batch_size: int, path: Path, opaque: Sequence[str] = ()
) -> Traced:
    """Trace `model` in training and in evaluation mode.

    Args:
        example: returns the inputs of a minibatch of a given size, as ModelInputs takes them; dimensions that grow with
            the size are the batch.
        batch_size: minibatch size to trace with, at least 2; the operators are the same for any other.
        path: the user's file, for the lines named in errors.
        opaque: paths of modules to make opaque, besides those that cannot be traced.

    Raises:
        TraceError: torch.export cannot trace the model, it works for one batch size only, or a stage cannot do the
            same.
    """
    tracer = _Tracer(model, lambda size: ModelInputs.of(example(size)), max(2, batch_size), path)
    was_training = model.training
    _check_paths(model, opaque)
    _check_hooks(model)
    hooked = [name for name, module in model.named_modules() if name and _has_backward_hook(module)]
    reasons = without_inner(dict.fromkeys(hooked, _HOOKED) | dict.fromkeys(opaque, _HINTED))
    _check_state(model)
    try:
        while True:
            try:
                traced = tracer.trace(reasons)
                called = {part.module for op in traced.operators for part in op.parts if part.opaque}
                _check_opaque(traced, reasons, called)
                _check_shared_memory(traced)
                return replace(traced, opaque={path: why for path, why in reasons.items() if path in called})
            except TraceError as error:
                found = _next_opaque(model, error.module, reasons)
                if not found:
                    raise
                reasons = without_inner(reasons | dict.fromkeys(sorted(found), error.what))
    finally:
        model.train(was_training)
        forget_last_export()


def _check_paths(model: nn.Module, opaque: Sequence[str]) -> None:
    known = dict(model.named_modules())
    for path in opaque:
        if not path or path not in known:
            remedy = unknown_module_remedy(path, known)
            raise TraceError(f"HINTS names {path!r} as opaque, but the model has no such module inside it", remedy)


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            what = f"parameter {name} has a gradient hook, but stages have parameters of their own, without it"
            raise TraceError(what, "register it in optimizer(), or clip with MAX_GRAD_NORM")
    if _has_backward_hook(model):
        what = "the model has a backward hook, but no stage would call it"
        raise TraceError(what, "put it on modules inside the model")


def _has_backward_hook(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _check_state(model: nn.Module) -> None:
    for name, tensor in registered_state(model).items():
        if tensor.layout is not torch.strided:
            raise TraceError(f"{name} is a sparse tensor, which torch.export cannot trace", _NOT_SPARSE)
    for path, module in model.named_modules():
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            what = f"the parameters of {path or 'the model'}, a {type(module).__name__}, have no shape yet"
            raise TraceError(what, "pass the input size, or call the model once in model() before you return it")


def _check_opaque(traced: Traced, opaque: Mapping[str, str], called: Collection[str]) -> None:
    """Check that modules inside an opaque one are called from there only, and that opaque modules of HINTS are
    called."""
    parts = [part for op in traced.operators for part in op.parts]
    for path in opaque:
        if inner := next((part for part in parts if part.module.startswith(f"{path}.")), None):
            what = f"{inner.module} is called from outside {path}, which is opaque and cannot be split"
            raise TraceError(what, f"call it from {path} only", location=inner.location, module=path.rpartition(".")[0])
        if path not in called and opaque[path] == _HINTED:
            raise TraceError(f"HINTS names {path} as opaque, but forward never calls it", "remove it from HINTS")


def _check_shared_memory(traced: Traced) -> None:
    """Check that forward uses every saved tensor that shares a trained parameter's memory; otherwise no stage has
    it."""
    state = named_state(traced.model)
    used = {name for op in traced.operators for name in (*op.parameters, *op.buffers)}
    used_parameters = {id(state[name]) for name in used if isinstance(state[name], nn.Parameter)}
    unused = {n for n in traced.model.state_dict() if n not in used and id(state.get(n)) not in used_parameters}
    for group in names_over_parameters(state):
        if used.intersection(group) and (name := next(filter(unused.__contains__, group), None)):
            other = next(filter(used.__contains__, group))
            what = f"{name} shares memory with {other}. forward uses only the latter, so no stage would have {name}"
            raise TraceError(what, "give it its own memory with clone(), or register the buffer as persistent=False")


def trace_file(file: ModelFile, model: nn.Module, batch_size: int) -> Traced:
    """Trace a model of the user's file, as `trace` does."""
    return trace(model, file.example_inputs, batch_size, file.path, file.hints.opaque)


def _next_opaque(model: nn.Module, failing: str | None, opaque: Collection[str]) -> set[str]:
    """The paths of the modules to make opaque: those like the failing one or, if these are opaque already, like the one
    around it; none if that is the model."""
    path, inside = failing, tuple(f"{each}." for each in opaque)
    while path:
        found = _alike(model, path)
        if not all(f"{each}.".startswith(inside) for each in found):
            return found
        path = path.rpartition(".")[0]
    return set()


def _alike(model: nn.Module, path: str) -> set[str]:
    """The paths of a module and of those that run the same code, which would fail next; none for the model."""
    if is_leaf(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    if not path:
        return set()
    module = model.get_submodule(path)
    if type(module).__module__.startswith("torch."):
        return {path}
    return {other for other, m in model.named_modules() if other and type(m) is type(module)}


@dataclass(frozen=True)
class _Tracer:
    """Traces a model with some opaque modules."""

    model: nn.Module
    example: Callable[[int], ModelInputs]
    batch_size: int
    path: Path

    def trace(self, opaque: Collection[str]) -> Traced:
        """Trace in both modes; if one writes into part of a tensor in place, remove all in-place writes."""
        try:
            merged = self._merged(opaque, functional=False)
        except PartialWriteError:
            merged = self._merged(opaque, functional=True)
        return replace(merged, together=operators_sharing_state(merged))

    def _merged(self, opaque: Collection[str], *, functional: bool) -> Traced:
        training, asked = self._read(True, opaque, functional=functional)
        if not (opaque or asked):
            with single_operators(self.model):
                if keeps_no_fake_tensor(self.model, self.example(self.batch_size)):
                    return training  # which is the same in evaluation
        return merge_modes(training, self._read(False, opaque, functional=functional)[0])

    def _read(self, mode: bool, opaque: Collection[str], *, functional: bool) -> tuple[Traced, bool]:
        """Return the operators in one mode, and whether forward may have asked for the mode."""
        self.model.train(mode)
        inputs = self.example(self.batch_size)
        fixed: list[FixedSize] = []
        try:
            # the training set may have no sample more than the minibatch
            other = self.batch_size - 1 if self.batch_size > RECORDED_SIZES[1] else self.batch_size + 1
            dynamic = _dynamic_dims(inputs, self.example(other), self.batch_size, other)
            recorded = record_calls(self.model, opaque, self.example)
            operators = single_operators(self.model, recorded)
            with operators, fixed_sizes(self.model) as fixed, asks_for_mode(self.model) as asked:
                program = exported(self.model, inputs, dynamic, functional=functional)
            traced = GraphReader(self.model, program, calls, functional=functional).read()
            return replace(traced, arguments=inputs.signature), asked()
        except TraceError as error:
            if error.module is not None or error.location or isinstance(error, PartialWriteError):
                raise
            where, module = user_line(error, self.path), failing_module(error, self.model)
            raise TraceError(f"{where}{error.what}", error.remedy, module=module) from error
        except ModelError:  # of example_inputs, or of the training set in its place
            raise
        except Exception as error:
            raise _explained(
                error, self.model, [inputs, *map(self.example, RECORDED_SIZES)], self.path, fixed
            ) from error


def _dynamic_dims(inputs: ModelInputs, others: ModelInputs, size: int, other: int) -> ShapesCollection:
    """For each input the dimensions that grow with the minibatch, from inputs of `size` and of `other` samples."""
    batch = torch.export.Dim("batch", min=2, max=2**20)
    dynamic = ShapesCollection()  # type: ignore[no-untyped-call]
    if inputs.signature != others.signature or len(inputs.tensors) != len(others.tensors):
        what = f"the inputs of {size} and of {other} samples pass different arguments to the model"
        raise TraceError(what, "change only the minibatch size in example_inputs")
    for a, b in zip(inputs.tensors, others.tensors, strict=True):
        growing = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
        if a.dim() != b.dim() or any(a.shape[d] * other != b.shape[d] * size for d in growing):
            raise TraceError(
                f"the inputs of {size} and of {other} samples have shapes {list(a.shape)} and {list(b.shape)}: they "
                "differ in more than the minibatch size",
                "pad to a fixed length",
            )
        dynamic[a] = {d: batch if a.shape[d] == size else (a.shape[d] // size) * batch for d in growing}
    if not any(dynamic[tensor] for tensor in inputs.tensors):
        shapes = [tuple(t.shape) for t in inputs.tensors]
        raise TraceError(
            f"the inputs have shapes {shapes}, whatever the batch size",
            "make their first dimension the batch size that example_inputs() receives. If you have no "
            "example_inputs(), stack the samples in collate()",
        )
    return dynamic


def _explained(
    error: Exception, model: nn.Module, minibatches: Sequence[ModelInputs], path: Path, fixed: Sequence[FixedSize]
) -> TraceError:
    """Translate torch.export's error: the model itself fails, works for one batch size only, or cannot be traced.

    Args:
        minibatches: as profiled, and of other sizes.
        fixed: code that turned the minibatch size into a number or compared it.
    """
    text = describe_error(error).removeprefix(f"{type(error).__name__}: ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (
        _failure_of_model(model, minibatches, path)
        or _size_that_is_fixed(lines, path, fixed)
        or _untraceable(error, lines[0].partition(" (unhinted")[0], model, path)
    )


def _failure_of_model(model: nn.Module, minibatches: Sequence[ModelInputs], path: Path) -> TraceError | None:
    """Make the error of a model that fails without torch.export, too."""
    try:
        for inputs in minibatches:
            with torch.no_grad(), unchanged(model):
                inputs.call(model)
    except (DataDependentOutputException, DynamicOutputShapeException):
        pass  # fake tensors, which an estimate has, hold no values
    except Exception as failure:
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs.tensors)
        what = f"the model fails on inputs of shape {shapes}: {describe_error(failure)}"
        remedy = "fix the model or example_inputs"
        if f": {type(model).forward.__qualname__}() takes" in what:
            remedy = "a tuple is passed as several arguments: return it in another tuple, (inputs,), to pass it as one"
        if inputs is not minibatches[0]:
            remedy = "let forward take any number of samples; the last minibatch of an epoch may have fewer"
        return TraceError(f"{user_line(failure, path)}{what}", remedy)
    return None


def _size_that_is_fixed(lines: Sequence[str], path: Path, fixed: Sequence[FixedSize]) -> TraceError | None:
    """Make the error of a model that works for some minibatch sizes only, if torch.export says so in `lines`."""
    specialized = next((line for line in lines if "specialized" in line or line.startswith("- ")), "")
    if "data-dependent" in lines[0] or not (specialized or lines[0].startswith("Constraints violated")):
        return None
    return TraceError(
        f"{fixed[0].location if fixed else path.name}: the model works for some minibatch sizes only: "
        f"{(specialized.removeprefix('- ') or lines[-1]).partition('. If you')[0]}",
        "use x.shape[0] or -1 for the batch dimension, and keep no state in forward. If a line must branch on "
        "the batch size, or compute more than sums and products of it, move that line into a module of its own",
        module=fixed[0].module if fixed else None,
    )


def _untraceable(error: Exception, reason: str, model: nn.Module, path: Path) -> TraceError:
    """Make the error of code that torch.export cannot trace for this reason."""
    where, module = user_line(error, path), failing_module(error, model)
    what, remedy = f"torch.export cannot trace this line: {type(error).__name__}: {reason}", OWN_MODULE
    if "constant's list" in reason:
        where = f"{path.name}: "  # the line is none of the causes
        owner = reason.partition("model attribute: ")[2].split(". ")[0].rpartition(".")[0]
        what = (
            f"forward of {owner or 'the model'} takes a tensor that is not a part of the model: from an object or "
            "cache where an earlier call has put it, or from a module in a plain list"
        )
        remedy = "make that tensor in __init__ and register it as a buffer, and put modules into an nn.ModuleList; or "
        remedy += f"name {owner} in HINTS opaque" if owner else OWN_MODULE
        if writers := modules_using_data(model):
            module = writers[0] or module
            what = f"forward of {writers[0] or 'the model'} uses .data, which torch.export cannot trace"
            remedy = f"use .detach() to read a tensor without its gradient; or {OWN_MODULE}"
    elif "meta converter nyi" in reason or re.search(r"aten\._?(to_)?sparse", reason):
        what, remedy = "forward uses a sparse tensor, which torch.export cannot trace", _NOT_SPARSE
    elif "SymIntArrayRef" in reason:  # of torch.randn(x.shape, generator=...), for one
        global_ones = "the global generators of torch, numpy or random, which pdtool seeds for each minibatch"
        remedy = f"if it draws from a generator of its own, draw from {global_ones}; otherwise {OWN_MODULE}"
    return TraceError(f"{where}{what}", remedy, module=module)
