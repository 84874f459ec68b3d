"""What the stages between any two cuts stash, and what they hold at their fullest moment.

In a forward each operator adds to the stash, in a backward it frees its part. While an operator computes, in either
pass, the stash holds its own part and that of the operators before it:

    operator              a      b      c      d
    stash meanwhile       a      ab     abc    abcd
    working memory        ▂      ▇      ▂      ▁

So the peak of a stage is the largest sum of both, which is at most the whole stash and the largest working memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Node, Profile

Array = NDArray[Any]

_ENDS_AT_ONCE = 128  # stages of similar size, so that few columns are computed that most of them do not have


@dataclass(frozen=True)
class StashTable:
    """The stash and the working memory of the stages between any two of some cuts.

    A *run* is some nodes in a row that are in one block, without a skip connection that begins or ends between them.

    Args:
        block_of: node -> its block. No cut separates the nodes of a block.
        inside: [cuts, blocks] whether a cut holds a block.
    """

    profile: Profile
    block_of: Mapping[str, int]
    inside: NDArray[np.bool_]

    def between(self, begin: int, ends: Array, received: Collection[str]) -> tuple[Array, Array]:
        """Return the stash_bytes and working_bytes of the stages from cut `begin` to each of the cuts `ends`, both
        [ends]; see StageLoad.

        Args:
            received: nodes inside `begin` whose outputs the stages may receive. These do not count as stash.
        """
        stash = self._stash.copy()
        for name in received:
            node = self.profile.by_name[name]
            if node.saved_by:
                stash[self._run_of[node.saved_by]] -= node.output_bytes
        stash = np.maximum(stash, 0)
        stash_bytes, peaks = np.zeros((2, len(ends)))
        for first in range(0, len(ends), _ENDS_AT_ONCE):
            rows = slice(first, first + _ENDS_AT_ONCE)
            is_held = self._runs_inside[ends[rows]] & ~self._runs_inside[begin]
            used = np.flatnonzero(is_held.any(axis=0))
            columns = slice(used[0], used[-1] + 1) if used.size else slice(1)
            is_held = is_held[:, columns]
            held_bytes = np.cumsum(is_held * stash[columns], axis=1)
            stash_bytes[rows] = held_bytes[:, -1]
            held_bytes += self._excess[ends[rows], columns]
            np.maximum(held_bytes, self._step[columns], out=held_bytes)
            held_bytes *= is_held
            peaks[rows] = held_bytes.max(axis=1)
            if self.profile.step_scratch_bytes:
                peaks[rows] = np.maximum(peaks[rows], (is_held * self._whole_step[columns]).sum(axis=1))
        return stash_bytes, np.maximum(peaks - stash_bytes, 0)

    @cached_property
    def _runs(self) -> list[list[Node]]:
        runs: list[list[Node]] = []
        skipping = self._skipping
        takers = {taker for names in skipping.values() for taker in names}
        block, last = -1, ""
        for node in self.profile.nodes:
            if self.block_of[node.name] == block and last not in skipping and node.name not in takers:
                runs[-1].append(node)
            else:
                runs.append([node])
            block, last = self.block_of[node.name], node.name
        return runs

    @cached_property
    def _skipping(self) -> dict[str, Sequence[str]]:
        """Node whose output has a gradient and skips the next node -> the nodes that take it."""
        following = dict(pairwise(self.profile.graph.names))
        return {
            name: takers
            for name, takers in self.profile.graph.consumers.items()
            if self.profile.by_name[name].gradient_bytes and set(takers) - {following.get(name)}
        }

    @cached_property
    def _run_of(self) -> dict[str, int]:
        return {node.name: r for r, run in enumerate(self._runs) for node in run}

    @cached_property
    def _runs_inside(self) -> NDArray[np.bool_]:
        """[cuts, runs] whether a cut holds a run."""
        return self.inside[:, [self.block_of[run[0].name] for run in self._runs]]

    @cached_property
    def _stash(self) -> Array:
        """[runs] bytes that a run adds to the stash."""
        return np.array([sum(node.stash_bytes for node in run) for run in self._runs], dtype=float)

    @cached_property
    def _excess(self) -> Array:
        """[cuts, runs] the most bytes that a run needs beyond all of its stash while it computes, in a stage that ends
        at the cut.

        These are an operator's output (or the gradient of that), the gradients of its inputs, scratch memory, and
        gradients that skip connections bring past it.
        """
        received = Counter[str]()  # counts as stash of the first node, unless another block computes it
        for node in self.profile.nodes:
            if node.saved_by and self.block_of[node.saved_by] != self.block_of[node.name]:
                received[node.saved_by] += node.output_bytes
        excess = []
        for run in self._runs:
            needed_bytes, later_bytes = [], 0
            for node in reversed(run):
                gradient_bytes = sum(self.profile.by_name[source].gradient_bytes for source in node.inputs)
                needed_bytes.append(node.output_bytes + gradient_bytes + node.scratch_bytes - later_bytes)
                later_bytes += max(0, node.stash_bytes - received[node.name])
            excess.append(max(needed_bytes))
        return np.array(excess, dtype=float) + self._skipping_bytes

    @cached_property
    def _skipping_bytes(self) -> Array:
        """[cuts, runs] bytes of the gradients that skip connections inside a cut bring past a run.

        If branches were cut apart, such a connection may end in an earlier stage. Then this is too much.
        """
        change, cuts = np.zeros(self._runs_inside.shape), np.arange(len(self.inside))
        for name, takers in self._skipping.items():
            runs, next_run = np.array([self._run_of[taker] for taker in takers]), self._run_of[name] + 1
            last = np.where(self._runs_inside[:, runs], runs, next_run).max(axis=1)
            change[:, next_run] += self.profile.by_name[name].gradient_bytes
            change[cuts, last] -= self.profile.by_name[name].gradient_bytes
        return np.cumsum(change, axis=1)

    @cached_property
    def _step(self) -> Array:
        """[runs] the most bytes of temporary memory of an optimizer step on a node; the minibatch has no stash then.

        It is as large as the optimizer's state, as in PyTorch's own optimizers that step one parameter after the other,
        which is usual on a CPU; see also `_whole_step`.
        """
        largest = [max(node.parameter_bytes for node in run) for run in self._runs]
        return np.ceil(np.array(largest, dtype=float) * self.profile.optimizer_state_bytes)

    @cached_property
    def _whole_step(self) -> Array:
        """[runs] bytes of temporary memory of an optimizer step that takes all parameters at once, as on a GPU."""
        parameter_bytes = [sum(node.parameter_bytes for node in run) for run in self._runs]
        return np.array(parameter_bytes, dtype=float) * self.profile.step_scratch_bytes
