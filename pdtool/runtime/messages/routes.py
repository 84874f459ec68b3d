"""Routes of tensors between stages and workers, and the two ends of the channel that carries a route.

Edge    one tensor from one stage directly to another, once per minibatch; its gradient comes back the same way
Route   all edges between two stages in one direction, from one worker to another: one message per minibatch
Part    one array of a message: one tensor, in the dtype in which it travels

         stage                   message                 stage
    float32 [8, 64]  ──pack──▶  bfloat16 [8, 64]  ──unpack──▶  float32 [8, 64]        --wire-dtype bf16

stage 0, replica 0 ──route: minibatches 0, 2, 4──▶ stage 1, replica 0     edges of both routes: activation "a",
stage 0, replica 1 ──route: minibatches 1, 3, 5──▶ stage 1, replica 0     labels "the target 0"

All workers list the same edges and routes. A channel has a Sender and a Receiver.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pdtool.artifacts.bundle import Bundle, TensorSpec
from pdtool.frontend.model_io import dtype_of
from pdtool.runtime.groups import peer_error
from pdtool.runtime.status import PeerError

Direction = Literal["forward", "backward"]
# Value of `--wire-dtype` -> the dtype in which float32 activations and gradients travel between workers. The formulas
# charge for the bytes in WIRE_BYTES (pdtool/options/plan_options.py).
WIRE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Part(NamedTuple):
    """One array of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Edge:
    """One tensor from one stage directly to another, once per minibatch; its gradient comes back the same way.

    Attributes:
        name: name of the tensor, or of a part of the target.
    """

    name: str
    source: int
    destination: int
    tensor: TensorSpec


