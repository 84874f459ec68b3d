"""The space of plans: where the graph may be cut, and what lies between two cuts, as arrays for the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Profile
from pdtool.errors import UsageError

_MOST_CUTS = 2000


@dataclass(frozen=True)
class Space:
    """All cuts of a profile's graph: first the empty one, then those that hold all inputs, smaller ones first.

    Row i, column j of a matrix is for the stage of the nodes in cut j that are not in cut i.

    Attributes:
        blocks: groups of nodes that no cut separates, in topological order; block 0 holds the inputs.
        cuts: (cuts, blocks) whether the cut holds the block; the last cut holds all.
        inside: (cuts, cuts) whether a stage may begin at cut i and end at cut j.
        seconds: (cuts, cuts) F + B + U of the stage.
        parameters, stash, received, tied: (cuts, cuts) bytes: distinct parameters, stash, activations that come from
            earlier stages, and parameters that other stages hold too.
        activations, gradients: (cuts,) bytes alive across the cut, forwards and backwards.
        coarsened: what was merged to keep the number of cuts in bounds, in words; "" when nothing was.
    """

    blocks: Sequence[Sequence[str]]
    cuts: NDArray[np.bool_]
    inside: NDArray[np.bool_]
    seconds: NDArray[np.float64]
    parameters: NDArray[np.float64]
    stash: NDArray[np.float64]
    received: NDArray[np.float64]
    tied: NDArray[np.float64]
    activations: NDArray[np.float64]
    gradients: NDArray[np.float64]
    coarsened: str

    @classmethod
    def of(cls, profile: Profile, most_cuts: int = _MOST_CUTS) -> Space:
        """Enumerate the cuts; beyond `most_cuts` the cheapest operators are merged with their neighbours first."""
        inputs = [node.name for node in profile.nodes if node.op == "input"]
        groups = [list(group) for group in profile.together] + ([inputs] if inputs else [])
        blocks = profile.graph.contracted(groups)
        before = len(blocks)
        masks = _downsets(profile, blocks, inputs, most_cuts)
        while masks is None:
            blocks = _merged(profile, blocks, groups)
            masks = _downsets(profile, blocks, inputs, most_cuts)
        note = "" if len(blocks) == before else f"{before} groups of operators were merged into {len(blocks)}"
        return cls._of_masks(profile, blocks, masks, note)

    @classmethod
    def _of_masks(cls, profile: Profile, blocks: Sequence[Sequence[str]], masks: Sequence[int], note: str) -> Space:
        cuts = np.array([[mask >> b & 1 for b in range(len(blocks))] for mask in masks], dtype=bool)
        held = cuts.astype(np.float64)
        inside = ((held @ (1 - held).T) == 0) & ~np.eye(len(masks), dtype=bool)
        nodes = [[profile.by_name[name] for name in block] for block in blocks]

        def between(per_block: Sequence[float]) -> NDArray[np.float64]:
            values = np.array(per_block, dtype=np.float64)
            return (held @ values)[None, :] - (held @ values)[:, None]

        block_of = {name: b for b, block in enumerate(blocks) for name in block}
        parameters = between([sum(n.parameter_bytes for n in block) for block in nodes])
        tied = np.zeros_like(parameters)
        for shared in profile.shared:
            count = between(list(np.bincount([block_of[n] for n in shared.nodes], minlength=len(blocks))))
            parameters -= shared.bytes * np.maximum(count - 1, 0)
            tied += shared.bytes * ((count > 0) & (count < len(shared.nodes)))
        received = np.zeros_like(parameters)
        alive, alive_back = np.zeros(len(masks)), np.zeros(len(masks))
        for node in profile.nodes:
            takers = sorted({block_of[c] for c in profile.graph.consumers[node.name]} - {block_of[node.name]})
            if takers:
                has = cuts[:, block_of[node.name]]
                taken = held[:, takers].sum(1)
                received += node.output_bytes * (has[:, None] & (taken[None, :] > taken[:, None]))
                alive += node.output_bytes * (has & (taken < len(takers)))
                alive_back += node.gradient_bytes * (has & (taken < len(takers)))
        return cls(
            blocks=blocks,
            cuts=cuts,
            inside=inside & _pins(profile, block_of, cuts),
            seconds=between([sum(n.forward_s + n.backward_s + n.update_s for n in block) for block in nodes]),
            parameters=parameters,
            stash=between([sum(n.stash_bytes for n in block) for block in nodes]),
            received=received,
            tied=tied,
            activations=alive,
            gradients=alive_back,
            coarsened=note,
        )

    def nodes(self, i: int, j: int) -> list[str]:
        """The nodes of the stage from cut i to cut j."""
        return [name for b in np.flatnonzero(self.cuts[j] & ~self.cuts[i]).tolist() for name in self.blocks[b]]


def _pins(profile: Profile, block_of: dict[str, int], cuts: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which stages (i, j) keep every pinned node in the first or the last stage."""
    allowed = np.ones((len(cuts), len(cuts)), dtype=bool)
    for name, stage in profile.pin.items():
        if stage not in (0, -1):
            raise UsageError(
                f"{name} is pinned to stage {stage}, but the search places pins in the first and last stage only",
                "pin it to 0 or -1, or move it in the plan by hand",
            )
        holds = cuts[:, block_of[name]][None, :] & ~cuts[:, block_of[name]][:, None]
        outside = np.ones_like(allowed)
        if stage == 0:
            outside[0, :] = False
        else:
            outside[:, -1] = False
        allowed &= ~(holds & outside)
    return allowed


def _downsets(profile: Profile, blocks: Sequence[Sequence[str]], inputs: Sequence[str], most: int) -> list[int] | None:
    """The empty set and all sets of blocks that hold the inputs and every predecessor of their members, as bits.

    None when there are more than `most`.
    """
    block_of = {name: b for b, block in enumerate(blocks) for name in block}
    needs = [0] * len(blocks)
    for name, sources in profile.graph.inputs.items():
        for source in sources:
            if block_of[source] != block_of[name]:
                needs[block_of[name]] |= 1 << block_of[source]
    inputs_only = sum(1 << b for b in {block_of[name] for name in inputs})
    for b in reversed(range(len(blocks))):
        inputs_only |= needs[b] if inputs_only >> b & 1 else 0
    level, found = {inputs_only}, [inputs_only]
    while level and len(found) <= most:
        level = {
            mask | 1 << b for mask in level for b in range(len(blocks)) if not mask >> b & 1 and not needs[b] & ~mask
        }
        found += sorted(level)
    # A stage of inputs alone would compute nothing; the empty cut is where the first stage begins.
    return None if len(found) > most else [0, *(found[1:] or found)]


def _merged(profile: Profile, blocks: Sequence[Sequence[str]], groups: list[list[str]]) -> list[list[str]]:
    """Fewer blocks: the cheapest tenth, each joined with the block that takes its output."""
    seconds = [sum(profile.by_name[n].forward_s + profile.by_name[n].backward_s for n in block) for block in blocks]
    block_of = {name: b for b, block in enumerate(blocks) for name in block}
    cheapest = sorted(range(1, len(blocks)), key=lambda b: (seconds[b], b))[: max(1, len(blocks) // 10)]
    joined = []
    for b in cheapest:
        after = sorted({block_of[c] for name in blocks[b] for c in profile.graph.consumers[name]} - {b})
        before = sorted({block_of[s] for name in blocks[b] for s in profile.graph.inputs[name]} - {b})
        neighbour = (after or before or [b - 1])[0]
        joined.append([blocks[b][0], blocks[neighbour][0]])
    return profile.graph.contracted([*groups, *blocks, *joined])
