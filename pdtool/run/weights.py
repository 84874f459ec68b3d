"""Weight versions: the backward of a minibatch must see the weights that its forward saw (PipeDream, section 3.3).

The optimizer owns the Parameters, which always hold the newest weights. What the module computes with is a *version*:
one leaf tensor per parameter that shares the Parameter's memory. Autograd graphs hold the leaves, so the graphs
themselves are the stash, and gradients land on the leaves of the right version.

    step t      Parameters ─┬─ memory a ── leaves of version t ◀── graphs of the minibatches in flight
    step t + 1  Parameters ─┼─ memory b ── leaves of version t+1     (a stays until its last backward)

Before a step, if somebody still needs the current version, the Parameters move to other memory; if nobody does, the
step is done in place and nothing is copied. Memory that a live graph has saved is never written: a backward would use
the new weights. (Without stashing that is what is asked for.)

Which version a minibatch reads is the schedule's matter (schedule/versions.py): the newest, or with vertical sync the
one that it read at the first stage, which is kept here for it until it comes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Version:
    """Leaves in the order of `Weights.parameters`, and how many minibatches still need them.

    Attributes:
        number: updates since the phase began.
    """

    leaves: list[Tensor]
    number: int
    users: int


class Weights:
    """The weight versions of one module.

    Args:
        stashing: keep versions for those that read them; otherwise there is one, and every step is done in place.
        ahead: forwards read what `look_ahead` is given, which is not what the Parameters hold (run/correct.py).

    Attributes:
        parameters: name -> Parameter, each once (one that is used under several names has the first).
        by_name: the same under all names.
        peak_versions: most versions ever alive together, the current one included.
    """

    def __init__(self, module: nn.Module, *, stashing: bool = True, ahead: bool = False) -> None:
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
        self.stashing = stashing
        self._reads: Mapping[int, int] = {}
        self._readers: Counter[int] = Counter()
        self._spare: list[list[Tensor]] = []
        self._alive: dict[int, Version] = {}
        self.peak_versions = 1
        self._bound: Version | None = None
        self._own = self._over([p.data for p in self.parameters.values()], 0) if ahead else None
        self._bind(0, self._memory() if ahead else [p.data for p in self.parameters.values()])
        self.look_ahead({})

    def open(self, reads: Mapping[int, int]) -> None:
        """Begin a phase, with nothing in flight.

        Args:
            reads: minibatch -> how many updates of this phase its forward sees; those left out see the newest.
        """
        self._reads = reads if self.stashing else {}
        self._readers = Counter(self._reads.values())
        self._current.number, self._current.users = 0, self._readers[0]
        self._alive = {0: self._current}

    def acquire(self, minibatch: int) -> Version:
        """The version that this minibatch reads, which the module now computes with; `release` it in the end."""
        number = self._reads.get(minibatch)
        if number is None:
            version = self._current
            version.users += 1
        else:
            version = self._alive[number]
        self.use(version)
        return version

    def release(self, version: Version) -> None:
        """A minibatch is done with `version`; the memory of one that nobody needs is kept for the next."""
        version.users -= 1
        if version is not self._current and not version.users:
            del self._alive[version.number]
            self._spare.append([leaf.detach() for leaf in version.leaves])

    def lend(self, version: Version, weight: float) -> None:
        """Call before a backward: where nothing is to be scaled, it adds to what the Parameters have, in place."""
        if weight == 1.0:
            for parameter, leaf in zip(self.parameters.values(), version.leaves, strict=True):
                leaf.grad = parameter.grad

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
        """Call before a step: afterwards nobody needs what is in the memory of the Parameters."""
        number = self._current.number + 1
        if not self.stashing or not self._current.users:
            del self._alive[self._current.number]
            self._current.number, self._current.users = number, self._current.users + self._readers[number]
            self._alive[number] = self._current
        elif self._own:
            self._bind(number, self._memory())
        else:
            memory = self._memory()
            for parameter, new in zip(self.parameters.values(), memory, strict=True):
                new.copy_(parameter.data)
                parameter.data = new
            self._bind(number, memory)
        self.peak_versions = max(self.peak_versions, len(self._alive))

    def look_ahead(self, seen: Mapping[int, Tensor]) -> None:
        """Call after a step: what forwards will see instead of a parameter, by its id; of others they see the value."""
        if self._own:
            with torch.no_grad():
                for parameter, leaf in zip(self.parameters.values(), self._current.leaves, strict=True):
                    leaf.copy_(seen.get(id(parameter), parameter.detach()))

    def _memory(self) -> list[Tensor]:
        return self._spare.pop() if self._spare else [torch.empty_like(p.data) for p in self.parameters.values()]

    def _over(self, memory: Sequence[Tensor], number: int) -> Version:
        """Fresh leaves over some memory."""
        parameters = self.parameters.values()
        leaves = [m.detach().requires_grad_(p.requires_grad) for m, p in zip(memory, parameters, strict=True)]
        return Version(leaves, number, self._readers[number])

    def _bind(self, number: int, memory: Sequence[Tensor]) -> None:
        """Let the module compute with a new version."""
        self._current = self._alive[number] = self._over(memory, number)
        self.use(self._current)

    def use(self, version: Version | None = None) -> None:
        """Let the module compute with a version; with what the Parameters hold if none is given."""
        version = version or self._own or self._current
        if version is self._bound:
            return
        self._bound = version
        for entries, key, i in self._slots:
            entries[key] = version.leaves[i]  # type: ignore[assignment]
        for rnn in self._rnns:  # with the references, or on a GPU its forward would move the leaves to its own memory
            rnn._flat_weights = [rnn._parameters[name] for name in rnn._flat_weights_names]
            rnn._flat_weight_refs = [weakref.ref(weight) for weight in rnn._flat_weights]


def _collect(parameter: nn.Parameter, leaf: Tensor, weight: float) -> None:
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None and gradient is not parameter.grad:
        gradient = gradient if weight == 1.0 else gradient.mul_(weight)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
