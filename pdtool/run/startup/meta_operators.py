"""Operators on tensors of the meta device, which stand for tensors with values: what they write, and would draw."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

META = torch.device("meta")
_DRAWN_IN_PIECES = {"aten::normal_", "aten::uniform_"}
# These draw as much for a tensor as its shape says, whatever its values are.
DRAWN_BY_SHAPE = _DRAWN_IN_PIECES | {
    *("aten::random_", "aten::bernoulli_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_"),
    *("aten::geometric_", "aten::rand_like", "aten::randn_like"),
}
_PIECE = 2**18  # elements; a multiple of the 16 that normal_ draws together
_DRAWN_TOGETHER = 16


def move_to_meta(param: nn.Parameter) -> None:
    """Move a parameter itself, not a copy, so that whoever holds it sees it there."""
    moved = nn.Parameter(torch.empty_like(param, device=META), param.requires_grad)
    moved.__dict__.update(param.__dict__)
    with suppress(RuntimeError):  # there are views of it, or weak references: it stays
        torch.utils.swap_tensors(param, moved)  # type: ignore[no-untyped-call]


def draw(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """Draw as many random numbers as `func` does to fill a tensor on the meta device, and drop them.

    Args:
        func: an operator of DRAWN_BY_SHAPE that works in place.
        tensor: of any shape; a large one is drawn in pieces where that draws the same.
    """
    args = pytree.tree_map(with_memory, args)
    scratch = [with_memory(tensor)]
    if func._schema.name in _DRAWN_IN_PIECES and tensor.is_contiguous() and tensor.is_floating_point():
        pieces = max(0, tensor.numel() - _DRAWN_TOGETHER) // _PIECE
        rest = torch.empty(tensor.numel() - pieces * _PIECE, dtype=tensor.dtype)
        scratch = [torch.empty(_PIECE, dtype=tensor.dtype)] * pieces + [rest]
    for piece in scratch:
        func(piece, *args, **kwargs)


def is_random(func: Any) -> bool:
    """Return whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def storage_address(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from others, as long as it lives; views share it."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operator writes into."""
    if "batch_norm" in func._schema.name:  # its schema does not say that it writes statistics
        return tensors_in((args, kwargs))
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    return tensors_in([value for argument, value in given if argument.alias_info and argument.alias_info.is_write])


def to_meta(value: Any) -> Any:
    """Return a tensor without values, and the meta device in place of the CPU; anything else as it is."""
    if isinstance(value, torch.device):
        return META if value.type == "cpu" else value
    return value.to(META) if isinstance(value, Tensor) else value


def with_memory(value: Any) -> Any:
    """Return memory of the shape and strides of a tensor on the meta device; anything else as it is."""
    if not (isinstance(value, Tensor) and value.is_meta):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