@dataclass(frozen=True)
class Route:
    """The messages from one worker to another between two stages in one direction, one for each of its minibatches.

    Attributes:
        number: position in the list of all routes.
        source, destination: stages, in the direction of the messages.
        sender, receiver: ranks.
        every, first: it carries the minibatches i with i mod every == first.
        edges: edges whose tensors (backward: gradients) are in a message, in this order.
        has_flags: whether a last part says for each edge, by 0 or 1, whether it has a gradient.
        wire_dtype: how float32 activations and gradients travel between workers.
    """

    number: int
    direction: Direction
    source: int
    destination: int
    sender: int
    receiver: int
    every: int
    first: int
    edges: tuple[Edge, ...]
    has_flags: bool = False
    wire_dtype: str = "fp32"

    def has(self, minibatch: int) -> bool:
        """Whether this minibatch takes this route."""
        return minibatch % self.every == self.first

    def depth(self, in_flight: int) -> int:
        """Return the most messages under way: the receiver has every minibatch that is older by this number.

        Args:
            in_flight: minibatches that the schedule has in flight at once, over all replicas.
        """
        return 1 + -(-in_flight // self.every)

    @cached_property
    def is_local(self) -> bool:
        """Whether both stages are on one worker, so that nothing travels."""
        return self.sender == self.receiver

    @cached_property
    def consumer(self) -> str:
        """The action that takes the messages, without the minibatch: `1F` or `0B`; a trace says `for 1F7`."""
        return f"{self.destination}{'F' if self.direction == 'forward' else 'B'}"

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """The dtype of each part; what stays on a worker, or the dataset gives, or is not float32 travels as it is."""
        float_dtype = WIRE_DTYPES["fp32" if self.is_local else self.wire_dtype]
        dtypes = [
            float_dtype if dtype == torch.float32 and edge.tensor.producer >= 0 else dtype
            for edge, dtype in zip(self.edges, self._edge_dtypes, strict=True)
        ]
        return [*dtypes, torch.uint8] if self.has_flags else dtypes

    @cached_property
    def _edge_dtypes(self) -> list[torch.dtype]:
        return [dtype_of(edge.tensor) for edge in self.edges]

    def parts(self, samples: int) -> list[Part]:
        """Return the parts of the message of a minibatch of `samples`."""
        shapes = [edge.tensor.sizes(samples) for edge in self.edges]
        if self.has_flags:
            shapes.append((len(self.edges),))
        return list(map(Part, shapes, self.dtypes))

    def pack(self, by_name: Mapping[str, Tensor | None], samples: int, device: torch.device) -> list[Tensor]:
        """Return what goes into the parts of a message, without graphs; it is converted when it is copied there.

        Args:
            by_name: tensor of each edge, [samples, ...]; None for a missing gradient, which is sent as zeros.
            device: where zeros are made.
        """
        parts: list[Tensor] = []
        for edge, dtype in zip(self.edges, self._edge_dtypes, strict=True):
            tensor = by_name[edge.name]
            if tensor is None:
                tensor = torch.zeros(edge.tensor.sizes(samples), dtype=dtype, device=device)
            parts.append(tensor.detach())
        if self.has_flags:
            has_gradient = [by_name[edge.name] is not None for edge in self.edges]
            parts.append(torch.tensor(has_gradient, dtype=torch.uint8))
        return parts

    def unpack(self, parts: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the tensor of each edge, [samples, ...]; None for one whose flag says that it has no gradient."""
        tensors: list[Tensor | None] = [
            part if part.dtype is dtype else part.to(dtype)
            for part, dtype in zip(parts, self._edge_dtypes, strict=False)
        ]
        if self.has_flags:
            flags = parts[-1].tolist()
            return [tensor if is_there else None for tensor, is_there in zip(tensors, flags, strict=True)]
        return tensors

    def describe(self, minibatch: int) -> str:
        """Return `forward 'b' of minibatch 4`."""
        return f"{self.direction} {', '.join(repr(edge.name) for edge in self.edges)} of minibatch {minibatch}"

    def not_received(self, minibatch: int, error: RuntimeError | OSError) -> PeerError:
        """Return the receiver's error when a message does not come; see `peer_error`."""
        what = f"{self.describe(minibatch)} did not arrive from rank {self.sender}"
        return peer_error(what, self.sender, error)

    def not_sent(self, minibatch: int, error: RuntimeError | OSError) -> PeerError:
        """Return the sender's error when a message cannot be delivered; see `peer_error`."""
        what = f"{self.describe(minibatch)} could not be sent to rank {self.receiver}"
        return peer_error(what, self.receiver, error)


def list_edges(bundle: Bundle, targets: Sequence[TensorSpec]) -> list[Edge]:
    """Return all edges. Loaded tensors that later stages need (model inputs, targets) start at stage 0.

    Args:
        targets: the tensors of a target, which go to the last stage.
    """
    last = len(bundle.stages) - 1
    edges = [
        Edge(tensor.name, max(tensor.producer, 0), consumer, tensor)
        for tensor in bundle.tensors
        for consumer in tensor.consumers
    ]
    edges += [Edge(target_name(i), 0, last, target) for i, target in enumerate(targets)]
    return [edge for edge in edges if edge.source != edge.destination]


def list_routes(
    edges: Sequence[Edge], ranks: Sequence[Sequence[int]], *, optional_gradients: bool = False, wire_dtype: str = "fp32"
) -> list[Route]:
    """Return all routes of both directions; minibatch i is at replica i mod r of each stage.

    Args:
        ranks: ranks of each stage's replicas.
        optional_gradients: see Bundle.
        wire_dtype: how float32 activations and gradients travel between workers.
    """
    between: dict[tuple[Direction, int, int], list[Edge]] = {}
    for edge in edges:
        between.setdefault(("forward", edge.source, edge.destination), []).append(edge)
        if edge.tensor.gradient:
            between.setdefault(("backward", edge.destination, edge.source), []).append(edge)
    routes: list[Route] = []
    for (direction, source, destination), group in between.items():
        senders, receivers = ranks[source], ranks[destination]
        every = math.lcm(len(senders), len(receivers))
        for i in range(every):
            ends = (source, destination, senders[i % len(senders)], receivers[i % len(receivers)])
            has_flags = optional_gradients and direction == "backward"
            routes.append(Route(len(routes), direction, *ends, every, i, tuple(group), has_flags, wire_dtype))
    return routes


def target_name(i: int) -> str:
    """Name of the i-th tensor of the target."""
    return f"the target {i}"


def describe_targets(leaves: Sequence[Tensor]) -> list[TensorSpec]:
    """Describe the tensors of the target of any minibatch.

    Args:
        leaves: the tensors for a minibatch of one sample, [1, ...] each.
    """
    return [
        TensorSpec(
            name=f"target_{i}",
            producer=-1,
            consumers=(),
            shape=("batch", *leaf.shape[1:]),
            dtype=str(leaf.dtype).removeprefix("torch."),
            gradient=False,
        )
        for i, leaf in enumerate(leaves)
    ]


class Sender(Protocol):
    """The sending end of a channel. A channel carries the messages of one route, first in, first out.

    The route defines the parts of a message.
    """

    def send(self, minibatch: int, parts: Sequence[Tensor]) -> int:
        """Start sending the parts from `Route.pack`, which must not change afterwards; return the bytes that travel.
        Raises PeerError.

        Convert each part to its dtype in `Route.dtypes`.
        """

    def flush(self) -> None:
        """Wait until sent messages need this worker no longer; raises PeerError. By default they never do."""
        return


class Receiver(Protocol):
    """The receiving end of a channel.

    The action lists of both workers name the same minibatches in the same order. Only StageIO asserts that the receiver
    asks for messages in the order of `expect`.
    """

    def expect(self, minibatch: int, samples: int) -> None:
        """Prepare to receive the message of a minibatch of `samples`, after those expected earlier; raises PeerError.

        By default there is nothing to prepare: a sender does not wait to be asked.
        """
        return

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Wait for the oldest expected message, which is that of `minibatch`, and return its parts; raises
        PeerError."""


class LocalChannel(Sender, Receiver):
    """Both ends of a channel between two stages on one worker: nothing travels."""

    def __init__(self) -> None:
        self._sent: deque[list[Tensor]] = deque()

    def send(self, minibatch: int, parts: Sequence[Tensor]) -> int:
        """Keep the parts for the stage that will ask for them."""
        self._sent.append(list(parts))
        return 0

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Return the parts that were sent."""
        return self._sent.popleft()
