"""Write one stage as a Python file that imports torch and nothing else, and that a person might have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pdtool.codegen.expressions import expression, literal
from pdtool.codegen.init_writer import InitWriter
from pdtool.codegen.module_tree import access, access_state
from pdtool.codegen.output_writer import OutputWriter
from pdtool.codegen.wiring import Wiring
from pdtool.errors import TraceError
from pdtool.frontend.operators import Branch, ByMode, Operator, Size, State, Value
from pdtool.frontend.random_operators import operator_draws, values_drawn_like
from pdtool.frontend.user_code import user_module

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
    def opaque(self) -> list[str]:
        """The paths of the modules that it takes from the model."""
        return self._init.opaque_paths

    @cached_property
    def _init(self) -> InitWriter:
        return InitWriter(self.wiring, self.stage)

    @cached_property
    def inputs(self) -> list[Value]:
        """The arguments of forward."""
        return self.wiring.inputs(self.stage)

    @cached_property
    def _output(self) -> OutputWriter:
        return OutputWriter(self.wiring.traced.output if self.is_last else None, self._write)

    def text(self) -> str:
        """Return the text of the file."""
        body = [*self._forward()]
        count = len(self.wiring.stages)
        uses_functional = any("F." in line for line in body)
        lines = [
            f'"""Stage {self.stage + 1} of {count} of {self.title}; written by pdtool codegen."""',
            "",
            *self._output.imports(),
            "import torch",
            "from torch import nn",
            *(["from torch.nn import functional as F"] if uses_functional else []),
            *self._function_imports(),
            "",
            *self._output.classes(),
            *(_SEED_OPERATOR.splitlines() if any("seed_operator(" in line for line in body) else []),
            "",
            f"class {self.class_name}(nn.Module):",
            *self._docstring(),
            "",
            *self._init.lines(),
            f"    def forward({', '.join(['self', *(self._name(v) for v in self.inputs)])}):",
            *(f"        {line}" for line in body),
            *self._train(),
        ]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _function_imports(self) -> list[str]:
        """Import each autograd.Function of the user's; pdtool finds the user's file wherever it is."""
        functions = [part.function for op in self.operators for part in op.parts if part.function]
        lines = [f"from {user_module(f.__module__)} import {f.__name__}  # an autograd.Function" for f in functions]
        return ["", *dict.fromkeys(lines)] if lines else []

    def _train(self) -> Iterator[str]:
        """Yield a method `train` where leaf modules do not follow the mode of the model, as in the model."""
        model = self.wiring.traced.model
        modes = {}
        for training in (False, True):
            model.train(training)
            modes[training] = {path: model.get_submodule(path).training for path in self._init.leaf_paths}
        fixed = {path: mode for path, mode in modes[True].items() if mode == modes[False][path]}
        if fixed:
            yield from ("", "    def train(self, mode=True):", "        super().train(mode)")
            for path, mode in fixed.items():
                yield f"        {access(path)}.{'train' if mode else 'eval'}()  # as in the model"
            yield "        return self"

    def _docstring(self) -> Iterator[str]:
        yield '    """Shapes, for a minibatch of `batch` samples:'
        yield ""
        outputs = self.wiring.output_values if self.is_last else self.wiring.outputs(self.stage)
        for word, values in (("takes", self.inputs), ("returns", outputs)):
            for value in dict.fromkeys(values):
                shape = ", ".join(literal(dim) for dim in value.shape)
                yield f"        {word:<7} {self._name(value)}: ({shape}{',' if len(value.shape) == 1 else ''})"
        if self.opaque:
            yield ""
            yield "    Takes from the model, and calls as it is:"
            yield ""
            for path in self.opaque:
                kind = type(self.wiring.traced.model.get_submodule(path))
                yield f"        {path}: {kind.__qualname__} of {user_module(kind.__module__)}"
        yield '    """'

    # Each operator is a line of forward. A tensor that only the next line takes is called `x`, as people do.

    def _forward(self) -> Iterator[str]:
        yield from self._prologue()
        module = ""
        for op in self.operators:
            yield from _comment(op, module)
            module = _container(op)
            yield from self._lines(op)
        if self.is_last:
            yield f"return {self._output.text()}"
        else:
            yield f"return {', '.join(self._name(v) for v in self.wiring.outputs(self.stage))}"

    def _lines(self, op: Operator) -> Iterator[str]:
        if op.branch:
            yield from self._branch_lines(op, op.branch)
            return
        if op.name != op.module and operator_draws(op, self.wiring.traced.model):
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
        """Yield `if self.training:` with what runs in training, and `else:` with what runs in evaluation."""
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

    def _seeding(self, op: Operator) -> str:
        """Return the line before a random operator that has another name than a module."""
        names = [self._name(value) for value in values_drawn_like(op)]
        call = f"seed_operator({', '.join([literal(op.name), *names])})"
        return f"{', '.join(names)} = {call}" if names else call

    def _prologue(self) -> Iterator[str]:
        parts = [part for op in self.operators for part in op.parts]
        zeros = [output for op in self.operators if op.branch for output in _zeros(op, op.branch)]
        leaves = [leaf for op in parts for leaf in pytree.tree_leaves((op.args, op.kwargs))]
        leaves += pytree.tree_leaves(self._output.output)
        if any(isinstance(leaf, Size) for leaf in (*leaves, *(dim for value in zeros for dim in value.shape))):
            yield f"batch = {self._batch()}"
        factories = any(isinstance(leaf, (torch.device, torch.Tensor)) for leaf in leaves)
        if zeros or factories or any(op.target and _is_factory(op) for op in parts):
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
        raise TraceError(
            f"stage {self.stage} computes with the minibatch's size, and takes no tensor that tells it",
            "plan fewer stages, or keep modules together with HINTS no_split",
        )

    @cached_property
    def _short_lived(self) -> set[Value]:
        """Tensors taken once, by the operator right after theirs, and by no other stage."""
        uses = Counter(value for op in self.operators for value in op.values)
        returned = set(self.wiring.outputs(self.stage)) | (set(self.wiring.output_values) if self.is_last else set())
        short_lived = set()
        for op, following in zip(self.operators, self.operators[1:], strict=False):
            if op.branch or following.branch:
                continue
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
        if value in self._short_lived:
            return self._short_name
        return self._result_names.get(value, self.wiring.names[value])

    @cached_property
    def _used(self) -> set[Value]:
        """Tensors that an operator of this stage takes, or that the stage or the model returns."""
        taken = {value for op in self.operators for part in op.parts for value in part.values}
        taken |= {value for op in self.operators if op.branch for pair in op.branch.results for value in pair if value}
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
        called = f"{op.function.__name__}.apply" if op.function else access(op.module)
        return f"{called}({', '.join(arguments)})"

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


def _comment(op: Operator, previous: str) -> Iterator[str]:
    """Yield `# layers.1.attention` where the operators of that module begin; leaf modules show where they are."""
    container = _container(op)
    if not op.is_module and container and not f"{previous}.".startswith(f"{container}."):
        yield f"# {container}"


def _container(op: Operator) -> str:
    """The module whose forward calls the operator."""
    return op.module.rpartition(".")[0] if op.is_module else op.module


def _zeros(op: Operator, branch: Branch) -> list[Value]:
    """The outputs that one of the modes does not compute."""
    return [output for output, values in zip(op.outputs, branch.results, strict=True) if None in values]


def _is_unpacked(structure: Any) -> bool:
    """Whether what an operator returns is nested tuples and lists, which names left of the `=` unpack."""
    if isinstance(structure, (tuple, list)):
        return all(_is_unpacked(part) for part in structure)
    return structure is None or isinstance(structure, int)


def _is_factory(op: Operator) -> bool:
    return "device" in op.kwargs and not op.values
