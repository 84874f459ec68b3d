"""Run torch.export on a model as PyTorch's users write it.

Each context manager closes one gap of torch.export: code that it cannot trace, or traces wrongly.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.export import ShapesCollection
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import transformer
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pdtool.errors import TraceError
from pdtool.frontend.leaf_calls import attributes_restored, calls
from pdtool.frontend.leaf_modules import is_leaf
from pdtool.frontend.model_io import LEAVES, ModelInputs, named_leaves, register_containers
from pdtool.frontend.opaque_modules import caught_errors_raised, untraceable_refused
from pdtool.frontend.user_code import defaults_kept, description

_DIVIDING = (torch.chunk, Tensor.chunk, torch.split, Tensor.split)


def exported(
    model: nn.Module, inputs: ModelInputs, dynamic: ShapesCollection, *, functional: bool
) -> torch.export.ExportedProgram:
    """Export the model in its present mode.

    Args:
        dynamic: the dimensions that grow with the minibatch.
        functional: turn every write in place into an operator that returns a new tensor.

    Raises:
        TraceError: the model takes, returns or calls something that operators cannot express.
        Exception: any error of torch.export or the model.
    """
    with _traceable():
        with _called_anew(model, inputs):
            shapes = dynamic.dynamic_shapes(model, inputs.args, inputs.kwargs)  # type: ignore[no-untyped-call]
            program = torch.export.export(model, inputs.args, inputs.kwargs, strict=False, dynamic_shapes=shapes)
        if functional:
            _keep_no_grad(program)
            program = program.run_decompositions({})
    return program


def keeps_no_fake_tensor(model: nn.Module, inputs: ModelInputs) -> bool:
    """Whether the model can be called again after an export. It cannot if it kept a fake tensor of the export where
    nothing restores it, as in an object of a class of its own."""
    mode = detect_fake_mode([*inputs.tensors, *model.parameters()])
    if not mode:
        mode = FakeTensorMode()
        mode.cache_enabled = False  # it would not look whether a tensor is of this mode

    def fake(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with suppress(Exception), _traceable(), _called_anew(model, inputs), mode:
        args, kwargs, state = pytree.tree_map_only(Tensor, fake, (inputs.args, inputs.kwargs, state))
        with _reparametrize_module(model, state, tie_weights=True):
            model(*args, **kwargs)
        return True
    return False


@contextmanager
def _traceable() -> Iterator[None]:
    """Close the gaps of torch.export that concern any code."""
    with (
        defaults_kept("forward"),
        _quiet(),
        untraceable_refused(),
        caught_errors_raised(),
        # Checks of values that change no result: whether a mask is causal, and whether a distribution's are valid.
        patch.object(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal)),
        patch.object(Distribution, "_validate_args", False),
    ):
        yield


@contextmanager
def _called_anew(model: nn.Module, inputs: ModelInputs) -> Iterator[None]:
    """Close the gaps of torch.export that concern a call of the model."""
    with (
        _caches_made_anew(model),
        _named_arguments(model, inputs),
        _known_outputs(model),
        _assigned_buffers(model),
        _EvenChunks(),
        symbolic_len(model),
    ):
        yield


def _keep_no_grad(program: torch.export.ExportedProgram) -> None:
    """Detach what regions of no_grad take: run_decompositions dissolves the regions, and gradients would flow."""
    enters = torch.ops.higher_order.wrap_with_set_grad_enabled
    for module in [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]:
        for region in module.graph.find_nodes(op="call_function", target=enters):
            is_enabled, body = region.args[0], getattr(module, region.args[1].target)
            parts = body.graph.find_nodes(op="call_function", target=operator.getitem)  # of what leaf modules return
            for taken in () if is_enabled else (*body.graph.find_nodes(op="placeholder"), *parts):
                if taken.users and isinstance(taken.meta.get("val"), Tensor):
                    _detach(body.graph, taken)


def _detach(graph: torch.fx.Graph, taken: torch.fx.Node) -> None:
    with graph.inserting_before(next(node for node in graph.nodes if node in taken.users)):
        detached = graph.call_function(torch.ops.aten.detach.default, (taken,))
    detached.meta = dict(taken.meta)
    taken.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)


def forget_last_export() -> None:
    """Release the graph of the last export; `calls` and a table of torch would keep it until the next one."""
    calls.clear()
    getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()


@contextmanager
def symbolic_len(model: nn.Module) -> Iterator[None]:
    """Let `len(x)` of a tensor be x.shape[0], by a `len` of our own in the files that define the model's modules.

    Python's own `len` returns a plain integer, which would bind the model to one minibatch size.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    with ExitStack() as stack:
        for name in sorted({kind.__module__ for kind in kinds}):
            if name in sys.modules and name.partition(".")[0] != "torch":
                stack.enter_context(patch.object(sys.modules[name], "len", _len, create=True))
        yield


