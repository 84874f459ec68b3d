"""The kernels that PyTorch launches, as work: flops, bytes moved, and how long a device takes for that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pdtool.artifacts.device import DeviceSpec, Precision
from pdtool.profile.flops import FORMULAS

PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
_UNREAD = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "fill_", "zero_", "new_zeros", "new_ones"}
_LOOKUPS = {"embedding", "index_select", "index", "gather"}  # read of their table only what they return


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        flops: of its matrix products; 0 where it has none.
        bytes: that it reads and writes, each tensor once.
        dtype: of its operands.
        times: how often it is launched.
    """

    flops: int
    bytes: int
    dtype: torch.dtype
    times: int = 1


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, notes every kernel in `kernels`; what only looks at memory in another way is none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self._formulas = FlopCounterMode(display=False, custom_mapping=FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        name = func._schema.name.split("::")[-1]
        if not written or name in _FREE or _is_view(func):
            return result
        read = list({id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values())
        formula = self._formulas.get(func._overloadpacket)
        floating = [t.dtype for t in (*read, *written) if t.is_floating_point()]
        self.kernels.append(
            Kernel(
                flops=int(formula(*args, **(kwargs or {}), out_val=result)) if formula else 0,
                bytes=_nbytes(_read(name, read)) + _nbytes(written) * (2 if name in _LOOKUPS else 1),
                dtype=floating[0] if floating else written[0].dtype,
            )
        )
        return result


def _is_view(func: Any) -> bool:
    alias = [r.alias_info for r in func._schema.returns]
    return bool(alias) and all(a is not None and not a.is_write for a in alias)


def _read(name: str, tensors: list[Tensor]) -> list[Tensor]:
    if name in _UNREAD:
        return []
    return tensors[1:] if name in _LOOKUPS else tensors


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind the tensors; an expanded one has fewer than elements."""
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def recurrent(module: nn.RNNBase, inputs: Tensor) -> Iterator[Kernel]:
    """The forward of a whole LSTM, GRU or RNN as cuDNN does it; the backward is each of them twice.

    For each layer and direction one product of all steps' inputs with the one matrix, (steps · batch, features) by
    (features, gates), and then step after step one of the state with the other, which is read again each time.
    """
    steps = inputs.shape[1 if module.batch_first and inputs.dim() == 3 else 0]
    rows = inputs.numel() // inputs.shape[-1]
    for weights in module.all_weights:
        of_input, *of_state = [w for w in weights if w.dim() == 2]
        yield _product(rows, of_input, 1)
        for matrix in of_state:
            yield _product(rows // steps, matrix, steps)


def recurrent_stash(module: nn.RNNBase, inputs: Tensor) -> int:
    """Bytes that its backward needs: of each step and layer the input, and for each direction gates and state."""
    rows = inputs.numel() // inputs.shape[-1]
    matrices = [weights[0] for weights in module.all_weights]
    kept = sum(w.shape[0] + module.hidden_size + w.shape[1] // (1 + module.bidirectional) for w in matrices)
    return rows * kept * inputs.itemsize


def _product(rows: int, matrix: Tensor, times: int) -> Kernel:
    """(rows, features) by the transpose of `matrix` (outputs, features)."""
    moved = (matrix.numel() + rows * sum(matrix.shape)) * matrix.itemsize
    return Kernel(2 * rows * matrix.numel(), moved, matrix.dtype, times)


def backward(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Of matrix products: one by the gradient for each operand."""
    return [replace(kernel, times=2 * kernel.times) for kernel in kernels]


def seconds(kernels: Iterable[Kernel], device: DeviceSpec, *, tf32: bool, launch_s: float) -> float:
    """Time of the kernels one after another.

    Roofline (Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
    Architectures", CACM 52(4), 2009): each takes the longer of flops over peak and bytes over bandwidth,
    and its launch.

    Args:
        tf32: products of fp32 run in TF32.
    """
    return sum(k.times * (max(k.flops / _peak(device, k.dtype, tf32), _moving(k, device)) + launch_s) for k in kernels)


def _moving(kernel: Kernel, device: DeviceSpec) -> float:
    return kernel.bytes / device.bandwidth_bytes_per_s


def _peak(device: DeviceSpec, dtype: torch.dtype, tf32: bool) -> float:
    precision: Precision = "tf32" if tf32 and dtype == torch.float32 else PRECISIONS.get(dtype, "fp32")
    return device.peak_flops_per_s.get(precision, device.peak_flops_per_s["fp32"])
