"""A stage's borders: what its module takes and gives, as messages to and from other stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdtool.artifacts.bundle import Bundle
from pdtool.run.data import Loader, Minibatches, Split
from pdtool.run.spec import seed_of
from pdtool.run.transport import Lane
from pdtool.run.wiring import TARGET, Wire


class Border:
    """Inputs, target, outputs and gradients of one stage, by minibatch.

    Args:
        forward, backward: the lanes of this worker.
        loader: loads the minibatches; None unless this is the first stage.
    """

    def __init__(
        self, bundle: Bundle, stage: int, wires: Sequence[Wire], forward: Lane, backward: Lane, device: torch.device
    ) -> None:
        self.stage, self.bundle, self.device = stage, bundle, device
        self.forward, self.backward = forward, backward
        self.last = len(bundle.stages) - 1
        self.is_last = stage == self.last
        self.into = [wire for wire in wires if wire.destination == stage]
        self.out = [wire for wire in wires if wire.source == stage]
        self._loaded: dict[str, Tensor] = {}

    def open(
        self,
        split: Split,
        loader: Loader | None,
        minibatches: Minibatches,
        seed: Sequence[int | str],
        forwards: Sequence[int],
        backwards: Sequence[int],
    ) -> None:
        """Begin a phase: the minibatches this worker will forward, and those it will backward, in order."""
        self.split, self.loader, self.minibatches, self.seed = split, loader, minibatches, seed
        self.forward.open([(i, minibatches.samples(i)) for i in forwards])
        self.backward.open([(i, minibatches.samples(i)) for i in backwards])

    def close(self) -> None:
        """End the phase: everything sent has arrived."""
        self.forward.close()
        self.backward.close()

    def inputs(self, minibatch: int) -> tuple[list[Tensor], Any]:
        """What the stage's module takes, each a leaf that collects its gradient, and the target at the last stage."""
        arrived = self.forward.receive(minibatch)
        known = {wire.name: _leaf(wire, arrived[wire.number]) for wire in self.into}
        if self.loader:
            inputs, leaves = self.loader.load(self.minibatches[minibatch], seed_of(*self.seed, "data", minibatch))
            self._loaded = dict(zip(self.bundle.inputs, inputs, strict=True))
            self._loaded |= {f"{TARGET} {i}": leaf for i, leaf in enumerate(leaves)}
            known |= self._loaded
        target = None
        if self.is_last:
            leaves = [known[f"{TARGET} {i}"].to(self.device) for i in range(len(self.split.leaves))]
            target = self.split.unflatten(leaves)
        return [known[name].to(self.device) for name in self.bundle.stages[self.stage].inputs], target

    def send_outputs(self, minibatch: int, outputs: Sequence[Tensor]) -> None:
        """Send each output, and at the first stage what later stages need of the data, straight to its consumers."""
        named = {} if self.is_last else dict(zip(self.bundle.stages[self.stage].outputs, outputs, strict=True))
        named |= self._loaded
        self.forward.send(minibatch, {wire.number: named[wire.name] for wire in self.out})
        self._loaded = {}

    def gradients(self, minibatch: int) -> list[Tensor | None]:
        """The gradient of each output: the sum of what its consumers send; None for one that has none."""
        arrived = self.backward.receive(minibatch)
        if self.is_last:
            return [None]
        total: dict[str, Tensor] = {}
        for wire in self.out:
            if wire.tensor.gradient:
                gradient = arrived[wire.number]
                total[wire.name] = total[wire.name] + gradient if wire.name in total else gradient
        return [total.get(name) for name in self.bundle.stages[self.stage].outputs]

    def send_gradients(self, minibatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Send each input's gradient to the stage it came from; zeros where the backward did not lead to one."""
        named = dict(zip(self.bundle.stages[self.stage].inputs, gradients, strict=True))
        samples = self.minibatches.samples(minibatch)
        out = {}
        for wire in self.into:
            if wire.tensor.gradient:
                gradient = named[wire.name]
                out[wire.number] = torch.zeros(wire.sizes(samples), dtype=wire.dtype) if gradient is None else gradient
        self.backward.send(minibatch, out)


def _leaf(wire: Wire, value: Tensor) -> Tensor:
    return value.requires_grad_() if wire.tensor.gradient else value
