"""Make each whole call of a leaf module, an opaque one, or an autograd.Function a single operator for torch.export.

The forward of a leaf module runs on meta tensors meanwhile. That of an opaque module, which torch.export cannot see
through (it loops over the values of tensors, say), ran before that on real minibatches of two sizes; its outputs have
the shapes that they had then, as a function of the minibatch's size.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pdtool.errors import TraceError
from pdtool.frontend.leaf_modules import is_leaf
from pdtool.frontend.model_io import ModelInputs, register_containers

_LIBRARY = torch.library.Library("pdtool", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("leaf(int number, Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]

_CHANGEABLE = (dict, OrderedDict, defaultdict, list, set, deque)  # containers, with nothing but what is in them
_MAX_DEPTH = 4


@dataclass(frozen=True)
class LinearDim:
    """A dimension of a tensor: `offset + slope * batch`."""

    offset: int
    slope: int

    @classmethod
    def of(cls, small: int, large: int, sizes: tuple[int, int]) -> LinearDim:
        """Return the dimension that is `small` and `large` in minibatches of these two sizes."""
        slope = (large - small) // (sizes[1] - sizes[0])
        return cls(small - slope * sizes[0], slope)

    def at(self, batch: Any) -> Any:
        """Return its size for a minibatch of `batch` samples, which may be a symbol."""
        return self.offset + self.slope * batch if self.slope else self.offset


@dataclass(frozen=True)
class RecordedCall:
    """What a call of an opaque module took and returned.

    Attributes:
        inputs, outputs: the dimensions of its tensors.
        dtypes, differentiable: of its outputs; whether a gradient flows back through each of them.
        result: what it returned: a pytree of indices into its outputs, None elsewhere.
    """

    path: str
    inputs: tuple[tuple[LinearDim, ...], ...]
    outputs: tuple[tuple[LinearDim, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    result: Any

    def meta_outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return its outputs on the meta device, from its inputs there, whose batch size may be a symbol."""
        batch: Any = None
        for tensor, dims in zip(tensors, self.inputs, strict=True):
            for size, dim in zip(tensor.shape, dims, strict=True):
                if dim.slope and batch is None:
                    batch = (size - dim.offset) // dim.slope if dim != LinearDim(0, 1) else size
        if batch is None and any(dim.slope for dims in self.outputs for dim in dims):
            raise TraceError(f"{self.path} returns a minibatch, and takes none", module=self.path)
        return [
            torch.empty([dim.at(batch) for dim in dims], dtype=dtype, device="meta")
            for dims, dtype in zip(self.outputs, self.dtypes, strict=True)
        ]


@dataclass
class LeafCall:
    """One call of a leaf module, an opaque one, or an autograd.Function, made while torch.export runs.

    Attributes:
        path: of the module; "" for a function.
        forward: the module's own, which is replaced meanwhile; or the function's `apply`.
        arguments: positional and keyword arguments as a flat list; `spec` is their pytree.
        recorded: of an opaque module.
        function: the user's autograd.Function.
        result: what the module returned: a pytree of indices into its tensors, None elsewhere.
        outputs: these tensors, on the meta device.
        is_recorded: whether they are those of this export, and the module need not be run again.
    """

    path: str
    forward: Callable[..., Any]
    arguments: list[Any]
    spec: pytree.TreeSpec
    recorded: RecordedCall | None = None
    function: Any = None
    result: Any = None
    outputs: list[Tensor] = field(default_factory=list)
    is_recorded: bool = False


calls: list[LeafCall] = []  # of the export that is running; `number` below is an index into it


def _leaf_meta(number: int, tensors: list[Tensor]) -> list[Tensor]:
    """Run the leaf module's own forward on meta tensors, and record what it returns, for when the graph is traced
    again."""
    call = calls[number]
    if call.recorded:
        call.result = call.recorded.result
        return call.recorded.meta_outputs(tensors)
    if call.is_recorded:
        return [torch.empty_like(output) for output in call.outputs]
    remaining = iter(tensors)
    flat = [next(remaining) if isinstance(a, Tensor) else a for a in call.arguments]
    args, kwargs = pytree.tree_unflatten(flat, call.spec)
    returned, spec = pytree.tree_flatten(call.forward(*args, **kwargs))
    call.result, outputs = _indexed(returned, spec)
    call.outputs = [o.clone() if any(o is t for t in tensors) else o for o in outputs]
    return call.outputs


torch.library.impl(_LIBRARY, "leaf", "Meta")(_leaf_meta)


