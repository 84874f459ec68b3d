"""Find what a model keeps on its modules from one call of forward to the next, outside parameters and buffers.

In a pipeline several minibatches are in flight, and a stage is a class of its own: a hidden state that is carried over,
or a counter that forward reads, would not be what it is in a plain training loop. What forward only writes, such as the
attention weights of the last call, makes no difference.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_MAX_DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # `training`, and the dictionaries of parameters, buffers and hooks
_NOT_FORWARD = {"__init__", "__repr__", "extra_repr", "reset_parameters"}

Attributes = Mapping[tuple[str, str], object]  # (path of a module, name) -> something that is equal while it is kept


@dataclass(frozen=True)
class KeptAttribute:
    """An attribute that calls of forward change and read.

    Attributes:
        module: path of the module; "" for the model.
        location: `model.py:12`, where it is changed; "" when unknown.
    """

    module: str
    name: str
    location: str


def attributes(model: nn.Module) -> Attributes:
    """Return what the modules hold besides parameters, buffers and modules."""
    return {
        (path, name): _fingerprint(value, _MAX_DEPTH)
        for path, module in model.named_modules()
        if not _is_of_torch(type(module))
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }


def kept_attributes(model: nn.Module, before: Attributes) -> Iterator[KeptAttribute]:
    """Yield the attributes that were changed since `before` and that some forward reads."""
    after = attributes(model)
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    if not changed:
        return
    modules = dict(model.named_modules())
    classes = [kind for module in modules.values() for kind in _classes(type(module))]
    uses = [use for kind in dict.fromkeys(classes) for use in _uses(kind)]
    read = {use.name for use in uses if use.is_read}
    for path, name in sorted(changed):
        own = _classes(type(modules[path]))
        changes = [use.location for use in uses if use.name == name and not use.is_read and use.owner in own]
        if name in read or not any(use.name == name for use in uses):
            yield KeptAttribute(path, name, next(iter(changes), ""))


@dataclass(frozen=True)
class _Use:
    """One place in a class where an attribute is read, or assigned to."""

    owner: type
    name: str
    is_read: bool
    location: str


def _classes(kind: type) -> list[type]:
    """A module's class and its bases, without those of torch."""
    return [base for base in kind.__mro__ if issubclass(base, nn.Module) and not _is_of_torch(base)]


@cache
def _uses(kind: type) -> list[_Use]:
    """Where the methods of a class use attributes; empty where its source is not there."""
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = Path(inspect.getsourcefile(kind) or "").name
    except (OSError, TypeError, SyntaxError):
        return []
    uses = []
    for method in ast.walk(tree):
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or method.name in _NOT_FORWARD:
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute):
                where = f"{file}:{first + node.lineno - 1}"
                uses.append(_Use(kind, node.attr, isinstance(node.ctx, ast.Load), where))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                uses.append(_Use(kind, node.value, True, f"{file}:{first + node.lineno - 1}"))  # getattr
    return uses


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def has_same_content(a: Any, b: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether two values hold the same tensors and numbers; False where it cannot be told."""
    if type(a) is not type(b) or depth == 0:
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(has_same_content(a[key], b[key], depth - 1) for key in a)
    if isinstance(a, (list, tuple)) or type(a).__name__ == "deque":
        return len(a) == len(b) and all(has_same_content(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, (*_PLAIN, torch.dtype, torch.device)):
        return bool(a == b)
    return hasattr(a, "__dict__") and not callable(a) and has_same_content(vars(a), vars(b), depth - 1)


def _fingerprint(value: Any, depth: int) -> object:
    """Something that is equal as long as the value is not changed, nor replaced by another."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # NaN equals itself here
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, nn.Module) or depth == 0:
        return id(value)
    if isinstance(value, Mapping):
        items = [(repr(key), _fingerprint(item, depth - 1)) for key, item in value.items()]
        return id(value), tuple(items)
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return id(value), tuple(_fingerprint(item, depth - 1) for item in value)
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return id(value), _fingerprint(vars(value), depth - 1)
    return id(value)
