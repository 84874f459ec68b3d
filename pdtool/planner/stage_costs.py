"""Loads of stages: time, memory and traffic per minibatch, for the stages of one plan or between any two cuts.

A stage lies between two cuts (see pdtool.graph). Its load is the sum inside the second cut less the sum inside the
first:

    cut i   | x  a |  b  c  d        stage (i, j) = b, c      load[j] - load[i]
    cut j   | x  a    b  c |  d

The stages of one plan are the pairs of consecutive cuts of that plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Profile
from pdtool.planner.stash_table import StashTable

Array = NDArray[Any]
Number = Any  # one number, or a numpy array of them
Stages: TypeAlias = tuple[tuple[str, ...], ...]  # names of operators

_REMEMBERED_PLANS = 1024  # bounds, formulas and simulations of a plan each ask for its loads


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """The time, memory and traffic of one stage for one minibatch on one worker; or arrays of these, for many stages.

    Attributes:
        forward_s, backward_s, update_s: seconds on one worker.
        parameter_bytes: distinct trained parameters, tied ones included.
        frozen_bytes: parameters that are not trained.
        tied_bytes: parameters that other stages hold too.
        stash_bytes: kept from forward to backward, besides received tensors.
        working_bytes: the most that is needed beyond the stash at any moment (see stash_table): what one operator needs
            while it computes, less the stash of the operators after it. An optimizer step may need more, without stash.
        input_bytes: memory of a minibatch's tensors from all earlier stages, each once. On a GPU, messages have slots
            that are set aside, and the gradients from later stages count, too.
        arriving_bytes: memory of the messages that arrive meanwhile: these tensors for the next minibatch, and the
            gradients of all tensors that later stages take. On a GPU these have spare slots: three more than the
            minibatches in flight, as `_device_layout` in runtime/messages/open_channels.py counts them.
        received_bytes: message size of these tensors, see Profile.sent_bytes.
        returned_bytes: message size of the gradients sent back for them.
        entering_bytes: message size of all tensors that cross the cut before the stage, whoever takes them, without the
            model's inputs.
    """

    forward_s: Number
    backward_s: Number
    update_s: Number
    parameter_bytes: Number
    frozen_bytes: Number
    tied_bytes: Number
    stash_bytes: Number
    working_bytes: Number
    input_bytes: Number
    arriving_bytes: Number
    received_bytes: Number
    returned_bytes: Number
    entering_bytes: Number

    def select(self, index: Any) -> StageLoad:
        """Return the loads at these positions of the arrays."""
        return StageLoad(**{name: column[index] for name, column in vars(self).items()})


@dataclass(frozen=True)
class StageLoadTable:
    """The loads of the stages between any two of some cuts.

    Args:
        blocks: nodes that no cut separates, in topological order of the blocks.
        inside: [cuts, blocks] whether a cut holds a block; from the empty cut to the whole.
    """

    profile: Profile
    blocks: Sequence[Sequence[str]]
    inside: NDArray[np.bool_]

    @cached_property
    def forward_backward_s(self) -> Array:
        """[cuts] seconds of all that lies inside each cut."""
        return self._sums["forward_s"] + self._sums["backward_s"]

    def stages_from(self, begin: int, ends: Array) -> StageLoad:
        """Return the loads of the stages from cut `begin` to each of the cuts `ends`; every field is [ends]."""
        moved, gradient_bytes = np.zeros((3, len(ends))), self._returning_bytes[ends]
        received, has_slots = np.flatnonzero(self._crossing[begin]), not self.profile.is_measured_on_cpu
        for producer in received:
            is_taken = self._takers_inside[ends, producer] > self._takers_inside[begin, producer]
            moved += is_taken * self._producer_bytes[:3, producer, np.newaxis]
            gradient_bytes -= self._crossing[ends, producer] * self._producer_bytes[3, producer]
        sums = {name: np.maximum(0.0, values[ends] - values[begin]) for name, values in self._sums.items()}  # rounded
        stash_bytes, working_bytes = self._stashes.between(begin, ends, [self._producers[k][0] for k in received])
        tied = np.zeros(len(ends))
        for size_bytes, holders_inside in self._shared:
            holders = holders_inside[ends] - holders_inside[begin]
            sums["parameter_bytes"] = sums["parameter_bytes"] - size_bytes * np.maximum(holders - 1, 0)
            tied += size_bytes * ((holders > 0) & (holders < holders_inside[-1]))
        return StageLoad(
            **sums,
            tied_bytes=tied,
            stash_bytes=stash_bytes,
            working_bytes=working_bytes,
            received_bytes=moved[0],
            returned_bytes=moved[1],
            input_bytes=moved[2] + gradient_bytes * has_slots,
            arriving_bytes=moved[2] + gradient_bytes + has_slots * (3 * moved[2] + 2 * gradient_bytes),
            entering_bytes=np.full(len(ends), self._entering_bytes[begin]),
        )

    @cached_property
    def _stashes(self) -> StashTable:
        return StashTable(self.profile, self._block_of, self.inside)

    @cached_property
    def _block_of(self) -> dict[str, int]:
        return {name: b for b, block in enumerate(self.blocks) for name in block}

    @cached_property
    def _blocks_of_nodes(self) -> Array:
        """[nodes] the block of each node of the profile."""
        return np.array([self._block_of[node.name] for node in self.profile.nodes], dtype=np.int64)

    def _sum_inside(self, values: Sequence[float]) -> Array:
        """[cuts] sum of one value per node over the nodes inside each cut."""
        per_block = np.bincount(self._blocks_of_nodes, weights=values, minlength=len(self.blocks))
        return np.asarray(self.inside @ per_block)

    @cached_property
    def _sums(self) -> dict[str, Array]:
        """Field of StageLoad -> [cuts] its sum inside each cut, shared parameters counted at each of their nodes."""
        fields = ("forward_s", "backward_s", "update_s", "parameter_bytes", "frozen_bytes")
        return {name: self._sum_inside([getattr(node, name) for node in self.profile.nodes]) for name in fields}

    @cached_property
    def _shared(self) -> list[tuple[int, Array]]:
        """For each shared parameter its bytes, and [cuts] how many of its nodes lie inside each cut."""
        return [
            (shared.bytes, self._sum_inside([float(node.name in shared.nodes) for node in self.profile.nodes]))
            for shared in self.profile.shared
        ]

    @cached_property
    def _producers(self) -> list[tuple[str, list[int]]]:
        """Nodes whose output leaves their block, and the blocks that take it."""
        producers = (
            (name, sorted({self._block_of[taker] for taker in takers} - {self._block_of[name]}))
            for name, takers in self.profile.graph.consumers.items()
        )
        return [(name, blocks) for name, blocks in producers if blocks]

    @cached_property
    def _producer_bytes(self) -> Array:
        """[4, producers] bytes sent forward, bytes of gradient sent backward, and both in memory."""
        nodes = [self.profile.by_name[name] for name, _ in self._producers]
        sizes = [(*self.profile.sent_bytes(node.name), node.output_bytes, node.gradient_bytes) for node in nodes]
        return np.array(sizes, dtype=float).reshape(len(nodes), 4).T

    @cached_property
    def _takers_inside(self) -> Array:
        """[cuts, producers] how many of the blocks that take a producer's output lie inside each cut."""
        columns = [self.inside[:, blocks].sum(axis=1) for _, blocks in self._producers]
        return np.array(columns, dtype=np.int32).reshape(len(columns), len(self.inside)).T

    @cached_property
    def _crossing(self) -> Array:
        """[cuts, producers] whether a producer is inside a cut and something outside takes its output."""
        homes = np.array([self._block_of[name] for name, _ in self._producers], dtype=np.int64)
        return np.asarray(self.inside[:, homes] & (self._takers_inside < self._takers_inside[-1]))

    @cached_property
    def _returning_bytes(self) -> Array:
        """[cuts] memory of the gradients that cross each cut."""
        return np.asarray(self._crossing @ self._producer_bytes[3])

    @cached_property
    def _entering_bytes(self) -> Array:
        """[cuts] bytes that cross each cut, without the model's inputs."""
        is_computed = np.array([self.profile.by_name[name].op != "input" for name, _ in self._producers], dtype=bool)
        return np.asarray(self._crossing @ (self._producer_bytes[0] * is_computed))