@contextmanager
def single_operators(model: nn.Module, recorded: Sequence[RecordedCall] = ()) -> Iterator[None]:
    """Make each call of a leaf module, or of a module of which calls were recorded, one `pdtool::leaf` operator.

    The calls are kept in `calls`.
    """
    opaque = {call.path for call in recorded}
    remaining = iter(recorded)

    def replaced(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            flat, spec = pytree.tree_flatten((args, kwargs))
            return _as_operator(LeafCall(path, forward, flat, spec, next(remaining) if path in opaque else None))

        return call

    leaves = [path for path, module in model.named_modules() if path and is_leaf(module) and not _is_in(path, opaque)]
    calls.clear()
    with _forwards_replaced(model, [*leaves, *opaque], replaced):
        yield


def call_function(function: Any, apply: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Make a call of an autograd.Function one `pdtool::leaf` operator, kept in `calls`; return what it returns."""
    flat, spec = pytree.tree_flatten((tuple(args), {}))
    return _as_operator(LeafCall("", apply, flat, spec, function=function))


def _as_operator(call: LeafCall) -> Any:
    calls.append(call)
    outputs = torch.ops.pdtool.leaf(len(calls) - 1, [a for a in call.arguments if isinstance(a, Tensor)])
    indices, spec = pytree.tree_flatten(call.result, is_leaf=lambda x: x is None)
    return pytree.tree_unflatten([None if i is None else outputs[i] for i in indices], spec)


def record_calls(
    model: nn.Module, paths: Collection[str], minibatches: Sequence[ModelInputs], sizes: tuple[int, int]
) -> list[RecordedCall]:
    """Run the model on minibatches of two sizes, and return the calls of some of its modules, in order.

    Raises:
        TraceError: a call takes or returns what an operator cannot, or the sizes make other calls.
    """
    if not paths:
        return []
    with unchanged(model):
        small, large = (_observed(model, paths, minibatch) for minibatch in minibatches)
    if [call.path for call in small] != [call.path for call in large]:
        raise TraceError("the size of the minibatch decides which modules are called", "call the same in each")
    return [_recorded(a, b, sizes) for a, b in zip(small, large, strict=True)]


@dataclass(frozen=True)
class _Observed:
    """A call of an opaque module on real tensors."""

    path: str
    inputs: list[torch.Size]
    outputs: list[Tensor]
    result: Any


def _observed(model: nn.Module, paths: Collection[str], minibatch: ModelInputs) -> list[_Observed]:
    observed: list[_Observed] = []

    def replaced(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
            before = [t.detach().clone() for t in inputs]
            versions = [t._version for t in inputs]
            result = forward(*args, **kwargs)
            register_containers(result)
            returned, spec = pytree.tree_flatten(result)
            if versions != [t._version for t in inputs] or not all(map(_is_same, inputs, before)):  # by `.data`
                what = f"{path} writes into its input in place"
                raise TraceError(what, "let it work on a copy", module=_parent(path))
            if others := [o for o in returned if o is not None and not isinstance(o, Tensor)]:
                what = f"{path} returns {type(others[0]).__name__} {others[0]!r:.80}, which is no tensor"
                raise TraceError(what, "let it return tensors", module=_parent(path))
            structure, outputs = _indexed(returned, spec)
            observed.append(_Observed(path, [t.shape for t in inputs], outputs, structure))
            return result

        return call

    with _forwards_replaced(model, paths, replaced):
        minibatch.call(model)
    return observed


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; those of an estimate have none."""
    return isinstance(tensor, FakeTensor) or torch.equal(tensor.nan_to_num(), other.nan_to_num())


def _recorded(small: _Observed, large: _Observed, sizes: tuple[int, int]) -> RecordedCall:
    def dims(a: torch.Size, b: torch.Size) -> tuple[LinearDim, ...]:
        return tuple(LinearDim.of(m, n, sizes) for m, n in zip(a, b, strict=True))

    return RecordedCall(
        path=small.path,
        inputs=tuple(dims(a, b) for a, b in zip(small.inputs, large.inputs, strict=True)),
        outputs=tuple(dims(a.shape, b.shape) for a, b in zip(small.outputs, large.outputs, strict=True)),
        dtypes=tuple(output.dtype for output in small.outputs),
        differentiable=tuple(output.requires_grad for output in small.outputs),
        result=small.result,
    )


def _indexed(returned: list[Any], spec: pytree.TreeSpec) -> tuple[Any, list[Tensor]]:
    """What a module returned as a pytree of indices into its tensors, and these tensors."""
    outputs = [o for o in returned if isinstance(o, Tensor)]
    indices = iter(range(len(outputs)))
    return pytree.tree_unflatten([next(indices) if isinstance(o, Tensor) else None for o in returned], spec), outputs


@contextmanager
def _forwards_replaced(
    model: nn.Module, paths: Collection[str], replaced: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace the forward of the modules at `paths` by what `replaced` makes of path and forward."""
    with ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            stack.enter_context(patch.object(module, "forward", replaced(path, module.forward)))
        yield


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Give the model its attributes and the values of its buffers, and torch its random state, back as they were."""
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]), attributes_restored(model):
            yield
    finally:
        for buffer, value in values:
            with torch.no_grad():
                buffer.copy_(value)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Give the model back what its modules hold, without what forward makes in its first call, such as caches.

    Raises:
        TraceError: forward makes a parameter or a module.
    """
    parts = _parts(model)
    containers: dict[int, Any] = {}
    for module in model.modules():
        _collect_containers(vars(module), _MAX_DEPTH, containers)
    contents = {key: copy(container) for key, container in containers.items()}
    try:
        yield
    finally:
        made = {name: part for name, part in _parts(model).items() if name not in parts}
        for key, container in containers.items():
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(contents[key])
        for name, part in made.items():
            kind = "parameter" if isinstance(part, Tensor) else type(part).__name__
            what = f"forward makes {name}, a {kind}, in its first call, of which optimizer() is not told"
            remedy = "make it in __init__, or let model() call the model once before it returns it"
            raise TraceError(what, remedy, module="")


def _parts(model: nn.Module) -> dict[str, Any]:
    return {**dict(model.named_modules()), **dict(model.named_parameters())}


def _collect_containers(value: Any, depth: int, found: dict[int, Any]) -> None:
    """Add to `found`, by their ids, the containers that can be changed in what a module holds, and in plain objects."""
    if hasattr(value, "__dict__") and not isinstance(value, (type, Tensor, nn.Module)) and not callable(value):
        value = vars(value)
    if type(value) in _CHANGEABLE and id(value) not in found:
        found[id(value)] = value
    elif type(value) is not tuple:
        return
    for held in (value.values() if isinstance(value, dict) else value) if depth else ():
        _collect_containers(held, depth - 1, found)


def _is_in(path: str, parents: Collection[str]) -> bool:
    return any(path == parent or path.startswith(f"{parent}.") for parent in parents)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
