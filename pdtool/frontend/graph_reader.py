"""Read one exported program into operators: ATen nodes, leaf calls, and nothing that is only bookkeeping."""

from __future__ import annotations

import operator as python_operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from pdtool.errors import TraceError
from pdtool.frontend.operators import BATCH, Operator, Size, State, Traced, Value

_TORCH = str(Path(torch.__file__).parent)
_SMALL = 64  # elements of a constant tensor that may stand in a stage file as a literal
_NAME = re.compile(r"[A-Za-z0-9_.]*")
_ALIASES = {"alias", "detach", "detach_", "lift_fresh", "lift_fresh_copy", "lift"}


@dataclass
class LeafCall:
    """One call of a leaf module, noted while torch.export runs."""

    path: str
    forward: Callable[..., Any]
    arguments: list[Any]
    spec: pytree.TreeSpec
    result: Any = None


class Reader:
    """Walks the nodes of one exported program; `read` gives the operators."""

    def __init__(self, model: nn.Module, program: torch.export.ExportedProgram, calls: list[LeafCall]) -> None:
        self.model = model
        self.program = program
        self.calls = calls
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.batch = _batch_symbol(program)
        self.env: dict[fx.Node, Any] = {}
        self.operators: list[Operator] = []
        self.names: set[str] = set(self.modules) | {"loss", "target"}
        self.leaf_calls: dict[str, int] = {}
        self.changed: set[str] = set()  # buffers written by an operator

    def read(self) -> Traced:
        """All operators, model inputs first; raises TraceError."""
        for name in (*self.modules, *self.parameters, *self.buffers):
            if not _NAME.fullmatch(name):
                raise TraceError(
                    f"the model has a part named {name!r}", "name modules with letters, digits and underscores only"
                )
            if name in ("loss", "target"):
                raise TraceError(f"the model has a part named {name!r}, as pdtool calls a node of its own", "rename it")
        for node, spec in zip(self._placeholders(), self.program.graph_signature.input_specs, strict=True):
            self.env[node] = self._input(node, spec)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
        output = self._output()
        return Traced(
            model=self.model,
            operators=tuple(self._finished(output)),
            output=output,
            together=self._together(),
            tied=self._tied(),
        )

    def _placeholders(self) -> list[fx.Node]:
        return [node for node in self.program.graph.nodes if node.op == "placeholder"]

    def _input(self, node: fx.Node, spec: Any) -> Any:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return State(spec.target)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            return self._constant(self.program.constants[spec.target], node)
        if spec.kind is not InputKind.USER_INPUT or not isinstance(node.meta.get("val"), Tensor):
            raise TraceError(f"input {node.name!r} of the model is no tensor", "pass tensors only to forward")
        name = self._unique(node.name)
        value = self._value(node.meta["val"], name, 0, differentiable=False)
        self.operators.append(Operator(name=name, op="input", module="", outputs=(value,)))
        return value

    def _constant(self, tensor: Tensor, node: fx.Node) -> Tensor:
        if tensor.numel() > _SMALL:
            raise TraceError(
                f"the model holds a tensor of {tensor.numel()} elements that is neither parameter nor buffer",
                "use register_buffer for it",
                location=_location(next(iter(node.users), node)),
            )
        return tensor.detach().clone()

    def _call(self, node: fx.Node) -> None:
        """One node: a leaf call, an ATen operator, or bookkeeping that leaves no trace in the list."""
        target: Any = node.target
        value = node.meta.get("val")
        if isinstance(value, (int, float, bool, torch.SymInt)) and not isinstance(
            target, torch._ops.HigherOrderOperator
        ):
            self.env[node] = self._size(value, node)
        elif target is python_operator.getitem:
            self.env[node] = self._argument(node.args[0])[node.args[1]]
        elif target is torch.ops.pdtool.leaf.default:
            self._leaf(node)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._region(node, str(target))
        elif not isinstance(target, torch._ops.OpOverload):
            raise TraceError(f"{target} is no operator of a stage", location=_location(node))
        elif target._schema.name.split("::")[-1].startswith(("_assert", "sym_constrain")):
            return
        elif target is torch.ops.aten.contiguous.default and len(node.args) == 1 and not node.kwargs:
            self.env[node] = self._argument(node.args[0])  # whether it copies depends on the mode; `view` is a reshape
        elif target._schema.name.split("::")[-1] in _ALIASES and isinstance(self._argument(node.args[0]), Tensor):
            self.env[node] = self._argument(node.args[0])
        else:
            self._aten(node, target)

    def _region(self, node: fx.Node, kind: str) -> None:
        """The body of `with torch.no_grad()`, its inputs detached, or of a switched-off autocast, as it is."""
        place = next((i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"), -1)
        no_grad = kind == "wrap_with_set_grad_enabled" and node.args[0] is False
        if place < 0 or not (no_grad or (kind == "wrap_with_autocast" and node.args[2] is False)):
            raise TraceError(
                f"{kind} cannot be cut into stages",
                "keep autocast, enable_grad and control-flow operators out of forward",
                location=_location(node),
            )
        taken = [self._argument(a) for a in node.args[place + 1 :]]
        if no_grad:
            taken = [self._detached(v) if isinstance(v, Value) and v.differentiable else v for v in taken]
        body = getattr(self.program.graph_module, str(node.args[place].target))  # type: ignore[union-attr]
        inner = list(body.graph.nodes)
        self.env.update(zip((n for n in inner if n.op == "placeholder"), taken, strict=True))
        for inside in inner:
            if inside.op == "call_function":
                self._call(inside)
        self.env[node] = list(self._argument(inner[-1].args[0]))

    def _detached(self, value: Value) -> Value:
        name = self._unique("detach")
        result = replace(value, operator=name, index=0, differentiable=False)
        target = torch.ops.aten.detach.default
        self._append(
            Operator(name=name, op="detach", module="", target=target, kwargs={"self": value}, outputs=(result,))
        )
        return result

    def _leaf(self, node: fx.Node) -> None:
        index, tensors = node.args
        call = self.calls[index]  # type: ignore[index]
        feed = iter(self._argument(tensors))
        flat = [next(feed) if isinstance(a, Tensor) else a for a in call.arguments]
        if any(isinstance(a, (torch.SymInt, torch.SymFloat)) for a in flat):
            raise TraceError(f"{call.path} takes a size as an argument", location=_location(node))
        args, kwargs = pytree.tree_unflatten(flat, call.spec)
        module = self.modules[call.path]
        number = self.leaf_calls[call.path] = self.leaf_calls.get(call.path, -1) + 1
        often = sum(other.path == call.path for other in self.calls) > 1
        name = f"{call.path}@{number}" if often else call.path
        parameters = [f"{call.path}.{n}" for n, _ in module.named_parameters(remove_duplicate=False)]
        buffers = [f"{call.path}.{n}" for n, _ in module.named_buffers(remove_duplicate=False)]
        self.changed |= set(buffers)
        taken = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)]
        differentiable = any(v.differentiable for v in taken) or self._trainable(parameters)
        outputs = tuple(self._value(v, name, i, differentiable) for i, v in enumerate(node.meta["val"]))
        self._append(
            Operator(
                name=name,
                op=type(module).__name__,
                module=call.path,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                structure=call.result,
                parameters=tuple(parameters),
                buffers=tuple(buffers),
                location=_location(node),
            )
        )
        self.env[node] = list(outputs)
        if getattr(module, "inplace", False) and taken:
            self._rename(taken[0], outputs[0])

    def _aten(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
        arguments = {
            a.name: self._argument(given[a.name]) if a.name in given else a.default_value
            for a in target._schema.arguments
        }
        written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        overwritten = arguments[written[0]] if written else None
        if isinstance(overwritten, State) and target._schema.name == "aten::copy_" and arguments["src"] is overwritten:
            return  # torch.export's own note of a buffer that an operator before it has already changed
        if written and not isinstance(overwritten, State):
            target = self._out_of_place(node, target, overwritten)
        state = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, State)]
        parameters = tuple(dict.fromkeys(s.name for s in state if s.name in self.parameters))
        buffers = tuple(dict.fromkeys(s.name for s in state if s.name in self.buffers))
        taken = [v for v in pytree.tree_leaves(arguments) if isinstance(v, Value)]
        differentiable = any(v.differentiable for v in taken) or self._trainable(parameters)
        differentiable = differentiable and target._schema.name.split("::")[-1] not in _ALIASES
        op = target._schema.name.split("::")[-1]
        module, name = self._place(node, op)
        meta = node.meta["val"]
        tensors = list(meta) if isinstance(meta, (tuple, list)) else [meta]
        outputs = tuple(self._value(v, name, i, differentiable) for i, v in enumerate(tensors))
        self._append(
            Operator(
                name=name,
                op=op,
                module=module,
                target=target,
                kwargs=arguments,
                outputs=outputs,
                structure=list(range(len(tensors))) if isinstance(meta, (tuple, list)) else 0,
                parameters=parameters,
                buffers=buffers,
                location=_location(node),
            )
        )
        self.env[node] = list(outputs) if isinstance(meta, (tuple, list)) else outputs[0]
        if isinstance(overwritten, State):
            self.changed.add(overwritten.name)
            self.env[node] = overwritten
        elif isinstance(overwritten, Value):
            self._rename(overwritten, outputs[0])

    def _out_of_place(self, node: fx.Node, target: torch._ops.OpOverload, overwritten: Any) -> torch._ops.OpOverload:
        """`add_` -> `add`; only where nothing else looks at the same memory."""
        name, overload = target._schema.name.split("::")[-1].rstrip("_"), target._overloadname
        packet = getattr(torch.ops.aten, name, None)
        source = self._source(overwritten)
        if packet is None or overload not in packet.overloads() or source is None or self._is_shared_view(source, node):
            raise TraceError(
                f"{target} writes into part of a tensor in place",
                "build the tensor with torch.cat, torch.where or masked_fill instead",
                location=_location(node),
            )
        return getattr(packet, overload)  # type: ignore[no-any-return]

    def _source(self, value: Any) -> fx.Node | None:
        """The latest node whose result is `value`."""
        return next((n for n in reversed(self.env) if self.env[n] is value), None)

    def _is_shared_view(self, node: fx.Node, writer: fx.Node) -> bool:
        """Whether `node` is a view of a tensor that is still used after `writer`."""
        seen = list(self.program.graph.nodes)
        while isinstance(node.target, torch._ops.OpOverload) and node.args and isinstance(node.args[0], fx.Node):
            alias = node.target._schema.returns[0].alias_info
            if alias is None or alias.is_write:
                return False
            node = node.args[0]
            if any(seen.index(user) > seen.index(writer) for user in node.users):
                return True
        return False

    def _rename(self, old: Value, new: Value) -> None:
        """From here on, whoever uses `old` means `new`: it was written in place."""
        for node, value in self.env.items():
            if value is old:
                self.env[node] = new
            elif isinstance(value, list):
                self.env[node] = [new if v is old else v for v in value]

    def _finished(self, output: Any) -> list[Operator]:
        """The operators that something depends on, with `constant` set where only constants come in."""
        used = {v.operator for v in pytree.tree_leaves(output) if isinstance(v, Value)}
        kept = []
        for op in reversed(self.operators):
            if op.is_input or op.name in used or self.changed & set(op.buffers):
                kept.append(op)
                used |= {v.operator for v in op.values}
        constants: set[str] = set()
        finished = []
        for op in reversed(kept):
            random = op.target is not None and torch.Tag.nondeterministic_seeded in op.target.tags
            stateful = op.parameters or self.changed & set(op.buffers)
            if op.target is not None and not (random or stateful) and all(v.operator in constants for v in op.values):
                constants.add(op.name)
            finished.append(replace(op, constant=op.name in constants))
        return finished

    def _append(self, op: Operator) -> None:
        self.names.add(op.name)
        self.operators.append(op)

    def _place(self, node: fx.Node, op: str) -> tuple[str, str]:
        """(path of the module whose forward runs this node, unique name of the operator)."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = re.sub(r"@\d+", "", str(stack[-1][0])) if stack else ""
        return path, self._unique(f"{path}.{op}" if path else op)

    def _unique(self, name: str) -> str:
        base, count = name, 0
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self.names.add(name)
        return name

    def _value(self, tensor: Tensor, operator: str, index: int, differentiable: bool) -> Value:
        shape = tuple(self._size(dim, None) for dim in tensor.shape)
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return Value(operator, index, shape, tensor.dtype, differentiable and floating)

    def _size(self, value: Any, node: fx.Node | None) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr.subs(self.batch, BATCH) if self.batch is not None else value.node.expr
        if expression.is_number:
            return int(expression)
        if expression.free_symbols != {BATCH}:
            raise TraceError(
                f"the size {value} depends on the values of a tensor",
                "give every tensor a shape that follows from the minibatch size alone",
                location=_location(node) if node else "",
            )
        return Size(sympy.sympify(expression))

    def _argument(self, argument: Any) -> Any:
        return pytree.tree_map(lambda a: self.env[a] if isinstance(a, fx.Node) else self._size(a, None), argument)

    def _trainable(self, names: Any) -> bool:
        return any(self.parameters[name].requires_grad for name in names)

    def _output(self) -> Any:
        node = next(n for n in self.program.graph.nodes if n.op == "output")
        kinds = self.program.graph_signature.output_specs
        users = [o for o, spec in zip(node.args[0], kinds, strict=True) if spec.kind.name == "USER_OUTPUT"]
        flat = [self._argument(o) for o in users]
        output = pytree.tree_unflatten(flat, self.program.call_spec.out_spec)
        return dict(output) if isinstance(output, dict) else output

    def _together(self) -> tuple[tuple[str, ...], ...]:
        """Operators that share a buffer which one of them changes."""
        users: dict[str, list[str]] = {}
        for op in self.operators:
            for name in op.buffers if not op.constant else ():
                if name in self.changed:
                    users.setdefault(name, []).append(op.name)
        return tuple(dict.fromkeys(tuple(names) for names in users.values() if len(names) > 1))

    def _tied(self) -> dict[str, str]:
        first: dict[int, str] = {}
        return {name: first.setdefault(id(parameter), name) for name, parameter in self.parameters.items()}


def _batch_symbol(program: torch.export.ExportedProgram) -> Any:
    """The one symbol in the shapes of the inputs."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            for dim in value.shape:
                if isinstance(dim, torch.SymInt):
                    return next(iter(dim.node.expr.free_symbols))
    return None


def _location(node: fx.Node) -> str:
    """`file.py:12`: the innermost line outside torch that made this node."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [
        (file, number) for file, number in lines if not file.startswith(_TORCH) and "/pdtool/frontend/" not in file
    ]
    return f"{Path(outside[-1][0]).name}:{outside[-1][1]}" if outside else ""
