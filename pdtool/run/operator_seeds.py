"""Random numbers that do not depend on the plan: each random operator draws from generators seeded for it.

The seed follows from the run's seed, the epoch, the minibatch and the operator's name, so that an operator draws the
same wherever the cuts are, whoever computes its stage and how often (recomputation). A leaf module that is called once
has its path as name, and is seeded by a hook. Before any other random operator the stage file calls `seed_operator`
with its name, a function that does nothing until a run puts its own in place. What is neither, such as an operator of a
stage that torch.compile takes, draws from generators that are seeded at the beginning of the stage's forward.

Which element of a tensor gets which random number depends on the tensor's layout in memory, and a tensor that has
crossed a stage border is contiguous, whatever it was before: so operators that draw like their inputs get contiguous
ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdtool.frontend.random_operators import is_user_module, module_draws, module_draws_by_layout
from pdtool.run.config import derive_seed
from pdtool.run.data import seed_generators, seed_torch

_FUNCTION = "seed_operator"  # of the stage files


class OperatorSeeds:
    """Seeds the generators for the random operators of one stage.

    Args:
        stage: its number.
        device: where it computes; None is the CPU.
    """

    def __init__(self, stage: int = 0, device: torch.device | None = None) -> None:
        self._stage, self._device = stage, device
        self._phase: tuple[int | str, ...] = ()
        self._minibatch = 0
        self._named = ""  # the operator that the stage file named last

    def attach(self, module: nn.Module) -> None:
        """Let every random operator of the stage's module draw from generators seeded for it."""
        code = sys.modules[type(module).__module__]
        if hasattr(code, _FUNCTION):
            setattr(code, _FUNCTION, self._seed_named)
        for path, leaf in _leaves(module):
            if module_draws(leaf):
                seed = self.seed_user_code if is_user_module(leaf) else self.seed
                leaf.register_forward_pre_hook(partial(self._before_call, seed, path), with_kwargs=True)

    def begin_phase(self, *phase: int | str) -> None:
        """Begin a pass over a split of the data: (seed of the run, name of the split, epoch)."""
        self._phase = phase

    def begin_forward(self, minibatch: int) -> None:
        """Begin the stage's forward of a minibatch, the first one or its repetition before the backward."""
        self._minibatch = minibatch
        self.seed(f"stage {self._stage}")

    def seed(self, operator: str) -> None:
        """Seed torch's generators for an operator of the minibatch."""
        seed_torch(self._seed_of(operator), self._device)

    def seed_user_code(self, operator: str) -> None:
        """Seed the generators of Python and numpy too, from which code that is not torch's may draw."""
        seed_generators(self._seed_of(operator), self._device)

    def _seed_of(self, operator: str) -> int:
        return derive_seed(*self._phase, self._minibatch, operator)

    def _seed_named(self, name: str, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Seed for the operator of this name; return the tensors like which it draws, contiguous."""
        self._named = name
        self.seed(name)
        contiguous = tuple(map(_contiguous, tensors))
        return contiguous[0] if len(contiguous) == 1 else contiguous

    def _before_call(
        self, seed: Callable[[str], None], path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook of a leaf module: seed for it; the stage file has named the call if it is one of several."""
        seed(self._named if self._named.startswith(f"{path}@") else path)
        if not module_draws_by_layout(module):
            return args, kwargs
        return tuple(map(_contiguous, args)), {name: _contiguous(value) for name, value in kwargs.items()}


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of what lies in the containers of a stage; what lies inside of these is their own."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child) in (nn.Module, nn.ModuleDict):
            yield from _leaves(child, f"{path}.")
        else:
            yield path, child
