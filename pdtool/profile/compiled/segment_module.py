"""Make one module of several operators, which torch.compile can take as it takes the module of a stage."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pdtool.frontend.operators import Operator, Value
from pdtool.profile.execute import Executor


def segment_module(
    run: Executor, operators: Sequence[Operator], inputs: Sequence[Value], outputs: Sequence[Value]
) -> fx.GraphModule:
    """Return a module that takes `inputs`, runs the operators as `run` does, and returns a tuple of `outputs`.

    It shares parameters, buffers and modules with the model.
    """
    writer = _GraphWriter(run)
    for value in inputs:
        writer.nodes[value] = writer.graph.placeholder(f"input_{len(writer.nodes)}")
    for op in operators:
        writer.add(op)
    writer.graph.output(tuple(writer.nodes[value] for value in outputs))
    return fx.GraphModule(writer.attributes, writer.graph)


class _FunctionCall(nn.Module):
    """Calls a function that a graph cannot name, such as the `apply` of a user's autograd.Function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@dataclass
class _GraphWriter:
    """Appends operators to a graph.

    Attributes:
        attributes: what the graph takes from its module, by name: tensors and modules.
        nodes: what computes each tensor.
    """

    run: Executor
    graph: fx.Graph = field(default_factory=fx.Graph)
    attributes: dict[str, Any] = field(default_factory=dict)
    nodes: dict[Value, fx.Node] = field(default_factory=dict)

    def add(self, op: Operator) -> None:
        """Append an operator whose inputs are there."""
        if op.branch:
            for part in op.branch.training:
                self.add(part)
            for (value, _), output in zip(op.branch.results, op.outputs, strict=True):
                self.nodes[output] = self.nodes[value] if value else self._zeros(output)
            return
        result = self._call(op)
        for path, index in pytree.tree_flatten_with_path(op.structure)[0]:
            if index is not None:
                self.nodes[op.outputs[index]] = self._part(result, path)

    def _call(self, op: Operator) -> fx.Node:
        arguments = self.run.resolved((op.args, op.kwargs), self.nodes)
        args, kwargs = pytree.tree_map_only(Tensor, self._tensor, arguments)
        if op.target:
            return self.graph.call_function(op.target, args, kwargs)
        callee = self.run.callee(op)
        module = callee if isinstance(callee, nn.Module) else _FunctionCall(callee)
        return self.graph.call_module(self._attribute("module", module), args, kwargs)

    def _part(self, result: fx.Node, path: Sequence[Any]) -> fx.Node:
        """Return the part of what an operator returned that stands at a path in it."""
        for key in path:
            if isinstance(key, pytree.GetAttrKey):
                result = self.graph.call_function(getattr, (result, key.name))
            else:
                index = key.idx if isinstance(key, pytree.SequenceKey) else key.key
                result = self.graph.call_function(operator.getitem, (result, index))
        return result

    def _zeros(self, output: Value) -> fx.Node:
        """Return what stands for an output that only evaluation computes."""
        meta = output.meta(self.run.batch)
        options: dict[str, Any] = {"dtype": meta.dtype, "device": self.run.device}
        return self.graph.call_function(torch.zeros, (tuple(meta.shape),), options)

    def _tensor(self, tensor: Tensor) -> fx.Node:
        return self.graph.get_attr(self._attribute("tensor", tensor))

    def _attribute(self, kind: str, value: Tensor | nn.Module) -> str:
        name = f"{kind}_{len(self.attributes)}"
        self.attributes[name] = value
        return name
