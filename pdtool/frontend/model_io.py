"""What a model takes and returns: tensors and constants in nested tuples, dicts and dataclasses.

torch.export sees only into containers that torch's pytrees know. A model's own dataclasses and subclasses of dict are
registered when they are met. `Structure` describes such a value to a worker that does not have it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdtool.artifacts.bundle import TensorSpec
from pdtool.errors import ModelError

LEAVES = (Tensor, bool, int, float, type(None))
_NUMBERS: dict[str, Any] = {"builtins:bool": False, "builtins:int": 0, "builtins:float": 0.0}
_INTEGER_BITS = 64  # of a number that is sent, its sign included
_FACTORIES: dict[str, Any] = {"": None, "list": list, "dict": dict, "set": set, "int": int, "float": float}


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of one call of a model.

    Attributes:
        args: positional ones.
        kwargs: those by name, in alphabetical order, so that the tensors' order does not depend on how a dict was
            filled.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> ModelInputs:
        """Read the result of `example_inputs` or a dataset: a dict is passed by name, a tuple or a list by position."""
        if isinstance(inputs, ModelInputs):
            return inputs
        register_containers(inputs)
        if isinstance(inputs, Mapping):
            return cls((), _ordered(dict(inputs)))
        return cls(tuple(map(_ordered, inputs)) if isinstance(inputs, (tuple, list)) else (inputs,), {})

    @cached_property
    def leaves(self) -> list[tuple[str, Any]]:
        """(name, value) of each tensor and constant: `0` for the first argument by position, `batch.mask` inside it."""
        arguments = [*enumerate(self.args), *self.kwargs.items()]
        return [leaf for name, argument in arguments for leaf in named_leaves(argument, str(name))]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in the order in which torch.export takes them."""
        return [leaf for _, leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def signature(self) -> tuple[str, ...]:
        """The arguments as texts, `input_ids` or `use_cache=False`; () if all are tensors by position."""
        if not self.kwargs and all(isinstance(argument, Tensor) for argument in self.args):
            return ()
        return tuple(name if isinstance(leaf, Tensor) else f"{name}={leaf!r}" for name, leaf in self.leaves)

    def map(self, function: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Return the same arguments with `function` applied to each tensor."""
        apply = partial(pytree.tree_map_only, Tensor, function)
        return ModelInputs(apply(self.args), apply(self.kwargs))

    def call(self, model: nn.Module) -> Any:
        """Call the model."""
        return model(*self.args, **self.kwargs)


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) of each tensor and constant in nested containers: `output.logits` inside `output`."""
    inner = children(value)
    if inner is None:
        yield name, value
    for key, child in inner or ():
        yield from named_leaves(child, f"{name}.{key}")


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output, in order."""
    return [leaf for _, leaf in named_leaves(output, "output") if isinstance(leaf, Tensor)]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers that torch's pytrees know, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def register_containers(value: Any) -> None:
    """Make the dataclasses and subclasses of dict in `value` known to torch's pytrees."""
    kind = type(value)
    if kind not in pytree.SUPPORTED_NODES and (isinstance(value, dict) or _is_dataclass(value)):
        unflatten = partial(_made_container, kind)
        pytree.register_pytree_node(kind, _flatten, unflatten, flatten_with_keys_fn=_flatten_with_keys)
    for _, child in children(value) or ():
        register_containers(child)


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return a container's (key, value) pairs; None if it is not a container."""
    if isinstance(value, LEAVES):  # first, because this runs for each minibatch, mostly on tensors
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


@dataclass(frozen=True)
class Structure:
    """The structure of tensors in nested containers, without their values.

    Attributes:
        kind: `module:Class` of a container or a Python number; `float32` for a tensor, "" for None.
        shape: shape of a tensor.
        keys: keys of a dict or fields of a dataclass; for a deque with a limit, the limit.
        factory: builtin class that makes the values of a defaultdict.
    """

    kind: str
    shape: tuple[int, ...] = ()
    keys: tuple[str | int | float | bool | None, ...] = ()
    children: tuple[Structure, ...] | None = None
    factory: str = ""

    @classmethod
    def of(cls, value: Any) -> Structure:
        """Describe a value; raises ModelError if part of it cannot be described."""
        if value is None:
            return cls("")
        if isinstance(value, Tensor):
            return cls(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if type(value) in (bool, float) or (type(value) is int and value.bit_length() < _INTEGER_BITS):
            return cls(_class_name(type(value)))
        register_containers(value)
        held = list(enumerate(value)) if isinstance(value, deque) else children(value)
        if held is None or pytree.tree_is_leaf(value):
            raise _cannot_be_sent(type(value).__name__)
        keys = [] if isinstance(value, (tuple, list)) else [key for key, _ in held]
        if isinstance(value, deque):
            keys = [value.maxlen]
        if wrong := [key for key in keys if type(key) not in (str, int, float, bool, type(None))]:
            raise _cannot_be_sent(f"the key {wrong[0]!r:.80}")
        maker = getattr(value, "default_factory", None)
        factory = getattr(maker, "__name__", "")
        if _FACTORIES.get(factory) is not maker:
            raise _cannot_be_sent(f"a defaultdict of {maker!r:.80}")
        return cls(_class_name(type(value)), (), tuple(keys), tuple(cls.of(child) for _, child in held), factory)

    def example(self) -> Any:
        """Return a value of this structure, whose tensors are zeros without memory; raises ModelError.

        A container's class is found by its name among the modules that this process has imported.
        """
        try:
            return self._made()
        except Exception as error:  # of the constructor of that class as well
            what = f"this worker cannot make a {self.kind:.200}, which a target contains ({error!s:.200})"
            raise ModelError(what, "import the module of that class at the top of the model file") from error

    def _made(self) -> Any:
        if self.kind in _NUMBERS:
            return _NUMBERS[self.kind]
        if self.children is None:
            return torch.zeros((), dtype=getattr(torch, self.kind)).expand(self.shape) if self.kind else None
        kind: Any = _class(self.kind)
        made = [child._made() for child in self.children]
        if issubclass(kind, defaultdict):
            return kind(_FACTORIES[self.factory], zip(self.keys, made, strict=True))
        if issubclass(kind, deque):
            return kind(made, *self.keys)
        return _made_container(kind, made, self.keys)


def _cannot_be_sent(what: str) -> ModelError:
    return ModelError(
        f"a target of the dataset holds {what}, which cannot be sent to another worker",
        "return tensors or numbers from dataset(), or tuples and dicts of them",
    )


def _class_name(kind: type) -> str:
    """Return the name by which other workers find a class; raises ModelError if they cannot."""
    if name := global_name(kind):
        return name
    raise _cannot_be_sent(f"a {kind.__qualname__}, a class that is not found in {kind.__module__}")


def global_name(kind: type) -> str:
    """Return the name by which other processes find a class, `module:Class`; "" for one that a function defines."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    with suppress(LookupError):
        if _class(name) is kind:
            return name
    return ""


def with_own_classes(value: Any, names: Mapping[str, str]) -> Any:
    """Return what a stage file returns with the user's own classes, which have methods, and which isinstance() knows.

    Args:
        names: name of a class in the stage file -> `module:Class` of the user's class that it stands for.
    """
    held = children(value)
    if held is None:
        return value
    kind: Any = type(value)
    with suppress(LookupError):
        kind = _class(names[kind.__name__])
    inner = [with_own_classes(child, names) for _, child in held]
    if kind is type(value) and all(new is old for new, (_, old) in zip(inner, held, strict=True)):
        return value
    return _made_container(kind, inner, [key for key, _ in held])


def _class(name: str) -> Any:
    """Find a class by `module:Class` among the imported modules; raises LookupError."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = vars(found)[part]
    if not isinstance(found, type):
        raise LookupError(f"{name} is not a class")
    return found


def dtype_of(tensor: TensorSpec) -> torch.dtype:
    """Return the tensor's dtype, whose name the artifact has checked: `float32` -> torch.float32."""
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _ordered(value: Any) -> Any:
    """The same with the keys of plain dicts in alphabetical order."""
    if type(value) is dict:
        return {key: _ordered(value[key]) for key in sorted(value, key=str)}
    return type(value)(map(_ordered, value)) if type(value) in (tuple, list) else value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _flatten(value: Any) -> tuple[list[Any], list[Any]]:
    pairs = children(value) or []
    return [child for _, child in pairs], [key for key, _ in pairs]


def _flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    values, keys = _flatten(value)
    return [(pytree.MappingKey(key), child) for key, child in zip(keys, values, strict=True)], keys


def _made_container(kind: type, values: Sequence[Any], keys: Sequence[Any]) -> Any:
    """Make a container. A dataclass is made without __init__, which may check its arguments, because the graph has
    other objects in place of tensors."""
    if issubclass(kind, dict):
        return kind(dict(zip(keys, values, strict=True)))
    if hasattr(kind, "__dataclass_fields__"):
        made: Any = object.__new__(kind)
        for key, value in zip(keys, values, strict=True):
            object.__setattr__(made, key, value)
        return made
    if not issubclass(kind, (tuple, list)):
        raise TypeError("it is not a container")
    return kind._make(values) if hasattr(kind, "_make") else kind(values)