@lru_cache(_REMEMBERED_PLANS)
def stage_loads(profile: Profile, stages: Stages) -> Sequence[StageLoad]:
    """Return the load of each stage of one plan, as plain numbers."""
    prefixes = np.tri(len(stages) + 1, len(stages), -1, dtype=bool)
    table = StageLoadTable(profile, stages, prefixes)
    loads = (table.stages_from(s, np.array([s + 1])) for s in range(len(stages)))
    return [
        StageLoad(
            **{
                name: float(column[0]) if name.endswith("_s") else round(float(column[0]))
                for name, column in vars(load).items()
            }
        )
        for load in loads
    ]


@dataclass(frozen=True, kw_only=True)
class StageEdge:
    """Tensors that one stage sends another for each minibatch; `has_gradient`: whether gradients come back."""

    source: int
    destination: int
    forward_bytes: int = 0
    backward_bytes: int = 0
    has_gradient: bool = True


@lru_cache(_REMEMBERED_PLANS)
def stage_edges(profile: Profile, stages: Stages) -> Sequence[StageEdge]:
    """Return the tensors that go from each node's stage straight to every stage that takes them; inputs come from stage
    0."""
    stage_of = _stage_of(stages)
    sent: dict[tuple[int, int], list[str]] = {}
    for name, takers in profile.graph.consumers.items():
        for s in sorted({stage_of[taker] for taker in takers} - {stage_of[name]}):
            sent.setdefault((stage_of[name], s), []).append(name)
    edges = []
    for (source, destination), names in sorted(sent.items()):
        nodes = [profile.by_name[name] for name in names]
        forward_bytes, backward_bytes = map(sum, zip(*map(profile.sent_bytes, names), strict=True))
        edges.append(
            StageEdge(
                source=source,
                destination=destination,
                forward_bytes=forward_bytes,
                backward_bytes=backward_bytes,
                has_gradient=any(node.gradient_bytes or not node.output_bytes for node in nodes),
            )
        )
    return edges


@lru_cache(_REMEMBERED_PLANS)
def tied_bytes(profile: Profile, stages: Stages) -> Mapping[tuple[int, ...], int]:
    """Return the bytes of tied parameters by the group of stages that hold them, where these are several."""
    stage_of = _stage_of(stages)
    sizes: dict[tuple[int, ...], int] = {}
    for shared in profile.shared:
        holders = tuple(sorted({stage_of[name] for name in shared.nodes}))
        if len(holders) > 1:
            sizes[holders] = sizes.get(holders, 0) + shared.bytes
    return sizes


def _stage_of(stages: Stages) -> dict[str, int]:
    return {name: s for s, nodes in enumerate(stages) for name in nodes}
