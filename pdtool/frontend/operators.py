"""Describe a traced model: a list of operators, each with the tensors that it takes and returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Arguments of ATen operators about memory and device, not about the result.
LAYOUT_ARGUMENTS = {"layout", "pin_memory", "cudnn_enable", "cudnn_enabled", "non_blocking"}
OWN_NODES = re.compile(r"(loss|target)(_[0-9]+)?")  # nodes of a profile that are not operators of the model
BATCH = sympy.Symbol("batch", integer=True, positive=True)


@dataclass(frozen=True)
class Size:
    """An integer that depends on the number of samples in a minibatch, as an expression of `batch`."""

    expression: sympy.Expr

    def __str__(self) -> str:
        return str(self.expression)

    def at(self, batch: int) -> int:
        """Return its value for a minibatch of `batch` samples."""
        return int(self.expression.subs(BATCH, batch))


@dataclass(frozen=True)
class ByMode:
    """An argument with one value in training and another in evaluation."""

    training: Any
    evaluation: Any


@dataclass(frozen=True)
class State:
    """A parameter or buffer of the model, or a large tensor in a plain attribute, used directly by an operator."""

    name: str


@dataclass(frozen=True)
class Value:
    """A tensor in the graph.

    Attributes:
        operator: name of the operator that computes it.
        index: which of the operator's outputs it is.
        shape: each dimension an int or a Size.
        differentiable: whether a gradient flows back through it.
    """

    operator: str
    index: int
    shape: tuple[int | Size, ...]
    dtype: torch.dtype
    differentiable: bool

    def meta(self, batch: int) -> Tensor:
        """Make a tensor without storage that has its shape for a minibatch of `batch` samples, and its type."""
        shape = [dim.at(batch) if isinstance(dim, Size) else dim for dim in self.shape]
        return torch.empty(shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Branch:
    """Operators that run in training, and those that run instead in evaluation.

    Attributes:
        training, evaluation: operators, in order.
        results: for each output, its tensor in training and in evaluation; None, which stands for zeros, in a mode that
            does not compute it.
    """

    training: tuple[Operator, ...]
    evaluation: tuple[Operator, ...]
    results: tuple[tuple[Value | None, Value | None], ...]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One node: a call of a leaf or opaque module, an ATen operator, a model input, or several of them by mode.

    Attributes:
        name: unique; the module's path for a leaf call, `PATH.OP` elsewhere.
        op: its kind: `Conv2d`, `add`, `input`.
        module: path of the leaf module, or of the module whose forward called the operator.
        target: the ATen overload; None for a leaf call or an input.
        args, kwargs: nested lists, tuples and dicts of Value, State, Size, ByMode and constants. An ATen operator has
            all its arguments in kwargs, under the names of its schema, defaults included.
        outputs: the tensors it returns.
        structure: its return value as a pytree of indices into `outputs`, None elsewhere.
        parameters, buffers: names of the model's state that it uses.
        location: `file.py:12` in the user's code.
        branch: operators that run in one mode only; this operator consists of them and its args are their inputs.
        function: the user's autograd.Function that it applies.
        opaque: whether it calls an opaque module, which the stage takes from the model.
        constant: computed from nothing but constants and unchanging buffers; repeated in each stage that needs it.
    """

    name: str
    op: str
    module: str
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Value, ...] = ()
    structure: Any = 0
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    location: str = ""
    branch: Branch | None = None
    function: Any = None
    opaque: bool = False
    constant: bool = False

    @property
    def is_module(self) -> bool:
        """Whether it calls a module."""
        return not (self.target or self.branch or self.function or self.is_input)

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the model."""
        return self.op == "input"

    @property
    def values(self) -> list[Value]:
        """The tensors it takes, in order."""
        return values_in((self.args, self.kwargs))

    @property
    def parts(self) -> tuple[Operator, ...]:
        """The operators of its branch, or itself."""
        return (*self.branch.training, *self.branch.evaluation) if self.branch else (self,)


@dataclass(frozen=True)
class Traced:
    """A model as a list of operators in execution order.

    Attributes:
        model: the model that was traced.
        operators: model inputs first.
        output: what the model returns, in containers of the model's own types: Value, State, Size and constants.
        together: groups of operators that must stand in one stage, since they share changing state.
        arguments: what it was called with; see ModelInputs.signature.
        opaque: path of an opaque module -> why it is opaque.
        changed_buffers: names of the buffers that an operator writes.
        functional: whether operators write buffers only at the end; views of these have the values from before.
        autocast_off: lines where it switches autocast off; its stages would not.
    """

    model: nn.Module
    operators: tuple[Operator, ...]
    output: Any
    together: tuple[tuple[str, ...], ...] = ()
    arguments: tuple[str, ...] = ()
    opaque: dict[str, str] = field(default_factory=dict)
    changed_buffers: frozenset[str] = frozenset()
    functional: bool = False
    autocast_off: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        """Operator name -> operator."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def tied(self) -> dict[str, str]:
        """Parameter name -> first name of the same parameter, for every parameter."""
        return first_names(dict(self.model.named_parameters(remove_duplicate=False)))

    @cached_property
    def with_gradient(self) -> frozenset[Value]:
        """The tensors that lead to the model's output by paths through which gradients flow."""
        reached = {value for value in values_in(self.output) if value.differentiable}
        for op in reversed(self.operators):
            if not reached.isdisjoint(op.outputs):
                reached.update(value for value in op.values if value.differentiable)
        return frozenset(reached)

    def sources(self, values: Iterable[Value]) -> tuple[str, ...]:
        """Return the names of the operators that make these values, without constants, each once."""
        names = dict.fromkeys(value.operator for value in values)
        return tuple(name for name in names if not self.by_name[name].constant)

    @property
    def output_state(self) -> list[str]:
        """Names of the parameters and buffers that the model returns."""
        return [leaf.name for leaf in pytree.tree_leaves(self.output) if isinstance(leaf, State)]

    def output_with(self, tensor: Callable[[Value | State], Tensor], batch: int) -> Any:
        """Return the output in training for `batch` samples, with the tensors that the function gives."""

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, (Value, State)):
                return tensor(leaf)
            return leaf.at(batch) if isinstance(leaf, Size) else leaf

        output = self.output.training if isinstance(self.output, ByMode) else self.output
        return pytree.tree_map(filled, output)


