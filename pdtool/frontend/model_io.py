"""What a model takes and returns: tensors and constants in nested tuples, dicts and dataclasses.

torch.export sees only into containers that torch's pytrees know. Of a model's own, dataclasses and subclasses of dict
are made known when they are met.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdtool.artifacts.bundle import TensorSpec

LEAVES = (Tensor, bool, int, float, type(None))


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of one call of a model.

    Attributes:
        args: those by position.
        kwargs: those by name, in alphabetical order, so that the tensors have one order however a dict was filled.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> ModelInputs:
        """Return what `example_inputs` or a dataset gives: a dict is passed by name, a tuple or a list by position."""
        if isinstance(inputs, ModelInputs):
            return inputs
        if isinstance(inputs, Tensor):
            return cls((inputs,), {})
        register_containers(inputs)
        if isinstance(inputs, Mapping):
            return cls((), _ordered(dict(inputs)))
        return cls(tuple(map(_ordered, inputs)) if isinstance(inputs, (tuple, list)) else (inputs,), {})

    @property
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
        """The arguments as texts, `input_ids` or `use_cache=False`; () where all are tensors by position."""
        if not self.kwargs and all(isinstance(argument, Tensor) for argument in self.args):
            return ()
        return tuple(name if isinstance(leaf, Tensor) else f"{name}={leaf!r}" for name, leaf in self.leaves)

    def map(self, function: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Return the same arguments with `function` of each tensor in its place."""
        apply = partial(pytree.tree_map_only, Tensor, function)
        return ModelInputs(apply(self.args), apply(self.kwargs))

    def call(self, model: nn.Module) -> Any:
        """Call the model."""
        return model(*self.args, **self.kwargs)


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) of each tensor and constant in nested containers: `output.logits` inside of `output`."""
    inner = children(value)
    if inner is None:
        yield name, value
    for key, child in inner or ():
        yield from named_leaves(child, f"{name}.{key}")


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of what a model returns, in order."""
    return [leaf for _, leaf in named_leaves(output, "output") if isinstance(leaf, Tensor)]


def register_containers(value: Any) -> None:
    """Make the dataclasses and subclasses of dict in `value` known to torch's pytrees."""
    held, kind = children(value), type(value)
    if held is None:
        return
    if kind not in pytree.SUPPORTED_NODES and (isinstance(value, dict) or _is_dataclass(value)):
        unflatten = _made_dict if isinstance(value, dict) else _made_dataclass
        pytree.register_pytree_node(kind, _flatten, partial(unflatten, kind), flatten_with_keys_fn=_flatten_with_keys)
    for _, child in held:
        register_containers(child)


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return (key, value) of what a container holds; None for what is no container."""
    if isinstance(value, LEAVES):  # first, for it is asked of each minibatch, mostly of tensors
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


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


def _made_dict(kind: type, values: Sequence[Any], keys: Sequence[Any]) -> Any:
    return kind(dict(zip(keys, values, strict=True)))


def _made_dataclass(kind: type, values: Sequence[Any], keys: Sequence[Any]) -> Any:
    """Without __init__, which may check its arguments: the graph has other things in the places of tensors."""
    made: Any = object.__new__(kind)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(made, key, value)
    return made
