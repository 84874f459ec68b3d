"""Cuts: where the graph of a profile may be cut into stages, and the load of every stage between two cuts.

A cut is a downset of the graph (see pdtool.graph). Nodes that must stay together are one *block*, and cuts are
enumerated over blocks. A graph with more cuts than can be searched is coarsened first, and the result says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.plan import MergedOperators, PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.planner.stage_costs import Array, StageLoad, StageLoadTable

NOT_OPERATORS = {"input": 0, "loss": -1}  # the first stage loads the data; only the last can have the loss


@dataclass(frozen=True, kw_only=True)
class CutSpace:
    """The cuts of a profile, which of them may border which stage, and the stages between them.

    c: cuts, j: the cuts that a stage may end at.

    Attributes:
        blocks: nodes that no cut separates, in topological order of the blocks.
        inside: [cuts, blocks] whether a cut holds a block; from the empty cut to the whole, by size.
        pins: for each block the stage indices it is pinned to, negative from the end.
        merged_operators: operators that were merged to keep the search small; None: none were.
        merged_free_blocks: number of merged blocks that cost no time; this loses no plan unless memory is short.
    """

    profile: Profile
    blocks: Sequence[Sequence[str]]
    inside: NDArray[np.bool_]
    pins: Sequence[Collection[int]]
    merged_operators: MergedOperators | None = None
    merged_free_blocks: int = 0
    _coarser: dict[int, CutSpace] = field(default_factory=dict, init=False)

    @cached_property
    def contains(self) -> NDArray[np.bool_]:
        """[cuts, cuts] whether the second cut is a proper superset of the first."""
        within = self.inside.astype(np.float32)
        supersets: NDArray[np.bool_] = within @ (1 - within).T == 0
        np.fill_diagonal(supersets, False)
        return supersets

    @property
    def max_stages(self) -> int:
        """Length of the longest chain of cuts; every maximal chain of downsets grows by one block at a time."""
        return len(np.unique(self.inside.sum(axis=1))) - 1

    @property
    def has_counted_pins(self) -> bool:
        """Whether a block is pinned to a stage in the middle, so that it matters how many stages there are."""
        return any(pin not in (0, -1) for pins in self.pins for pin in pins)

    def allowed_before(self, stage: int, stages: int) -> NDArray[np.bool_]:
        """[cuts] which cuts can stand before stage `stage` of `stages`: all that is pinned before it lies inside.

        A pin beyond the last stage wraps around, as in Plan.stage_nodes.
        """
        is_allowed = np.ones(len(self.inside), dtype=bool)
        for block, pins in enumerate(self.pins):
            for pin in pins:
                is_allowed &= self.inside[:, block] == (pin % stages < stage)
        return is_allowed

    @property
    def cut_count(self) -> int:
        """c: number of cuts."""
        return len(self.inside)

    @cached_property
    def loads(self) -> StageLoadTable:
        """The loads of the stages between any two cuts."""
        return StageLoadTable(self.profile, self.blocks, self.inside)

    @cached_property
    def stages_from(self) -> list[tuple[Array, StageLoad]]:
        """For each cut that a stage may begin at: the cuts where it may end [j], and its load then, each field [j]."""
        ends = [np.flatnonzero(row) for row in self.contains]
        return [(row, self.loads.stages_from(i, row)) for i, row in enumerate(ends)]

    def coarser(self, max_cuts: int) -> CutSpace:
        """Return a space of at most `max_cuts` cuts along one order of the operators; itself if it has no more."""
        inside = self.inside
        if len(inside) > max_cuts and max_cuts not in self._coarser:
            last = inside.shape[1] - inside[:, ::-1].argmax(axis=1)
            chain = np.flatnonzero(inside.sum(axis=1) == np.where(inside.any(axis=1), last, 0))
            chosen = chain[np.unique(np.linspace(0, len(chain) - 1, max_cuts).astype(int))]
            self._coarser[max_cuts] = replace(self, inside=inside[chosen])
        return self._coarser.get(max_cuts, self)

    def nodes(self, before: int, after: int) -> list[str]:
        """Return the nodes of the stage between two cuts."""
        blocks = np.flatnonzero(self.inside[after] & ~self.inside[before]).tolist()
        return [name for block in blocks for name in self.blocks[block]]


def find_cuts(profile: Profile, max_cuts: int = PlanOptions.max_cuts, finer: CutSpace | None = None) -> CutSpace:
    """Enumerate the cuts of `profile`: groups unbroken, pins kept, an operator in every stage.

    Args:
        max_cuts: rough limit, at least 2; above it, blocks are merged.
        finer: cuts found earlier for a larger `max_cuts`, to continue from.
    """
    max_cuts = max(2, max_cuts)
    pins = {node.name: NOT_OPERATORS[node.op] for node in profile.nodes if node.op in NOT_OPERATORS} | profile.pin
    same_pin = ([name for name, pin in pins.items() if pin == index] for index in sorted(set(pins.values())))
    blocks = _BlockGraph(profile, pins, [*unbroken_groups(profile), *same_pin])
    original = len(blocks.members)
    if finer:
        blocks = _BlockGraph(profile, pins, finer.blocks)
    if blocks.cuts(max_cuts) is None:
        blocks = blocks.without_free()
    without_free = len(blocks.members)
    while (cuts := blocks.cuts(max_cuts)) is None:
        blocks = blocks.coarser(max_cuts)
    count = len(blocks.members)
    merged_operators = finer.merged_operators if finer else None
    if count < without_free:
        merged_operators = MergedOperators(groups=original, merged_into=count, max_cuts=max_cuts)
    packed = b"".join(cut.to_bytes(count // 8 + 1, "little") for cut in cuts)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(cuts), -1), axis=1, bitorder="little")
    return CutSpace(
        profile=profile,
        blocks=blocks.members,
        inside=bits[:, :count].astype(bool),
        pins=blocks.pins,
        merged_operators=merged_operators,
        merged_free_blocks=original - without_free,
    )


def unbroken_groups(profile: Profile) -> list[Sequence[str]]:
    """Return groups of nodes that no cut may separate: those of the profile, and each dead end with a neighbour.

    A dead end is an operator whose output nobody takes: it only writes a buffer, such as a batch norm's counter. A
    stage of dead ends would have nothing to send, and each dead end without inputs would double the cuts. The model's
    outputs are not dead ends, because the loss takes them. Without a loss, they cannot be told apart.
    """
    groups: list[Sequence[str]] = [group for group in profile.together if group]
    by_name, takers = profile.by_name, profile.graph.consumers
    if all(node.op != "loss" for node in profile.nodes):
        return groups
    ends = {name for name, node in by_name.items() if node.op not in NOT_OPERATORS and not takers[name]}
    while ends:
        blocks = profile.graph.contracted(groups)
        pairs = [block + blocks[b] for block, b in _dead_ends(profile, blocks, ends)]
        if not pairs:
            break
        groups += pairs
    return groups


def _dead_ends(
    profile: Profile, blocks: Sequence[Sequence[str]], ends: Collection[str]
) -> Iterator[tuple[list[str], int]]:
    """Yield each dead-end block and its neighbour among the computing blocks: the last one that it takes a tensor from,
    or else the next, or the one before. Pinned blocks stay in place."""
    graph, pinned = profile.graph, profile.pin.keys()
    block_of = {name: b for b, block in enumerate(blocks) for name in block}
    computing = [b for b, block in enumerate(blocks) if _computes(profile, block)]
    for b in sorted({block_of[name] for name in ends}):
        if not pinned.isdisjoint(blocks[b]) or any(block_of[t] != b for n in blocks[b] for t in graph.consumers[n]):
            continue
        sources = {block_of[source] for name in blocks[b] for source in graph.inputs[name]}
        others = [c for c in computing if c != b]
        last_source = [c for c in others if c in sources][-1:]
        neighbours = [*last_source, *(c for c in others if c > b), *reversed(others)]
        if neighbours:
            yield list(blocks[b]), neighbours[0]


def _bits(blocks: Iterable[int]) -> int:
    """Return an int with the bits of these blocks set."""
    return sum(1 << b for b in blocks)


def _computes(profile: Profile, block: Sequence[str]) -> bool:
    return any(profile.by_name[name].op not in NOT_OPERATORS for name in block)


class _BlockGraph:
    """A graph of blocks that is merged until its cuts can be searched. Cuts are ints, one bit per block."""

    def __init__(self, profile: Profile, pin: Mapping[str, int], groups: Sequence[Sequence[str]]) -> None:
        self.profile, self.pin = profile, pin
        self.members = profile.graph.contracted(groups)
        self.pins = [{pin[name] for name in block if name in pin} for block in self.members]
        block_of = {name: b for b, block in enumerate(self.members) for name in block}
        self.edges: dict[tuple[int, int], int] = {}  # bytes between two blocks
        for name, takers in profile.graph.consumers.items():
            for end in {block_of[taker] for taker in takers} - {block_of[name]}:
                edge = (block_of[name], end)
                self.edges[edge] = self.edges.get(edge, 0) + profile.sent_bytes(name)[0]
        self.before: list[list[int]] = [[] for _ in self.members]
        self.after: list[list[int]] = [[] for _ in self.members]
        for a, b in sorted(self.edges):
            self.before[b].append(a)
            self.after[a].append(b)

    def cuts(self, limit: int) -> list[int] | None:
        """Return all cuts, by size; None when there are more than `limit` (known after about `limit` steps).

        Blocks pinned to the first stage are in every cut but the empty one. Blocks pinned to the last stage are only in
        the whole. A cut without an operator on one side is left out, because a stage there would compute nothing.
        """
        last = {b for b, pins in enumerate(self.pins) if -1 in pins}
        smallest = self._closure({b for b, pins in enumerate(self.pins) if 0 in pins})
        sources = [_bits(before) for before in self.before]
        # Cuts grow by one block at a time. A block may be next if the cut holds its sources: `sources[b] & ~cut` is 0.
        next_blocks = [b for b, needed in enumerate(sources) if not smallest >> b & 1 and not needed & ~smallest]
        queue = [] if smallest & _bits(last) else [(smallest, [b for b in next_blocks if b not in last])]
        cuts = {cut for cut, _ in queue}
        for cut, next_blocks in queue:
            for b in next_blocks:
                larger = cut | 1 << b
                if larger not in cuts:
                    cuts.add(larger)
                    more = [c for c in self.after[b] if c not in last and not sources[c] & ~larger]
                    queue.append((larger, [c for c in next_blocks if c != b] + more))  # the loop comes to it too
            if len(cuts) > limit:
                return None
        computing = _bits(b for b, block in enumerate(self.members) if _computes(self.profile, block))
        inner = [cut for cut in cuts if cut & computing and ~cut & computing]
        return [0, *sorted(inner, key=lambda cut: (cut.bit_count(), cut)), _bits(range(len(self.members)))]

    def _closure(self, blocks: Collection[int]) -> int:
        """Return the smallest cut that holds `blocks`."""
        cut = 0
        for b in reversed(range(len(self.members))):
            if b in blocks or any(cut >> after & 1 for after in self.after[b]):
                cut |= 1 << b
        return cut

    def without_free(self) -> _BlockGraph:
        """Merge blocks without time and parameters into a neighbour if that loses no good plan: no plan gets slower
        when such a block moves over the border to that neighbour."""
        merged: set[int] = set()
        pairs = []
        for b in range(len(self.members)):
            partner = self._free_partner(b)
            if partner is not None and not {b, partner} & merged:
                merged |= {b, partner}
                pairs.append(self.members[b] + self.members[partner])
        return _BlockGraph(self.profile, self.pin, [*self.members, *pairs]).without_free() if pairs else self

    def _free_partner(self, b: int) -> int | None:
        """Return the block that the free block `b` can always join: the source of its only input, if nobody else takes
        that and `b`'s output is no larger than its input; or its only taker, if its input is no larger than its
        output."""
        nodes = [self.profile.by_name[name] for name in self.members[b]]
        if self.pins[b] or any(n.forward_s + n.backward_s + n.update_s + n.parameter_bytes for n in nodes):
            return None
        entering = [self._bytes(a, [b]) for a in self.before[b]]
        leaving = self._bytes(b, self.after[b])
        if len(self.before[b]) == 1 and not self.pins[self.before[b][0]] & {0}:
            is_only_taker = self.after[self.before[b][0]] == [b] or not self.after[b]
            if is_only_taker and all(out <= into for out, into in zip(leaving, entering[0], strict=True)):
                return self.before[b][0]
        totals = [sum(sizes) for sizes in zip(*entering, strict=True)]
        if len(self.after[b]) == 1 and all(into <= out for into, out in zip(totals, leaving, strict=False)):
            return self.after[b][0]
        return None

    def _bytes(self, b: int, takers: Collection[int]) -> list[int]:
        """Return what `b` makes and any of `takers` takes: bytes sent forward, sent backward, and in memory."""
        taken = {name for taker in takers for inner in self.members[taker] for name in self.profile.graph.inputs[inner]}
        names = [name for name in self.members[b] if name in taken]
        sizes = [(*self.profile.sent_bytes(name), self.profile.by_name[name].output_bytes) for name in names]
        return [sum(column) for column in zip(*sizes, strict=True)] or [0, 0, 0]

    def coarser(self, max_cuts: int) -> _BlockGraph:
        """Merge up to a twelfth of the blocks (a third if there are far too many) with a neighbour each; at least one
        block.

        A block multiplies the cuts if many others may be on either side of a cut next to it: those in parallel with it.
        The first to be merged are those with many others in parallel and little time of their own, so that stages can
        still be balanced. Each is merged with the neighbour to which most bytes flow: a border there would be slow.
        """
        nodes, count = self.profile.by_name, len(self.members)
        time_s = [sum(nodes[name].forward_s + nodes[name].backward_s for name in block) for block in self.members]
        earlier, later = _reached(self.before, range(count)), _reached(self.after, reversed(range(count)))
        parallel = [count - 1 - earlier[b].bit_count() - later[b].bit_count() for b in range(count)]
        rank = [(not n, time / max(1, n)) for n, time in zip(parallel, time_s, strict=True)]
        # the blocks on another way between two would be merged as well
        edges = [(a, c) for a, c in self.edges if not later[a] & earlier[c] and not (self.pins[a] and self.pins[c])]
        edges = [edge for edge in edges if any(parallel[b] for b in edge)] or edges
        max_pairs = count // (3 if count > 2 * max_cuts else 12)
        merged: set[int] = set()
        pairs: list[tuple[int, int]] = []
        for edge in sorted(edges, key=lambda edge: (min(rank[b] for b in edge), -self.edges[edge])):
            if len(pairs) <= max_pairs and merged.isdisjoint(edge):
                merged.update(edge)
                pairs.append(edge)
        groups = [self.members[a] + self.members[c] for a, c in pairs or [(0, 1)]]
        return _BlockGraph(self.profile, self.pin, [*self.members, *groups])


def _reached(neighbours: Sequence[Sequence[int]], order: Iterable[int]) -> dict[int, int]:
    """Return, for each block, all blocks on one side of it, as bits.

    Args:
        neighbours: those next to it on that side, all earlier in the order.
    """
    reached: dict[int, int] = {}
    for b in order:
        reached[b] = _bits(neighbours[b])
        for c in neighbours[b]:
            reached[b] |= reached[c]
    return reached
