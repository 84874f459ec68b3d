"""Matrix products and convolutions of a graph: the gradients of some of their operands, apart from the graph.

They are computed as torch/csrc/autograd/FunctionsManual.cpp does (`mm_mat1_backward`, `mm_mat2_backward`), to the
same bits.
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
OperandGradients = Callable[[Tensor], Sequence[Tensor | None]]


def operand_gradients(node: Node, wanted: Sequence[bool]) -> OperandGradients | None:
    """Return a function from the gradient of a product's output to those of its operands.

    The function keeps the tensors that it needs and not the graph.

    Args:
        node: the backward node of the product.
        wanted: for each operand, whether its gradient is needed; others may be computed or None.

    Returns:
        The function, which takes a tensor of the output's shape and returns tensors of the operands' shapes (of the
        broadcast shape for an operand that was broadcast); None for an operator of another kind.
    """
    name, saved = type(node).__name__, partial(_saved_value, node)
    if name == "ConvolutionBackward0":
        return partial(_convolution_gradients, [saved("input"), saved("weight"), *map(saved, _OPTIONS), wanted])
    if name not in _FACTORS or saved("alpha", 1) != 1 or saved("beta", 1) != 1:
        return None
    factors = _FACTORS[name]
    by_columns = [_is_by_columns(saved(f"{one}_sym_sizes", ()), saved(f"{one}_sym_strides", ())) for one in factors]
    left, right = (saved(one) if needed else None for one, needed in zip(factors, reversed(wanted[-2:]), strict=True))
    return partial(_product_gradients, left, right, by_columns, len(wanted) == 3)


def _saved_value(node: Node, name: str, default: Any = None) -> Any:
    value = getattr(node, f"_saved_{name}", default)
    return value.detach() if isinstance(value, Tensor) else value


def _is_by_columns(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return len(strides) == 2 and strides[0] == 1 and strides[1] == sizes[0]


def _product_gradients(
    left: Tensor | None, right: Tensor | None, by_columns: Sequence[bool], has_addend: bool, gradient: Tensor
) -> list[Tensor | None]:
    """Gradients of the addend, if there is one, and of both factors; each lies in memory by columns if its factor does.

    Args:
        left, right: the factors [..., m, k] and [..., k, n]; None for one that the wanted gradients do not need.
        gradient: of the output [..., m, n].
    """
    of_left = of_right = None
    if right is not None:
        of_left = (right.conj() @ gradient.mT).mT if by_columns[0] else gradient @ right.mH
    if left is not None:
        of_right = (gradient.mT @ left.conj()).mT if by_columns[1] else left.mH @ gradient
    return [*[gradient] * has_addend, of_left, of_right]


def _convolution_gradients(saved: Sequence[Any], gradient: Tensor) -> Sequence[Tensor | None]:
    gradients: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(gradient, *saved)
    return gradients
