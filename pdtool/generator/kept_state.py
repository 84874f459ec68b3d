"""Find state that a model keeps between calls of forward, besides parameters and buffers.

In a pipeline several minibatches are in flight, and a stage is a class of its own. A hidden state carried over, or a
counter that forward reads, would differ from a plain training loop. Such state may be in attributes of modules, of the
user's classes, or in global variables of the user's files. What forward only writes, such as the last call's attention
weights, makes no difference.
"""

from __future__ import annotations

import ast
import dis
import inspect
import logging
import textwrap
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdtool.frontend.user_modules import CODE, files_and_classes, variables

Place = tuple[str, object]  # a module's path and None; or the name of a class or file, and that class or file
State = Mapping[tuple[Place, str], object]  # (where, attribute) -> a key that stays equal while the attribute does
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # of values that are computed in two ways
_NO_COPY = object()  # differs from every value
_MAX_DEPTH = 8
_MAX_ITEMS, _MAX_BYTES = 10_000, 1 << 28  # of one container, one array; larger ones are data
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # `training`, and the dictionaries of parameters, buffers and hooks
_READING = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")  # of Python's bytecode
_NOT_FORWARD = {"__init__", "__repr__", "extra_repr", "reset_parameters"}


@dataclass(frozen=True)
class KeptAttribute:
    """An attribute that calls of forward change and read.

    Attributes:
        place: the module, class or file that has it.
        location: `model.py:12`, where it is changed; "" if unknown.
    """

    place: Place
    name: str
    location: str

    @property
    def described(self) -> str:
        """The attribute as the user calls it."""
        match self.place:
            case path, None:
                return f"self.{self.name} of {path or 'the model'}"
            case file, ModuleType():
                return f"the global variable {self.name} of {file}"
            case kind, _:
                return f"the class attribute {kind}.{self.name}"

    def value(self, model: nn.Module) -> Any:
        """Return its value, None if it has none yet; a copy if all models of the process share it."""
        path, owner = self.place
        if owner is None:
            return getattr(model.get_submodule(path), self.name, None)
        try:
            return deepcopy(pytree.tree_map_only(Tensor, Tensor.detach, getattr(owner, self.name, None)))
        except Exception:
            return _NO_COPY

    def restore(self, value: Any) -> None:
        """Give an attribute that all models share this value, which forward may then change."""
        owner = self.place[1]
        if owner is None or value is _NO_COPY:
            return
        current: Any = getattr(owner, self.name, None)
        if isinstance(current, (dict, list, set, deque)) and type(value) is type(current):  # others may hold it, too
            current.clear()
            getattr(current, "update" if hasattr(current, "update") else "extend")(value)
        else:
            setattr(owner, self.name, value)


def kept_state(model: nn.Module) -> State:
    """Return what forward could keep: attributes of modules, except parameters and modules, of classes and of files."""
    held: dict[tuple[Place, str], object] = {}
    for path, module in model.named_modules():
        of_torch = _is_of_torch(type(module))
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and (not of_torch or isinstance(value, _PLAIN)):
                held[(path, None), name] = _fingerprint(value, _MAX_DEPTH)
        if not of_torch:
            buffers = [name for name, buffer in module._buffers.items() if buffer is not None]
            held |= {((path, None), name): "buffer" for name in buffers}
    for place in _shared_places(model):
        held |= {(place, name): _fingerprint(value, _MAX_DEPTH) for name, value in variables(place[1]).items()}
    return held


def kept_attributes(model: nn.Module, before: State) -> Iterator[KeptAttribute]:
    """Yield the attributes that changed since `before` and that some forward reads."""
    after = kept_state(model)
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    if not changed:
        return
    modules = dict(model.named_modules())
    of_classes = {kind: _uses(kind) for module in modules.values() for kind in _user_classes(type(module))}
    of_files = [use for _, owner in _shared_places(model) if isinstance(owner, ModuleType) for use in _uses(owner)]
    for place, name in sorted(changed, key=lambda key: (key[0][0], key[1])):
        path, owner = place
        uses = of_files if owner else [use for of_class in of_classes.values() for use in of_class]
        uses = [use for use in uses if use.name == name and (isinstance(owner, ModuleType) or not use.is_variable)]
        own = uses if owner else [use for kind in _user_classes(type(modules[path])) for use in of_classes[kind]]
        changes = [use.location for use in own if use.name == name and not use.is_read]
        if not uses or any(use.is_read for use in uses):
            yield KeptAttribute(place, name, next(iter(changes), ""))


