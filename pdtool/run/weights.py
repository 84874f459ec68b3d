"""Weight versions: the backward of a minibatch must see the weights that its forward saw (PipeDream, section 3.3).

The optimizer owns the Parameters, which always hold the newest weights. What the module computes with is a *version*:
one leaf tensor per parameter that shares the Parameter's memory. Autograd graphs hold the leaves, so the graphs
themselves are the stash, and gradients land on the leaves of the right version.

    step t      Parameters ─┬─ memory a ── leaves of version t ◀── graphs of the minibatches in flight
    step t + 1  Parameters ─┼─ memory b ── leaves of version t+1     (a stays until its last backward)

Before a step, if a minibatch in flight still needs the current version, the Parameters move to other memory; if none
does, the step is done in place and nothing is copied. Memory that a live graph has saved is never written: autograd
would raise for some operators and silently use the new weights for others (convolutions).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Version:
    """Leaves in the order of `Weights.parameters`, and how many minibatches in flight need them."""

    leaves: list[Tensor]
    users: int = 0


class Weights:
    """The weight versions of one module.

    Attributes:
        parameters: name -> Parameter, each once (one that is used under several names has the first).
        by_name: the same under all names.
        peak_versions: most versions ever alive together, the current one included.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(module.named_parameters())
        self.by_name = dict(module.named_parameters(remove_duplicate=False))
        index = {id(parameter): i for i, parameter in enumerate(self.parameters.values())}
        self._slots = [
            (owner._parameters, key, index[id(parameter)])
            for owner in module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        # nn.LSTM and its kind compute with a list of their own, made when a parameter is assigned
        self._rnns: list[Any] = [owner for owner in module.modules() if hasattr(owner, "_flat_weights_names")]
        self._spare: list[list[Tensor]] = []
        self._old: set[Version] = set()
        self.peak_versions = 1
        self._current = self._bind()

    def acquire(self) -> Version:
        """The current version, for one forward; `release` it after the backward."""
        self._current.users += 1
        return self._current

    def release(self, version: Version) -> None:
        """A minibatch is done with `version`; the memory of one that nobody needs is kept for the next."""
        version.users -= 1
        if version is not self._current and not version.users:
            self._old.discard(version)
            self._spare.append([leaf.detach() for leaf in version.leaves])

    def collect(self, version: Version, weight: float) -> None:
        """Move the gradients from the version's leaves to the Parameters, times `weight`, added to what is there."""
        for parameter, leaf in zip(self.parameters.values(), version.leaves, strict=True):
            _collect(parameter, leaf, weight)

    @contextmanager
    def collecting(self, version: Version, weight: float, final: Callable[[nn.Parameter], None]) -> Iterator[None]:
        """Around a backward: collect each gradient as soon as it is complete, and say so."""

        def hook(parameter: nn.Parameter, leaf: Tensor) -> None:
            _collect(parameter, leaf, weight)
            final(parameter)

        handles = [
            leaf.register_post_accumulate_grad_hook(partial(hook, parameter))  # type: ignore[no-untyped-call]
            for parameter, leaf in zip(self.parameters.values(), version.leaves, strict=True)
            if leaf.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def make_room(self) -> None:
        """Call before a step: afterwards no live graph holds the memory of the Parameters."""
        if not self._current.users:
            return
        self._old.add(self._current)
        self.peak_versions = max(self.peak_versions, 1 + len(self._old))
        memory = self._spare.pop() if self._spare else [torch.empty_like(p.data) for p in self.parameters.values()]
        for parameter, new in zip(self.parameters.values(), memory, strict=True):
            new.copy_(parameter.data)
            parameter.data = new
        self._current = self._bind()

    def _bind(self) -> Version:
        """Let the module compute with fresh leaves over the Parameters' memory."""
        parameters = self.parameters.values()
        version = Version([p.data.detach().requires_grad_(p.requires_grad) for p in parameters])
        self._use(version)
        return version

    @contextmanager
    def bound(self, version: Version) -> Iterator[None]:
        """Let the module compute with an older version for a while."""
        self._use(version)
        try:
            yield
        finally:
            self._use(self._current)

    def _use(self, version: Version) -> None:
        for entries, key, i in self._slots:
            entries[key] = version.leaves[i]  # type: ignore[assignment]
        for (
            rnn
        ) in self._rnns:  # with the references, or its forward on a GPU would move the leaves to memory of its own
            rnn._flat_weights = [rnn._parameters[name] for name in rnn._flat_weights_names]
            rnn._flat_weight_refs = [weakref.ref(weight) for weight in rnn._flat_weights]


def _collect(parameter: nn.Parameter, leaf: Tensor, weight: float) -> None:
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None:
        gradient = gradient if weight == 1.0 else gradient.mul_(weight)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
