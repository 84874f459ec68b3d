"""Trace a model with torch.export.

Each whole call of a leaf module (leaf_modules.py) is a single operator; what lies between them arrives as ATen
operators. The model is traced twice, in training and in evaluation mode: what differs between the two depends on
`self.training`. A module that torch.export cannot see through becomes opaque, one operator as well, and the model is
traced again.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules import transformer

from pdtool.errors import PartialWriteError, TraceError
from pdtool.frontend.by_mode import merge_modes
from pdtool.frontend.graph_reader import GraphReader
from pdtool.frontend.leaf_calls import calls, record_calls, single_operators, unchanged
from pdtool.frontend.leaf_modules import is_leaf
from pdtool.frontend.modelfile import ModelFile
from pdtool.frontend.opaque_modules import (
    failing_module,
    fixed_sizes,
    modules_writing_data,
    untraceable_refused,
    without_inner,
)
from pdtool.frontend.operators import Traced
from pdtool.frontend.user_code import user_line

_SIZES = (2, 3)  # of the minibatches that tell the shapes of opaque modules


def trace(
    model: nn.Module,
    example: Callable[[int], tuple[Tensor, ...]],
    batch_size: int,
    path: Path,
    opaque: Sequence[str] = (),
) -> Traced:
    """Trace `model` in training and in evaluation mode.

    Args:
        example: gives the inputs of a minibatch of a given size; dimensions that grow with the size are the batch.
        batch_size: to trace with, at least 2; the operators are the same for any other.
        path: the user's file, for the lines named in errors.
        opaque: paths of modules to call whole, besides those that cannot be traced.

    Raises:
        TraceError: torch.export cannot take the model, it is bound to one batch size, or it does what a stage cannot.
    """
    tracer = _Tracer(model, example, max(2, batch_size), path)
    was_training = model.training
    reasons = dict.fromkeys(opaque, "HINTS")
    if unknown := reasons.keys() - dict(model.named_modules()).keys():
        raise TraceError(f"HINTS names {min(unknown)!r} as opaque, which is no module of the model")
    try:
        while True:
            try:
                return replace(tracer.trace(reasons), opaque=reasons)
            except TraceError as error:
                found = _alike(model, error.module)
                if found <= reasons.keys():
                    raise
                reasons = without_inner(reasons | dict.fromkeys(found, error.what))
    finally:
        model.train(was_training)


def trace_file(file: ModelFile, model: nn.Module, batch_size: int) -> Traced:
    """Trace a model of the user's file, as `trace` does."""
    return trace(model, file.example_inputs, batch_size, file.path, file.hints.opaque)


