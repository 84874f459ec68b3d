"""Trace a model with torch.export.

Leaf modules (leaf_modules.py) are made opaque while torch.export runs, so that each whole call of one is a single node;
what lies between them arrives as ATen operators. The model is traced twice, in training and in evaluation mode: an
argument that differs between the two depends on `self.training`.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.export import ShapesCollection
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pdtool.errors import PartialWriteError, TraceError
from pdtool.frontend.graph_reader import GraphReader, LeafCall
from pdtool.frontend.leaf_modules import is_leaf
from pdtool.frontend.model_io import CONSTANTS, ModelInputs, named_leaves, register_containers
from pdtool.frontend.operators import ByMode, Operator, Traced
from pdtool.frontend.symbolic_len import symbolic_len
from pdtool.frontend.user_code import user_line

_LIBRARY = torch.library.Library("pdtool", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("leaf(int number, Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]

_leaf_calls: list[LeafCall] = []  # of the export that is running; `number` below is an index into it


def _leaf_meta(number: int, tensors: list[Tensor]) -> list[Tensor]:
    """Run the leaf module's own forward on meta tensors, and record what it returns, for when the graph is traced
    again."""
    call = _leaf_calls[number]
    if call.is_recorded:
        return [torch.empty_like(output) for output in call.outputs]
    remaining = iter(tensors)
    flat = [next(remaining) if isinstance(a, Tensor) else a for a in call.arguments]
    args, kwargs = pytree.tree_unflatten(flat, call.spec)
    returned, spec = pytree.tree_flatten(call.forward(*args, **kwargs))
    outputs = [o for o in returned if isinstance(o, Tensor)]
    indices = iter(range(len(outputs)))
    call.result = pytree.tree_unflatten([next(indices) if isinstance(o, Tensor) else None for o in returned], spec)
    call.outputs = [o.clone() if any(o is t for t in tensors) else o for o in outputs]
    return call.outputs


torch.library.impl(_LIBRARY, "leaf", "Meta")(_leaf_meta)


@contextmanager
def _opaque_leaves(model: nn.Module) -> Iterator[None]:
    """Make each call of a leaf module one `pdtool::leaf` operator, and record the calls in `_leaf_calls`."""

    def opaque(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            flat, spec = pytree.tree_flatten((args, kwargs))
            leaf_call = LeafCall(path, forward, flat, spec)
            _leaf_calls.append(leaf_call)
            outputs = torch.ops.pdtool.leaf(len(_leaf_calls) - 1, [a for a in flat if isinstance(a, Tensor)])
            indices, result_spec = pytree.tree_flatten(leaf_call.result, is_leaf=lambda x: x is None)
            return pytree.tree_unflatten([None if i is None else outputs[i] for i in indices], result_spec)

        return call

    leaves = [(path, module) for path, module in model.named_modules() if path and is_leaf(module)]
    for path, module in leaves:
        module.forward = opaque(path, module.forward)
    _leaf_calls.clear()
    try:
        yield
    finally:
        for _, module in leaves:
            del module.forward


def trace(model: nn.Module, example: Callable[[int], Any], batch_size: int, path: Path) -> Traced:
    """Trace `model` in training and in evaluation mode.

    Args:
        example: gives the inputs of a minibatch of a given size, as ModelInputs takes them; dimensions that grow with
            the size are the batch.
        batch_size: to trace with, at least 2; the operators are the same for any other.
        path: the user's file, for the lines named in errors.

    Raises:
        TraceError: torch.export cannot take the model, it is bound to one batch size, or it does what a stage cannot.
    """
    batch_size = max(2, batch_size)
    inputs = ModelInputs.of(example(batch_size))
    dynamic = _dynamic_dims(inputs, ModelInputs.of(example(batch_size + 1)), batch_size)
    was_training = model.training

    def read(mode: bool, *, functional: bool) -> Traced:
        program, calls = _export(model.train(mode), inputs, dynamic, path, functional=functional)
        return GraphReader(model, program, calls, functional=functional).read()

    try:
        try:
            training, evaluation = (read(mode, functional=False) for mode in (True, False))
        except PartialWriteError:
            training, evaluation = (read(mode, functional=True) for mode in (True, False))
    finally:
        model.train(was_training)
    operators = tuple(_by_mode(training.operators, evaluation.operators))
    return replace(training, operators=operators, arguments=inputs.signature)


def _dynamic_dims(inputs: ModelInputs, larger: ModelInputs, size: int) -> ShapesCollection:
    """For each input the dimensions that grow with the minibatch, from inputs of `size` and of `size + 1` samples."""
    batch = torch.export.Dim("batch", min=2, max=2**20)
    dynamic = ShapesCollection()  # type: ignore[no-untyped-call]
    if inputs.signature != larger.signature or len(inputs.tensors) != len(larger.tensors):
        what = f"the inputs of {size} and of {size + 1} samples are not the same arguments of the model"
        raise TraceError(what, "let example_inputs differ in the minibatch's size alone")
    for a, b in zip(inputs.tensors, larger.tensors, strict=True):
        growing = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
        if a.dim() != b.dim() or any(a.shape[d] * (size + 1) != b.shape[d] * size for d in growing):
            raise TraceError(
                f"the inputs of {size} and of {size + 1} samples have shapes {list(a.shape)} and {list(b.shape)}: more "
                "than the minibatch's size changes",
                "pad to a fixed length",
            )
        dynamic[a] = {d: batch if a.shape[d] == size else (a.shape[d] // size) * batch for d in growing}
    if not any(dynamic[tensor] for tensor in inputs.tensors):
        shapes = [tuple(t.shape) for t in inputs.tensors]
        raise TraceError(f"example_inputs gives shapes {shapes} whatever the batch size", "let it use its argument")
    return dynamic


def _export(
    model: nn.Module, inputs: ModelInputs, dynamic: ShapesCollection, path: Path, *, functional: bool
) -> tuple[torch.export.ExportedProgram, list[LeafCall]]:
    """Export the model; `functional`: with every write in place turned into an operator that returns a new tensor."""
    try:
        with _opaque_leaves(model), _without_data_dependent_checks(), warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            with _named_arguments(model, inputs), _known_outputs(model), _EvenChunks(), symbolic_len(model):
                shapes = dynamic.dynamic_shapes(model, inputs.args, inputs.kwargs)  # type: ignore[no-untyped-call]
                program = torch.export.export(model, inputs.args, inputs.kwargs, strict=False, dynamic_shapes=shapes)
            if functional:
                for call in _leaf_calls:
                    call.is_recorded = True
                program = program.run_decompositions({})
        return program, list(_leaf_calls)
    except TraceError:
        raise
    except Exception as error:
        raise _explained(error, model, inputs, path) from error


@contextmanager
def _named_arguments(model: nn.Module, inputs: ModelInputs) -> Iterator[None]:
    """Let `forward(**batch)` have a signature with the names in `batch`, without which torch.export misses some."""
    forward, signature = model.forward, inspect.signature(model.forward)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    others = inputs.kwargs.keys() - {p.name for p in parameters}
    if len(parameters) == len(signature.parameters) or not others:
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(others)]
    call.__signature__ = signature.replace(parameters=parameters + named)  # type: ignore[attr-defined]
    with patch.object(model, "forward", call):
        yield


class _EvenChunks(TorchFunctionMode):
    """Divides what holds k minibatches into parts without asking how many there are, which torch.export cannot tell:
    `net(torch.cat([x1, x2])).chunk(2)`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(value for key, value in (kwargs or {}).items() if key != "dim")]
        if func in _DIVIDING and len(given) > 1 and not isinstance(given[1], (list, tuple)):
            tensor, number, *rest = given
            dim = rest[0] if rest else (kwargs or {}).get("dim", 0)
            if sizes := _even_sizes(tensor.shape[dim], number, is_count=func in _DIVIDING[:2]):
                return tensor.split(sizes, dim)
        return func(*args, **(kwargs or {}))


