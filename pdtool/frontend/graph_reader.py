"""Read an exported program into operators, and skip its bookkeeping.

GraphReader walks the nodes and reads ATen operators. LeafReader reads calls that were recorded as one operator: of leaf
modules, opaque modules and autograd.Functions.
"""

from __future__ import annotations

import operator as python_operator
import re
from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from pdtool.errors import PartialWriteError, TraceError
from pdtool.frontend.leaf_calls import OWN_MODULE, LeafCall
from pdtool.frontend.operator_builder import (
    NodeValues,
    OperatorBuilder,
    drop_dead_operators,
    location,
    mark_constants,
    module_path,
)
from pdtool.frontend.operators import (
    Operator,
    Size,
    State,
    Traced,
    Value,
    have_one_storage,
    named_state,
    names_over_parameters,
    tensor_attributes,
)

_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_MAX_LITERAL_ELEMENTS = 64  # of a constant tensor, to stand in a stage file as a literal
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_FUNCTIONAL_FORMS = {  # where the operator that writes in place has another name or overload
    torch.ops.aten.bernoulli_.float: torch.ops.aten.bernoulli.p,
    torch.ops.aten.normal_.default: torch.ops.aten.normal_functional.default,
}
_FACTORIES = {  # uses only a tensor's type, but the tensor would have to be in the stage
    torch.ops.aten.new_zeros.default: torch.ops.aten.zeros.default,
    torch.ops.aten.new_ones.default: torch.ops.aten.ones.default,
    torch.ops.aten.new_full.default: torch.ops.aten.full.default,
}
_WITHOUT_COMPLEX_GRADIENT = (torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default)
_END = 2**63 - 1  # of a slice
_WHOLE_SLICES = {torch.ops.aten.slice.Tensor: "self", torch.ops.aten.slice_scatter.default: "src"}
_ALIASES = {"alias", "detach", "detach_", "lift_fresh", "lift_fresh_copy", "lift"}


