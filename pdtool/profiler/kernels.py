"""The kernels that PyTorch launches, as work: flops, bytes moved, and a device's time for them.

FLOP_FORMULAS count operators that PyTorch's own counter leaves out: LSTM, recurrent layers on cuDNN, attention on a
CPU. Each step of each layer and direction multiplies the batch by the matrices of that layer, gates side by side: 2 ·
steps · batch · elements of the matrices, as PyTorch counts a matrix product (a multiplication and an addition each).
Elementwise work counts nothing, as everywhere in that counter. A GRU or RNN on a CPU arrives as single matrix products
and needs no formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pdtool.artifacts.device import DeviceSpec, Precision
from pdtool.frontend.model_io import tensors_in

Shape = Sequence[int]

PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
_UNREAD = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "fill_", "zero_", "new_zeros", "new_ones"}
_LOOKUPS = {"embedding", "index_select", "index", "gather"}  # only read from their table


def _recurrent_flops(steps: Shape, matrices: Sequence[Shape]) -> int:
    """Count flops of an input (steps, batch, features) or (batch, steps, features) and matrices (rows, columns)."""
    return 2 * steps[0] * steps[1] * sum(rows * columns for rows, columns in matrices)


def _onednn(x: Shape, w0: Shape, w1: Shape, *rest: Any, **kwargs: Any) -> int:
    return _recurrent_flops(x, (w0, w1))


def _cudnn(x: Shape, weights: Sequence[Shape], *rest: Any, **kwargs: Any) -> int:
    return _recurrent_flops(x, [shape for shape in weights if len(shape) == 2])


def _backward_of(forward: Callable[..., int]) -> Callable[..., int]:
    """Return the formula of a backward: a product by the gradient for each of the two operands."""
    return lambda *shapes, **kwargs: 2 * forward(*shapes, **kwargs)


def _attention(q: Shape, k: Shape, v: Shape, *rest: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Shape, q: Shape, k: Shape, v: Shape, *rest: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
FLOP_FORMULAS: dict[Any, Any] = {
    _aten.mkldnn_rnn_layer: _onednn,
    _aten.mkldnn_rnn_layer_backward: _backward_of(_onednn),
    _aten._cudnn_rnn: _cudnn,
    _aten._cudnn_rnn_backward: _backward_of(_cudnn),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        flops: flops of its matrix products; 0 if it has none.
        moved_bytes: bytes that it reads and writes, each tensor once.
        dtype: type of its operands.
        launches: how often it is launched.
    """

    flops: int
    moved_bytes: int
    dtype: torch.dtype
    launches: int = 1


class KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records in `kernels`, while it is entered, every launched kernel; a view is not a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self._formulas = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = tensors_in(result)
        name = func._schema.name.split("::")[-1]
        if not written or name in _FREE or func.is_view:
            return result
        read = list({id(t): t for t in tensors_in((args, kwargs))}.values())
        formula = self._formulas.get(func._overloadpacket)
        floating = [t.dtype for t in (*read, *written) if t.is_floating_point()]
        self.kernels.append(
            Kernel(
                flops=int(formula(*args, **(kwargs or {}), out_val=result)) if formula else 0,
                moved_bytes=_nbytes(_read(name, read)) + _nbytes(written) * (2 if name in _LOOKUPS else 1),
                dtype=floating[0] if floating else written[0].dtype,
            )
        )
        return result


def _read(name: str, tensors: list[Tensor]) -> list[Tensor]:
    if name in _UNREAD:
        return []
    return tensors[1:] if name in _LOOKUPS else tensors


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes behind the tensors; an expanded tensor has fewer bytes than elements."""
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def recurrent_costs(module: nn.RNNBase, inputs: Tensor) -> tuple[list[Kernel], list[Kernel], int]:
    """Return the kernels of forward and backward of a whole LSTM, GRU or RNN in cuDNN, and its stash in bytes.

    Each layer and direction has one product of all steps' inputs with the first matrix, (steps · batch, features) by
    (features, gates). Then each step has one product of the state with the second matrix, which is read again each
    time. The backward has a product by the gradient for each of the two operands. The stash keeps, for each step and
    layer, the input, and per direction the gates and the state.

    Args:
        inputs: (steps, features), or (steps, batch, features), or with `batch_first` (batch, steps, features).
    """
    steps = inputs.shape[1 if module.batch_first and inputs.dim() == 3 else 0]
    rows = inputs.numel() // inputs.shape[-1]
    forward, stash_per_row = [], 0
    for weights in module.all_weights:
        of_input, *of_state = [w for w in weights if w.dim() == 2]
        forward += [_product(rows, of_input, 1), *(_product(rows // steps, matrix, steps) for matrix in of_state)]
        gates, features = of_input.shape
        stash_per_row += gates + module.hidden_size + features // (1 + module.bidirectional)
    backward = [replace(kernel, launches=2 * kernel.launches) for kernel in forward]
    return forward, backward, rows * stash_per_row * inputs.itemsize


def _product(rows: int, matrix: Tensor, launches: int) -> Kernel:
    """Multiply (rows, features) by the transpose of `matrix` (outputs, features)."""
    moved_bytes = (matrix.numel() + rows * sum(matrix.shape)) * matrix.itemsize
    return Kernel(2 * rows * matrix.numel(), moved_bytes, matrix.dtype, launches)


def roofline_s(kernels: Iterable[Kernel], device: DeviceSpec, *, tf32: bool, launch_s: float) -> float:
    """Compute the seconds that the kernels take one after another.

    Roofline (Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
    Architectures", CACM 52(4), 2009): each takes the longer of flops over peak and bytes over bandwidth,
    and its launch.

    Args:
        tf32: products of fp32 run in TF32.
    """
    return sum(kernel.launches * (_work_s(kernel, device, tf32) + launch_s) for kernel in kernels)


def _work_s(kernel: Kernel, device: DeviceSpec, tf32: bool) -> float:
    precision: Precision = "tf32" if tf32 and kernel.dtype == torch.float32 else PRECISIONS.get(kernel.dtype, "fp32")
    peak = device.peak_flops_per_s.get(precision, device.peak_flops_per_s["fp32"])
    return max(kernel.flops / peak, kernel.moved_bytes / device.bandwidth_bytes_per_s)
