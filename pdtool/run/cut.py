"""Which parameters of a stage's graph have their gradients with those of the inputs, and which later.

    path       operators between an output and an input    loss ─▶ relu ─▶ mm ─▶ relu ─▶ mm ─▶ input
    hanging    what one of them has besides                             └▶ t ─▶ W2    └▶ t ─▶ W1

Later come the parameters that hang on products, where either gradient is a kernel of its own, and those of outputs that
no input has a part in (of a first stage: all). Parameters that hang on other operators (norms, recurrent layers, a
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

from pdtool.run.products import Gradients, operand_gradients

Known = list[tuple[GradientEdge, Tensor]]  # gradients, and where they come into the graph
Nodes = dict[Node, None]  # a set, in order


@dataclass(frozen=True)
class Product:
    """A product of the path.

    Attributes:
        hanging: place among the operands -> what hangs there.
        leaves: the parameters below.
        operands: gradients of all operands.
    """

    hanging: Mapping[int, GradientEdge]
    leaves: Nodes
    operands: Gradients

    def known(self, gradient: Tensor) -> Known:
        """For what hangs on it, given the gradient of its output."""
        with torch.no_grad():
            made = self.operands(gradient)
            return [(edge, _shrunk(made[i], edge)) for i, edge in self.hanging.items()]


@dataclass(frozen=True)
class Cut:
    """What of a graph is computed when.

    Attributes:
        path: its operators, and the inputs.
        later: products of the path whose parameters come later.
        apart: parameters of outputs off the path, if they come later.
        now: all other parameters.
    """

    path: Nodes
    later: Mapping[Node, Product]
    apart: Nodes
    now: Nodes


def cut(starts: Sequence[Node], ends: Iterable[Node]) -> Cut:
    """Cut the graph from `starts`, the outputs, to `ends`, the inputs."""
    below = _graph(starts)
    path = _path(below, ends)
    later: dict[Node, Product] = {}
    now: Nodes = {}
    for node in path:
        children = list(enumerate(node.next_functions))
        hanging = {i: GradientEdge(child, n) for i, (child, n) in children if child is not None and child not in path}
        leaves = _leaves(below, [edge.node for edge in hanging.values()])
        operands = operand_gradients(node, [i in hanging for i, _ in children]) if leaves else None
        if operands:
            later[node] = Product(hanging, leaves, operands)
        else:
            now |= leaves
    apart = _leaves(below, [start for start in starts if start not in path])
    return _settled(path, later, apart, now)


def _settled(path: Nodes, later: dict[Node, Product], apart: Nodes, now: Nodes) -> Cut:
    """Move to `now` what shares a parameter with it, until nothing does."""
    size = -1
    while size != len(now):
        size = len(now)
        for leaves in [apart, *(product.leaves for product in later.values())]:
            if not now.keys().isdisjoint(leaves):
                now |= leaves
    return Cut(
        path,
        {node: product for node, product in later.items() if now.keys().isdisjoint(product.leaves)},
        apart if now.keys().isdisjoint(apart) else {},
        now,
    )


def _graph(starts: Iterable[Node]) -> dict[Node, list[Node]]:
    """Every node below `starts` -> the nodes right below it. While they are in here, equal nodes are identical."""
    graph: dict[Node, list[Node]] = {}
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in graph:
            graph[node] = [child for child, _ in node.next_functions if child is not None]
            todo += graph[node]
    return graph


def _path(below: Mapping[Node, Sequence[Node]], ends: Iterable[Node]) -> Nodes:
    above = defaultdict(list)
    for node, children in below.items():
        for child in children:
            above[child].append(node)
    return _reach(above, [end for end in ends if end in below])


def _leaves(below: Mapping[Node, Sequence[Node]], starts: Iterable[Node]) -> Nodes:
    return {node: None for node in _reach(below, starts) if type(node).__name__ == "AccumulateGrad"}


def _reach(edges: Mapping[Node, Sequence[Node]], starts: Iterable[Node]) -> Nodes:
    """The nodes that `edges` lead to from `starts`, these included."""
    found = dict.fromkeys(starts)
    todo = list(found)
    while todo:
        for node in edges.get(todo.pop(), ()):
            if node not in found:
                found[node] = None
                todo.append(node)
    return found


def _shrunk(gradient: Tensor | None, edge: GradientEdge) -> Tensor:
    """The sum over what was broadcast, as the engine does it between two operators."""
    assert gradient is not None
    return gradient.sum_to_size(edge.node._input_metadata[edge.output_nr].shape)
