"""Write one stage as a readable Python file that imports only torch.

The only other imports are the user's autograd.Functions, from their files. The constructor makes leaf modules under
their original paths, and the state used outside of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword

import torch
from torch import nn

from pdtool.frontend.operators import Operator, is_persistent, named_state, names_over_parameters
from pdtool.frontend.user_modules import user_module
from pdtool.generator.expressions import (
    access,
    access_state,
    constructor_call,
    literal,
    module_statements,
    set_parameter,
)
from pdtool.generator.forward_writer import ForwardWriter
from pdtool.generator.output_writer import output_classes, output_imports
from pdtool.generator.wiring import Wiring

FUNCTION_MARK = "  # an autograd.Function"  # after the import of one of the user's
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
    def _forward(self) -> ForwardWriter:
        return ForwardWriter(self.wiring, self.stage)

    def text(self) -> str:
        """Return the text of the file."""
        body, output = [*self._forward.lines()], self._forward.output
        parameters = ", ".join(["self", *(self.wiring.names[value] for value in self.wiring.inputs(self.stage))])
        count = len(self.wiring.stages)
        uses_functional = any("F." in line for line in body)
        others = f"whose stages are 0 to {count - 1}" if count > 1 else "the only one"
        lines = [
            f'"""Stage {self.stage} of {self.title}, {others}; written by pdtool codegen."""',
            "",
            *output_imports(output),
            "import torch",
            "from torch import nn",
            *(["from torch.nn import functional as F"] if uses_functional else []),
            *self._function_imports(),
            "",
            *output_classes(output),
            *(_SEED_OPERATOR.splitlines() if any("seed_operator(" in line for line in body) else []),
            "",
            f"class {self.class_name}(nn.Module):",
            *self._docstring(),
            "",
            f"    def __init__({'self, model' if self.opaque else 'self'}):",
            "        super().__init__()",
            *(f"        {statement}" for statement in self._init_statements()),
            "",
            f"    def forward({parameters}):",
            *(f"        {line}" for line in body),
            *self._train(),
        ]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _function_imports(self) -> list[str]:
        """Import each autograd.Function of the user; pdtool finds the user's file wherever it is."""
        functions = [part.function for op in self._forward.operators for part in op.parts if part.function]
        lines = [f"{_import(f)}{FUNCTION_MARK}" for f in functions]
        return ["", *dict.fromkeys(lines)] if lines else []

    def _train(self) -> Iterator[str]:
        """Yield a method `train` if leaf modules do not follow the mode of the model."""
        model = self.wiring.traced.model
        modes = {}
        for training in (False, True):
            model.train(training)
            modes[training] = {path: self._module(path).training for path in self._leaf_paths}
        if fixed := {path: mode for path, mode in modes[True].items() if mode == modes[False][path]}:
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
                kind = type(self._module(path))
                yield f"        {path}: {kind.__qualname__} of {user_module(kind.__module__)}"
        yield '    """'

    # The constructor.

    def _init_statements(self) -> Iterator[str]:
        calls = {path: self._construction(path) for path in self._leaf_paths}
        containers = (name.rpartition(".")[0] for name in self._direct_state)
        yield from module_statements(calls | dict.fromkeys(filter(None, containers), ""))
        for name in self._direct_state:
            yield self._declaration(name)
        yield from self._ties()
        yield from self._shared_memory()
        yield from self._ties_to_other_stages()
        yield from self._frozen()

    @cached_property
    def _operators(self) -> list[Operator]:
        return [part for op in self.wiring.operators(self.stage) for part in op.parts]

    @cached_property
    def _leaf_paths(self) -> list[str]:
        """The paths of the modules that the stage calls as a whole."""
        return list(dict.fromkeys(op.module for op in self._operators if op.is_module))

    @cached_property
    def opaque(self) -> list[str]:
        """The paths of the modules that the stage takes from the model."""
        return list(dict.fromkeys(op.module for op in self._operators if op.opaque))

    @cached_property
    def _direct_state(self) -> list[str]:
        """Parameters and buffers that operators use directly, outside leaf modules."""
        names = (*self.wiring.parameters(self.stage), *self.wiring.buffers(self.stage))
        leaves = tuple(f"{path}." for path in self._leaf_paths)
        return list(dict.fromkeys(name for name in names if not name.startswith(leaves)))

    def _module(self, path: str) -> nn.Module:
        return self.wiring.traced.model.get_submodule(path)

    def _construction(self, path: str) -> str:
        """Return the expression that makes a leaf module, or takes an opaque one from the model."""
        return f'model.get_submodule("{path}")' if path in self.opaque else constructor_call(self._module(path))

    def _declaration(self, name: str) -> str:
        """Return the statement that makes a parameter or buffer, filled with zeros."""
        path, _, attribute = name.rpartition(".")
        owner = self._module(path)
        tensor = getattr(owner, attribute)
        sizes = ", ".join(map(str, tensor.shape)) or "()"
        dtype = "" if tensor.dtype == torch.get_default_dtype() == torch.float32 else f", dtype={tensor.dtype}"
        zeros = f"torch.zeros({sizes}{dtype})"
        if isinstance(tensor, nn.Parameter):
            trained = "" if _may_be_trained(tensor) else ", requires_grad=False"
            return set_parameter(name, f"nn.Parameter({zeros}{trained})")
        persistent = "" if is_persistent(owner, attribute) else ", persistent=False"
        return f'{access(path)}.register_buffer("{attribute}", {zeros}{persistent})'

    def _ties(self) -> Iterator[str]:
        """Yield an assignment for each parameter or changing buffer that equals an earlier one in this stage."""
        first: dict[int, str] = {}
        state, changing = named_state(self.wiring.traced.model), self.wiring.traced.changed_buffers
        names = [*self.wiring.parameters(self.stage), *(n for n in self.wiring.buffers(self.stage) if n in changing)]
        names.sort(key=lambda name: self._opaque_owner(name) is None)
        for name in names:  # the model's own objects first, because we must not change them
            original = first.setdefault(id(state[name]), name)
            if original != name and not self._opaque_owner(name):
                owner = self._opaque_owner(original)
                get = "get_parameter" if isinstance(state[name], nn.Parameter) else "get_buffer"
                inside = f'{access(owner)}.{get}("{original[len(owner) + 1 :]}")' if owner else None
                yield f"{set_parameter(name, inside or access_state(original))}  # tied"

    def _shared_memory(self) -> Iterator[str]:
        """Yield a comment for tensors that share the memory of a parameter."""
        names = {*self.wiring.parameters(self.stage), *self.wiring.buffers(self.stage)}
        for group in names_over_parameters(named_state(self.wiring.traced.model)):
            if len(held := [name for name in group if name in names]) > 1:
                yield f"# {' and '.join(held)} share memory: `pdtool run` takes them from the model"

    def _ties_to_other_stages(self) -> Iterator[str]:
        """Yield a comment for each parameter that another stage also holds."""
        for tied in self.wiring.tied:
            names = dict(zip(tied.stages, tied.names, strict=True))
            if own := names.pop(self.stage, None):
                others = " and ".join(f"{name} of stage {stage}" for stage, name in names.items())
                yield f"# {own} is {others} as well: `pdtool run` keeps them equal"

    def _opaque_owner(self, name: str) -> str | None:
        """The opaque module that contains a parameter; None for other parameters."""
        return next((path for path in self.opaque if name.startswith(f"{path}.")), None)

    def _frozen(self) -> Iterator[str]:
        for name in self.wiring.parameters(self.stage):
            parameter = self.wiring.traced.model.get_parameter(name)
            is_frozen = not parameter.requires_grad and _may_be_trained(parameter)
            if is_frozen and not self._opaque_owner(name):
                yield f"{access_state(name)}.requires_grad_(False)"


def _import(function: type) -> str:
    """Write the import of a user's class, from a file whose name need not be an identifier."""
    module, name = user_module(function.__module__), function.__name__
    if any(not part.isidentifier() or iskeyword(part) for part in module.split(".")):
        return f'{name} = __import__("{module}").{name}'
    return f"from {module} import {name}"


def _may_be_trained(parameter: nn.Parameter) -> bool:
    """Whether its dtype can have a gradient."""
    return parameter.is_floating_point() or parameter.is_complex()
