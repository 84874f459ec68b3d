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
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pdtool.run.backward.backward_graph import DeferredProduct, EdgeGradients, NodeSet, divide_backward


class _GradientSource(NamedTuple):
    """Computes, in the second part, gradients that lead to `leaves`."""

    leaves: NodeSet
    edge_gradients: Callable[[], EdgeGradients]


@dataclass
class WeightBackward:
    """The second part of a backward, which `backward_input` returns.

    Attributes:
        computed: gradients of parameters that the first part computed, each at its leaf.
        sources: what computes the others.
    """

    computed: EdgeGradients = field(default_factory=list)
    sources: deque[_GradientSource] = field(default_factory=deque)

    def run(self) -> None:
        """Add the gradients of the parameters to their leaves' `.grad`, each once, releasing what was kept.

        The result has the bits of one backward, except that what three or more operators add up may be summed in
        another order.
        """
        self._add_computed()
        last = {leaf: i for i, source in enumerate(self.sources) for leaf in source.leaves}
        gradients: EdgeGradients = []
        unfinished: NodeSet = {}
        for i in range(len(self.sources)):
            source = self.sources.popleft()
            gradients += source.edge_gradients()
            unfinished = {leaf: None for leaf in unfinished | source.leaves if last[leaf] > i}
            if not unfinished:
                _accumulate(gradients)
                gradients.clear()

    def _add_computed(self) -> None:
        with ExitStack() as hooks:
            for leaf, gradient in self.computed:  # the leaf's own hooks had their say in the first part
                hooks.enter_context(leaf.node.register_prehook(partial(_replace_gradient, gradient)))
            _accumulate(self.computed)
        self.computed.clear()


def backward_input(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], WeightBackward]:
    """Compute the gradients of `inputs` in a backward from `outputs`, and no `.grad`.

    Args:
        outputs: of the stage, those that have a gradient; of any shapes.
        inputs: leaves, of any shapes.
        gradients: one per output, of its shape; None, for a scalar, is one. They must stay as they are until the
            second part.

    Returns:
        One gradient per input, of its shape, None where no path leads to one; and the second part.
    """
    starts = [
        (get_gradient_edge(output), torch.ones_like(output) if gradient is None else gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
    ends = [get_gradient_edge(value).node if value.requires_grad else None for value in inputs]
    graph = divide_backward([start.node for start, _ in starts], filter(None, ends))
    second_part = WeightBackward()
    with ExitStack() as hooks:
        for node, product in graph.deferred.items():
            hooks.enter_context(node.register_prehook(partial(_defer_product, second_part, product)))
        computed = _grad(starts, [end for end in ends if end in graph.path] + list(graph.immediate))
    for leaf in graph.immediate:
        if leaf in computed:
            second_part.computed.append((GradientEdge(leaf, 0), computed[leaf]))
    if graph.independent:
        independent = [(start, gradient) for start, gradient in starts if start.node not in graph.path]
        second_part.sources.append(_GradientSource(graph.independent, lambda: independent))
    return [computed.get(end) for end in ends], second_part


def _defer_product(second_part: WeightBackward, product: DeferredProduct, gradients: tuple[Tensor | None]) -> None:
    """Hook of the first part at a product: keep the gradient of its output for the second part."""
    if gradients[0] is not None:
        edge_gradients = partial(product.edge_gradients, gradients[0])
        second_part.sources.append(_GradientSource(product.leaves, edge_gradients))


def _grad(starts: EdgeGradients, ends: Iterable[Node]) -> dict[Node | None, Tensor]:
    """The gradients of those of `ends` that have one."""
    if not ends:
        return {}
    edges, edge_gradients = zip(*starts, strict=True)
    gradients = torch.autograd.grad(edges, [GradientEdge(end, 0) for end in ends], edge_gradients, allow_unused=True)
    return {end: gradient for end, gradient in zip(ends, gradients, strict=True) if gradient is not None}


def _accumulate(starts: EdgeGradients) -> None:
    """Run a backward from `starts` into the leaves' `.grad`."""
    if starts:
        edges, edge_gradients = zip(*starts, strict=True)
        torch.autograd.backward(edges, edge_gradients)


def _replace_gradient(gradient: Tensor, _: object) -> tuple[Tensor]:
    return (gradient,)
