"""Recomputing: a stage keeps only what it received, and runs its forward again before its backward.

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
class Before:
    """What a forward saw besides its weights and inputs.

    Attributes:
        random: state of each generator; `cpu`, and the device's.
        buffers: name -> value, of those that forwards change.
    """

    random: dict[str, Tensor]
    buffers: dict[str, Tensor]
    target: Any


class Recompute:
    """The memory of one stage's forwards."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._changing: set[str] | None = None  # names of buffers that a forward changes, once one was seen

    @contextmanager
    def first(self, inputs: list[Tensor], target: Any) -> Iterator[Before]:
        """Around the first forward; no graph is made."""
        buffers = dict(self.module.named_buffers())
        names = buffers if self._changing is None else self._changing
        before = Before(_random(inputs), {name: buffers[name].clone() for name in names}, target)
        with torch.no_grad():
            yield before
        if self._changing is None:
            now = dict(self.module.named_buffers())  # by value: batch norm's kernels leave `_version` as it is
            self._changing = {name for name, old in before.buffers.items() if not torch.equal(now[name], old)}
            for name in before.buffers.keys() - self._changing:
                del before.buffers[name]

    @contextmanager
    def again(self, before: Before) -> Iterator[None]:
        """Around the second forward."""
        devices = [name for name in before.random if name != "cpu"]
        entries = {name: _entry(self.module, name) for name in before.buffers}
        kept = {name: owner[key] for name, (owner, key) in entries.items()}
        with torch.random.fork_rng(devices):
            torch.set_rng_state(before.random["cpu"])
            for name in devices:
                torch.cuda.set_rng_state(before.random[name], name)
            try:
                for name, (owner, key) in entries.items():
                    owner[key] = before.buffers[name]
                with torch.enable_grad():
                    yield
            finally:
                for name, (owner, key) in entries.items():
                    owner[key] = kept[name]


def _random(inputs: list[Tensor]) -> dict[str, Tensor]:
    devices = {str(value.device) for value in inputs if value.is_cuda}
    return {"cpu": torch.get_rng_state(), **{name: torch.cuda.get_rng_state(name) for name in devices}}


def _entry(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path)._buffers, key
