"""Write the body of a stage's forward: each operator is a line, except for those that do nothing.

A tensor that only the next line takes is called `x`, as people do. Values computed from constants alone, such as a
mask, are written in as few lines as the width allows. `unchanged_values` finds the operators that do nothing.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pdtool.errors import TraceError
from pdtool.frontend.operators import Branch, ByMode, Operator, Size, State, Traced, Value, named_state
from pdtool.frontend.random_numbers import operator_draws, values_drawn_like
from pdtool.generator.expressions import access, access_state, expression, literal, sequence
from pdtool.generator.output_writer import output_text
from pdtool.generator.wiring import Wiring

Source = Value | State
_MAX_NESTED = 3  # operators in one line
_MANY_UNNEEDED = 3  # so many variables are deleted before the next module begins
_CASTS = {"_to_copy", "to"}
_VIEWS = {"alias", "lift", "lift_fresh", "expand"}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}  # the other operand
_MEMORY = ("memory_format", "copy")  # arguments that make a cast do more


@dataclass(frozen=True)
class ForwardWriter:
    """Writes the body of the forward of one stage.

    Attributes:
        wiring: the whole model, cut into stages.
        stage: index of the stage.
    """

    wiring: Wiring
    stage: int

    @property
    def is_last(self) -> bool:
        """Whether the stage returns the model's own output."""
        return self.stage == len(self.wiring.stages) - 1

    @property
    def output(self) -> Any:
        """The model's output, in containers of its own types; None except for the last stage."""
        return self.wiring.traced.output if self.is_last else None

    @cached_property
    def operators(self) -> list[Operator]:
        """The stage's operators that do something, in order, with the constants that it needs."""
        return [op for op in self.wiring.operators(self.stage) if not self._unchanged.keys() & set(op.outputs)]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the body, without indentation; raises TraceError if no input gives a size."""
        yield from self._prologue()
        module = ""
        commented = {op.module for op in self._written if not op.is_module}  # a leaf's call shows its path
        unneeded: list[str] = []
        for i, op in enumerate(self._written):
            container = op.module.rpartition(".")[0] if op.is_module else op.module  # whose forward calls it
            is_next_module = container != module and container in commented and (container or not op.is_module)
            if len(unneeded) >= (1 if is_next_module else _MANY_UNNEEDED):
                yield f"del {', '.join(unneeded)}"
                unneeded.clear()
            if is_next_module:
                yield f"# {container or 'the model'}"
                module = container
            yield from self._lines(op)
            if self.wiring.traced.functional:
                yield from (f"{self._name(v)} = {self._name(v)}.clone()" for v in op.outputs if v in self._cloned)
            unneeded += self._unneeded_after.get(i, [])
        if self.is_last:
            yield f"return {output_text(self.output, self._write)}"
        else:
            cloned = set() if self.wiring.traced.functional else self._cloned
            outputs = self.wiring.outputs(self.stage)
            yield f"return {', '.join(self._name(v) + '.clone()' * (v in cloned) for v in outputs)}"

    @cached_property
    def _cloned(self) -> set[Value]:
        """The tensors for later stages that may share memory with a buffer that is written."""
        views = views_of_buffers(self.operators, self.wiring.traced.changed_buffers)
        return set() if self.is_last else views.intersection(self.wiring.outputs(self.stage))

    def _lines(self, op: Operator) -> Iterator[str]:
        if op.branch:
            yield from self._branch_lines(op, op.branch)
            return
        if self._is_seeded(op):
            yield self._seeding(op)
        if not _is_unpacked(op.structure):
            returned = f"{self.wiring.names[op.outputs[0]]}_returned"
            yield f"{returned} = {self._call(op)}"
            for path, index in pytree.tree_flatten_with_path(op.structure)[0]:
                if index is not None and op.outputs[index] in self._used:
                    yield f"{self._name(op.outputs[index])} = {returned}{pytree.keystr(path)}".replace("'", '"')
        else:
            targets = self._targets(op)
            yield self._call(op) if targets == "_" else f"{targets} = {self._call(op)}"

    def _branch_lines(self, op: Operator, branch: Branch) -> Iterator[str]:
        """Yield `if self.training:` with the training operators, and `else:` with the evaluation operators."""
        training = list(self._mode_lines(op, branch.training, [value for value, _ in branch.results]))
        evaluation = list(self._mode_lines(op, branch.evaluation, [value for _, value in branch.results]))
        if training:
            yield "if self.training:"
            yield from (f"    {line}" for line in training)
        if evaluation:
            yield "else:" if training else "if not self.training:"
            yield from (f"    {line}" for line in evaluation)

    def _mode_lines(self, op: Operator, parts: Sequence[Operator], results: Sequence[Value | None]) -> Iterator[str]:
        for part in parts:
            yield from self._lines(part)
        for output, value in zip(op.outputs, results, strict=True):
            if value is None:
                shape = self._write(output.shape)
                yield f"{self._name(output)} = torch.zeros({shape}, dtype={output.dtype}, device=device)"
            elif self._name(value) != self._name(output):
                yield f"{self._name(output)} = {self._name(value)}"

    @cached_property
    def _result_names(self) -> dict[Value, str]:
        """The tensors that an operator computes in one mode -> the name of its output."""
        names: dict[Value, str] = {}
        for op in self.operators:
            for output, values in zip(op.outputs, op.branch.results, strict=True) if op.branch else ():
                for value in values:
                    if value and value not in op.values:
                        names.setdefault(value, self.wiring.names[output])
        return names

    def _is_seeded(self, op: Operator) -> bool:
        """Whether it is a random operator whose name is not a module's."""
        return op.name != op.module and operator_draws(op, self.wiring.traced.model)

    def _seeding(self, op: Operator) -> str:
        """Return the line before a random operator whose name is not a module's."""
        names = [self._name(value) for value in values_drawn_like(op) if isinstance(self._source(value), Value)]
        call = f"seed_operator({', '.join([literal(op.name), *names])})"
        return f"{', '.join(names)} = {call}" if names else call

    def _prologue(self) -> Iterator[str]:
        parts = [part for op in self.operators for part in op.parts]
        zeros = [output for op in self.operators if op.branch for output in _zeros(op, op.branch)]
        leaves = [leaf for op in parts for leaf in pytree.tree_leaves((op.args, op.kwargs))]
        leaves += pytree.tree_leaves(self.output)
        if any(isinstance(leaf, Size) for leaf in (*leaves, *(dim for value in zeros for dim in value.shape))):
            yield f"batch = {self._batch()}"
        factories = any(isinstance(leaf, (torch.device, torch.Tensor)) for leaf in leaves)
        if zeros or factories or any(op.target and "device" in op.kwargs and not op.values for op in parts):
            taken = [*self.wiring.inputs(self.stage), *(leaf for leaf in leaves if isinstance(leaf, State))]
            yield f"device = {self._write(taken[0])}.device"

    def _batch(self) -> str:
        """Return the size of the minibatch as an expression of an input's shape."""
        dims = [
            (str(dim), f"{self._name(value)}.shape[{d}]")
            for value in self.wiring.inputs(self.stage)
            for d, dim in enumerate(value.shape)
        ]
        for size, text in sorted(dims, key=lambda dim: dim[0] != "batch"):
            if size == "batch":
                return text
            if size.endswith("*batch"):
                return f"{text} // {size.removesuffix('*batch')}"
        what = (
            f"stage {self.stage} needs the minibatch size, but none of the tensors that it receives has that dimension"
        )
        raise TraceError(what, "plan fewer stages, or keep modules together with HINTS no_split")

    # Which tensors have a name of their own.

    @cached_property
    def _unchanged(self) -> dict[Value, Source]:
        """Tensors that only repeat another one -> that one; a stage does not return unchanged inputs."""
        found = unchanged_values(self.wiring.operators(self.stage), self.wiring.traced)
        taken, sent = self.wiring.inputs(self.stage), self.wiring.outputs(self.stage)
        return {value: source for value, source in found.items() if not (value in sent and source in taken)}

    def _source(self, value: Value) -> Source:
        """The tensor that stands for `value`: if it only repeats another one, that one."""
        return self._unchanged.get(value, value)

    def _taken(self, op: Operator) -> Iterator[Value]:
        """Yield the tensors named in an operator's line, including those in nested expressions."""
        for value in op.values:
            source = self._source(value)
            if source in self._nested:
                yield from self._taken(self._nested[source])
            elif isinstance(source, Value):
                yield source

    @cached_property
    def _returned(self) -> set[Source]:
        values = self.wiring.output_values if self.is_last else self.wiring.outputs(self.stage)
        return {self._source(value) for value in values}

    @cached_property
    def _nested(self) -> dict[Any, Operator]:
        """Constants with a single user that is itself a constant -> the operator to write inline in its line."""
        uses = Counter(self._source(value) for op in self.operators for value in op.values)
        takers = {self._source(value): op for op in self.operators for value in op.values}
        nested: dict[Any, Operator] = {}
        operators_in_line: Counter[str] = Counter()
        for op in self.operators:
            operators_in_line[op.name] += 1
            is_short = operators_in_line[op.name] < _MAX_NESTED and op.structure == 0 and not self._is_seeded(op)
            for value in op.outputs[:1] if op.constant and is_short else ():
                if uses[value] == 1 and takers[value].constant and value not in self._returned:
                    nested[value] = op
                    operators_in_line[takers[value].name] += operators_in_line[op.name]
        return nested

    @cached_property
    def _written(self) -> list[Operator]:
        """The operators that have a line."""
        return [op for op in self.operators if not set(op.outputs) & self._nested.keys()]

    @cached_property
    def _short_lived(self) -> set[Value]:
        """Tensors taken once, by the line right after theirs, and by no other stage."""
        uses = Counter(value for op in self._written for value in self._taken(op))
        short_lived = set()
        for op, following in zip(self._written, self._written[1:], strict=False):
            if op.branch or following.branch:
                continue
            if len(op.outputs) == 1 and op.outputs[0] in self._taken(following) and uses[op.outputs[0]] == 1:
                short_lived.add(op.outputs[0])
        return short_lived - self._returned

    @cached_property
    def _unneeded_after(self) -> dict[int, list[str]]:
        """Index of an operator's line -> the names of activations that no later line takes. A variable would keep its
        tensor until forward returns, even if autograd does not need it."""
        in_branch = {
            v for op in self.operators if op.branch for part in (op, *op.parts) for v in (*part.values, *part.outputs)
        }
        computed = {
            value
            for op in self._written
            for value in op.outputs
            if value.dtype.is_floating_point and not op.constant and _is_unpacked(op.structure)
        }
        deletable = computed - in_branch - self._short_lived - self._returned
        last = {value: i for i, op in enumerate(self._written) for value in self._taken(op)}
        unneeded: dict[int, list[str]] = {}
        for value, i in last.items():
            if value in deletable and i < len(self._written) - 1:
                unneeded.setdefault(i, []).append(self._name(value))
        return unneeded

    @cached_property
    def _short_name(self) -> str:
        """`x`, unless a tensor of that name is still needed after the first line."""
        later = {v for op in self._written[1:] for v in self._taken(op)} | self._returned
        named = {v for op in self._written for v in op.outputs} | (set(self.wiring.inputs(self.stage)) & later)
        long_lived = {self.wiring.names[v] for v in named - self._short_lived}
        return next(name for name in ("x", "h", "y", "z", "short_lived") if name not in long_lived)

    def _name(self, value: Value) -> str:
        source = self._source(value)
        if isinstance(source, State):
            return access_state(source.name)
        if source in self._short_lived:
            return self._short_name
        return self._result_names.get(source, self.wiring.names[source])

    @cached_property
    def _used(self) -> set[Source]:
        """Tensors that an operator of this stage takes, or that the stage or the model returns."""
        taken = {value for op in self.operators for part in op.parts for value in part.values}
        taken |= {value for op in self.operators if op.branch for pair in op.branch.results for value in pair if value}
        return taken | self._returned | {self._source(value) for value in taken}

    def _targets(self, op: Operator) -> str:
        """Return the left side of the `=`: names nested like the operator's result, `_` for unused ones."""

        def write(structure: Any) -> str:
            if isinstance(structure, int):
                return self._name(op.outputs[structure]) if op.outputs[structure] in self._used else "_"
            if structure is None:
                return "_"
            parts = [write(part) for part in structure]
            if all(part == "_" for part in parts):
                return "_"
            nested = [f"({p})" if "," in p and not p.startswith("(") else p for p in parts]
            return ", ".join(nested) + ("," if len(parts) == 1 else "")

        return write(op.structure)

    # The texts of expressions.

    def _call(self, op: Operator) -> str:
        if op.target is not None:
            return expression(op, self._write)
        arguments = [self._write(a) for a in op.args] + [f"{k}={self._write(v)}" for k, v in op.kwargs.items()]
        called = f"{op.function.__name__}.apply" if op.function else access(op.module)
        return f"{called}({', '.join(arguments)})"

    def _write(self, argument: Any) -> str:
        if isinstance(argument, Value):
            source = self._source(argument)
            return self._parenthesized(self._nested[source]) if source in self._nested else self._name(argument)
        if isinstance(argument, State):
            return access_state(argument.name)
        if isinstance(argument, ByMode):
            training, evaluation = self._write(argument.training), self._write(argument.evaluation)
            if (training, evaluation) == ("True", "False"):
                return "self.training"
            return f"{training} if self.training else {evaluation}"
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{literal(k)}: {self._write(v)}" for k, v in argument.items()) + "}"
        return sequence(argument, self._write) if isinstance(argument, (list, tuple)) else literal(argument)

    def _parenthesized(self, op: Operator) -> str:
        """The expression of an operator inside another one."""
        text = self._call(op)
        return text if isinstance(ast.parse(text, mode="eval").body, (ast.Call, ast.Subscript)) else f"({text})"