def _len(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)


@contextmanager
def _caches_made_anew(model: nn.Module) -> Iterator[None]:
    """Trace what forward creates in its first call and caches as if each call created it; forget it afterwards.

    Buffers would become inputs of the graph, so make them plain attributes meanwhile.
    """
    register = nn.Module.register_buffer

    def register_as_attribute(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name in module._buffers:
            register(module, name, tensor, persistent)
        else:
            setattr(module, name, tensor)

    with attributes_restored(model), patch.object(nn.Module, "register_buffer", register_as_attribute):
        for module in model.modules():
            empty = [name for name, buffer in module._buffers.items() if buffer is None and not is_leaf(module)]
            for name in empty:
                del module._buffers[name]
                setattr(module, name, None)
        yield


@contextmanager
def _named_arguments(model: nn.Module, inputs: ModelInputs) -> Iterator[None]:
    """Give `forward(**batch)` a signature with the names in `batch`; without it torch.export misses some."""
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
    """Divides a tensor of k minibatches into parts without asking for its size, which torch.export does not know:
    `net(torch.cat([x1, x2])).chunk(2)`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(value for key, value in (kwargs or {}).items() if key != "dim")]
        if func in _DIVIDING and len(given) > 1 and not isinstance(given[1], (list, tuple)):
            tensor, number, *rest = given
            dim = rest[0] if rest else (kwargs or {}).get("dim", 0)
            if sizes := _even_sizes(tensor.shape[dim], number, is_count=func in _DIVIDING[:2]):
                return tensor.split(sizes, dim)
        return func(*args, **(kwargs or {}))


def _even_sizes(whole: Any, number: Any, *, is_count: bool) -> list[Any] | None:
    """The sizes of equal parts, at least two, of a dimension that grows with the minibatch; None for other divisions.

    Args:
        number: number of parts if `is_count`, else the size of each.
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
    """Let torch.export see into the model's output; raises TraceError if that holds something it cannot see."""

    def check(module: nn.Module, arguments: Any, output: Any) -> None:
        register_containers(output)
        for name, leaf in named_leaves(output, "output"):
            if not isinstance(leaf, (torch.SymInt, str, *LEAVES)):
                what = f"the model returns {name}, which is {type(leaf).__name__}"
                raise TraceError(what, "return tensors and numbers, in tuples, dicts or dataclasses")

    with model.register_forward_hook(check):
        yield


@contextmanager
def _assigned_buffers(model: nn.Module) -> Iterator[None]:
    """Write forward's assignment to a buffer into that buffer; torch.export misses it in all modules but the model
    itself."""
    before: dict[tuple[nn.Module, str], Tensor] = {}

    def begin(module: nn.Module, arguments: Any) -> None:
        inner = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]  # which runs outside Python
        before.update({(m, name): b for m in inner for name, b in m._buffers.items() if b is not None})

    def end(module: nn.Module, arguments: Any, output: Any) -> None:
        for (owner, name), buffer in before.items():
            assigned = owner._buffers.get(name)
            if assigned is not None and assigned is not buffer:
                if (assigned.shape, assigned.dtype) != (buffer.shape, buffer.dtype):
                    kinds = " by ".join(map(description, (buffer, assigned)))
                    what = f"forward replaces the buffer {name}, {kinds}"
                    once = "if only the first call does it, call the model once in model() before you return it"
                    raise TraceError(what, f"keep its shape and dtype; or, {once}")
                buffer.copy_(assigned)
                owner._buffers[name] = buffer

    with model.register_forward_pre_hook(begin), model.register_forward_hook(end):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings, the log and graph dumps out of the terminal. Our own error says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
