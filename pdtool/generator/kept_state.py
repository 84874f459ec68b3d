"""Find state that a model keeps between calls of forward, besides parameters and buffers.

In a pipeline several minibatches are in flight, and a stage is a class of its own. A hidden state carried over, or a
counter that forward reads, would differ from a plain training loop. Such state may be in attributes of modules, of the
user's classes, or in global variables of the user's files. What forward only writes, such as the last call's attention
weights, makes no difference.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdtool.frontend.random_numbers import GENERATORS, generator_state
from pdtool.frontend.user_modules import CODE, files_and_classes, variables
from pdtool.frontend.variable_uses import is_of_torch, user_classes, uses_in

Place = tuple[str, object]  # a module's path and None; or the name of a class or file, and that class or file
State = Mapping[tuple[Place, str], object]  # (where, attribute) -> a key that stays equal while the attribute does
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # of values that are computed in two ways
_NO_COPY = object()  # differs from every value
_MAX_DEPTH = 8
_MAX_ITEMS, _MAX_BYTES = 10_000, 1 << 28  # of one container, one array; larger ones are data
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_COMPARABLE = (set, frozenset, range, slice, np.generic, torch.dtype, torch.device)
_CLOSED = (*CODE, logging.Logger, enum.Enum)  # not looked into
_OF_USER = (*_PLAIN, dict, set, deque)  # attributes of torch's modules that are looked at
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # `training`, and the dictionaries of parameters, buffers and hooks


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
        value = getattr(self._owner_in(model), self.name, None)
        try:
            return deepcopy(pytree.tree_map_only(Tensor, Tensor.detach, value))
        except Exception:
            return _NO_COPY

    def _owner_in(self, model: nn.Module) -> Any:
        """The class or file; of a class that a function makes anew for each model, this model's."""
        kinds = {(kind.__module__, kind.__qualname__): kind for kind in user_classes(model)}
        owner: Any = self.place[1]
        return kinds.get((owner.__module__, owner.__qualname__), owner) if isinstance(owner, type) else owner

    def restore(self, model: nn.Module, value: Any) -> None:
        """Give an attribute that all models share this value, which forward may then change."""
        if self.place[1] is None or value is _NO_COPY:
            return
        owner = self._owner_in(model)
        current: Any = getattr(owner, self.name, None)
        if isinstance(current, (dict, list, set, deque)) and type(value) is type(current):  # others may hold it, too
            current.clear()
            getattr(current, "update" if hasattr(current, "update") else "extend")(value)
        else:
            setattr(owner, self.name, value)


def kept_state(model: nn.Module) -> State:
    """Return what forward could keep: attributes of modules, except parameters and modules, of classes and of files."""
    key, held = _Key(model), dict[tuple[Place, str], object]()
    for path, module in model.named_modules():
        of_torch = is_of_torch(type(module))
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and (not of_torch or isinstance(value, _OF_USER)):
                held[(path, None), name] = key.of(value)
        if not of_torch:
            held |= {((path, None), name): "buffer" for name, b in module._buffers.items() if b is not None}
    for place in _shared_places(model):
        held |= {(place, name): key.of(value) for name, value in variables(place[1]).items()}
    return held


def changed_attributes(model: nn.Module, before: State) -> Iterator[KeptAttribute]:
    """Yield the attributes that changed since `before` and that are shared by all models of the process."""
    for (place, name), key in kept_state(model).items():
        if place[1] is not None and key != before.get((place, name)):
            yield KeptAttribute(place, name, "")


def kept_attributes(model: nn.Module, before: State) -> Iterator[KeptAttribute]:
    """Yield the attributes that changed since `before` and that some code of the user reads."""
    after = kept_state(model)
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    if not changed:
        return
    of_classes = {kind: uses_in(kind) for kind in user_classes(model)}
    of_files = {owner.__name__: uses_in(owner) for _, owner in _shared_places(model) if isinstance(owner, ModuleType)}
    near = [use for name in {kind.__module__ for kind in of_classes} for use in of_files.get(name, [])]
    near += [use for of_class in of_classes.values() for use in of_class]
    everywhere = [*near, *(use for of_file in of_files.values() for use in of_file)]
    for place, name in sorted(changed, key=lambda key: (key[0][0], key[1])):
        path, owner = place
        uses = [use for use in (everywhere if owner else near) if use.name == name]
        if not isinstance(owner, ModuleType):
            uses = [use for use in uses if not use.is_variable]
        kinds = () if owner else type(model.get_submodule(path)).__mro__
        own = everywhere if owner else [use for kind in kinds for use in of_classes.get(kind, [])]
        changes = [use.location for use in own if use.name == name and not use.is_read]
        if not uses or any(use.is_read for use in uses):
            yield KeptAttribute(place, name, next(iter(changes), ""))


