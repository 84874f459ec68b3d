"""Write the `__init__` of a stage: its leaf modules under their original paths, and the state used outside of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from pdtool.codegen.module_tree import ModuleTree, access, access_state, constructor_call, set_parameter
from pdtool.codegen.wiring import Wiring
from pdtool.frontend.operators import Operator, is_persistent


@dataclass(frozen=True)
class InitWriter:
    """Writes the constructor of one stage.

    Attributes:
        wiring: the whole model, cut into stages.
        stage: index of the stage.
    """

    wiring: Wiring
    stage: int

    def lines(self) -> Iterator[str]:
        """Yield the method's lines, indented as in the class, and an empty line."""
        yield f"    def __init__({'self, model' if self.opaque_paths else 'self'}):"
        yield "        super().__init__()"
        for statement in self._statements():
            yield f"        {statement}"
        yield ""

    def _statements(self) -> Iterator[str]:
        tree = ModuleTree()
        for path in self.leaf_paths:
            whole = path in self.opaque_paths
            tree.insert(path, f'model.get_submodule("{path}")' if whole else constructor_call(self._module(path)))
        for name in self._direct_state:
            tree.insert(name.rpartition(".")[0])
        yield from tree.statements()
        for name in self._direct_state:
            yield self._declaration(name)
        yield from self._ties()
        yield from self._ties_to_other_stages()
        yield from self._frozen()

    @cached_property
    def _operators(self) -> list[Operator]:
        return [part for op in self.wiring.operators(self.stage) for part in op.parts]

    @cached_property
    def leaf_paths(self) -> list[str]:
        """The modules that are called whole."""
        return list(dict.fromkeys(op.module for op in self._operators if op.is_module))

    @cached_property
    def opaque_paths(self) -> list[str]:
        """The modules that the stage takes from the model."""
        return list(dict.fromkeys(op.module for op in self._operators if op.opaque))

    @cached_property
    def _direct_state(self) -> list[str]:
        """Parameters and buffers that operators use directly, outside leaf modules."""
        names = (*self.wiring.parameters(self.stage), *self.wiring.buffers(self.stage))
        leaves = tuple(f"{path}." for path in self.leaf_paths)
        return list(dict.fromkeys(name for name in names if not name.startswith(leaves)))

    def _module(self, path: str) -> nn.Module:
        return self.wiring.traced.model.get_submodule(path)

    def _declaration(self, name: str) -> str:
        """Return the statement that makes a parameter or buffer, filled with zeros."""
        path, _, attribute = name.rpartition(".")
        owner = self._module(path)
        tensor = getattr(owner, attribute)
        sizes = ", ".join(map(str, tensor.shape)) or "()"
        dtype = "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"
        zeros = f"torch.zeros({sizes}{dtype})"
        if isinstance(tensor, nn.Parameter):
            return set_parameter(name, f"nn.Parameter({zeros})")
        persistent = "" if is_persistent(owner, attribute) else ", persistent=False"
        return f'{access(path)}.register_buffer("{attribute}", {zeros}{persistent})'

    def _ties(self) -> Iterator[str]:
        """Yield an assignment for each parameter that is the same as one before it in this stage."""
        first: dict[str, str] = {}
        names = sorted(self.wiring.parameters(self.stage), key=lambda name: self._opaque_owner(name) is None)
        for name in names:  # what is taken from the model first, for it is not ours to change
            original = first.setdefault(self.wiring.traced.tied[name], name)
            if original != name and not self._opaque_owner(name):
                owner = self._opaque_owner(original)
                inside = f'{access(owner)}.get_parameter("{original[len(owner) + 1 :]}")' if owner else None
                yield f"{set_parameter(name, inside or access_state(original))}  # tied"

    def _ties_to_other_stages(self) -> Iterator[str]:
        """Yield a comment for each parameter that another stage holds as well."""
        for tied in self.wiring.tied:
            names = dict(zip(tied.stages, tied.names, strict=True))
            if own := names.pop(self.stage, None):
                others = " and ".join(f"{name} of stage {stage}" for stage, name in names.items())
                yield f"# {own} is {others} as well: `pdtool run` keeps them equal"

    def _opaque_owner(self, name: str) -> str | None:
        """The opaque module in which a parameter is; None elsewhere."""
        return next((path for path in self.opaque_paths if name.startswith(f"{path}.")), None)

    def _frozen(self) -> Iterator[str]:
        for name in self.wiring.parameters(self.stage):
            is_frozen = not self.wiring.traced.model.get_parameter(name).requires_grad
            if is_frozen and not self._opaque_owner(name):
                yield f"{access_state(name)}.requires_grad_(False)"
