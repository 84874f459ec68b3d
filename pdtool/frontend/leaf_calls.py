"""Make each call of a leaf module, an opaque module or an autograd.Function a single operator for torch.export.

During the export, a leaf module's forward runs on meta tensors. An opaque module is one that torch.export cannot see
through, for example because it loops over the values of tensors. It runs before the export on real minibatches of two
sizes. Its outputs get the shapes seen then, as a function of the minibatch's size.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree

from pdtool.errors import TraceError
from pdtool.frontend.leaf_modules import is_leaf
from pdtool.frontend.model_io import ModelInputs, register_containers, tensors_in
from pdtool.frontend.user_modules import files_and_classes, variables

_LIBRARY = torch.library.Library("pdtool", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("leaf(int number, Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]

_CHANGEABLE = (dict, OrderedDict, defaultdict, list, set, deque)  # containers without attributes of their own
_CACHED = type(functools.cache(int))
_MAX_DEPTH = 4
OWN_MODULE = "move that code into a module of its own: pdtool then keeps that module in one piece"  # a remedy
RECORDED_SIZES = (2, 3)  # of the minibatches that show the shapes of opaque modules' outputs


@dataclass(frozen=True)
class RecordedCall:
    """A call of an opaque module on real tensors, in a minibatch of one of RECORDED_SIZES.

    Attributes:
        inputs: the shapes of its tensors.
        outputs: tensors like those that it returns, without values.
        result: its return value as a pytree of indices into its outputs, None elsewhere.
    """

    path: str
    inputs: list[torch.Size]
    outputs: list[Tensor]
    result: Any


@dataclass
class LeafCall:
    """One call of a leaf module, an opaque module or an autograd.Function, made while torch.export runs.

    Attributes:
        path: path of the module; "" for a function.
        forward: the module's own forward, which is replaced meanwhile; or the function's `apply`.
        arguments: positional ones, and those by name.
        recorded: for an opaque module, its calls in minibatches of each of RECORDED_SIZES.
        function: the user's autograd.Function.
        result: the module's return value as a pytree of indices into `outputs`, None elsewhere.
        outputs: tensors on the meta device; empty until the module has run.
    """

    path: str
    forward: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    recorded: tuple[RecordedCall, RecordedCall] | None = None
    function: Any = None
    result: Any = None
    outputs: list[Tensor] = field(default_factory=list)

    def as_operator(self) -> Any:
        """Call `pdtool::leaf` instead, keep the call in `calls`, and return its result."""
        calls.append(self)
        outputs = torch.ops.pdtool.leaf(len(calls) - 1, tensors_in(self.arguments))
        return pytree.tree_map_only(int, outputs.__getitem__, self.result)


calls: list[LeafCall] = []  # of the export that is running; `number` below is an index into it
running: list[str] = []  # path of the leaf module whose own forward runs now, as one operator


def _leaf_meta(number: int, tensors: list[Tensor]) -> list[Tensor]:
    """Run the leaf module's own forward on meta tensors, and record its result for when the graph is traced again."""
    call = calls[number]
    if call.recorded:
        call.result = call.recorded[0].result
        return _outputs_at(*call.recorded, tensors)
    if call.outputs:
        return [torch.empty_like(output) for output in call.outputs]
    remaining = iter(tensors)
    args, kwargs = pytree.tree_map_only(Tensor, lambda _: next(remaining), call.arguments)
    if call.function is None:
        running.append(call.path)
    try:
        result = call.forward(*args, **kwargs)
    except Exception:
        with torch.device("meta"):  # also for tensors that it makes
            result = call.forward(*args, **kwargs)
    finally:
        running.clear()
    call.result, outputs = _indexed(result)
    call.outputs = [o.clone() if any(o is t for t in tensors) else o for o in outputs]
    return call.outputs


torch.library.impl(_LIBRARY, "leaf", "Meta")(_leaf_meta)


