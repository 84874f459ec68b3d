"""The backward of a stage in two parts: the gradients of its inputs now, those of its parameters later.

Qi et al., ICLR'24, "Zero Bubble Pipeline Parallelism", section 2: the stage before waits for the first part only. There
the engine walks from the outputs to the inputs; at a product it notes the gradient that comes in, which the second part
multiplies by what the product had saved. Besides that, and the graphs of parameters alone, nothing is kept between the
parts: for a stage of products less than for a whole backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pdtool.run.cut import Known, Nodes, Product, cut


@dataclass(frozen=True)
class _Source:
    """Where gradients of `leaves` come from."""

    leaves: Nodes
    known: Callable[[], Known]


class Rest:
    """What `input_part` left to do."""

    def __init__(self) -> None:
        self._made: Known = []
        self._sources: deque[_Source] = deque()

    def weight_part(self) -> None:
        """Add the gradients of the parameters to their leaves' `.grad`, each once, letting go of what was kept.

        To the bits of one backward, but that what three or more operators add up may be summed in another order.
        """
        self._add_made()
        last = {leaf: i for i, source in enumerate(self._sources) for leaf in source.leaves}
        known: Known = []
        unfinished: Nodes = {}
        for i in range(len(self._sources)):
            source = self._sources.popleft()
            known += source.known()
            unfinished = {leaf: None for leaf in unfinished | source.leaves if last[leaf] > i}
            if not unfinished:
                _backward(known)
                known.clear()

    def _add_made(self) -> None:
        with ExitStack() as hooks:
            for leaf, gradient in self._made:  # the leaf's own hooks had their say when it was made
                hooks.enter_context(leaf.node.register_prehook(partial(_instead, gradient)))
            _backward(self._made)
        self._made.clear()

    def _meet(self, product: Product, gradients: tuple[Tensor | None]) -> None:
        """The first part is at a product."""
        if gradients[0] is not None:
            self._sources.append(_Source(product.leaves, partial(product.known, gradients[0])))


def input_part(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], Rest]:
    """The gradients of `inputs`, and what is left of a backward from `outputs`. No `.grad` is touched.

    Args:
        outputs: of the stage, those that have a gradient.
        inputs: leaves.
        gradients: one per output; None, for a scalar, is one. They must stay as they are until the second part.

    Returns:
        One gradient per input, None where no path leads to one.
    """
    known = [
        (get_gradient_edge(output), torch.ones_like(output) if gradient is None else gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
    ends = [get_gradient_edge(value).node if value.requires_grad else None for value in inputs]
    parts = cut([start.node for start, _ in known], filter(None, ends))
    rest = Rest()
    with ExitStack() as hooks:
        for node, product in parts.later.items():
            hooks.enter_context(node.register_prehook(partial(rest._meet, product)))
        found = _grad(known, [end for end in ends if end in parts.path] + list(parts.now))
    rest._made += [(GradientEdge(leaf, 0), found[leaf]) for leaf in parts.now if leaf in found]
    if parts.apart:
        apart = [(start, gradient) for start, gradient in known if start.node not in parts.path]
        rest._sources.append(_Source(parts.apart, lambda: apart))
    return [found.get(end) for end in ends], rest


def _grad(known: Known, ends: Iterable[Node]) -> dict[Node | None, Tensor]:
    """The gradients of those of `ends` that have one."""
    if not ends:
        return {}
    starts, gradients = zip(*known, strict=True)
    found = torch.autograd.grad(starts, [GradientEdge(end, 0) for end in ends], gradients, allow_unused=True)
    return {end: gradient for end, gradient in zip(ends, found, strict=True) if gradient is not None}


def _backward(known: Known) -> None:
    if known:
        starts, gradients = zip(*known, strict=True)
        torch.autograd.backward(starts, gradients)


def _instead(gradient: Tensor, _: object) -> tuple[Tensor]:
    return (gradient,)
