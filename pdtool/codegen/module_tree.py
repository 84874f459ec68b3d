"""Write the statements that build a tree of modules under their original paths."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from typing import Any

from torch import nn

from pdtool.codegen.expressions import literal
from pdtool.frontend.leaf_modules import constructor_arguments

Tree = dict[str, Any]  # child -> the text of a leaf module's constructor call, or the Tree below a container


class ModuleTree:
    """Leaf modules and containers of a stage by path; containers are ModuleDicts where the names allow it."""

    def __init__(self) -> None:
        self._root: Tree = {}

    def insert(self, path: str, call: str | None = None) -> None:
        """Put the leaf module made by `call` at `path`; without one, a container."""
        *parents, last = path.split(".")
        tree = self._root
        for name in parents:
            tree = tree.setdefault(name, {})
        if call:
            tree[last] = call
        elif last:
            tree.setdefault(last, {})

    def statements(self) -> Iterator[str]:
        """Yield the statements of `__init__` that make all modules."""
        for name, child in self._root.items():
            yield from _assign(name, child)


def access(path: str) -> str:
    """Return the expression of what stands at `path`: `layer1.0.conv1` is `self.layer1["0"].conv1`."""
    text = "self"
    for index, name in enumerate(name for name in path.split(".") if name):
        if _is_attribute(name):
            text += f".{name}"
        else:
            text += f'["{name}"]' if index else f'.get_submodule("{name}")'
    return text


def access_state(name: str) -> str:
    """Return the expression of a parameter or buffer; one in a ParameterList is `getattr(self.scales, "0")`.

    `get_parameter` refuses the tensors of a weight version, which stand in the places of parameters in a run.
    """
    path, _, attribute = name.rpartition(".")
    return access(name) if _is_attribute(attribute) else f'getattr({access(path)}, "{attribute}")'


def set_parameter(name: str, value: str) -> str:
    """Return the statement that makes a parameter."""
    path, _, attribute = name.rpartition(".")
    if _is_attribute(attribute):
        return f"{access(name)} = {value}"
    return f'{access(path)}.register_parameter("{attribute}", {value})'


def constructor_call(module: nn.Module) -> str:
    """Return the call that makes such a leaf module: `nn.Linear(8, 16)`."""
    arguments = [
        _constructor_literal(value) if required else f"{name}={_constructor_literal(value)}"
        for name, value, required in constructor_arguments(module)
    ]
    return f"nn.{type(module).__name__}({', '.join(arguments)})"


def _constructor_literal(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_constructor_literal(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return literal(value)


def _is_attribute(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _fits_module_dict(tree: Tree) -> bool:
    """Whether a ModuleDict can hold these names: one such as `keys` would hide a method of its own."""
    return not any(hasattr(nn.ModuleDict, name) for name in tree)


def _assign(name: str, child: str | Tree) -> Iterator[str]:
    """Yield the statements that make one child of the stage, and all that is below it."""
    lines = list(_expression(child))
    if _is_attribute(name):
        lines[0] = f"self.{name} = {lines[0]}"
        yield from lines
    else:
        yield from _add_module("self", name, lines)
    yield from _fill(name, child)


def _add_module(parent: str, name: str, lines: list[str]) -> list[str]:
    lines[0] = f'{parent}.add_module("{name}", {lines[0]}'
    lines[-1] += ")"
    return lines


def _expression(child: str | Tree) -> Iterator[str]:
    """Yield the lines of a leaf's constructor call, or of a container with its children."""
    if isinstance(child, str):
        yield child
    elif not child:
        yield "nn.ModuleDict()"
    elif not _fits_module_dict(child):
        yield "nn.Module()"
    else:
        yield "nn.ModuleDict({"
        for name, grandchild in child.items():
            first, *rest = _expression(grandchild)
            lines = [f'"{name}": {first}', *rest]
            yield from (f"    {line}" for line in lines[:-1])
            yield f"    {lines[-1]},"
        yield "})"


def _fill(path: str, child: str | Tree) -> Iterator[str]:
    """Yield the statements that add children to the containers at or below `path` that are no ModuleDict."""
    if isinstance(child, str):
        return
    for name, grandchild in child.items():
        if not _fits_module_dict(child):
            yield from _add_module(access(path), name, list(_expression(grandchild)))
        yield from _fill(f"{path}.{name}", grandchild)