def _zeros(op: Operator, branch: Branch) -> list[Value]:
    """The outputs that one of the modes does not compute."""
    return [output for output, values in zip(op.outputs, branch.results, strict=True) if None in values]


def _is_unpacked(structure: Any) -> bool:
    """Whether an operator returns nested tuples and lists, which names left of the `=` can unpack."""
    if isinstance(structure, (tuple, list)):
        return all(_is_unpacked(part) for part in structure)
    return structure is None or isinstance(structure, int)


def unchanged_values(operators: Sequence[Operator], traced: Traced) -> dict[Value, Source]:
    """Return each tensor that only repeats another one -> the tensor that it repeats.

    Operators that return their input are aliases, casts of integers and masks to their own type, and `x * 1.0`. A cast
    of an activation to float32 is not one: under autocast the activation may have a different type than in the trace.

    Tensors that a module may write, and written buffers, count as repeated by none, so that their copies stay.

    Args:
        operators: operators of one stage, in order. A repeated tensor is an input of the stage or computed there, and
            repeats no other.
        traced: the whole model.
    """
    modifiable = {value for op in traced.operators for part in op.parts if part.target is None for value in part.values}
    state = {name: value for name, value in named_state(traced.model).items() if name not in traced.changed_buffers}
    found: dict[Value, Source] = {}
    for op in operators:
        source = _source(op, state)
        makes_tensor = op.op not in _VIEWS | _CASTS  # with memory of its own, which a module may write
        if source and not (makes_tensor and op.outputs[0] in modifiable):
            found[op.outputs[0]] = found.get(source, source) if isinstance(source, Value) else source
    return found