def _alike(model: nn.Module, path: str | None) -> set[str]:
    """The paths of a module and of those that run the same code: one would fail after the other; none for the model."""
    if path and is_leaf(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    if not path:
        return set()
    module = model.get_submodule(path)
    if type(module).__module__.startswith("torch."):
        return {path}
    return {other for other, m in model.named_modules() if other and type(m) is type(module)}


@dataclass(frozen=True)
class _Tracer:
    """Traces a model that calls some of its modules whole."""

    model: nn.Module
    example: Callable[[int], tuple[Tensor, ...]]
    batch_size: int
    path: Path

    def trace(self, opaque: Collection[str]) -> Traced:
        """Trace in both modes, with every write in place taken out where one of them writes into part of a tensor."""
        try:
            training, evaluation = (self._read(mode, opaque, functional=False) for mode in (True, False))
        except PartialWriteError:
            training, evaluation = (self._read(mode, opaque, functional=True) for mode in (True, False))
        return merge_modes(training, evaluation)

    def _read(self, mode: bool, opaque: Collection[str], *, functional: bool) -> Traced:
        self.model.train(mode)
        inputs = self.example(self.batch_size)
        fixed: list[str] = []
        try:
            dynamic = _dynamic_dims(inputs, self.example(self.batch_size + 1), self.batch_size)
            recorded = record_calls(self.model, opaque, [self.example(size) for size in _SIZES], _SIZES)
            with (
                single_operators(self.model, recorded),
                _without_data_dependent_checks(),
                _quiet(),
                fixed_sizes(self.model) as fixed,
            ):
                program = _export(self.model, inputs, dynamic, functional=functional)
            return GraphReader(self.model, program, list(calls), functional=functional).read()
        except TraceError as error:
            if error.module is not None or isinstance(error, PartialWriteError):
                raise
            where, module = user_line(error, self.path), failing_module(error, self.model)
            raise TraceError(f"{where}{error.what}", error.remedy, module=module) from error
        except Exception as error:
            raise _explained(error, self.model, inputs, self.path, fixed) from error


def _dynamic_dims(inputs: Sequence[Tensor], larger: Sequence[Tensor], size: int) -> tuple[dict[int, Any], ...]:
    """For each input the dimensions that grow with the minibatch, from inputs of `size` and of `size + 1` samples."""
    batch = torch.export.Dim("batch", min=2, max=2**20)
    dynamic: list[dict[int, Any]] = []
    for a, b in zip(inputs, larger, strict=True):
        growing = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
        dynamic.append({d: batch if a.shape[d] == size else (a.shape[d] // size) * batch for d in growing})
    if not any(dynamic):
        shapes = [tuple(t.shape) for t in inputs]
        raise TraceError(f"example_inputs gives shapes {shapes} whatever the batch size", "let it use its argument")
    return tuple(dynamic)


def _export(
    model: nn.Module, inputs: Sequence[Tensor], dynamic: tuple[dict[int, Any], ...], *, functional: bool
) -> torch.export.ExportedProgram:
    """Export the model; `functional`: with every write in place turned into an operator that returns a new tensor."""
    with warnings.catch_warnings(), untraceable_refused():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, tuple(inputs), strict=False, dynamic_shapes=dynamic)
        if functional:
            for call in calls:
                call.is_recorded = True
            program = program.run_decompositions({})
    return program


def _explained(
    error: Exception, model: nn.Module, inputs: Sequence[Tensor], path: Path, fixed: Sequence[str]
) -> TraceError:
    """Say what torch.export's error means: the model itself fails, knows one batch size only, or cannot be traced.

    Args:
        fixed: paths of the modules that made a number of the minibatch's size.
    """
    try:
        with torch.no_grad(), unchanged(model):
            model(*inputs)
    except Exception as failure:
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs)
        what = f"the model fails on inputs of shape {shapes}: {type(failure).__name__}: {failure}"
        return TraceError(f"{user_line(failure, path)}{what}", "mend the model or example_inputs")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    specialized = next((line for line in lines if "specialized" in line), "")
    if specialized or lines[0].startswith("Constraints violated"):
        return TraceError(
            f"{path.name}: the model works for one minibatch size only: {specialized or lines[-1]}",
            "use x.shape[0] or -1 for the batch dimension, and keep no state between minibatches",
            module=next(iter(fixed), None),
        )
    reason = lines[0].partition(" (unhinted")[0]
    writers = modules_writing_data(model) if "constant's list" in reason else []
    return TraceError(
        f"{user_line(error, path)}torch.export cannot trace this line: {type(error).__name__}: {reason}",
        "put this line into a module of its own, which pdtool then calls whole",
        module=next(iter(writers), None) or failing_module(error, model),
    )


@contextmanager
def _without_data_dependent_checks() -> Iterator[None]:
    """Leave out what torch's own modules look up in a tensor's values, and what makes no difference to the result:
    whether a mask is the causal one (torch.nn.Transformer), and whether arguments of distributions are valid."""
    validates = Distribution._validate_args
    with patch.object(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal)):
        Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            Distribution.set_default_validate_args(validates)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log and graph dumps of torch.export out of the terminal: the error that follows says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
