"""Build the operators of a model, each with a unique name, its outputs, and its line in the source.

OperatorBuilder appends the operators. NodeValues knows what the nodes of the exported graph stand for, as far as they
have been read. The functions are passes over the finished list: they drop dead operators, mark constants, and group
operators that share state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pdtool.errors import TraceError
from pdtool.frontend.operators import (
    BATCH,
    Operator,
    Size,
    State,
    Traced,
    Value,
    first_names,
    named_state,
    names_over_parameters,
    shared_memory,
    unique_name,
    values_in,
)

_TORCH = str(Path(torch.__file__).parent)
# Operators that detach a tensor, take only its form, or overwrite it: no gradient flows back to it.
_WITHOUT_GRADIENT = {f"{value}_like" for value in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
_WITHOUT_GRADIENT |= {f"new_{value}" for value in ("empty", "empty_strided", "zeros", "ones", "full")}
_WITHOUT_GRADIENT |= {"uniform", "normal_functional", "exponential", "log_normal", "cauchy", "geometric", "random"}
_WITHOUT_GRADIENT |= {"detach", "detach_"}


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
        self, op: Operator, node: fx.Node, results: Sequence[Tensor], flows: Iterable[bool] = repeat(True)
    ) -> tuple[Value, ...]:
        """Append the operator that `node` stands for, with the state among its arguments, and return its outputs.

        Args:
            op: with the parameters and buffers that it uses besides its arguments.
            results: tensors of the shapes and types of the outputs.
            flows: for each output, whether a gradient flows back to the operator's inputs or parameters.
        """
        leaves = pytree.tree_leaves((op.args, op.kwargs))
        names = dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, State))
        parameters = (*op.parameters, *filter(self.parameters.__contains__, names))
        buffers = (*op.buffers, *filter(self.buffers.__contains__, names))
        takes_gradient = any(leaf.differentiable for leaf in leaves if isinstance(leaf, Value))
        takes_gradient = takes_gradient or any(self.parameters[name].requires_grad for name in parameters)
        takes_gradient = takes_gradient and op.op not in _WITHOUT_GRADIENT
        outputs = tuple(
            self.value(tensor, op.name, i, takes_gradient and flow, node)
            for i, (tensor, flow) in enumerate(zip(results, flows, strict=False))
        )
        place = location(node)
        self.operators.append(replace(op, outputs=outputs, parameters=parameters, buffers=buffers, location=place))
        return outputs

    def value(
        self, tensor: Tensor, operator: str, index: int, differentiable: bool, node: fx.Node | None = None
    ) -> Value:
        """Return an operator's output of the shape and type of `tensor`; `node` tells an error's line."""
        shape = tuple(self._values.size(dim, node) for dim in tensor.shape)
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return Value(operator, index, shape, tensor.dtype, differentiable and floating)

    def unique_name(self, name: str) -> str:
        """Return the name, with a number if an operator or a module has it already."""
        return unique_name(name, self._names)

    def module_and_name(self, node: fx.Node, op: str) -> tuple[str, str]:
        """Return the path of the module whose forward runs this node, and a unique name of the operator."""
        path = module_path(node)
        return path, self.unique_name(f"{path}.{op}" if path else op)

    def detached(self, value: Any) -> Any:
        """Return `value` without a gradient: the output of a `detach`, or `value` itself if none flows anyway."""
        if not isinstance(value, Value) or not value.differentiable:
            return value
        return self._detach(value, replace(value, operator=self.unique_name("detach"), index=0, differentiable=False))

    def detached_parameter(self, name: str, tensor: Tensor) -> Value:
        """Append a `detach` of a parameter, of the shape and type of `tensor`, and return its output."""
        value = self.value(tensor, self.unique_name("detach"), 0, differentiable=False)
        return self._detach(State(name), value, name)

    def _detach(self, source: Value | State, result: Value, *parameters: str) -> Value:
        kwargs, target = {"self": source}, torch.ops.aten.detach.default
        operator = Operator(name=result.operator, op="detach", module="", target=target, kwargs=kwargs)
        self.operators.append(replace(operator, outputs=(result,), parameters=parameters))
        return result


class NodeValues(dict[fx.Node, Any]):
    """What each node stands for: a Value, a State, a constant, a size, or a list of these."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self._batch = _batch_symbol(program)
        graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]  # and of no_grad
        self._order = {node: i for graph in graphs for i, node in enumerate(graph.nodes)}
        self._outer_inputs = set(program.graph.find_nodes(op="placeholder"))

    def argument(self, argument: Any) -> Any:
        """Return an argument of a node, nested in containers, with nodes and sizes replaced by their values."""
        return pytree.tree_map(lambda a: self[a] if isinstance(a, fx.Node) else self.size(a), argument)

    def size(self, value: Any, node: fx.Node | None = None) -> Any:
        """Return a symbolic integer as a Size, or as a number; anything else as it is.

        Raises:
            TraceError: it depends on something other than the number of samples; `node` tells the line.
        """
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr.subs(self._batch, BATCH) if self._batch is not None else value.node.expr
        if expression.is_number:
            return int(expression)
        if expression.free_symbols != {BATCH}:
            what = "the size of a tensor depends on the values of another"
            remedy = "make every shape depend only on the minibatch size, or move that code into a module of its own"
            raise TraceError(what, remedy, location=location(node) if node else "")
        return Size(sympy.sympify(expression))

    def source(self, value: Any) -> fx.Node | None:
        """The latest node that stands for `value`."""
        return next((n for n in reversed(self) if self[n] is value), None)

    def is_shared_view(self, node: fx.Node, writer: fx.Node) -> bool:
        """Whether `node` is a view of a tensor that is still used after `writer`: later, by another minibatch (a
        buffer), or outside the region of no_grad."""
        while isinstance(node.target, torch._ops.OpOverload) and node.args and isinstance(node.args[0], fx.Node):
            if not node.target.is_view:
                return False
            node = node.args[0]
            if isinstance(self[node], State) or (node.op == "placeholder" and node not in self._outer_inputs):
                return True
            if any(self._order[user] > self._order[writer] for user in node.users):
                return True
        return False

    def replace(self, old: Value, new: Value) -> None:
        """Make later users of `old`, which was written in place, take `new`."""
        for node, value in self.items():
            if value is old:
                self[node] = new
            elif isinstance(value, list):
                self[node] = [new if v is old else v for v in value]


