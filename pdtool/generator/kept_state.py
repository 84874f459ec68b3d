"""Find state that a model's modules keep between calls of forward, besides parameters and buffers.

In a pipeline several minibatches are in flight, and a stage is a class of its own. A hidden state carried over, or a
counter that forward reads, would differ from a plain training loop. Attributes that forward only writes, such as the
last call's attention weights, make no difference.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Attributes = Mapping[tuple[str, str], object]  # (path of a module, name) -> a key that is equal while it is kept
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # of values that are computed in two ways
_MAX_DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # `training`, and the dictionaries of parameters, buffers and hooks
_NOT_FORWARD = {"__init__", "__repr__", "extra_repr", "reset_parameters"}


@dataclass(frozen=True)
class KeptAttribute:
    """An attribute that calls of forward change and read.

    Attributes:
        module: path of the module; "" for the model.
        location: `model.py:12`, where it is changed; "" if unknown.
    """

    module: str
    name: str
    location: str


def attributes(model: nn.Module) -> Attributes:
    """Return the modules' attributes except parameters, buffers and modules, and the names of their buffers."""
    held: dict[tuple[str, str], object] = {}
    for path, module in model.named_modules():
        if not _is_of_torch(type(module)):
            values = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
            held |= {(path, name): _fingerprint(value, _MAX_DEPTH) for name, value in values.items()}
            held |= {(path, name): "buffer" for name, buffer in module._buffers.items() if buffer is not None}
    return held


def kept_attributes(model: nn.Module, before: Attributes) -> Iterator[KeptAttribute]:
    """Yield the attributes that changed since `before` and that some forward reads."""
    after = attributes(model)
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    if not changed:
        return
    modules = dict(model.named_modules())
    uses = {kind: list(_uses(kind)) for kind in {type(module) for module in modules.values()}}
    used = {use.name for of_class in uses.values() for use in of_class}
    read = {use.name for of_class in uses.values() for use in of_class if use.is_read}
    for path, name in sorted(changed):
        changes = [use.location for use in uses[type(modules[path])] if use.name == name and not use.is_read]
        if name in read or name not in used:
            yield KeptAttribute(path, name, next(iter(changes), ""))


def has_same_content(a: Any, b: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether two values hold the same tensors and numbers; False if unknown."""
    if type(a) is not type(b) or depth == 0:
        return False
    if isinstance(a, Tensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.allclose(a, b, **TOLERANCE, equal_nan=True)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(has_same_content(a[key], b[key], depth - 1) for key in a)
    if isinstance(a, (list, tuple)) or type(a).__name__ == "deque":
        return len(a) == len(b) and all(has_same_content(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, (*_PLAIN, torch.dtype, torch.device)):
        return bool(a == b)
    return hasattr(a, "__dict__") and not isinstance(a, _CODE) and has_same_content(vars(a), vars(b), depth - 1)


@dataclass(frozen=True)
class _Use:
    """One place in a class where an attribute is read or assigned."""

    name: str
    is_read: bool
    location: str


def _uses(kind: type) -> Iterator[_Use]:
    """Yield where methods of a module's class, and of its bases outside torch, use attributes."""
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and not _is_of_torch(base):
            yield from _uses_in(base)


def _uses_in(kind: type) -> Iterator[_Use]:
    """Yield where the methods in a class's source use attributes; nothing if there is no source."""
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = Path(inspect.getsourcefile(kind) or "").name
    except (OSError, TypeError, SyntaxError):
        return
    for method in ast.walk(tree):
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or method.name in _NOT_FORWARD:
            continue
        for node in ast.walk(method):
            match node:
                case ast.Attribute(attr=name):
                    is_read = isinstance(node.ctx, ast.Load)
                case ast.Constant(value=str(name)) if name.isidentifier():  # of getattr
                    is_read = True
                case _:
                    continue
            yield _Use(name, is_read, f"{file}:{first + node.lineno - 1}")


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _fingerprint(value: Any, depth: int) -> object:
    """A key that stays equal as long as the value is neither changed nor replaced."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # NaN equals itself here
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return id(value), value.tobytes()
    if isinstance(value, nn.Module) or depth == 0:
        return id(value)
    if isinstance(value, Mapping):
        return id(value), tuple((repr(key), _fingerprint(item, depth - 1)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return id(value), tuple(_fingerprint(item, depth - 1) for item in value)
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        state = repr(value)  # of itertools.count; others tell it only to pickle, and a generator not at all
        with suppress(Exception):
            state += repr(value.__reduce__())
        return id(value), state
    is_code = isinstance(value, _CODE) or (callable(value) and _is_of_torch(type(value)))
    if hasattr(value, "__dict__") and not is_code:
        return id(value), _fingerprint(vars(value), depth - 1)
    return id(value)
