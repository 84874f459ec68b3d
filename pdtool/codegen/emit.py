"""Write one stage as a Python file that imports torch and nothing else, and reads as a person would have written it."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdtool.codegen.expressions import expression, literal
from pdtool.codegen.wiring import Wiring
from pdtool.frontend.leaf_modules import constructor_arguments
from pdtool.frontend.operators import ByMode, Operator, Size, State, Value

_WIDTH = 110
_OUTPUT_CLASS = '''
class Output(dict):
    """What the model returns, by name: output["logits"] or output.logits."""

    __getattr__ = dict.__getitem__

'''


@dataclass(frozen=True)
class StageWriter:
    """Writes the file of one stage.

    Attributes:
        wiring: the whole model, cut into stages.
        stage: which one.
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
        """What the stage computes, in order."""
        return self.wiring.operators(self.stage)

    @cached_property
    def inputs(self) -> list[Value]:
        """The arguments of forward."""
        return self.wiring.inputs(self.stage)

    def text(self) -> str:
        """The file."""
        body = [*self._forward()]
        count = len(self.wiring.stages)
        uses = "\n".join(body)
        lines = [
            f'"""Stage {self.stage + 1} of {count} of {self.title}; written by pdtool codegen."""',
            "",
            "import torch",
            "from torch import nn",
            *(["from torch.nn import functional as F"] if "F." in uses else []),
            "",
            *(_OUTPUT_CLASS.splitlines() if self._returns_names else []),
            "",
            f"class {self.class_name}(nn.Module):",
            *self._docstring(),
            "",
            *self._constructor(),
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

    # The constructor: every leaf module that is called here, under its original path.

    def _constructor(self) -> Iterator[str]:
        modules = self._leaf_paths()
        loose = self._loose_state()
        yield "    def __init__(self):"
        yield "        super().__init__()"
        tree: dict[str, Any] = {}
        for path in modules:
            _insert(tree, path.split("."), _construct(self._module(path)))
        for name in loose:
            _insert(tree, name.split(".")[:-1], None)
        for name, child in tree.items():
            yield from (f"        {line}" for line in _assign(name, child))
        for name in loose:
            yield f"        {self._declare(name)}"
        for line in (*self._ties(), *self._frozen()):
            yield f"        {line}"
        yield ""

    def _leaf_paths(self) -> list[str]:
        return list(dict.fromkeys(op.module for op in self.operators if op.target is None))

    def _loose_state(self) -> list[str]:
        """Parameters and buffers that operators use directly, outside leaf modules."""
        names = (name for op in self.operators if op.target for name in (*op.parameters, *op.buffers))
        leaves = tuple(f"{path}." for path in self._leaf_paths())
        return list(dict.fromkeys(name for name in names if not name.startswith(leaves)))

    def _module(self, path: str) -> nn.Module:
        return self.wiring.traced.model.get_submodule(path)

    def _declare(self, name: str) -> str:
        path, _, last = name.rpartition(".")
        owner = self._module(path)
        tensor = getattr(owner, last)
        zeros = f"torch.zeros({literal_list(tensor.shape)}{_dtype(tensor.dtype)})"
        if isinstance(tensor, nn.Parameter):
            return f"{_access(name)} = nn.Parameter({zeros})"
        persistent = ", persistent=False" if last in owner._non_persistent_buffers_set else ""
        return f'{_access(path)}.register_buffer("{last}", {zeros}{persistent})'

    def _ties(self) -> Iterator[str]:
        """Parameters that are one and the same inside this stage."""
        first: dict[str, str] = {}
        for name in self.wiring.parameters(self.stage):
            original = first.setdefault(self.wiring.traced.tied[name], name)
            if original != name:
                yield f"{_access(name)} = {_access(original)}  # tied"

    def _frozen(self) -> Iterator[str]:
        parameters = dict(self.wiring.traced.model.named_parameters(remove_duplicate=False))
        for name in self.wiring.parameters(self.stage):
            if not parameters[name].requires_grad:
                yield f"{_access(name)}.requires_grad_(False)"

    # forward: a line an operator. A tensor that only the next line takes is called `x`, as people do.

    def _forward(self) -> Iterator[str]:
        yield from self._prologue()
        for op in self.operators:
            targets = self._targets(op)
            yield self._call(op) if targets == "_" else f"{targets} = {self._call(op)}"
        if self.is_last:
            yield f"return {self._output(self.wiring.traced.output)}"
        else:
            yield f"return {', '.join(self._name(v) for v in self.wiring.outputs(self.stage))}"

    def _prologue(self) -> Iterator[str]:
        leaves = [leaf for op in self.operators for leaf in pytree.tree_leaves((op.args, op.kwargs))]
        if any(isinstance(leaf, Size) for leaf in leaves):
            yield f"batch = {self._batch()}"
        factories = any(isinstance(leaf, (torch.device, torch.Tensor)) for leaf in leaves)
        if factories or any(op.target and _is_factory(op) for op in self.operators):
            yield f"device = {self._name(self.inputs[0])}.device"

    def _batch(self) -> str:
        """The minibatch's size, from the shape of an input."""
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
        takers = Counter(value for op in self.operators for value in op.values)
        leaving = set(self.wiring.outputs(self.stage)) | (set(self.wiring.output_values) if self.is_last else set())
        short = set()
        for op, following in zip(self.operators, self.operators[1:], strict=False):
            if len(op.outputs) == 1 and op.outputs[0] in following.values and takers[op.outputs[0]] == 1:
                short.add(op.outputs[0])
        return short - leaving

    @cached_property
    def _short_name(self) -> str:
        """`x`, unless a tensor of that name is still needed after the first line."""
        later = {v for op in self.operators[1:] for v in op.values} | set(self.wiring.output_values)
        named = {v for op in self.operators for v in op.outputs} | (set(self.inputs) & later)
        long_lived = {self.wiring.names[v] for v in named - self._short_lived}
        return next(name for name in ("x", "h", "y", "z", "short_lived") if name not in long_lived)

    def _name(self, value: Value) -> str:
        return self._short_name if value in self._short_lived else self.wiring.names[value]

    def _targets(self, op: Operator) -> str:
        taken = {v for other in self.operators for v in other.values} | set(self.wiring.outputs(self.stage))
        taken |= set(self.wiring.output_values)

        def write(structure: Any) -> str:
            if isinstance(structure, int):
                return self._name(op.outputs[structure]) if op.outputs[structure] in taken else "_"
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
        return f"{_access(op.module)}({', '.join(arguments)})"

    def _write(self, argument: Any) -> str:
        if isinstance(argument, Value):
            return self._name(argument)
        if isinstance(argument, State):
            return _access(argument.name)
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


def literal_list(sizes: Any) -> str:
    """`4, 12` for a shape; `()` for a scalar's."""
    return ", ".join(str(size) for size in sizes) or "()"


def _is_factory(op: Operator) -> bool:
    return "device" in op.kwargs and not op.values


def _dtype(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float32 else f", dtype={dtype}"


def _access(path: str) -> str:
    """`layer1.0.conv1` -> `self.layer1["0"].conv1`."""
    text = "self"
    for index, part in enumerate(part for part in path.split(".") if part):
        if part.isidentifier() and not keyword.iskeyword(part):
            text += f".{part}"
        else:
            text += f'["{part}"]' if index else f'.get_submodule("{part}")'
    return text


def _is_dict(children: dict[str, Any]) -> bool:
    """Whether a ModuleDict can hold these names: one such as `keys` would hide a method of its own."""
    return not any(hasattr(nn.ModuleDict, name) for name in children)


def _insert(tree: dict[str, Any], parts: list[str], leaf: str | None) -> None:
    for part in parts[:-1] if leaf else parts:
        tree = tree.setdefault(part, {})
    if leaf:
        tree[parts[-1]] = leaf


def _assign(name: str, child: Any) -> Iterator[str]:
    """Statements that make one child of the stage, and all that is below it."""
    lines = list(_nested(child))
    if name.isidentifier() and not keyword.iskeyword(name):
        lines[0] = f"self.{name} = {lines[0]}"
    else:
        lines[0] = f'self.add_module("{name}", {lines[0]}'
        lines[-1] += ")"
    yield from lines
    yield from _later(name, child)


def _nested(child: Any) -> Iterator[str]:
    """A leaf's constructor call, or a container of children, over several lines."""
    if isinstance(child, str):
        yield child
    elif not child:
        yield "nn.ModuleDict()"
    elif not _is_dict(child):
        yield "nn.Module()"
    else:
        yield "nn.ModuleDict({"
        for name, grandchild in child.items():
            first, *rest = _nested(grandchild)
            lines = [f'"{name}": {first}', *rest]
            yield from (f"    {line}" for line in lines[:-1])
            yield f"    {lines[-1]},"
        yield "})"


def _later(path: str, child: Any) -> Iterator[str]:
    """Statements that fill the containers which are no ModuleDict."""
    if isinstance(child, str):
        return
    for name, grandchild in child.items():
        if not _is_dict(child):
            lines = list(_nested(grandchild))
            lines[0] = f'{_access(path)}.add_module("{name}", {lines[0]}'
            lines[-1] += ")"
            yield from lines
        yield from _later(f"{path}.{name}", grandchild)


def _construct(module: nn.Module) -> str:
    arguments = [
        literal_argument(value) if required else f"{name}={literal_argument(value)}"
        for name, value, required in constructor_arguments(module)
    ]
    return f"nn.{type(module).__name__}({', '.join(arguments)})"


def literal_argument(value: Any) -> str:
    """The text of a constructor argument."""
    if isinstance(value, (tuple, list)):
        inner = ", ".join(literal_argument(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return literal(value)