def _batch_symbol(program: torch.export.ExportedProgram) -> Any:
    """The symbol of the minibatch's size in the shapes of the inputs; None if there is none."""
    inputs = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    sizes = (size for value in inputs if isinstance(value, Tensor) for size in value.shape)
    symbolic: Any = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    return None if symbolic is None else next(iter(symbolic.node.expr.free_symbols))


def location(node: fx.Node) -> str:
    """Return `file.py:12`: the innermost line outside torch that made this node."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [
        (file, number) for file, number in lines if not file.startswith(_TORCH) and "/pdtool/frontend/" not in file
    ]
    return f"{Path(outside[-1][0]).name}:{outside[-1][1]}" if outside else ""


def module_path(node: fx.Node) -> str:
    """Return the path of the module whose forward runs this node; "" for the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"@\d+", "", str(stack[-1][0])) if stack else ""


def drop_dead_operators(operators: Sequence[Operator], output: Any, changed_buffers: Collection[str]) -> list[Operator]:
    """Keep the model inputs, and the operators that the output or a changed buffer depends on."""
    used = {value.operator for value in values_in(output)}
    kept = []
    for op in reversed(operators):
        if op.is_input or op.name in used or not set(op.buffers).isdisjoint(changed_buffers):
            kept.append(op)
            used |= {value.operator for value in op.values}
    return kept[::-1]


def mark_constants(operators: Sequence[Operator], changed_buffers: Collection[str]) -> list[Operator]:
    """Set `constant` on the ATen operators whose inputs are only constants and unchanging buffers."""
    constants: set[str] = set()
    for op in operators:
        if op.target is None or torch.Tag.nondeterministic_seeded in op.target.tags:
            continue
        stateful = op.parameters or not set(op.buffers).isdisjoint(changed_buffers)
        if not stateful and all(value.operator in constants for value in op.values):
            constants.add(op.name)
    return [replace(op, constant=op.name in constants) for op in operators]


def operators_sharing_state(traced: Traced) -> tuple[tuple[str, ...], ...]:
    """Group the names of operators that must stand in one stage.

    They share a buffer that one of them changes, the memory of a parameter under different tensors, or an opaque
    module. Or they are a module's call and what its hooks compute: in a plan, the name of the call is that of both.
    """
    state = named_state(traced.model)
    memory = first_names(state)
    for group in shared_memory(state):
        memory |= dict.fromkeys(group, group[0])
    used = {op.name: _state_used(op, state) for op in traced.operators}
    changing = {memory[name] for name in traced.changed_buffers}
    all_used = dict.fromkeys(name for names in used.values() for name in names)
    for group in names_over_parameters(state):
        if len({id(state[name]) for name in group if name in all_used}) > 1:
            changing.add(group[0])
    users: dict[str, dict[str, None]] = {}
    called = {op.module for op in traced.operators if op.name == op.module}
    for op in traced.operators:
        shared = [op.module] if op.opaque or op.module in called else []
        for place in (*shared, *(memory[name] for name in used[op.name] if memory[name] in changing)):
            users.setdefault(place, {})[op.name] = None
    return tuple(dict.fromkeys(tuple(names) for names in users.values() if len(names) > 1))


def _state_used(op: Operator, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The parameters and buffers that an operator uses; for an opaque module also tensors that are plain attributes."""
    inside = (name for name in state if op.opaque and name.startswith(f"{op.module}."))
    return (*op.parameters, *op.buffers, *inside)
