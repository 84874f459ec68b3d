"""Read a recorded call into an operator: of a leaf module, an opaque module or an autograd.Function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pdtool.errors import TraceError
from pdtool.frontend.operators import Operator, Size, State, Value
from pdtool.frontend.tracing.leaf_calls import LeafCall
from pdtool.frontend.tracing.node_values import NodeValues, location
from pdtool.frontend.tracing.operator_builder import OperatorBuilder, module_path

_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class LeafReader:
    """Reads the calls that were recorded whole while the graph was made.

    Args:
        calls: those recorded; a node says which it is.
        values: what the nodes of the graph stand for.
        builder: gets an operator for each call.
    """

    def __init__(self, calls: Sequence[LeafCall], values: NodeValues, builder: OperatorBuilder) -> None:
        self._calls, self._values, self._builder = calls, values, builder
        self._read_calls: Counter[str] = Counter()  # of each module

    def read(self, node: fx.Node) -> None:
        """Read one node, which stands for a call.

        Raises:
            TraceError: it takes something else than tensors and constants.
        """
        number, tensors = node.args
        call = self._calls[number]  # type: ignore[index]
        args, kwargs = self._arguments(call, self._values.argument(tensors), node)
        if call.function:
            self._function(node, call, args)
        else:
            self._module(node, call, args, kwargs)

    def _module(self, node: fx.Node, call: LeafCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read a whole call of a leaf module, or of an opaque one."""
        module = self._builder.modules[call.path]
        name = self._name(call.path)
        parameters = [f"{call.path}.{n}" for n, _ in module.named_parameters(remove_duplicate=False)]
        buffers = [f"{call.path}.{n}" for n, _ in module.named_buffers(remove_duplicate=False)]
        self._builder.changed_buffers |= set(buffers)
        states = [leaf.name for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, State)]
        parameters += [name for name in states if name in self._builder.parameters]
        buffers += [name for name in states if name in self._builder.buffers]
        inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)]
        differentiable = any(v.differentiable for v in inputs) or self._builder.is_trainable(parameters)
        operator = Operator(
            name=name,
            op=type(module).__name__,
            module=call.path,
            args=args,
            kwargs=kwargs,
            structure=call.result,
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            opaque=call.recorded is not None,
        )
        recorded = call.recorded
        flows = [differentiable and flow for flow in recorded.differentiable] if recorded else differentiable
        outputs = self._builder.append(operator, node, node.meta["val"], flows)
        self._values[node] = list(outputs)
        if getattr(module, "inplace", False) and inputs and not recorded:
            self._values.replace(inputs[0], outputs[0])

    def _function(self, node: fx.Node, call: LeafCall, args: tuple[Any, ...]) -> None:
        """Read a call of an autograd.Function; its name is not that of the class, which the stage file imports."""
        leaves = pytree.tree_leaves(args)
        states = [leaf.name for leaf in leaves if isinstance(leaf, State)]
        parameters = tuple(name for name in states if name in self._builder.parameters)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Value)]
        flows = self._builder.is_trainable(parameters) or any(value.differentiable for value in inputs)
        kind = call.function.__name__
        module, name = self._builder.module_and_name(node, f"{kind.lower()}_apply")
        operator = Operator(
            name=name,
            op=kind,
            module=module,
            args=args,
            structure=call.result,
            parameters=parameters,
            buffers=tuple(name for name in states if name in self._builder.buffers),
            function=call.function,
        )
        self._values[node] = list(self._builder.append(operator, node, node.meta["val"], flows))

    def _arguments(self, call: LeafCall, tensors: list[Any], node: fx.Node) -> Any:
        """(args, kwargs) of the call, with `tensors` in the places of its tensors."""
        remaining = iter(tensors)
        flat = [next(remaining) if isinstance(a, Tensor) else self._values.size(a, node) for a in call.arguments]
        if others := [a for a in flat if not isinstance(a, (Value, State, Tensor, Size, *_CONSTANTS))]:
            what = f"{call.path or call.function.__name__} takes a {type(others[0]).__name__} as an argument"
            caller = call.path.rpartition(".")[0] if call.path else module_path(node)
            raise TraceError(what, "let it take tensors and numbers", location=location(node), module=caller)
        return pytree.tree_unflatten(flat, call.spec)

    def _name(self, path: str) -> str:
        """The module's path; `PATH@0`, `PATH@1`, ... where the module is called several times."""
        number = self._read_calls[path]
        self._read_calls[path] += 1
        return f"{path}@{number}" if sum(call.path == path for call in self._calls) > 1 else path