def _outputs_at(small: RecordedCall, large: RecordedCall, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return an opaque module's outputs on the meta device for its inputs there, whose batch size may be a symbol.

    A dimension of size m with 2 samples and n with 3 has m + (n - m) * k with 2 + k samples.
    """
    shapes = zip([tensor.shape for tensor in tensors], small.inputs, large.inputs, strict=True)
    dims = [dim for each in shapes for dim in zip(*each, strict=True)]
    more_samples: Any = next(((size - m) // (n - m) for size, m, n in dims if m != n), None)  # k
    outputs = []
    for one, other in zip(small.outputs, large.outputs, strict=True):
        if more_samples is None and one.shape != other.shape:
            what = f"{small.path} returns a tensor with a batch dimension, but none of its inputs has one"
            raise TraceError(what, "pass it an input with a batch dimension", module=small.path)
        sizes = [m + (n - m) * more_samples if m != n else m for m, n in zip(one.shape, other.shape, strict=True)]
        outputs.append(torch.empty(sizes, dtype=one.dtype, device="meta"))
    return outputs


@contextmanager
def single_operators(model: nn.Module, recorded: Sequence[tuple[RecordedCall, RecordedCall]] = ()) -> Iterator[None]:
    """Make each call of a leaf module, or of a module with recorded calls, one `pdtool::leaf` operator.

    The calls are kept in `calls`.
    """
    opaque = {call.path for call, _ in recorded}
    remaining = iter(recorded)

    def call(path: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return LeafCall(path, forward, (args, kwargs), next(remaining) if path in opaque else None).as_operator()

    modules, inside = model.named_modules(), tuple(f"{path}." for path in opaque)
    leaves = [path for path, module in modules if path and is_leaf(module) and not f"{path}.".startswith(inside)]
    calls.clear()
    with _forwards_replaced(model, [*leaves, *opaque], call):
        yield


def record_calls(
    model: nn.Module, paths: Collection[str], example: Callable[[int], ModelInputs]
) -> list[tuple[RecordedCall, RecordedCall]]:
    """Run the model on minibatches of two sizes, and return the calls of some of its modules, in order, in both.

    Raises:
        TraceError: a call takes or returns something that an operator cannot, or the calls depend on the size.
    """
    if not paths:
        return []
    minibatches = [example(size) for size in RECORDED_SIZES]
    with unchanged(model):
        small, large = (_recorded(model, paths, minibatch) for minibatch in minibatches)
    if [call.path for call in small] != [call.path for call in large]:
        what = "the minibatch size decides which modules forward calls"
        raise TraceError(what, "call the same modules for each size")
    for one, other in zip(small, large, strict=True):
        if len(one.outputs) != len(other.outputs):
            counts = f"{len(one.outputs)} tensors for {RECORDED_SIZES[0]} samples and {len(other.outputs)} for "
            what = f"{one.path} returns {counts}{RECORDED_SIZES[1]}"
            remedy = "let it stack them into one tensor with a batch dimension"
            raise TraceError(what, remedy, module=one.path.rpartition(".")[0])
    return list(zip(small, large, strict=True))


def _recorded(model: nn.Module, paths: Collection[str], minibatch: ModelInputs) -> list[RecordedCall]:
    recorded: list[RecordedCall] = []

    def call(path: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, inputs)):
            what = f"forward calls {path} inside a transform of torch.func"
            raise TraceError(what, "move the transform into a module of its own", module=path.rpartition(".")[0])
        before = [t.detach().clone() for t in inputs]
        versions = [t._version for t in inputs]
        result = forward(*args, **kwargs)
        register_containers(result)
        if versions != [t._version for t in inputs] or not all(map(_is_same, inputs, before)):  # by `.data`
            what = f"{path} overwrites its input"
            raise TraceError(what, "work on a copy", module=path.rpartition(".")[0])
        if others := [o for o in pytree.tree_leaves(result) if o is not None and not isinstance(o, Tensor)]:
            what = f"{path} returns {type(others[0]).__name__} {others[0]!r:.80}, which is not a tensor"
            raise TraceError(what, "return tensors", module=path.rpartition(".")[0])
        structure, outputs = _indexed(result)
        like = [torch.empty(o.shape, dtype=o.dtype, device="meta", requires_grad=_has_gradient(o)) for o in outputs]
        recorded.append(RecordedCall(path, [t.shape for t in inputs], like, structure))
        return result

    with _forwards_replaced(model, paths, call):
        minibatch.call(model)
    return recorded


def _has_gradient(output: Tensor) -> bool:
    """Whether a stage's call has a gradient for this output; without one, the caller is in `with torch.no_grad()`."""
    return output.requires_grad or (not torch.is_grad_enabled() and (output.is_floating_point() or output.is_complex()))


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; an estimate's tensors have none."""
    return isinstance(tensor, FakeTensor) or torch.equal(tensor.nan_to_num(), other.nan_to_num())


def _indexed(result: Any) -> tuple[Any, list[Tensor]]:
    """Return a module's result as a pytree of indices into its tensors, and these tensors."""
    indices = count()
    return pytree.tree_map(lambda o: next(indices) if isinstance(o, Tensor) else None, result), tensors_in(result)


@contextmanager
def _forwards_replaced(model: nn.Module, paths: Collection[str], call: Callable[..., Any]) -> Iterator[None]:
    """Replace calls of the modules at `paths` by `call`, with the path and the module's own forward before the
    arguments. In torch.func.functional_call they have other parameters, so there they stay as they are."""
    has_other_parameters = False
    functional_call = stateless._functional_call

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_other_parameters
        before, has_other_parameters = has_other_parameters, True
        try:
            return functional_call(*args, **kwargs)
        finally:
            has_other_parameters = before

    def replaced(path: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if has_other_parameters else call(path, forward, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(stateless, "_functional_call", called))
        for path in paths:
            module = model.get_submodule(path)
            stack.enter_context(patch.object(module, "forward", functools.partial(replaced, path, module.forward)))
        yield


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model's attributes and the values of its buffers, and torch's random state."""
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
    """Restore the attributes of the model's modules, classes and files, and drop what forward makes in its first call,
    such as caches.

    Raises:
        TraceError: forward makes a parameter or a module.
    """
    parts = _parts(model)
    shared = [(owner, variables(owner)) for owner in files_and_classes([type(module) for module in model.modules()])]
    kinds = [SimpleNamespace, *(owner for owner, _ in shared)]
    containers: dict[int, Any] = {}
    for module in model.modules():
        _collect_containers(vars(module), _MAX_DEPTH, containers)
    for value in (value for _, held in shared for value in held.values()):
        _collect_containers(value, _MAX_DEPTH, containers, kinds)
    with _contents_restored(containers.values()), _variables_restored(shared):
        try:
            yield
        finally:
            for name, part in _parts(model).items():
                if name not in parts:
                    kind = "parameter" if isinstance(part, Tensor) else type(part).__name__
                    what = f"forward makes {name}, a {kind}, in its first call, so optimizer() does not see it"
                    remedy = "make it in __init__, or call the model once in model() before you return it"
                    raise TraceError(what, remedy, module="")


@contextmanager
def _contents_restored(containers: Iterable[Any]) -> Iterator[None]:
    """Restore what these containers hold."""
    contents = [(container, copy(container)) for container in containers]
    try:
        yield
    finally:
        for container, content in contents:
            if not _holds(container, content):  # else leave it alone: other threads may use it
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def _holds(container: Any, content: Any) -> bool:
    """Whether two containers hold the same objects, in the same order."""
    if isinstance(container, dict) and not all(map(operator.is_, container.values(), content.values())):
        return False
    return len(container) == len(content) and all(map(operator.is_, container, content))


@contextmanager
def _variables_restored(shared: Sequence[tuple[ModuleType | type, Mapping[str, Any]]]) -> Iterator[None]:
    """Restore the variables of files and classes, and meanwhile let cached functions compute their tensors again."""
    caches: dict[int, _Cached] = {}
    for owner, values in shared:
        for name, function in values.items():
            if isinstance(function, _CACHED):
                with suppress(AttributeError, TypeError):  # a class that cannot be changed
                    setattr(owner, name, caches.setdefault(id(function), _Cached(function)))
    try:
        yield
    finally:
        for cached in caches.values():
            cached.forget()
        for owner, values in shared:
            present = variables(owner)
            for name in present.keys() - values.keys():
                delattr(owner, name)
            for name in (name for name, value in values.items() if present.get(name) is not value):
                setattr(owner, name, values[name])


class _Cached:
    """Takes the place of a function under functools.cache while a model is traced.

    A table that the function made before is computed again, because it would be a constant in the trace. What else it
    has returned, such as an object with settings, stays the same.
    """

    def __init__(self, function: Any) -> None:
        self._function, self._tables, self._has_traced = function, functools.cache(function.__wrapped__), False

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        misses = self._function.cache_info().misses
        result = self._function(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            return result
        self._has_traced |= self._function.cache_info().misses > misses
        return self._tables(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)  # cache_clear and so on

    def forget(self) -> None:
        """Drop the tensors of the trace."""
        if self._has_traced:
            self._function.cache_clear()


def _parts(model: nn.Module) -> dict[str, Any]:
    return {**dict(model.named_modules()), **dict(model.named_parameters())}


def _collect_containers(value: Any, depth: int, found: dict[int, Any], kinds: Sequence[object] | None = None) -> None:
    """Add to `found`, by id, the mutable containers in a value and in plain objects there.

    Args:
        kinds: classes of the objects to look into; None: all.
    """
    if type(value) not in _CHANGEABLE and isinstance(getattr(value, "__dict__", None), dict):  # an OrderedDict has both
        is_code = isinstance(value, (type, Tensor, nn.Module, ModuleType)) or callable(value)
        if is_code or not (kinds is None or any(type(value) is kind for kind in kinds)):
            return
        value = vars(value)
    if type(value) in _CHANGEABLE and id(value) not in found:
        found[id(value)] = value
    elif type(value) is not tuple:
        return
    for held in (value.values() if isinstance(value, dict) else value) if depth else ():
        _collect_containers(held, depth - 1, found, kinds)