def has_same_content(a: Any, b: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether two values hold the same tensors and numbers; False if unknown."""
    if type(a) is not type(b) or depth == 0 or a is _NO_COPY:
        return False
    if isinstance(a, Tensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.allclose(a, b, **TOLERANCE, equal_nan=True)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(has_same_content(a[key], b[key], depth - 1) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(has_same_content(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, (*_PLAIN, *_COMPARABLE)):
        return bool(a == b or (a != a and b != b))  # NaN
    if a is b:  # a function, or a member of an enumeration
        return True
    return bool(attributes := _attributes(a)) and has_same_content(attributes, _attributes(b), depth - 1)


def _shared_places(model: nn.Module) -> list[tuple[str, type | ModuleType]]:
    """What all models of a process share, by name."""
    owners = files_and_classes([type(module) for module in model.modules()])
    return [(o.__name__ if isinstance(o, type) else Path(o.__file__ or "").name, o) for o in owners]


class _Key:
    """Makes keys that stay equal as long as a value is neither changed nor replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._registered = {id(module) for module in model.modules()}
        self._seen: set[int] = set()

    def of(self, value: Any) -> object:
        """Return the key of an attribute's value."""
        self._seen.clear()
        try:
            return self._of(value, _MAX_DEPTH)
        except Exception:  # of an object that does not know its length before it is loaded
            return id(value)

    def _of(self, value: Any, depth: int) -> object:
        if isinstance(value, _PLAIN):
            return type(value), repr(value)  # NaN equals itself here
        if isinstance(value, _CLOSED) or id(value) in self._registered or id(value) in self._seen or depth == 0:
            return id(value)
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            return id(value), value._version, _checksum(value.detach())  # writes by numpy do not change the version
        if isinstance(value, np.ndarray):
            return id(value), _checksum(value)
        if isinstance(value, GENERATORS):
            return id(value), str(pytree.tree_map_only(Tensor, Tensor.tolist, generator_state(value)))
        if isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
            return id(value), tuple((repr(key), self._of(item, depth - 1)) for key, item in value.items())
        if isinstance(value, (list, tuple, set, frozenset, deque)) and len(value) <= _MAX_ITEMS:
            return id(value), tuple(self._of(item, depth - 1) for item in value)
        if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
            return id(value), len(value)
        if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            state = repr(value)  # of itertools.count; others tell it only to pickle, and a generator not at all
            with suppress(Exception):
                state += repr(value.__reduce__())
            return id(value), state
        is_of_library = callable(value) and is_of_torch(type(value)) and not isinstance(value, nn.Module)
        attributes = {} if is_of_library else _attributes(value)
        return id(value), tuple((name, self._of(item, depth - 1)) for name, item in attributes.items())


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its dictionary and its slots."""
    held = getattr(value, "__dict__", None)
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__ if kind.__module__ != "builtins"]
    names = [name for names in slots for name in ((names,) if isinstance(names, str) else names)]
    in_slots = {name: getattr(value, name) for name in names if name[:2] != "__" and hasattr(value, name)}
    return in_slots | (held if isinstance(held, dict) else {})


def _checksum(array: Tensor | np.ndarray[Any, Any]) -> int | None:
    """A checksum of the elements; None of large arrays, which are data, and of tensors outside the CPU's memory."""
    with suppress(Exception):
        if array.nbytes <= _MAX_BYTES:
            elements = array.reshape(-1).view(torch.uint8).numpy() if isinstance(array, Tensor) else array
            return crc32(np.asarray(elements).tobytes())
    return None
