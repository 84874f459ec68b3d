"""The backward of a stage in two parts: the gradients of its inputs now, those of its parameters later.

Qi et al., ICLR'24, "Zero Bubble Pipeline Parallelism", section 2: the stage before waits for the first part only. Put
off are the parameters of matrix products and convolutions, where either gradient is a kernel of its own. The others'
(norms, recurrent layers, operators whose backward is written in Python) come with the first part: they are cheap, or
come out of the same kernel as the gradients of the inputs.

    path       operators between an output and an input    loss ─▶ relu ─▶ mm ─▶ relu ─▶ mm ─▶ input
    hanging    parameters that one of them has besides                      └▶ t ─▶ W2    └▶ t ─▶ W1

The second part starts again at each product, from the gradient that came into it. From there no way along the path
may lead to the same parameter, or its gradient would count twice: one that hangs on several operators comes with the
first part, and so does all else that hangs on these.

Outputs that the inputs have no part in (of a first stage: all) are put off as a whole, on the same condition. A hook
that the module put on a tensor may be called in both parts; what it does to the gradient is done once.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_PRODUCTS = frozenset(  # each has one output
    {"MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0", "LinearBackward0", "ConvolutionBackward0"}
)
_Known = tuple[GradientEdge, Tensor]  # where the engine starts, and the gradient that comes in there


class Rest:
    """What `input_part` left to do. It keeps the graph alive."""

    def __init__(self) -> None:
        self._walks: deque[_Walk] = deque()

    def weight_part(self) -> None:
        """Add the gradients of the parameters to their leaves' `.grad`, each once, and let go of the graph."""
        while self._walks:
            self._walks.popleft().go()

    def _add(self, known: Sequence[_Known], leaves: Sequence[Node], *, again: bool = True) -> None:
        if known and leaves:
            self._walks.append(_Walk(known=known, leaves=leaves, again=again))

    def _meet(self, product: Node, leaves: Sequence[Node], gradients: tuple[Tensor | None]) -> None:
        """The first part is at a product whose parameters are put off."""
        if gradients[0] is not None:
            self._add([(GradientEdge(product, 0), gradients[0])], leaves)


def input_part(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], Rest]:
    """The gradients of `inputs`, and what is left of a backward from `outputs`. No `.grad` is touched.

    Args:
        outputs: of the stage, those that have a gradient.
        inputs: leaves.
        gradients: one per output; None, for a scalar, is one.

    Returns:
        One gradient per input, None where no path leads to one.
    """
    known = [
        (get_gradient_edge(output), torch.ones_like(output) if gradient is None else gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
    ends = [get_gradient_edge(value) if value.requires_grad else None for value in inputs]
    cut = _cut([start.node for start, _ in known], [end.node for end in ends if end])
    rest = Rest()
    with ExitStack() as hooks:
        for product, leaves in cut.later.items():
            hooks.enter_context(product.register_prehook(partial(rest._meet, product, leaves)))
        found = _gradients(known, [*cut.ends, *cut.now], keep=bool(cut.later))
    rest._add([(GradientEdge(leaf, 0), found[leaf]) for leaf in cut.now if leaf in found], cut.now)
    rest._add([(start, gradient) for start, gradient in known if start.node not in cut.path], cut.apart, again=False)
    return [found.get(end.node) if end else None for end in ends], rest


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """One walk of the engine to parameters, adding to their `.grad`.

    Attributes:
        leaves: the parameters' nodes.
        again: the first part came to the starts too: the hooks there have had their say.
    """

    known: Sequence[_Known]
    leaves: Sequence[Node]
    again: bool

    def go(self) -> None:
        with ExitStack() as hooks:
            for start, gradient in self.known if self.again else ():
                hooks.enter_context(start.node.register_prehook(partial(_as_seen, gradient)))
            starts, gradients = zip(*self.known, strict=True)
            parameters = [leaf.variable for leaf in self.leaves]  # type: ignore[attr-defined]
            torch.autograd.backward(starts, gradients, inputs=parameters)


def _as_seen(gradient: Tensor, _: object) -> tuple[Tensor]:
    return (gradient,)


def _gradients(known: Sequence[_Known], ends: Sequence[Node], *, keep: bool) -> dict[Node, Tensor]:
    """Of `ends`, those that have one; `keep` the graph for more."""
    if not ends:
        return {}
    starts, gradients = zip(*known, strict=True)
    found = torch.autograd.grad(
        starts, [GradientEdge(end, 0) for end in ends], gradients, retain_graph=keep, allow_unused=True
    )
    return {end: gradient for end, gradient in zip(ends, found, strict=True) if gradient is not None}


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """What of a graph is computed in which part.

    Attributes:
        path: operators between an output and an input, and the inputs.
        ends: the inputs among them.
        later: product of the path -> the parameters that hang on it and on nothing else.
        apart: parameters of the outputs that are not on the path, if they hang on nothing else.
        now: all other parameters.
    """

    path: Mapping[Node, None]
    ends: Sequence[Node]
    later: Mapping[Node, Sequence[Node]]
    apart: Sequence[Node]
    now: Sequence[Node]


def _cut(starts: Sequence[Node], ends: Sequence[Node]) -> _Cut:
    below = _graph(starts)
    above = defaultdict(list)
    for node, children in below.items():
        for child in children:
            above[child].append(node)
    ends = [end for end in dict.fromkeys(ends) if end in below]
    path = _reach(above, ends)
    apart = _leaves(below, [start for start in starts if start not in path])
    hanging = {node: _leaves(below, [child for child in below[node] if child not in path]) for node in path}
    count = Counter(chain(apart, *hanging.values()))
    alone = {leaf for leaf, times in count.items() if times == 1}
    later = {
        node: leaves
        for node, leaves in hanging.items()
        if leaves and type(node).__name__ in _PRODUCTS and alone.issuperset(leaves)
    }
    apart = apart if alone.issuperset(apart) else []
    put_off = set(chain(apart, *later.values()))
    return _Cut(path=path, ends=ends, later=later, apart=apart, now=[leaf for leaf in count if leaf not in put_off])


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


def _reach(edges: Mapping[Node, Sequence[Node]], starts: Iterable[Node]) -> dict[Node, None]:
    """The nodes that `edges` lead to from `starts`, these included."""
    found = dict.fromkeys(starts)
    todo = list(found)
    while todo:
        for node in edges.get(todo.pop(), ()):
            if node not in found:
                found[node] = None
                todo.append(node)
    return found


def _leaves(below: Mapping[Node, Sequence[Node]], starts: Iterable[Node]) -> list[Node]:
    return [node for node in _reach(below, starts) if type(node).__name__ == "AccumulateGrad"]
