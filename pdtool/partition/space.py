"""The space of plans: where a profile's graph may be cut into stages.

A cut is a downset of the graph (graph.py). Nodes that must stay together are one *block*; cuts are enumerated over
blocks. Where a graph has more cuts than can be searched it is coarsened first, and the space says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Profile

MAX_CUTS = 1200
NOT_OPERATORS = {"input": 0, "loss": -1}  # the first stage loads the data; only the last can have the loss


@dataclass(frozen=True, kw_only=True)
class Space:
    """The cuts of a profile, and which of them may border which stage.

    Attributes:
        blocks: nodes that no cut separates, in topological order of the blocks.
        inside: [cuts, blocks] whether a cut holds a block; from the empty cut to the whole, by size.
        pins: for each block the stage indices it is pinned to, negative from the end.
        coarsened: what was merged so that the cuts could be searched; "" when nothing was.
        freed: blocks that cost no time and were merged; no plan is lost by that but where memory is short.
    """

    blocks: Sequence[Sequence[str]]
    inside: NDArray[np.bool_]
    pins: Sequence[Collection[int]]
    coarsened: str = ""
    freed: int = 0

    @cached_property
    def contains(self) -> NDArray[np.bool_]:
        """[cuts, cuts] whether the second cut is a proper superset of the first."""
        within = self.inside.astype(np.float32)
        supersets: NDArray[np.bool_] = within @ (1 - within).T == 0
        np.fill_diagonal(supersets, False)
        return supersets

    @property
    def most_stages(self) -> int:
        """Length of the longest chain of cuts; every maximal chain of downsets grows by one block at a time."""
        return len(np.unique(self.inside.sum(axis=1))) - 1

    @property
    def positional(self) -> bool:
        """Whether a block is pinned to a stage in the middle, so that it matters how many stages there are."""
        return any(pin not in (0, -1) for pins in self.pins for pin in pins)

    def allowed(self, border: int, stages: int) -> NDArray[np.bool_]:
        """[cuts] which cuts can stand before stage `border` of `stages`: all that is pinned before it lies inside.

        An index beyond the stages counts round, as Plan.stage_nodes has it.
        """
        keep = np.ones(len(self.inside), dtype=bool)
        for block, pins in enumerate(self.pins):
            for pin in pins:
                keep &= self.inside[:, block] == (pin % stages < border)
        return keep

    def nodes(self, before: int, after: int) -> list[str]:
        """The nodes of the stage between two cuts."""
        chosen = np.flatnonzero(self.inside[after] & ~self.inside[before]).tolist()
        return [name for block in chosen for name in self.blocks[block]]


def build_space(profile: Profile, max_cuts: int = MAX_CUTS, finer: Space | None = None) -> Space:
    """The cuts of `profile`: groups unbroken, pins kept, an operator in every stage; about `max_cuts` at most.

    `finer` is one built before for more cuts, to go on from.
    """
    pins = {node.name: NOT_OPERATORS[node.op] for node in profile.nodes if node.op in NOT_OPERATORS} | profile.pin
    same_pin = ([name for name, pin in pins.items() if pin == index] for index in sorted(set(pins.values())))
    blocks = _Blocks(profile, pins, [*(group for group in profile.together if group), *same_pin])
    original = len(blocks.members)
    if finer:
        blocks = _Blocks(profile, pins, finer.blocks)
    if blocks.cuts(max_cuts) is None:
        blocks = blocks.without_free()
    without_free = len(blocks.members)
    while (cuts := blocks.cuts(max_cuts)) is None:
        blocks = blocks.coarser(max_cuts)
    count = len(blocks.members)
    coarsened = finer.coarsened if finer else ""
    if count < without_free:
        coarsened = (
            f"{original} groups of operators were merged into {count} so as to have no more than {max_cuts} "
            "cuts to search (--cuts); a better plan may exist"
        )
    packed = b"".join(cut.to_bytes(count // 8 + 1, "little") for cut in cuts)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(cuts), -1), axis=1, bitorder="little")
    return Space(
        blocks=blocks.members,
        inside=bits[:, :count].astype(bool),
        pins=blocks.pins,
        coarsened=coarsened,
        freed=original - without_free,
    )


class _Blocks:
    """A graph of blocks, on its way to a number of cuts that can be searched. Cuts are ints, one bit per block."""

    def __init__(self, profile: Profile, pin: Mapping[str, int], groups: Sequence[Sequence[str]]) -> None:
        self.profile, self.pin = profile, pin
        self.members = profile.graph.contracted(groups)
        self.pins = [{pin[name] for name in block if name in pin} for block in self.members]
        block_of = {name: b for b, block in enumerate(self.members) for name in block}
        self.edges: dict[tuple[int, int], int] = {}  # bytes between two blocks
        for name, takers in profile.graph.consumers.items():
            for end in {block_of[taker] for taker in takers} - {block_of[name]}:
                edge = (block_of[name], end)
                self.edges[edge] = self.edges.get(edge, 0) + profile.by_name[name].output_bytes
        self.before: list[list[int]] = [[] for _ in self.members]
        self.after: list[list[int]] = [[] for _ in self.members]
        for a, b in sorted(self.edges):
            self.before[b].append(a)
            self.after[a].append(b)

    def cuts(self, limit: int) -> list[int] | None:
        """All cuts, by size; None when there are more than `limit` (found out in about `limit` steps).

        All that is pinned to the first stage is in every cut but the empty one, all that is pinned to the last in none
        but the whole. A cut with no operator on one side is left out: that stage would compute nothing.
        """
        needs = [sum(1 << a for a in sources) for sources in self.before]
        start = self._closure({b for b, pins in enumerate(self.pins) if 0 in pins})
        last = sum(1 << b for b, pins in enumerate(self.pins) if -1 in pins)
        ready = [b for b, need in enumerate(needs) if not start >> b & 1 and need & ~start == 0]
        queue = [] if start & last else [(start, ready)]
        found = {cut for cut, _ in queue}
        for cut, ready in queue:
            for b in ready:
                larger = cut | 1 << b
                if not last >> b & 1 and larger not in found:
                    found.add(larger)
                    freed = [c for c in self.after[b] if needs[c] & ~larger == 0]
                    queue.append((larger, [c for c in ready if c != b] + freed))  # the loop comes to it too
            if len(found) > limit:
                return None
        computing = sum(1 << b for b, block in enumerate(self.members) if self._computes(block))
        inner = [cut for cut in found if cut & computing and ~cut & computing]
        return [0, *sorted(inner, key=lambda cut: (cut.bit_count(), cut)), (1 << len(self.members)) - 1]

    def _closure(self, blocks: Collection[int]) -> int:
        """The smallest cut that holds `blocks`."""
        cut = 0
        for b in reversed(range(len(self.members))):
            if b in blocks or any(cut >> after & 1 for after in self.after[b]):
                cut |= 1 << b
        return cut

    def _computes(self, block: Sequence[str]) -> bool:
        return any(self.profile.by_name[name].op not in NOT_OPERATORS for name in block)

    def without_free(self) -> _Blocks:
        """Merge the blocks that cost no time and hold no parameters with a neighbour, where no plan is lost but for a
        slower one: any plan gets no slower when such a block moves over the border to that neighbour."""
        taken: set[int] = set()
        merged = []
        for b in range(len(self.members)):
            partner = self._free_partner(b)
            if partner is not None and not {b, partner} & taken:
                taken |= {b, partner}
                merged.append(self.members[b] + self.members[partner])
        return _Blocks(self.profile, self.pin, [*self.members, *merged]).without_free() if merged else self

    def _free_partner(self, b: int) -> int | None:
        """Where a free block always may stand: with what it takes its only input from, if nobody else takes that and
        no more comes out of `b` than goes in; with its only taker, if no more goes in than comes out."""
        nodes = [self.profile.by_name[name] for name in self.members[b]]
        if self.pins[b] or any(n.forward_s + n.backward_s + n.update_s + n.parameter_bytes for n in nodes):
            return None
        entering = [self._bytes(a, [b]) for a in self.before[b]]
        leaving = self._bytes(b, self.after[b])
        if len(self.before[b]) == 1 and not self.pins[self.before[b][0]] & {0}:
            alone = self.after[self.before[b][0]] == [b] or not self.after[b]
            if alone and all(out <= into for out, into in zip(leaving, entering[0], strict=True)):
                return self.before[b][0]
        totals = [sum(sizes) for sizes in zip(*entering, strict=True)]
        if len(self.after[b]) == 1 and all(into <= out for into, out in zip(totals, leaving, strict=False)):
            return self.after[b][0]
        return None

    def _bytes(self, b: int, takers: Collection[int]) -> tuple[int, int]:
        """Bytes and bytes of gradients of what `b` makes and any of `takers` takes."""
        taken = {name for taker in takers for inner in self.members[taker] for name in self.profile.graph.inputs[inner]}
        nodes = [self.profile.by_name[name] for name in self.members[b] if name in taken]
        return sum(n.output_bytes for n in nodes), sum(n.gradient_bytes for n in nodes)

    def coarser(self, max_cuts: int) -> _Blocks:
        """Merge up to a twelfth of the blocks (a third when they alone are far too many), each with a neighbour; at
        least two blocks become one.

        Only blocks that stand beside others multiply the cuts, so those go first, the cheapest of them before all.
        """
        nodes = self.profile.by_name
        weight = [sum(nodes[name].forward_s + nodes[name].backward_s for name in block) for block in self.members]
        beside = self._beside()
        most = len(self.members) // (3 if len(self.members) > 2 * max_cuts else 12)
        taken: set[int] = set()
        merged: list[tuple[int, int]] = []
        for b in sorted(range(len(self.members)), key=lambda b: (not beside[b], weight[b], b)):
            if len(merged) > most or (merged and bool(beside[merged[0][0]]) != bool(beside[b])):
                break
            partner = next((c for c in self._partners(b, beside) if c not in taken), None)
            if b not in taken and partner is not None:
                taken |= {b, partner}
                merged.append((b, partner))
        pairs = [self.members[b] + self.members[c] for b, c in merged or [(0, 1)]]
        return _Blocks(self.profile, self.pin, [*self.members, *pairs])

    def _partners(self, b: int, beside: Sequence[int]) -> list[int]:
        """What `b` may be merged with, the best first: along a branch, a sibling, then where most bytes flow."""
        branch = [a for a in self.before[b] if beside[a] and len(self.after[a]) == len(self.before[b]) == 1]
        branch += [c for c in self.after[b] if beside[c] and len(self.before[c]) == len(self.after[b]) == 1]
        siblings = [c for a in self.before[b] for c in self.after[a] if self.before[c] == self.before[b]]
        others = sorted(
            [*self.before[b], *self.after[b]], key=lambda c: -max(self.edges.get((b, c), 0), self.edges.get((c, b), 0))
        )
        ranked = dict.fromkeys([*branch, *siblings, *others])
        return [c for c in ranked if c != b and not (self.pins[b] and self.pins[c])]

    def _beside(self) -> list[int]:
        """For each block, how many others are neither before nor after it."""
        upwards, downwards = [0] * len(self.members), [0] * len(self.members)
        for b, sources in enumerate(self.before):
            for a in sources:
                upwards[b] |= upwards[a] | 1 << a
        for b, takers in reversed(list(enumerate(self.after))):
            for c in takers:
                downwards[b] |= downwards[c] | 1 << c
        pairs = zip(upwards, downwards, strict=True)
        return [len(self.members) - 1 - up.bit_count() - down.bit_count() for up, down in pairs]
