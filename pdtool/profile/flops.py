"""Flops of what PyTorch's own counter leaves out: LSTM, recurrent layers on cuDNN, attention on a processor.

Each step of each layer and direction multiplies the batch by the matrices of that layer, gates side by side:
2 · steps · batch · elements of the matrices, as PyTorch counts a matrix product (a multiplication and an addition
each). What is elementwise counts nothing, as everywhere in that counter. A GRU or RNN on a processor arrives as
single matrix products and needs no formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]


def _forward(steps: Shape, matrices: Sequence[Shape]) -> int:
    """Of an input (steps, batch, features), either of the first two first, and matrices (rows, columns)."""
    return 2 * steps[0] * steps[1] * sum(rows * columns for rows, columns in matrices)


def _onednn(x: Shape, w0: Shape, w1: Shape, *rest: Any, **kwargs: Any) -> int:
    return _forward(x, (w0, w1))


def _onednn_backward(x: Shape, w0: Shape, w1: Shape, *rest: Any, **kwargs: Any) -> int:
    return 2 * _forward(x, (w0, w1))


def _cudnn(x: Shape, weights: Sequence[Shape], *rest: Any, **kwargs: Any) -> int:
    return _forward(x, [shape for shape in weights if len(shape) == 2])


def _cudnn_backward(x: Shape, weights: Sequence[Shape], *rest: Any, **kwargs: Any) -> int:
    return 2 * _cudnn(x, weights)


def _attention(q: Shape, k: Shape, v: Shape, *rest: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Shape, q: Shape, k: Shape, v: Shape, *rest: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
FORMULAS: dict[Any, Any] = {
    _aten.mkldnn_rnn_layer: _onednn,
    _aten.mkldnn_rnn_layer_backward: _onednn_backward,
    _aten._cudnn_rnn: _cudnn,
    _aten._cudnn_rnn_backward: _cudnn_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
