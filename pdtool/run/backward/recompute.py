"""Recomputation: a stage keeps only what it received, and runs its forward again before its backward.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", with one checkpoint for a whole stage. The second
forward sees what the first one saw: the same weight version, random numbers and buffers. Running statistics are
updated by the first only.
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
        rng_states: state of each random number generator; `cpu`, and the device's.
        buffers: name -> value, of those that forwards change.
        target: of the minibatch; None unless the stage is the last.
    """

    rng_states: dict[str, Tensor]
    buffers: dict[str, Tensor]
    target: Any


class Recomputation:
    """Saves and restores what the forwards of one stage see."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[str] | None = None  # names of the buffers that a forward changes, known after the first one

    @contextmanager
    def first_forward(self, inputs: list[Tensor], target: Any) -> Iterator[ForwardState]:
        """Save, during the first forward, what it sees; no graph is made.

        Args:
            inputs: of any shapes; they tell which devices draw random numbers.
        """
        buffers = dict(self._module.named_buffers())
        names = buffers if self._changing is None else self._changing
        state = ForwardState(_rng_states(inputs), {name: buffers[name].clone() for name in names}, target)
        with torch.no_grad():
            yield state
        if self._changing is None:
            now = dict(self._module.named_buffers())  # by value: batch norm's kernels leave `_version` as it is
            self._changing = {name for name, old in state.buffers.items() if not torch.equal(now[name], old)}
            for name in state.buffers.keys() - self._changing:
                del state.buffers[name]

    @contextmanager
    def second_forward(self, state: ForwardState) -> Iterator[None]:
        """Restore, during the second forward, what the first one saw."""
        devices = [name for name in state.rng_states if name != "cpu"]
        entries = {name: _buffer_entry(self._module, name) for name in state.buffers}
        newest = {name: owner[key] for name, (owner, key) in entries.items()}
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state.rng_states["cpu"])
            for name in devices:
                torch.cuda.set_rng_state(state.rng_states[name], name)
            try:
                for name, (owner, key) in entries.items():
                    owner[key] = state.buffers[name]
                with torch.enable_grad():
                    yield
            finally:
                for name, (owner, key) in entries.items():
                    owner[key] = newest[name]


def _rng_states(inputs: list[Tensor]) -> dict[str, Tensor]:
    devices = {str(value.device) for value in inputs if value.is_cuda}
    return {"cpu": torch.get_rng_state(), **{name: torch.cuda.get_rng_state(name) for name in devices}}


def _buffer_entry(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path)._buffers, key