def views_of_buffers(operators: Sequence[Operator], changed_buffers: Collection[str]) -> set[Value]:
    """Return the tensors that may share memory with a written buffer, because the next minibatch changes them.

    Args:
        operators: operators of one stage, in order.
    """
    views: set[Value] = set()
    for op in operators:
        for part in op.parts:
            if part.target and any(returned.alias_info for returned in part.target._schema.returns):
                taken = pytree.tree_leaves((part.args, part.kwargs))
                is_buffer = any(isinstance(leaf, State) and leaf.name in changed_buffers for leaf in taken)
                if is_buffer or views.intersection(part.values):
                    views.update(part.outputs)
        for output, values in zip(op.outputs, op.branch.results, strict=True) if op.branch else ():
            if views.intersection(value for value in values if value):
                views.add(output)
    return views


def _source(op: Operator, state: Mapping[str, Tensor]) -> Source | None:
    """The tensor that the operator returns unchanged in both modes; None if it may do something."""
    if op.target is None or len(op.outputs) != 1 or op.target._schema.is_mutable:
        return None
    source, output = op.kwargs.get("input" if op.op == "dropout" else "self"), op.outputs[0]
    if not isinstance(source, Value) and not (isinstance(source, State) and source.name in state):
        return None
    taken: Any = source if isinstance(source, Value) else state[source.name]
    if (tuple(taken.shape), taken.dtype) != (output.shape, output.dtype):
        return None
    is_fixed = isinstance(source, State) or not output.dtype.is_floating_point
    does_nothing = (
        op.op in _VIEWS
        or (op.op in _CASTS and is_fixed and not any(op.kwargs.get(argument) for argument in _MEMORY))
        or (op.op == "dropout" and op.kwargs["p"] == 0)
        or (op.op in _NEUTRAL and _is_neutral(op, _NEUTRAL[op.op]))
    )
    return source if does_nothing else None


def _is_neutral(op: Operator, neutral: int) -> bool:
    """Whether the other operand changes nothing; 0 is not neutral for floats, because it turns -0.0 into 0.0."""
    other, alpha = op.kwargs.get("other"), op.kwargs.get("alpha", 1)
    is_number = isinstance(other, (int, float)) and not isinstance(other, bool) and isinstance(alpha, (int, float))
    if op.kwargs.get("rounding_mode") is not None or not is_number or other != neutral:
        return False
    return neutral == 1 or not op.outputs[0].dtype.is_floating_point
