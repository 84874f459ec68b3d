"""Write one stage as a Python file that imports torch and nothing else, and that a person might have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pdtool.codegen.expressions import expression, literal
from pdtool.codegen.init_writer import InitWriter
from pdtool.codegen.module_tree import access, access_state
from pdtool.codegen.wiring import Wiring
from pdtool.frontend.operators import ByMode, Operator, Size, State, Value
from pdtool.frontend.random_operators import operator_draws, values_drawn_like

_OUTPUT_CLASS = '''
class Output(dict):
    """What the model returns, by name: output["logits"] or output.logits."""

    __getattr__ = dict.__getitem__

'''

_SEED_OPERATOR = '''
def seed_operator(name, *tensors):
    """Return the tensors that the random operator of this name draws like; `pdtool run` seeds torch here as well."""
    return tensors[0] if len(tensors) == 1 else tensors

'''


@dataclass(frozen=True)
class StageWriter:
    """Writes the file of one stage.

    Attributes:
        wiring: the whole model, cut into stages.
        stage: index of the stage.
        title: the plan's name, for the file's first line.
    """

    wiring: Wiring
    stage: int
    title: str

    @property
    def class_name(self) -> str:
        """`Stage0`."""
        return f"Stage{self.stage}"

    @property
    def is_last(self) -> bool:
        """Whether it returns the model's own output."""
        return self.stage == len(self.wiring.stages) - 1

    @cached_property
    def operators(self) -> list[Operator]:
        """The operators of the stage, in order, with the constants that it needs."""
        return self.wiring.operators(self.stage)

    @cached_property
    def inputs(self) -> list[Value]:
        """The arguments of forward."""
        return self.wiring.inputs(self.stage)

    def text(self) -> str:
        """Return the text of the file."""
        body = [*self._forward()]
        count = len(self.wiring.stages)
        uses_functional = any("F." in line for line in body)
        lines = [
            f'"""Stage {self.stage + 1} of {count} of {self.title}; written by pdtool codegen."""',
            "",
            "import torch",
            "from torch import nn",
            *(["from torch.nn import functional as F"] if uses_functional else []),
            "",
            *(_OUTPUT_CLASS.splitlines() if self._returns_names else []),
            *(_SEED_OPERATOR.splitlines() if any("seed_operator(" in line for line in body) else []),
            "",
            f"class {self.class_name}(nn.Module):",
            *self._docstring(),
            "",
            *InitWriter(self.wiring, self.stage).lines(),
            f"    def forward({', '.join(['self', *(self._name(v) for v in self.inputs)])}):",
            *(f"        {line}" for line in body),
        ]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _docstring(self) -> Iterator[str]:
        yield '    """Shapes, for a minibatch of `batch` samples:'
        yield ""
        outputs = self.wiring.output_values if self.is_last else self.wiring.outputs(self.stage)
        for word, values in (("takes", self.inputs), ("returns", outputs)):
            for value in dict.fromkeys(values):
                shape = ", ".join(literal(dim) for dim in value.shape)
                yield f"        {word:<7} {self._name(value)}: ({shape}{',' if len(value.shape) == 1 else ''})"
        yield '    """'

    # Each operator is a line of forward. A tensor that only the next line takes is called `x`, as people do.

    def _forward(self) -> Iterator[str]:
        yield from self._prologue()
        for op in self.operators:
            if op.name != op.module and operator_draws(op, self.wiring.traced.model):
                yield self._seeding(op)
            targets = self._targets(op)
            yield self._call(op) if targets == "_" else f"{targets} = {self._call(op)}"
        if self.is_last:
            yield f"return {self._output(self.wiring.traced.output)}"
        else:
            yield f"return {', '.join(self._name(v) for v in self.wiring.outputs(self.stage))}"

    def _seeding(self, op: Operator) -> str:
        """Return the line before a random operator that has another name than a module."""
        names = [self._name(value) for value in values_drawn_like(op)]
        call = f"seed_operator({', '.join([literal(op.name), *names])})"
        return f"{', '.join(names)} = {call}" if names else call

    def _prologue(self) -> Iterator[str]:
        leaves = [leaf for op in self.operators for leaf in pytree.tree_leaves((op.args, op.kwargs))]
        if any(isinstance(leaf, Size) for leaf in leaves):
            yield f"batch = {self._batch()}"
        factories = any(isinstance(leaf, (torch.device, torch.Tensor)) for leaf in leaves)
        if factories or any(op.target and _is_factory(op) for op in self.operators):
            yield f"device = {self._name(self.inputs[0])}.device"

    def _batch(self) -> str:
        """Return the size of the minibatch as an expression of an input's shape."""
        for value in self.inputs:
            for d, dim in enumerate(value.shape):
                if str(dim) == "batch":
                    return f"{self._name(value)}.shape[{d}]"
        for value in self.inputs:
            for d, dim in enumerate(value.shape):
                if isinstance(dim, Size) and str(dim).endswith("*batch"):
                    return f"{self._name(value)}.shape[{d}] // {str(dim).removesuffix('*batch')}"
        raise ValueError(f"no input of stage {self.stage} tells the size of the minibatch")

    @cached_property
    def _short_lived(self) -> set[Value]:
        """Tensors taken once, by the operator right after theirs, and by no other stage."""
        uses = Counter(value for op in self.operators for value in op.values)
        returned = set(self.wiring.outputs(self.stage)) | (set(self.wiring.output_values) if self.is_last else set())
        short_lived = set()
        for op, following in zip(self.operators, self.operators[1:], strict=False):
            if len(op.outputs) == 1 and op.outputs[0] in following.values and uses[op.outputs[0]] == 1:
                short_lived.add(op.outputs[0])
        return short_lived - returned

    @cached_property
    def _short_name(self) -> str:
        """`x`, unless a tensor of that name is still needed after the first line."""
        later = {v for op in self.operators[1:] for v in op.values} | set(self.wiring.output_values)
        named = {v for op in self.operators for v in op.outputs} | (set(self.inputs) & later)
        long_lived = {self.wiring.names[v] for v in named - self._short_lived}
        return next(name for name in ("x", "h", "y", "z", "short_lived") if name not in long_lived)

    def _name(self, value: Value) -> str:
        return self._short_name if value in self._short_lived else self.wiring.names[value]

    @cached_property
    def _used(self) -> set[Value]:
        """Tensors that an operator of this stage takes, or that the stage or the model returns."""
        taken = {value for op in self.operators for value in op.values}
        return taken | set(self.wiring.outputs(self.stage)) | set(self.wiring.output_values)

    def _targets(self, op: Operator) -> str:
        """Return what stands left of the `=`: names as the operator's result is nested, `_` for what nobody uses."""

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

    def _call(self, op: Operator) -> str:
        if op.target is not None:
            return expression(op, self._write)
        arguments = [self._write(a) for a in op.args] + [f"{k}={self._write(v)}" for k, v in op.kwargs.items()]
        return f"{access(op.module)}({', '.join(arguments)})"

    def _write(self, argument: Any) -> str:
        if isinstance(argument, Value):
            return self._name(argument)
        if isinstance(argument, State):
            return access_state(argument.name)
        if isinstance(argument, ByMode):
            training, evaluation = self._write(argument.training), self._write(argument.evaluation)
            if (training, evaluation) == ("True", "False"):
                return "self.training"
            return f"{training} if self.training else {evaluation}"
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{literal(k)}: {self._write(v)}" for k, v in argument.items()) + "}"
        if isinstance(argument, (list, tuple)):
            inner = ", ".join(self._write(a) for a in argument)
            if isinstance(argument, list):
                return f"[{inner}]"
            return f"({inner},)" if len(argument) == 1 else f"({inner})"
        return literal(argument)

    @property
    def _returns_names(self) -> bool:
        return self.is_last and isinstance(self.wiring.traced.output, dict)

    def _output(self, output: Any) -> str:
        text = self._write(output)
        return f"Output({text})" if self._returns_names else text


def _is_factory(op: Operator) -> bool:
    return "device" in op.kwargs and not op.values
