"""How one tensor travels: its parts in a message, and how it is packed into them and unpacked.

         stage                   message                 stage
    float32 [8, 64]  ──pack──▶  bfloat16 [8, 64]  ──unpack──▶  float32 [8, 64]        --wire-dtype bf16

A transport carries the parts and knows nothing else about them. A new format needs an entry in `WIRE_FORMATS` here, and
one in `WIRE_BYTES` (pdtool/options/plan_options.py) for its size in the formulas.
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
        """Return the tensors for the parts, each of its part's shape.

        If a dtype differs from its part's, the copy into the message converts it, which saves a pass over the tensor
        here.

        Args:
            tensor: of any shape, without a graph.
        """

    def unpack(self, parts: Iterator[Tensor]) -> Tensor:
        """Return the tensor made from its parts; it may be in the memory of a part."""


@dataclass(frozen=True)
class Cast:
    """One part, of the tensor's shape.

    Attributes:
        dtype: dtype at both stages.
        sent_as: dtype in messages.
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


# Value of `--wire-dtype` -> how float32 activations and gradients travel.
WIRE_FORMATS: dict[str, WireFormat] = {
    "fp32": Cast(torch.float32, torch.float32),
    "fp16": Cast(torch.float32, torch.float16),
    "bf16": Cast(torch.float32, torch.bfloat16),
}


def format_of(tensor: TensorSpec, wire_dtype: str) -> WireFormat:
    """Return how a tensor travels. Tensors other than float32, and the dataset's, travel unchanged."""
    if tensor.dtype == "float32" and tensor.producer >= 0:
        return WIRE_FORMATS[wire_dtype]
    return Cast(dtype_of(tensor), dtype_of(tensor))
