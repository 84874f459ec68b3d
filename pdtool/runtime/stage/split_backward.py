"""The backward of a stage in two parts: the gradients of its inputs now, those of its parameters later.

Qi et al., ICLR'24, "Zero Bubble Pipeline Parallelism", section 2: the stage before waits for the first part only. In
the first part the engine walks from the outputs to the inputs. At a product it keeps the incoming gradient; the second
part multiplies that by the product's saved tensors. Apart from these and the graphs of parameters alone, nothing is
kept between the parts. For a stage of products this is less than for a whole backward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pdtool.frontend.model_rules import autograd_graph

EdgeGradients = list[tuple[GradientEdge, Tensor]]  # gradients, and where they enter the graph
NodeSet = dict[Node, None]  # ordered
OperandGradients = Callable[[Tensor], Sequence[Tensor | None]]

_FACTORS = {  # names of a product's saved tensors
    "MmBackward0": ("self", "mat2"),
    "BmmBackward0": ("self", "mat2"),
    "AddmmBackward0": ("mat1", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
}
# of a convolution
_OPTIONS = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups")


def backward_input(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], WeightBackward]:
    """Compute the gradients of `inputs` in a backward from `outputs`, and no `.grad`.

    Args:
        outputs: where the gradients of the stage's outputs enter the graph.
        inputs: leaves, of any shapes.
        gradients: one per output, of its shape; None stands for 1 and is for a scalar. They must not change until the
            second part.

    Returns:
        One gradient per input, of its shape, None if no path leads to it; and the second part.
    """
    starts = [
        (output, _one(output) if gradient is None else gradient)
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


def _one(output: GradientEdge) -> Tensor:
    """The gradient of a scalar by itself."""
    scalar = output.node._input_metadata[output.output_nr]
    return torch.ones(scalar.shape, dtype=scalar.dtype, device=scalar.device)


@dataclass
class WeightBackward:
    """The second part of a backward, which `backward_input` returns.

    Attributes:
        computed: gradients of parameters that the first part computed, each at its leaf.
        sources: sources that compute the others.
    """

    computed: EdgeGradients = field(default_factory=list)
    sources: deque[_GradientSource] = field(default_factory=deque)

    def run(self) -> None:
        """Add the gradients of the parameters to their leaves' `.grad`, each once, and release the kept tensors.

        The result equals that of one backward bit for bit, except that a sum over three or more operators may be taken
        in another order.
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
            for leaf, gradient in self.computed:  # the leaf's own hooks ran in the first part
                hooks.enter_context(leaf.node.register_prehook(lambda _, own=gradient: (own,)))
            _accumulate(self.computed)
        self.computed.clear()


class _GradientSource(NamedTuple):
    """Computes the gradients of `leaves` in the second part."""

    leaves: NodeSet
    edge_gradients: Callable[[], EdgeGradients]


def _defer_product(second_part: WeightBackward, product: DeferredProduct, gradients: tuple[Tensor | None]) -> None:
    """Hook of the first part at a product: keep the gradient of its output for the second part."""
    if gradients[0] is not None:
        edge_gradients = partial(product.edge_gradients, gradients[0])
        second_part.sources.append(_GradientSource(product.leaves, edge_gradients))


def _grad(starts: EdgeGradients, ends: Iterable[Node]) -> dict[Node | None, Tensor]:
    """The gradients of `ends`, without missing ones."""
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


@dataclass(frozen=True)
class BackwardGraph:
    """The graph of a stage, divided by when its gradients are computed.

    path       operators between an output and an input    loss ─▶ relu ─▶ mm ─▶ relu ─▶ mm ─▶ input
    hanging    an operator's other branches                             └▶ t ─▶ W2    └▶ t ─▶ W1

    Two kinds of parameters come later: those that hang on products, where each gradient is a kernel of its own, and
    those of outputs that depend on no input (in a first stage: all). Parameters that hang on other operators (norms,
    recurrent layers, a backward written in Python) come at once: they are cheap, or come out of the same kernel as the
    gradients of the inputs. Anything that shares a parameter with these comes at once too.

    Attributes:
        path: operators between outputs and inputs, and the inputs.
        deferred: products of the path whose parameters come later.
        independent: parameters of outputs that depend on no input, if they come later.
        immediate: all other parameters.
    """

    path: NodeSet
    deferred: Mapping[Node, DeferredProduct]
    independent: NodeSet
    immediate: NodeSet


@dataclass(frozen=True)
class DeferredProduct:
    """A product of the path whose parameters get their gradients later.

    Attributes:
        hanging: position among the operands -> the edge to the branch that hangs there.
        leaves: the parameters below.
        operands: computes the gradients of the operands.
    """

    hanging: Mapping[int, GradientEdge]
    leaves: NodeSet
    operands: OperandGradients

    def edge_gradients(self, gradient: Tensor) -> EdgeGradients:
        """Return the gradients of the product's hanging branches, from that of its output (a tensor of its shape)."""
        with torch.no_grad():
            gradients = self.operands(gradient)
            return [(edge, _sum_broadcast(gradients[i], edge)) for i, edge in self.hanging.items()]