def changed_in_training(
    model: nn.Module, file: ModuleType, functions: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (line, function, variable) for each variable that a function of the user's file changes and forward reads.

    Stage files have the value that it had when the model was traced.

    Args:
        functions: names of the functions that are called during training.
    """
    kinds = {kind for module in model.modules() for kind in _user_classes(type(module))}
    read = {name for kind in kinds for name in _names_read(kind)}
    tree, _, file_name = _tree(file)
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name not in functions:
            continue
        for node in ast.walk(function):
            if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) or not isinstance(node.ctx, ast.Store):
                continue
            owner, attributes = cast("ast.expr", node), set()  # of CONFIG.rates["low"]: CONFIG and {rates}
            while isinstance(owner, (ast.Attribute, ast.Subscript)):
                attributes |= {owner.attr} if isinstance(owner, ast.Attribute) else set()
                owner = owner.value
            if not isinstance(owner, ast.Name) or not _is_global(owner.id, function, file):
                continue
            value = getattr(file, owner.id, None)
            is_owner = value in kinds if isinstance(value, type) else isinstance(value, (nn.Module, ModuleType))
            if owner.id in read or (is_owner and not read.isdisjoint(attributes)):
                yield f"{file_name}:{node.lineno}", function.name, ast.unparse(node)


def _is_global(name: str, function: ast.FunctionDef, file: ModuleType) -> bool:
    """Whether a name in a function is that of a variable of its file."""
    nodes = [*ast.walk(function)]
    if any(isinstance(node, ast.Global) and name in node.names for node in nodes):
        return True
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return name not in assigned | {node.arg for node in nodes if isinstance(node, ast.arg)} and hasattr(file, name)


def _names_read(kind: type) -> Iterator[str]:
    """Yield the variables of files, and the attributes, that a class's methods read."""
    codes = [f.__code__ for name, f in vars(kind).items() if isinstance(f, FunctionType) and name not in _NOT_FORWARD]
    for code in codes:  # which grows
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from (each.argval for each in dis.get_instructions(code) if each.opname in _READING)


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
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(has_same_content(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, (*_PLAIN, torch.dtype, torch.device)):
        return bool(a == b)
    return hasattr(a, "__dict__") and not isinstance(a, CODE) and has_same_content(vars(a), vars(b), depth - 1)


def _shared_places(model: nn.Module) -> list[tuple[str, type | ModuleType]]:
    """What all models of a process share, by name."""
    owners = files_and_classes(map(type, model.modules()))
    return [(o.__qualname__ if isinstance(o, type) else Path(o.__file__ or "").name, o) for o in owners]


@dataclass(frozen=True)
class _Use:
    """One place in a function where an attribute or a variable is read or assigned."""

    name: str
    is_variable: bool
    is_read: bool
    location: str


def _user_classes(kind: type) -> Iterator[type]:
    """Yield a module's class and its bases outside torch."""
    return (base for base in kind.__mro__ if issubclass(base, nn.Module) and not _is_of_torch(base))


def _uses(source: type | ModuleType) -> list[_Use]:
    """Where the functions in a class or file use attributes and variables; nothing if there is no source."""
    uses = []
    tree, first, file = _tree(source)
    for method in ast.walk(tree):
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or method.name in _NOT_FORWARD:
            continue
        for node in ast.walk(method):
            match node:
                case ast.Attribute(attr=name) | ast.Name(id=name):
                    is_read = isinstance(node.ctx, ast.Load)
                case ast.Constant(value=str(name)) if name.isidentifier():  # of getattr
                    is_read = True
                case _:
                    continue
            location = f"{file}:{first + node.lineno - 1}"
            uses.append(_Use(name, isinstance(node, ast.Name), is_read, location))
    return uses


def _tree(source: type | ModuleType) -> tuple[ast.Module, int, str]:
    """Return the syntax tree of a class or file, its first line and the file's name; an empty tree if it has none."""
    try:
        lines, first = inspect.getsourcelines(source)
        return ast.parse(textwrap.dedent("".join(lines))), max(first, 1), Path(inspect.getsourcefile(source) or "").name
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], []), 1, ""


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _fingerprint(value: Any, depth: int) -> object:
    """A key that stays equal as long as the value is neither changed nor replaced."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # NaN equals itself here
    if isinstance(value, Tensor):
        return id(value), value._version, _checksum(value.detach())  # writes by numpy do not change the version
    if isinstance(value, np.ndarray):
        return id(value), _checksum(value)
    if isinstance(value, (nn.Module, logging.Logger)) or depth == 0:
        return id(value)
    if isinstance(value, Collection) and len(value) > _MAX_ITEMS:
        return id(value), len(value)
    if isinstance(value, Mapping):
        return id(value), tuple((repr(key), _fingerprint(item, depth - 1)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return id(value), tuple(_fingerprint(item, depth - 1) for item in value)
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        state = repr(value)  # of itertools.count; others tell it only to pickle, and a generator not at all
        with suppress(Exception):
            state += repr(value.__reduce__())
        return id(value), state
    is_code = isinstance(value, CODE) or (callable(value) and _is_of_torch(type(value)))
    if isinstance(getattr(value, "__dict__", None), dict) and not is_code:
        return id(value), _fingerprint(vars(value), depth - 1)
    return id(value)


def _checksum(array: Tensor | np.ndarray[Any, Any]) -> int | None:
    """A checksum of the elements; None of large arrays, which are data, and of tensors outside the CPU's memory."""
    with suppress(Exception):
        if array.nbytes <= _MAX_BYTES:
            elements = array.reshape(-1).view(torch.uint8).numpy() if isinstance(array, Tensor) else array
            return crc32(np.asarray(elements).tobytes())
    return None
