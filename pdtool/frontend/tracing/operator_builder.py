"""Build the list of operators, each under a name of its own, with what it returns and where it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pdtool.frontend.operators import Operator, State, Value
from pdtool.frontend.tracing.node_values import NodeValues, location


class OperatorBuilder:
    """Builds the operators of a model, in the order in which its graph is read.

    Args:
        values: what the nodes of the graph stand for.

    Attributes:
        modules, parameters, buffers: of the model, by all of their names.
        operators: those built so far.
        changed_buffers: names of the buffers that an operator writes.
    """

    def __init__(self, model: nn.Module, values: NodeValues) -> None:
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.operators: list[Operator] = []
        self.changed_buffers: set[str] = set()
        self._values = values
        self._names: set[str] = set(self.modules) | {"loss", "target"}

    def append(
        self, op: Operator, node: fx.Node, results: Sequence[Tensor], differentiable: bool | Sequence[bool]
    ) -> tuple[Value, ...]:
        """Append the operator that `node` stands for and return its outputs.

        Args:
            results: tensors of the shapes and types of the outputs.
            differentiable: of all outputs, or of each.
        """
        each = [differentiable] * len(results) if isinstance(differentiable, bool) else differentiable
        outputs = tuple(self.value(tensor, op.name, i, each[i]) for i, tensor in enumerate(results))
        self.operators.append(replace(op, outputs=outputs, location=location(node)))
        return outputs

    def value(self, tensor: Tensor, operator: str, index: int, differentiable: bool) -> Value:
        """Return an operator's output of the shape and type of `tensor`."""
        shape = tuple(self._values.size(dim) for dim in tensor.shape)
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return Value(operator, index, shape, tensor.dtype, differentiable and floating)

    def unique_name(self, name: str) -> str:
        """Return the name, with a number where an operator or a module has it already."""
        base, count = name, 0
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    def module_and_name(self, node: fx.Node, op: str) -> tuple[str, str]:
        """Return the path of the module whose forward runs this node, and a unique name of the operator."""
        path = module_path(node)
        return path, self.unique_name(f"{path}.{op}" if path else op)

    def is_trainable(self, names: Iterable[str]) -> bool:
        """Whether one of these parameters gets a gradient."""
        return any(self.parameters[name].requires_grad for name in names)

    def detached(self, value: Any) -> Any:
        """Return what stands for `value` where no gradient flows back: the output of a `detach`, or `value` itself."""
        if not isinstance(value, Value) or not value.differentiable:
            return value
        name = self.unique_name("detach")
        result = replace(value, operator=name, index=0, differentiable=False)
        target = torch.ops.aten.detach.default
        self.operators.append(
            Operator(name=name, op="detach", module="", target=target, kwargs={"self": value}, outputs=(result,))
        )
        return result

    def detached_parameter(self, name: str, tensor: Tensor) -> Value:
        """Append a `detach` of a parameter, of the shape and type of `tensor`, and return its output."""
        value = self.value(tensor, self.unique_name("detach"), 0, differentiable=False)
        kwargs, target = {"self": State(name)}, torch.ops.aten.detach.default
        operator = Operator(name=value.operator, op="detach", module="", target=target, kwargs=kwargs)
        self.operators.append(replace(operator, outputs=(value,), parameters=(name,)))
        return value


def module_path(node: fx.Node) -> str:
    """Return the path of the module whose forward runs this node; "" for the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"@\d+", "", str(stack[-1][0])) if stack else ""