def values_in(tree: Any) -> list[Value]:
    """Return the tensors in nested containers, in order."""
    leaves = pytree.tree_leaves(tree)
    found = [(leaf,) if isinstance(leaf, Value) else _values_by_mode(leaf) for leaf in leaves]
    return [value for values in found for value in values]


def _values_by_mode(leaf: Any) -> Sequence[Value]:
    return values_in((leaf.training, leaf.evaluation)) if isinstance(leaf, ByMode) else ()


def unique_name(name: str, taken: set[str], first: int = 1) -> str:
    """Return `name`, or if that is taken `name_1` and so on, from number `first`; mark it as taken."""
    candidates = chain([name], (f"{name}_{number}" for number in count(first)))
    free = next(candidate for candidate in candidates if candidate not in taken)
    taken.add(free)
    return free


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, each under all of its names, and tensors in plain attributes."""
    return tensor_attributes(model) | registered_state(model)


def in_mode(model: nn.Module, training: bool) -> nn.Module:
    """Put a model into training or evaluation mode, and return it; a train() of the user's need not do so."""
    model.train(training)
    return model


def registered_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, each under all of its names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def tensor_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in plain attributes of modules, `self.mask = torch.ones(8, 8)`, under their paths."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name of a tensor to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def storage_address(tensor: Tensor) -> int:
    """Return a key for a tensor's storage, unique as long as it lives; views share it."""
    return int(tensor.untyped_storage()._cdata)


def have_one_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors lie in one storage."""
    return a.layout is b.layout is torch.strided and storage_address(a) == storage_address(b)


def shared_memory(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Group the names of different tensors that overlap in memory: a weight and a view of it, such as its transpose.

    Two names of one tensor alone are not a group; with a view of it they are.
    """
    extents: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in state.items():
        if tensor.layout is torch.strided and tensor.numel():
            last = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + (last + 1) * tensor.itemsize
            extents.setdefault(storage_address(tensor), []).append((begin, end, name))
    groups: list[list[str]] = []
    for in_storage in extents.values():
        reached = 0
        for begin, end, name in sorted(in_storage):
            if begin >= reached:
                groups.append([])
            groups[-1].append(name)
            reached = max(reached, end)
    return [group for group in groups if len({id(state[name]) for name in group}) > 1]


def names_over_parameters(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the groups of `shared_memory` that contain a parameter, so change with each update."""
    return [group for group in shared_memory(state) if any(isinstance(state[n], nn.Parameter) for n in group)]


def empty_in_same_place(
    tensor: Tensor, storages: dict[int, torch.UntypedStorage], device: torch.device | None = None
) -> Tensor:
    """Return an empty tensor with the same place in a new storage as `tensor` has in its own.

    So tensors that share memory share it in each version. And cuDNN takes a recurrent layer's weights from one piece of
    memory, in its own order, which the module makes when it moves to the device. If weights lie elsewhere, cuDNN copies
    them at every call, and warns.

    Args:
        storages: address of a storage -> the new one in its place; filled here.
        device: device of the new storage; None: the tensor's.
    """
    address, device = storage_address(tensor), device or tensor.device
    if address not in storages:
        size = tensor.untyped_storage().nbytes()
        storages[address] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(storages[address], tensor.storage_offset(), tensor.size(), tensor.stride())


def is_persistent(owner: nn.Module, name: str) -> bool:
    """Whether a module's tensor, a buffer or a plain attribute, is in its state_dict."""
    return name in owner._buffers and name not in owner._non_persistent_buffers_set


def is_default(value: Any, argument: Any) -> bool:
    """Whether `value` may be left out of a call: it is None, or the default that the schema gives to `argument`."""
    if isinstance(value, (Value, State, Size, ByMode, Tensor)):
        return False
    return value is None or (argument.has_default_value() and bool(value == argument.default_value))
