"""Which parameters of a stage's graph get their gradients together with the inputs, and which later.

    path       operators between an output and an input    loss ─▶ relu ─▶ mm ─▶ relu ─▶ mm ─▶ input
    hanging    what one of them has besides                             └▶ t ─▶ W2    └▶ t ─▶ W1

Later come the parameters that hang on products, where either gradient is a kernel of its own, and those of outputs that
do not depend on any input (of a first stage: all). Parameters that hang on other operators (norms, recurrent layers, a
backward written in Python) come at once: they are cheap, or come out of the same kernel as the gradients of the inputs.
What shares a parameter with these comes at once too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pdtool.run.backward.operand_grads import OperandGradients, operand_gradients

EdgeGradients = list[tuple[GradientEdge, Tensor]]  # gradients, and where they enter the graph
NodeSet = dict[Node, None]  # ordered


@dataclass(frozen=True)
class DeferredProduct:
    """A product of the path whose parameters get their gradients later.

    Attributes:
        hanging: position among the operands -> the edge to what hangs there.
        leaves: the parameters below.
        operands: computes the gradients of the operands.
    """

    hanging: Mapping[int, GradientEdge]
    leaves: NodeSet
    operands: OperandGradients

    def edge_gradients(self, gradient: Tensor) -> EdgeGradients:
        """Return the gradients of what hangs on the product, from that of its output (a tensor of its shape)."""
        with torch.no_grad():
            gradients = self.operands(gradient)
            return [(edge, _sum_broadcast(gradients[i], edge)) for i, edge in self.hanging.items()]


@dataclass(frozen=True)
class BackwardGraph:
    """The graph of a stage, divided by when its gradients are computed.

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


def divide_backward(outputs: Sequence[Node], inputs: Iterable[Node]) -> BackwardGraph:
    """Divide the graph from the nodes of the outputs to those of the inputs."""
    below = _nodes_below(outputs)
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


def _nodes_below(outputs: Iterable[Node]) -> dict[Node, list[Node]]:
    """Every node below `outputs` -> the nodes right below it. While they are in here, equal nodes are identical."""
    graph: dict[Node, list[Node]] = {}
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node not in graph:
            graph[node] = [child for child, _ in node.next_functions if child is not None]
            todo += graph[node]
    return graph


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
