"""Recomputation: a stage keeps only what it received, and runs its forward again before its backward.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", with one checkpoint for a whole stage. The second
forward sees what the first one saw: the same weight version and buffers, and the same random numbers, since the stage
seeds them again. Running statistics are updated by the first only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ForwardState:
    """What a forward saw besides its weights and inputs.

    Attributes:
        buffers: name -> value, of those that forwards change.
        target: of the minibatch; None unless the stage is the last.
    """

    buffers: dict[str, Tensor]
    target: Any


class Recomputation:
    """Saves and restores what the forwards of one stage see."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[str] | None = None  # names of the buffers that a forward changes, known after the first one

    @contextmanager
    def first_forward(self, target: Any) -> Iterator[ForwardState]:
        """Save, during the first forward, what it sees.

        It is computed in the mode that makes a graph, which nobody keeps: without one torch takes other kernels, as of
        an LSTM on a CPU, whose last bits differ.
        """
        buffers = dict(self._module.named_buffers())
        names = buffers if self._changing is None else self._changing
        state = ForwardState({name: buffers[name].clone() for name in names}, target)
        yield state
        if self._changing is None:
            now = dict(self._module.named_buffers())  # by value: batch norm's kernels leave `_version` as it is
            self._changing = {name for name, old in state.buffers.items() if not torch.equal(now[name], old)}
            for name in state.buffers.keys() - self._changing:
                del state.buffers[name]

    @contextmanager
    def second_forward(self, state: ForwardState) -> Iterator[None]:
        """Restore, during the second forward, what the first one saw."""
        entries = {name: _buffer_entry(self._module, name) for name in state.buffers}
        newest = {name: owner[key] for name, (owner, key) in entries.items()}
        try:
            for name, (owner, key) in entries.items():
                owner[key] = state.buffers[name]
            with torch.enable_grad():
                yield
        finally:
            for name, (owner, key) in entries.items():
                owner[key] = newest[name]


def _buffer_entry(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path)._buffers, key
