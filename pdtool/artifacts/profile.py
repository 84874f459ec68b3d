"""The artifact Profile: the costs of a model's operators on one device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from pdtool.artifacts.artifact import Artifact, FrozenModel, ModelRef
from pdtool.artifacts.device import CPU_THREADS, Device, Precision
from pdtool.artifacts.fields import Bytes, Count, Label, ModulePath, Name, Seconds, StageIndex, Title
from pdtool.errors import FieldError
from pdtool.graph import Graph
from pdtool.options.plan_options import WIRE_BYTES, ProfileOptions

_ONLY_IF_SET = ("exact_bytes", "exact_gradient_bytes", "frozen_bytes", "saved_by")
_OWN_PAGES = 3  # one part in so many, with threads and code: seen 30 to 70 MB, for 200 MB
_GAPS_ON_GPU = 16  # seen with segments that grow: 5 to 7 % of a stage's tensors
_GAPS_ON_CPU = 8  # seen with freed memory returned: up to 15 %, for convolutions


class Node(FrozenModel):
    """One operator, at the profile's batch size.

    Attributes:
        name: unique; for a module its path (`features.0`; `relu@0`, `relu@1` if called twice).
        op: its usual name: `input`, `Conv2d`, `add`, `loss`.
        module: path of the module that it belongs to.
        inputs: nodes whose outputs it takes.
        forward_s, backward_s: seconds for one minibatch.
        update_s: seconds of the optimizer step on its parameters.
        output_bytes: bytes of the outputs that other nodes take.
        gradient_bytes: bytes of those outputs that get a gradient back.
        exact_bytes, exact_gradient_bytes: the parts of these two that are not float32, and so travel between stages
            unchanged, whatever the wire format. The file has only those that are not 0.
        parameter_bytes: bytes of its trained parameters (a shared parameter counts at each node; see Profile.shared).
        frozen_bytes: bytes of its parameters without gradients. The file has only those that are not 0.
        stash_bytes: bytes kept from its forward for its backward, without parameters. A tensor that several nodes keep
            counts at the first.
        saved_by: the node at which its output counts as stash; None if no other node keeps it. The file has only names.
        scratch_bytes: measured bytes that it holds only while it computes, such as reordered copies and gradients of
            its inner tensors, without its output and the gradients of its inputs.
        flops: floating-point operations of its forward.
    """

    name: Name
    op: Label
    module: ModulePath
    inputs: tuple[Name, ...] = ()
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    update_s: Seconds = 0.0
    output_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    exact_bytes: Bytes = 0
    exact_gradient_bytes: Bytes = 0
    parameter_bytes: Bytes = 0
    frozen_bytes: Bytes = 0
    stash_bytes: Bytes = 0
    saved_by: Name | None = None
    scratch_bytes: Bytes = 0
    flops: Bytes = 0

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value or name not in _ONLY_IF_SET}


class SharedParameter(FrozenModel):
    """A trained parameter of several nodes (tied weights): counted once in a stage, synchronised between stages."""

    name: Name
    bytes: Bytes
    nodes: tuple[Name, ...]


class Profile(Artifact):
    """`profiles/NAME.json`.

    Attributes:
        together: groups of nodes that must stand in one stage (shared state, HINTS no_split).
        pin: node -> index of its stage; negative counts from the end.
        precision: precision of the computation. fp32 is the model as written. A bf16 measurement ran under autocast, as
            a run does. An estimate in another precision is as if the model were cast to it. None: not recorded, most
            likely fp32.
        compiled: whether its operators went through torch.compile.
        segments: groups of nodes that were compiled and timed together. The sum of a group's times was measured; each
            node has a share in proportion to its uncompiled time. Nodes outside groups were timed uncompiled.
        reserved_bytes: device memory not available to tensors (see DeviceSpec); on a CPU, memory of a process with
            PyTorch loaded besides tensors (see `tensor_bytes`). 0: an earlier pdtool did not record it.
        step_s: seconds of one whole training step, measured end to end; 0 if not measured.
        launch_s: seconds that the host needs to launch the kernels of a step on a GPU; 0 if not measured.
        coverage: sum of all nodes' forward, backward and update over step_s.
        loading_s: seconds of loading one minibatch with one thread; None if not measured.
        optimizer_state_bytes: bytes of optimizer state for each byte of parameters.
        step_scratch_bytes: bytes that a step of the optimizer holds only while it runs, for each byte of parameters:
            measured on a GPU, where torch steps all parameters at once. 0: it steps one after the other.
        opaque: path of an opaque module, which cannot be cut -> why its operators cannot be seen.
        asked: the options that it was made with; None: an earlier pdtool, which did not record them, made it.
    """

    KIND: ClassVar[str] = "profile"
    MAKER: ClassVar[str] = "pdtool profile"

    name: Title
    model: ModelRef | None
    batch_size: Count
    device: Device
    precision: Precision | None = None
    compiled: bool = False
    segments: tuple[tuple[Name, ...], ...] = ()
    reserved_bytes: Bytes = 0
    step_s: Seconds
    launch_s: Seconds = 0.0
    coverage: Seconds
    loading_s: Seconds | None = None
    optimizer_state_bytes: Seconds = 0.0
    step_scratch_bytes: Seconds = 0.0
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]
    shared: tuple[SharedParameter, ...] = ()
    together: tuple[tuple[Name, ...], ...] = ()
    pin: dict[Name, StageIndex] = Field(default_factory=dict)
    opaque: dict[Name, Label] = Field(default_factory=dict)
    asked: ProfileOptions | None = None
    _wire_dtype: str = PrivateAttr("fp32")

    def check(self) -> None:
        positions: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            if node.name in positions:
                raise FieldError(f"nodes[{index}].name", f"{node.name!r} appears twice")
            positions[node.name] = index
            if node.exact_bytes > node.output_bytes or node.exact_gradient_bytes > node.gradient_bytes:
                fault = "its exact_bytes exceed output_bytes, or its exact_gradient_bytes exceed gradient_bytes"
                raise FieldError(f"nodes[{index}]", fault)
        for index, node in enumerate(self.nodes):
            if node.saved_by and positions.get(node.saved_by, -1) <= index:
                raise FieldError(f"nodes[{index}].saved_by", f"{node.saved_by!r} is not a later node")
        _ = self.graph  # raises FieldError when it is not in topological order
        for field, group in (
            *((f"shared[{i}].nodes", s.nodes) for i, s in enumerate(self.shared)),
            *((f"segments[{i}]", group) for i, group in enumerate(self.segments)),
            *((f"together[{i}]", group) for i, group in enumerate(self.together)),
            ("pin", tuple(self.pin)),
        ):
            for name in group:
                if name not in positions:
                    raise FieldError(field, f"{name!r} is not a node")

        shared_bytes: Counter[str] = Counter()
        for i, shared in enumerate(self.shared):
            shared_bytes.update(dict.fromkeys(shared.nodes, shared.bytes))
            for name in shared.nodes:
                if self.nodes[positions[name]].parameter_bytes < shared_bytes[name]:
                    fault = f"{shared_bytes[name]} in all exceed the parameter_bytes of {name!r}"
                    raise FieldError(f"shared[{i}].bytes", fault)

    def __hash__(self) -> int:
        """Hash by name and size: figures that are computed from a profile are remembered by it."""
        return hash((self.name, len(self.nodes)))

    @property
    def threads(self) -> int | None:
        """The CPU threads that the times were measured with; None if they were not measured on a CPU."""
        match = CPU_THREADS.search(self.device.name)
        return int(match[1]) if match and self.device.kind == "measured" else None

    @property
    def is_measured_on_cpu(self) -> bool:
        """Whether its device is a CPU, whose memory is the machine's."""
        return self.threads is not None

    def tensor_bytes(self, memory_bytes: int, sharing: int) -> int:
        """Return how many bytes of a worker's memory its tensors may have; none are left if that is below 1.

        On a CPU all workers of a machine share the launcher and the fork server, which both have PyTorch loaded, a
        process that ends workers, and a loader worker. Every process that the fork server starts shares its pages, and
        rewrites some of them. On any device, memory allocators leave gaps between tensors, and libraries take some
        memory to compute.

        Args:
            memory_bytes: the memory of a worker.
            sharing: workers of one machine.
        """
        left_bytes = memory_bytes - self._overhead_bytes(sharing)
        return left_bytes - max(0, left_bytes) // self._gaps if self._gaps else left_bytes

    def memory_for(self, tensor_bytes: int, sharing: int) -> int:
        """Return the memory that a worker needs to have so many bytes for its tensors: see `tensor_bytes`."""
        with_gaps = math.ceil(tensor_bytes * self._gaps / (self._gaps - 1)) if self._gaps else tensor_bytes
        return with_gaps + self._overhead_bytes(sharing)

    @property
    def _gaps(self) -> int:
        """One part in so many of the memory for tensors is left for gaps; 0: none, if nothing is reserved either."""
        if not self.reserved_bytes:
            return 0
        return _GAPS_ON_CPU if self.is_measured_on_cpu else _GAPS_ON_GPU

    def _overhead_bytes(self, sharing: int) -> int:
        """What a worker's share of processes takes on a CPU, and CUDA's context and workspaces on a GPU."""
        if not self.is_measured_on_cpu:
            return self.reserved_bytes
        own_bytes = self.reserved_bytes // _OWN_PAGES
        return math.ceil(2 * (self.reserved_bytes + own_bytes) / sharing) + own_bytes

    @cached_property
    def graph(self) -> Graph:
        """The operator graph."""
        return Graph({n.name: n.inputs for n in self.nodes}, {n.name: n.module for n in self.nodes})

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Node name -> node."""
        return {node.name: node for node in self.nodes}

    @property
    def wire_dtype(self) -> str:
        """The dtype of float32 activations and gradients in messages, for plans made from it."""
        return self._wire_dtype

    def sent_as(self, wire_dtype: str) -> Self:
        """Return the profile for plans that send float32 activations and gradients in this format."""
        profile = self.model_copy()
        profile._wire_dtype = wire_dtype
        return profile

    def sent_bytes(self, name: str) -> tuple[int, int]:
        """Return the bytes of a node's outputs in messages between stages, and those of their gradients.

        Float32 is sent in the wire format. Other dtypes, and the dataset's inputs and targets, are sent unchanged. An
        earlier pdtool did not record other dtypes, so its profiles count as float32, except for estimates as if cast to
        another precision.
        """
        node = self.by_name[name]
        is_cast = self.device.kind == "estimated" and self.precision not in (None, "fp32", "tf32")
        if node.op == "input" or is_cast:
            return node.output_bytes, node.gradient_bytes
        forward = _sent(node.output_bytes, node.exact_bytes, self._wire_dtype)
        return forward, _sent(node.gradient_bytes, node.exact_gradient_bytes, self._wire_dtype)

    def parameter_bytes(self, nodes: Collection[str]) -> int:
        """Sum the bytes of the distinct trained parameters that `nodes` use."""
        repeated = sum(s.bytes * (max(1, sum(n in nodes for n in s.nodes)) - 1) for s in self.shared)
        return sum(self.by_name[name].parameter_bytes for name in nodes) - repeated

    def weight_bytes(self, nodes: Collection[str]) -> int:
        """Sum the same and the bytes of their frozen parameters."""
        return self.parameter_bytes(nodes) + sum(self.by_name[name].frozen_bytes for name in nodes)


def _sent(size_bytes: int, exact_bytes: int, wire_dtype: str) -> int:
    return exact_bytes + (size_bytes - exact_bytes) * WIRE_BYTES[wire_dtype] // WIRE_BYTES["fp32"]
