"""How one tensor travels: its parts in a message, and how it is packed into them and unpacked.

         stage                   message                 stage
    float32 [8, 64]  ──pack──▶  bfloat16 [8, 64]  ──unpack──▶  float32 [8, 64]        --wire-dtype bf16

A transport carries the parts and knows nothing else of them. A new format is an entry of `WIRE_FORMATS` here, and one
of `WIRE_BYTES` (pdtool/options.plan_options.py), which says what the formulas charge for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdtool.artifacts.bundle import TensorSpec
from pdtool.frontend.model_io import dtype_of


class Part(NamedTuple):
    """One array of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WireFormat(Protocol):
    """How the tensors of one dtype travel."""

    def parts(self, shape: tuple[int, ...]) -> list[Part]:
        """Return the parts of a tensor of this shape."""

    def pack(self, tensor: Tensor) -> list[Tensor]:
        """Return what goes into the parts, each of its part's shape.

        One of another dtype than its part is converted when it is copied into the message, so that no pass over the
        tensor is needed here.

        Args:
            tensor: of any shape, without a graph.
        """

    def unpack(self, parts: Iterator[Tensor]) -> Tensor:
        """Take a tensor's parts, and return the tensor; it may be in the memory of a part."""


@dataclass(frozen=True)
class Cast:
    """One part, of the tensor's shape.

    Attributes:
        dtype: at both stages.
        sent_as: the dtype in messages.
    """

    dtype: torch.dtype
    sent_as: torch.dtype

    def parts(self, shape: tuple[int, ...]) -> list[Part]:
        """Return the one part."""
        return [Part(shape, self.sent_as)]

    def pack(self, tensor: Tensor) -> list[Tensor]:
        """Leave the conversion to the copy into the message."""
        return [tensor]

    def unpack(self, parts: Iterator[Tensor]) -> Tensor:
        """Convert the one part."""
        return next(parts).to(self.dtype)


# What `--wire-dtype` may be -> how float32 activations and gradients travel.
WIRE_FORMATS: dict[str, WireFormat] = {
    "fp32": Cast(torch.float32, torch.float32),
    "fp16": Cast(torch.float32, torch.float16),
    "bf16": Cast(torch.float32, torch.bfloat16),
}


def format_of(tensor: TensorSpec, wire_dtype: str) -> WireFormat:
    """Return how a tensor travels: what is not float32, and what the dataset gives, always as it is."""
    if tensor.dtype == "float32" and tensor.producer >= 0:
        return WIRE_FORMATS[wire_dtype]
    return Cast(dtype_of(tensor), dtype_of(tensor))