class GraphReader:
    """Reads one exported program; `read` walks its nodes once, in order.

    Args:
        calls: calls recorded as one operator each during the export.
        functional: whether no operator writes in place, and slices over a whole tensor stand for views.
    """

    def __init__(
        self, model: nn.Module, program: torch.export.ExportedProgram, calls: Sequence[LeafCall], *, functional: bool
    ) -> None:
        self._model, self._program, self._functional = model, program, functional
        self._values = NodeValues(program)
        self._builder = OperatorBuilder(model, self._values)
        self._leaf_reader = LeafReader(calls, self._values, self._builder)
        self._in_calls = tuple(f"{call.path}." for call in calls if call.path)
        self._autocast_off: list[str] = []  # the lines where the model switches it off
        self._over_parameters = {name for group in names_over_parameters(named_state(model)) for name in group}

    def read(self) -> Traced:
        """Read all operators, model inputs first; raises TraceError."""
        self._check_names()
        placeholders = self._program.graph.find_nodes(op="placeholder")
        for node, spec in zip(placeholders, self._program.graph_signature.input_specs, strict=True):
            self._values[node] = self._input(node, spec)
        for node in self._program.graph.nodes:
            if node.op == "call_function":
                try:
                    self._call(node)
                except TraceError as error:
                    error.module = module_path(node) if error.module is None else error.module
                    raise
        output = self._output()
        changed = self._builder.changed_buffers | self._over_parameters.intersection(self._builder.buffers)
        operators = mark_constants(drop_dead_operators(self._builder.operators, output, changed), changed)
        return Traced(
            model=self._model,
            operators=tuple(operators),
            output=output,
            changed_buffers=frozenset(changed),
            functional=self._functional,
            autocast_off=tuple(dict.fromkeys(self._autocast_off)),
        )

    def _check_names(self) -> None:
        for name in (*self._builder.modules, *self._builder.parameters, *self._builder.buffers):
            if not _NAME.fullmatch(name):
                remedy = "name modules with letters, digits, dashes and underscores only"
                raise TraceError(f"the model has a part named {name!r}", remedy)

    def _input(self, node: fx.Node, spec: Any) -> Any:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return State(spec.target)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            return self._constant(spec.target, node)
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
            return spec.arg.value
        if spec.kind is not InputKind.USER_INPUT or not isinstance(node.meta.get("val"), Tensor):
            what = f"input {node.name!r} of the model is not a tensor"
            raise TraceError(what, "pass tensors and constants to forward")
        name = self._builder.unique_name(node.name)
        value = self._builder.value(node.meta["val"], name, 0, differentiable=False)
        self._builder.operators.append(Operator(name=name, op="input", module="", outputs=(value,)))
        return value

    def _constant(self, name: str, node: fx.Node) -> Tensor | State:
        """Return a small tensor itself; a large or trained one as a buffer, if it is an attribute of a module.

        Raises:
            TraceError: it is neither small nor an attribute, or belongs to a transform of torch.func.
        """
        tensor: Any = self._program.constants[name]
        user = next(iter(node.users), node)
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            what = "this line uses a transform of torch.func, which torch.export cannot trace"
            raise TraceError(what, OWN_MODULE, location=location(user), module=module_path(user))
        trained = next((n for n, p in self._builder.parameters.items() if have_one_storage(p, tensor)), None)
        attributes = tensor_attributes(self._model)
        if name in attributes and (trained or tensor.numel() > _MAX_LITERAL_ELEMENTS):
            same = [other for other, value in attributes.items() if value is attributes[name]]
            name = next((other for other in same if not other.startswith(self._in_calls)), "")
            if not name:
                what = f"forward uses {same[0]}, but its module is one operator, whose attributes only it can use"
                raise TraceError(what, "keep it with register_buffer", location=location(user))
            self._builder.buffers[name] = tensor
            return State(name)
        if trained:
            what = f"forward uses an unnamed tensor that shares the memory of parameter {trained}"
            remedy = (
                "if it is this parameter in a list, use nn.ParameterList; otherwise keep it with register_buffer, or "
                "make it from the parameter in forward"
            )
            raise TraceError(what, remedy, location=location(user))
        if tensor.numel() <= _MAX_LITERAL_ELEMENTS:
            small: Tensor = tensor.detach().clone()
            return small
        what = (
            f"forward uses a tensor of {tensor.numel()} elements that it makes from Python numbers, or finds in a list"
        )
        remedy = "make it in __init__, as an attribute of its own or with register_buffer"
        raise TraceError(what, remedy, location=location(user), module=module_path(user))

    def _call(self, node: fx.Node) -> None:
        """Read one node: a leaf call, an ATen operator, or bookkeeping, which adds no operator."""
        target: Any = node.target
        value = node.meta.get("val")
        if isinstance(value, (int, float, bool, torch.SymInt)) and not isinstance(
            target, torch._ops.HigherOrderOperator
        ):
            self._values[node] = self._values.size(value, node)
        elif target is python_operator.getitem:
            self._values[node] = self._values.argument(node.args[0])[node.args[1]]
        elif target is torch.ops.pdtool.leaf.default:
            self._leaf_reader.read(node)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._region(node, str(target))
        elif not isinstance(target, torch._ops.OpOverload):
            what = f"this line calls {getattr(target, '__name__', target)}, which a stage file cannot contain"
            raise TraceError(what, OWN_MODULE, location=location(node))
        elif (name := target._schema.name.split("::")[-1]).startswith(("_assert", "sym_constrain")):
            return
        elif target is torch.ops.aten.contiguous.default and len(node.args) == 1 and not node.kwargs:
            # It copies or not, depending on the mode. Leave it out, since `view` is read as `reshape`.
            self._values[node] = self._values.argument(node.args[0])
        elif (alias := self._alias(node, target)) is not None:
            self._values[node] = alias
        elif name in _ALIASES and isinstance(self._values.argument(node.args[0]), Tensor):
            self._values[node] = self._values.argument(node.args[0])
        else:
            self._aten(node, target)

    def _alias(self, node: fx.Node, target: torch._ops.OpOverload) -> Any:
        """Return the tensor that a node returns unchanged: a slice over a whole tensor, or a write over a whole tensor;
        None for other nodes."""
        if not self._functional or (target not in _WHOLE_SLICES and target is not torch.ops.aten.copy.default):
            return None
        arguments = self._aten_arguments(node, target)
        if target is torch.ops.aten.copy.default:
            source, result = arguments["src"], node.meta["val"]
            sizes = tuple(map(self._values.size, result.shape))
            is_alike = isinstance(source, Value) and (source.shape, source.dtype) == (sizes, result.dtype)
            # an operator that writes it into part of a tensor or into a buffer also converts it
            is_written = isinstance(arguments["self"], State) or all(map(_writes_part, node.users))
            return source if is_alike and is_written else None
        return arguments[_WHOLE_SLICES[target]] if _is_whole(node) else None

    def _region(self, node: fx.Node, kind: str) -> None:
        """Read the body of `with torch.no_grad()`, its inputs detached, or of a switched-off autocast as it is."""
        args: Any = node.args
        graph = next((a for a in args if isinstance(a, fx.Node) and a.op == "get_attr"), None)
        body = list(getattr(self._program.graph_module, str(graph.target)).graph.nodes) if graph else []
        no_grad = kind == "wrap_with_set_grad_enabled" and args[0] is False
        if not body or not (no_grad or (kind == "wrap_with_autocast" and args[2] is False)):
            raise _not_readable(kind.removeprefix("wrap_with_"), (node, *body))
        taken = args[args.index(graph) + 1 :]
        calls = [n for n in body if n.op == "call_function"]
        arguments = [self._values.argument(a) for a in taken]
        if no_grad:
            arguments = self._detached(arguments, taken, writes=any(_written(call.target) for call in calls))
        else:
            self._autocast_off.append(next(filter(None, map(location, calls)), module_path(node) or "the model"))
        self._values.update(zip((n for n in body if n.op == "placeholder"), arguments, strict=True))
        for call in calls:
            self._call(call)
        results = list(self._values.argument(body[-1].args[0]))
        # a parameter that is used there would have a gradient
        self._values[node] = [self._builder.detached(v) for v in results] if no_grad else results

    def _detached(self, arguments: list[Any], taken: Sequence[fx.Node], *, writes: bool) -> list[Any]:
        """Detach the arguments of a body; parameters only if it `writes` in place, maybe a parameter into a buffer."""
        if writes:
            arguments = [
                self._builder.detached_parameter(v.name, n.meta["val"])
                if isinstance(v, State) and v.name in self._builder.parameters
                else v
                for v, n in zip(arguments, taken, strict=True)
            ]
        return [self._builder.detached(v) for v in arguments]

    def _aten(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        """Read an ATen operator; one that writes into a tensor in place becomes its out-of-place form."""
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        arguments = self._aten_arguments(node, target)
        if target is torch.ops.aten.embedding_renorm_.default:
            where = module_path(node) or "the model"
            what = f"{where} renormalises its weight in forward (max_norm), while other minibatches and replicas use it"
            remedy = "leave out max_norm and do it in after_update(): p.renorm_(2, 0, max_norm)"
            raise TraceError(what, remedy, location=location(node), module="")
        if target in _FACTORIES and isinstance(arguments["self"], State):
            del arguments["self"]
            target = _FACTORIES[target]
            arguments |= {"dtype": node.meta["val"].dtype, "device": torch.device("cpu")}
        if target in _WITHOUT_COMPLEX_GRADIENT and node.meta["val"].is_complex():
            what = "this line writes into part of a complex tensor in place, which has no gradient"
            raise TraceError(what, OWN_MODULE, location=location(node))
        written = _written(target)
        overwritten = arguments[written[0]] if written else None
        if isinstance(overwritten, State) and target._schema.name == "aten::copy_" and arguments["src"] is overwritten:
            return  # torch.export's own note that an earlier operator changed a buffer
        if written and not isinstance(overwritten, State):
            target = self._out_of_place(node, target, overwritten)
            names = [argument.name for argument in target._schema.arguments]  # dropout_ has some that dropout lacks
            arguments = dict(zip(names, arguments.values(), strict=False))
        if target is torch.ops.aten.copy.default:
            outputs = self._copied(node, arguments["self"], arguments["src"])
        else:
            outputs = self._aten_operator(node, target, arguments)
        self._values[node] = list(outputs) if isinstance(node.meta["val"], (tuple, list)) else outputs[0]
        if isinstance(overwritten, State):
            self._builder.changed_buffers.add(overwritten.name)
            self._values[node] = overwritten
        elif isinstance(overwritten, Value):
            self._values.replace(overwritten, outputs[0])

    def _aten_arguments(self, node: fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
        """All arguments by the names of the schema, defaults included; no gradient may be sparse, as for modules."""
        names = [a.name for a in target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        if "sparse" in names:
            given["sparse"] = False
        return {
            a.name: self._values.argument(given[a.name]) if a.name in given else a.default_value
            for a in target._schema.arguments
        }

    def _copied(self, node: fx.Node, target: Any, source: Any) -> tuple[Value, ...]:
        """Append operators that copy a tensor over the whole of another; `copy` itself has no gradient.

        As in a plain loop, the result has the dtype of the other tensor, which with autocast may differ even if it is
        the same here, and the gradient of the other one is zero, which is not none for an optimizer with weight decay.
        """
        result, aten = node.meta["val"], torch.ops.aten
        source_node: Any = node.args[1]
        copied = source_node.meta["val"].to(result.dtype)
        [source] = self._aten_operator(node, aten.type_as.default, {"self": source, "other": target}, copied)
        if copied.shape != result.shape:
            sizes = [self._values.size(size) for size in result.shape]
            [source] = self._aten_operator(
                node, aten.expand.default, {"self": source, "size": sizes, "implicit": False}
            )
        if isinstance(target, Value) and target.differentiable and result.dim() and not result.is_complex():
            arguments = {"self": target, "src": source, "dim": 0, "start": None, "end": None, "step": 1}
            return self._aten_operator(node, aten.slice_scatter.default, arguments)
        arguments = {"self": source, "memory_format": torch.contiguous_format}  # the usual layout of the other tensor
        return self._aten_operator(node, aten.clone.default, arguments)

    def _aten_operator(
        self, node: fx.Node, target: torch._ops.OpOverload, arguments: dict[str, Any], result: Any = None
    ) -> tuple[Value, ...]:
        """Append the operator and return its outputs, of the shapes and types of `result`; None: of the node's own."""
        op = target._schema.name.split("::")[-1]
        module, name = self._builder.module_and_name(node, op)
        result = node.meta["val"] if result is None else result
        if isinstance(result, (torch.SymBool, torch.SymInt, torch.SymFloat)):
            what = "this line takes a number from a tensor, and the code after it depends on that number"
            raise TraceError(what, OWN_MODULE, location=location(node), module=module)
        several = isinstance(result, (tuple, list))
        operator = Operator(
            name=name,
            op=op,
            module=module,
            target=target,
            kwargs=arguments,
            structure=list(range(len(result))) if several else 0,
        )
        return self._builder.append(operator, node, result if several else [result])

    def _out_of_place(self, node: fx.Node, target: torch._ops.OpOverload, overwritten: Any) -> torch._ops.OpOverload:
        """Return `add` for `add_`; raises TraceError if something else still uses the same memory."""
        name, overload = target._schema.name.split("::")[-1].rstrip("_"), target._overloadname
        packet = getattr(torch.ops.aten, name, None)
        has_form = packet is not None and overload in packet.overloads()
        functional = _FUNCTIONAL_FORMS.get(target) or (getattr(packet, overload) if has_form else None)
        source = self._values.source(overwritten)
        if functional is None or source is None or self._values.is_shared_view(source, node):
            remedy = "build the tensor with torch.cat, torch.where or masked_fill instead"
            raise PartialWriteError(f"{target} writes into part of a tensor in place", remedy, location=location(node))
        return functional

    def _output(self) -> Any:
        """Return the model's output; a functional graph also ends with the new values of changed buffers."""
        outputs: Any = self._program.graph.output_node().args[0]
        returned = []
        for node, spec in zip(outputs, self._program.graph_signature.output_specs, strict=True):
            value = self._values.argument(node)
            if spec.kind is OutputKind.USER_OUTPUT:
                returned.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                buffer = State(str(spec.target))
                arguments = {"self": buffer, "src": value, "non_blocking": False}
                self._aten_operator(node, torch.ops.aten.copy_.default, arguments)
                self._builder.changed_buffers.add(buffer.name)
        return pytree.tree_unflatten(returned, self._program.call_spec.out_spec)


class LeafReader:
    """Reads the calls that were recorded as one operator each during the export.

    Args:
        calls: the recorded calls; a node has the number of one.
        values: what the nodes of the graph stand for.
        builder: gets an operator for each call.
    """

    def __init__(self, calls: Sequence[LeafCall], values: NodeValues, builder: OperatorBuilder) -> None:
        self._calls, self._values, self._builder = calls, values, builder
        self._read_calls: Counter[str] = Counter()  # of each module

    def read(self, node: fx.Node) -> None:
        """Read one node, which stands for a call.

        Raises:
            TraceError: it takes something other than tensors and constants.
        """
        number, tensors = node.args
        call = self._calls[number]  # type: ignore[index]
        args, kwargs = self._arguments(call, self._values.argument(tensors), node)
        if call.function:
            self._function(node, call, args)
        else:
            self._module(node, call, args, kwargs)

    def _module(self, node: fx.Node, call: LeafCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read a call of a leaf module or an opaque one."""
        module = self._builder.modules[call.path]
        name = self._name(call.path)
        parameters = [f"{call.path}.{n}" for n, _ in module.named_parameters(remove_duplicate=False)]
        buffers = [f"{call.path}.{n}" for n, _ in module.named_buffers(remove_duplicate=False)]
        self._builder.changed_buffers |= set(buffers)
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
        flows = (output.requires_grad for output in call.recorded[0].outputs) if call.recorded else repeat(True)
        outputs = self._builder.append(operator, node, node.meta["val"], flows)
        self._values[node] = list(outputs)
        if getattr(module, "inplace", False) and operator.values and not call.recorded:
            self._values.replace(operator.values[0], outputs[0])

    def _function(self, node: fx.Node, call: LeafCall, args: tuple[Any, ...]) -> None:
        """Read a call of an autograd.Function; its name differs from the class's, which the stage file imports."""
        kind = call.function.__name__
        module, name = self._builder.module_and_name(node, f"{kind.lower()}_apply")
        operator = Operator(name=name, op=kind, module=module, args=args, structure=call.result, function=call.function)
        self._values[node] = list(self._builder.append(operator, node, node.meta["val"]))

    def _arguments(self, call: LeafCall, tensors: list[Any], node: fx.Node) -> Any:
        """(args, kwargs) of the call, with `tensors` in the places of its tensors."""
        remaining = iter(tensors)
        arguments = pytree.tree_map(
            lambda a: next(remaining) if isinstance(a, Tensor) else self._values.size(a, node), call.arguments
        )
        allowed = (Value, State, Tensor, Size, *_CONSTANTS)
        if others := [a for a in pytree.tree_leaves(arguments) if not isinstance(a, allowed)]:
            what = f"{call.path or call.function.__name__} takes a {type(others[0]).__name__} as an argument"
            caller = call.path.rpartition(".")[0] if call.path else module_path(node)
            raise TraceError(what, "pass tensors and numbers", location=location(node), module=caller)
        return arguments

    def _name(self, path: str) -> str:
        """The module's path; `PATH@0`, `PATH@1`, ... where the module is called several times."""
        number = self._read_calls[path]
        self._read_calls[path] += 1
        return f"{path}@{number}" if sum(call.path == path for call in self._calls) > 1 else path


def _written(target: Any) -> list[str]:
    """The names of the arguments that an operator writes into in place."""
    arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _is_whole(node: fx.Node) -> bool:
    """Whether a slice, or a write into one, is over the whole tensor."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given.get("start") in (None, 0) and given.get("end") in (None, _END) and given.get("step", 1) == 1


def _writes_part(node: fx.Node) -> bool:
    """Whether it writes its second argument into a part of its first one, or is the end of the graph."""
    return (
        node.op == "output"
        or node.target is torch.ops.aten.select_scatter.default
        or (node.target is torch.ops.aten.slice_scatter.default and not _is_whole(node))
    )


def _not_readable(what: str, nodes: Sequence[fx.Node]) -> TraceError:
    """Make the error of a region with a body of its own, such as a branch; its line is the first that a node has."""
    remedy = "keep enable_grad and control-flow operators out of forward"
    if what == "autocast":
        remedy = "leave it out, and pass --precision bf16 to profile and run"
    where = next(filter(None, map(location, nodes)), "")
    return TraceError(f"{what} in forward cannot be cut into stages", remedy, location=where)
