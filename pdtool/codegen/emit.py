"""Write one stage as a Python file that imports torch and nothing else, and that a person might have written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pdtool.codegen.expressions import literal
from pdtool.codegen.forward_writer import ForwardWriter
from pdtool.codegen.init_writer import InitWriter
from pdtool.codegen.module_tree import access
from pdtool.codegen.wiring import Wiring
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

    @cached_property
    def opaque(self) -> list[str]:
        """The paths of the modules that it takes from the model."""
        return self._init.opaque_paths

    @cached_property
    def _init(self) -> InitWriter:
        return InitWriter(self.wiring, self.stage)

    @cached_property
    def _forward(self) -> ForwardWriter:
        return ForwardWriter(self.wiring, self.stage)

    def text(self) -> str:
        """Return the text of the file."""
        body, output = [*self._forward.lines()], self._forward.output
        count = len(self.wiring.stages)
        uses_functional = any("F." in line for line in body)
        others = f"whose stages are 0 to {count - 1}" if count > 1 else "the only one"
        lines = [
            f'"""Stage {self.stage} of {self.title}, {others}; written by pdtool codegen."""',
            "",
            *output.imports(),
            "import torch",
            "from torch import nn",
            *(["from torch.nn import functional as F"] if uses_functional else []),
            *self._function_imports(),
            "",
            *output.classes(),
            *(_SEED_OPERATOR.splitlines() if any("seed_operator(" in line for line in body) else []),
            "",
            f"class {self.class_name}(nn.Module):",
            *self._docstring(),
            "",
            *self._init.lines(),
            f"    def forward({', '.join(['self', *(self.wiring.names[v] for v in self.wiring.inputs(self.stage))])}):",
            *(f"        {line}" for line in body),
            *self._train(),
        ]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _function_imports(self) -> list[str]:
        """Import each autograd.Function of the user's; pdtool finds the user's file wherever it is."""
        functions = [part.function for op in self._forward.operators for part in op.parts if part.function]
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
        outputs = self.wiring.output_values if self._forward.is_last else self.wiring.outputs(self.stage)
        for word, values in (("takes", self.wiring.inputs(self.stage)), ("returns", outputs)):
            for value in dict.fromkeys(values):
                shape = ", ".join(literal(dim) for dim in value.shape)
                comma = "," if len(value.shape) == 1 else ""
                yield f"        {word:<7} {self.wiring.names[value]}: ({shape}{comma})"
        if self.opaque:
            yield ""
            yield "    Takes from the model, and calls as it is:"
            yield ""
            for path in self.opaque:
                kind = type(self.wiring.traced.model.get_submodule(path))
                yield f"        {path}: {kind.__qualname__} of {user_module(kind.__module__)}"
        yield '    """'