_DIVIDING = (torch.chunk, Tensor.chunk, torch.split, Tensor.split)


def _even_sizes(whole: Any, number: Any, *, is_count: bool) -> list[Any] | None:
    """The sizes of equal parts, at least two, of a dimension that grows with the minibatch; None for other divisions.

    Args:
        number: of the parts; or else the size of each.
    """
    if not isinstance(whole, torch.SymInt):
        return None
    first, *others = sorted(whole.node.expr.free_symbols, key=str)
    for symbol in others:  # the minibatch's size in another input
        whole.node.shape_env.evaluate_expr(sympy.Eq(first, symbol))
    quotient = whole.node.expr / (number.node.expr if isinstance(number, torch.SymInt) else number)
    count, size = (number, whole // number) if is_count else (quotient, number)
    is_even = quotient.is_integer if is_count else quotient.is_Integer
    return [size] * int(count) if is_even and count > 1 else None


@contextmanager
def _known_outputs(model: nn.Module) -> Iterator[None]:
    """Let torch.export see into what the model returns; raises TraceError where that holds more than it can see."""

    def check(module: nn.Module, arguments: Any, output: Any) -> None:
        register_containers(output)
        for name, leaf in named_leaves(output, "output"):
            if not isinstance(leaf, (Tensor, torch.SymInt, str, *CONSTANTS)):
                what = f"the model returns {name}, which is {type(leaf).__name__}"
                raise TraceError(what, "return tensors and numbers, in tuples, dicts or dataclasses")

    hook = model.register_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _explained(error: Exception, model: nn.Module, inputs: ModelInputs, path: Path) -> TraceError:
    """Say what torch.export's error means: the model itself fails, knows one batch size only, or cannot be traced."""
    try:
        with torch.no_grad():
            inputs.call(model)
    except Exception as failure:
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs.tensors)
        what = f"the model fails on inputs of shape {shapes}: {type(failure).__name__}: {failure}"
        return TraceError(f"{user_line(failure, path)}{what}", "mend the model or example_inputs")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    specialized = next((line for line in lines if "specialized" in line), "")
    if specialized or lines[0].startswith("Constraints violated"):
        return TraceError(
            f"{path.name}: the model works for one minibatch size only: {specialized or lines[-1]}",
            "use x.shape[0] or -1 for the batch dimension, and keep no state between minibatches",
        )
    return TraceError(
        f"{user_line(error, path)}torch.export cannot trace this model: {type(error).__name__}: {lines[0]}",
        "keep Python branches independent of tensor values (torch.where), and packed sequences out of forward",
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


def _by_mode(training: Sequence[Operator], evaluation: Sequence[Operator]) -> Iterator[Operator]:
    """Yield the operators in training mode, with ByMode where a constant is another one in evaluation mode."""
    for op, evaluated in zip_longest(training, evaluation):
        if op is None or evaluated is None or (op.name, op.target) != (evaluated.name, evaluated.target):
            single = op or evaluated
            what = f"{single.op} in module {single.module!r} runs in training or in evaluation mode only"
            remedy = "make both modes run the same operators; only their arguments may depend on self.training"
            raise TraceError(what, remedy, location=single.location)
        arguments, spec = _flat_arguments(op)
        evaluated_arguments, evaluated_spec = _flat_arguments(evaluated)
        if spec != evaluated_spec:
            what = f"{op.op} in module {op.module!r} takes other arguments in evaluation than in training mode"
            remedy = "only the values of numbers and flags may depend on self.training"
            raise TraceError(what, remedy, location=op.location)
        merged = [a if _is_same(a, b) else ByMode(a, b) for a, b in zip(arguments, evaluated_arguments, strict=True)]
        args, kwargs = pytree.tree_unflatten(merged, spec)
        yield replace(op, args=args, kwargs=kwargs)


def _flat_arguments(operator: Operator) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten((operator.args, operator.kwargs), is_leaf=lambda x: x is None)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b or a != a)  # NaN equals itself here