def divide_backward(outputs: Sequence[Node], inputs: Iterable[Node]) -> BackwardGraph:
    """Divide the graph from the nodes of the outputs to those of the inputs."""
    below = autograd_graph(outputs)
    path = _path(below, inputs)
    deferred: dict[Node, DeferredProduct] = {}
    immediate: NodeSet = {}
    for node in path:
        children = list(enumerate(node.next_functions))
        hanging = {i: GradientEdge(child, n) for i, (child, n) in children if child is not None and child not in path}
        leaves = _leaves(below, [edge.node for edge in hanging.values()])
        operands = operand_gradients(node, [i in hanging for i, _ in children]) if leaves else None
        if operands:
            deferred[node] = DeferredProduct(hanging, leaves, operands)
        else:
            immediate |= leaves
    independent = _leaves(below, [output for output in outputs if output not in path])
    _add_sharing(immediate, [independent, *(product.leaves for product in deferred.values())])
    later = {node: product for node, product in deferred.items() if immediate.keys().isdisjoint(product.leaves)}
    return BackwardGraph(path, later, independent if immediate.keys().isdisjoint(independent) else {}, immediate)


def _add_sharing(immediate: NodeSet, groups: Sequence[NodeSet]) -> None:
    """Add to `immediate` every group of parameters that shares one with it, until none does."""
    size = -1
    while size != len(immediate):
        size = len(immediate)
        for leaves in groups:
            if not immediate.keys().isdisjoint(leaves):
                immediate.update(leaves)


def _path(below: Mapping[Node, Sequence[Node]], inputs: Iterable[Node]) -> NodeSet:
    above = defaultdict(list)
    for node, children in below.items():
        for child in children:
            above[child].append(node)
    return _reachable(above, [node for node in inputs if node in below])


def _leaves(below: Mapping[Node, Sequence[Node]], starts: Iterable[Node]) -> NodeSet:
    return {node: None for node in _reachable(below, starts) if type(node).__name__ == "AccumulateGrad"}


def _reachable(edges: Mapping[Node, Sequence[Node]], starts: Iterable[Node]) -> NodeSet:
    """The nodes that `edges` lead to from `starts`, these included."""
    reached = dict.fromkeys(starts)
    todo = list(reached)
    while todo:
        for node in edges.get(todo.pop(), ()):
            if node not in reached:
                reached[node] = None
                todo.append(node)
    return reached


def _sum_broadcast(gradient: Tensor | None, edge: GradientEdge) -> Tensor:
    """Sum over the dimensions that were broadcast, as autograd does between two operators."""
    assert gradient is not None
    return gradient.sum_to_size(edge.node._input_metadata[edge.output_nr].shape)


def operand_gradients(node: Node, wanted: Sequence[bool]) -> OperandGradients | None:
    """Return a function from the gradient of a product's output to those of its operands.

    A product is a matrix product or a convolution. The function keeps the tensors that it needs and not the graph. It
    computes as torch/csrc/autograd/FunctionsManual.cpp does (`mm_mat1_backward`, `mm_mat2_backward`), to the same bits.

    Args:
        node: the backward node of the product.
        wanted: for each operand, whether its gradient is needed; others may be computed or None.

    Returns:
        The function, which takes a tensor of the output's shape and returns tensors of the operands' shapes (of the
        broadcast shape for an operand that was broadcast); None for an operator of another kind.
    """
    name, saved = type(node).__name__, partial(_saved_value, node)
    if name == "ConvolutionBackward0":
        arguments = [saved("input"), saved("weight"), *map(saved, _OPTIONS), wanted]
        return lambda gradient: torch.ops.aten.convolution_backward(gradient, *arguments)
    if name not in _FACTORS or saved("alpha", 1) != 1 or saved("beta", 1) != 1:
        return None
    factors = _FACTORS[name]
    by_columns = [_is_by_columns(saved(f"{one}_sym_sizes", ()), saved(f"{one}_sym_strides", ())) for one in factors]
    left, right = (saved(one) if needed else None for one, needed in zip(factors, reversed(wanted[-2:]), strict=True))
    return partial(_product_gradients, left, right, by_columns, len(wanted) == 3)


def _saved_value(node: Node, name: str, default: Any = None) -> Any:
    value = getattr(node, f"_saved_{name}", default)
    return value.detach() if isinstance(value, Tensor) else value


def _is_by_columns(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return len(strides) == 2 and strides[0] == 1 and strides[1] == sizes[0]


def _product_gradients(
    left: Tensor | None, right: Tensor | None, by_columns: Sequence[bool], has_addend: bool, gradient: Tensor
) -> list[Tensor | None]:
    """Gradients of the addend, if there is one, and of both factors; each lies in memory by columns if its factor does.

    Args:
        left, right: the factors [..., m, k] and [..., k, n]; None for one that the wanted gradients do not need.
        gradient: of the output [..., m, n].
    """
    of_left = of_right = None
    if right is not None:
        of_left = (right.conj() @ gradient.mT).mT if by_columns[0] else gradient @ right.mH
    if left is not None:
        of_right = (gradient.mT @ left.conj()).mT if by_columns[1] else left.mH @ gradient
    return [*[gradient] * has_addend, of_left, of_right]
