"""Matrix products and convolutions of a graph: the gradients of some of their operands, apart from the graph.

As torch/csrc/autograd/FunctionsManual.cpp computes them (`mm_mat1_backward`, `mm_mat2_backward`), to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

_FACTORS = {
    "MmBackward0": ("self", "mat2"),
    "BmmBackward0": ("self", "mat2"),
    "AddmmBackward0": ("mat1", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
}
_OPTIONS = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
Gradients = Callable[[Tensor], Sequence[Tensor | None]]


def operand_gradients(node: Node, wanted: Sequence[bool]) -> Gradients | None:
    """Gradient of the output -> those of the operands, at least the `wanted`; None for an operator of another kind.

    It keeps what they need and not the graph. The gradient of an operand that was broadcast has the larger size.
    """
    name, saved = type(node).__name__, partial(_saved, node)
    if name == "ConvolutionBackward0":
        return partial(_convolution, [saved("input"), saved("weight"), *map(saved, _OPTIONS), wanted])
    if name not in _FACTORS or saved("alpha", 1) != 1 or saved("beta", 1) != 1:
        return None
    factors = _FACTORS[name]
    by_columns = [_by_columns(saved(f"{one}_sym_sizes", ()), saved(f"{one}_sym_strides", ())) for one in factors]
    left, right = (saved(one) if needed else None for one, needed in zip(factors, reversed(wanted[-2:]), strict=True))
    return partial(_product, left, right, by_columns, len(wanted) == 3)


def _saved(node: Node, name: str, default: Any = None) -> Any:
    value = getattr(node, f"_saved_{name}", default)
    return value.detach() if isinstance(value, Tensor) else value


def _by_columns(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return len(strides) == 2 and strides[0] == 1 and strides[1] == sizes[0]


def _product(
    left: Tensor | None, right: Tensor | None, by_columns: Sequence[bool], added: bool, gradient: Tensor
) -> list[Tensor | None]:
    """For the addend, if there is one, and both factors; for one that lies in memory by columns so too."""
    of_left = of_right = None
    if right is not None:
        of_left = (right.conj() @ gradient.mT).mT if by_columns[0] else gradient @ right.mH
    if left is not None:
        of_right = (gradient.mT @ left.conj()).mT if by_columns[1] else left.mH @ gradient
    return [*[gradient] * added, of_left, of_right]


def _convolution(saved: Sequence[Any], gradient: Tensor) -> Sequence[Tensor | None]:
    made: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(gradient, *saved)
    return made
