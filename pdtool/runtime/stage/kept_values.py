"""Values that the user's functions keep from one update to the next, outside the model and the optimizer.

For example:

    AVERAGE = {}             a variable that loss(), metrics() or after_update() changes, and one of these reads later
    loss = CenterLoss()      buffers, parameters and other attributes of an object that such a function uses or is
    loss = counting(loss)    variables of a closure, default arguments, and arguments of a functools.partial

Each change is found by comparing a value with what it was when the worker started.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.random_numbers import generator_state, has_known_state, set_generator_state
from pdtool.frontend.user_modules import CODE, user_module, user_modules
from pdtool.frontend.variable_uses import (
    bound_values,
    collected,
    is_bound,
    kept_between_calls,
    set_in_closure,
    variables_used,
)
from pdtool.runtime.stage.averaging import without_repetition
from pdtool.runtime.stage.component import CannotPackError, moved_to, pack, tensors_on_cpu, unpack

_KEEPERS = ("loss", "after_update", "scheduler", "metrics", "summarize_metrics", "sampler")
# Functions that may assign a variable -> those that may read it later.
_READERS = {"after_update": ("loss", "collate", "dataset", "scheduler", "metrics"), "metrics": ("loss",)}
_OF_MODULES = vars(nn.Module()).keys()
_CONTAINERS = (dict, list, set, deque, tuple, frozenset)
_MOST_SEARCHED = 100  # values in a container, of which some may be generators of random numbers
_NO_OBJECTS = (*CODE, *_CONTAINERS, Tensor, np.ndarray, Enum)  # values themselves, whatever attributes they have
_Entries = Mapping[str, Tensor]


class KeptValues:
    """The component of a stage for values that user code keeps, if they have changed since the start.

    Each stage's worker has values of its own: the loss is computed at the last stage, and after_update() gets only the
    parameters of a stage. From a checkpoint of a plan with as many stages, a stage reads its own values. From another
    one it reads a value if all stages that changed it have the same, or if it is a dict of parameters, such as that of
    an EMA, which is put together from all stages.

    Args:
        model: the worker's model, which has a component of its own.
        stages: names of the parameters of each stage.
        number: the stage.

    Attributes:
        names: variables that may have changed.
        lost: variables of which the checkpoint has no value for this stage, although they had changed.
    """

    key = "kept"

    def __init__(
        self, file: ModelFile, model: nn.Module, stages: Sequence[Collection[str]], number: int, device: torch.device
    ) -> None:
        self._stages, self._number, self._device = stages, number, device
        modules = user_modules() | {file.module.__name__: file.module}
        self._lines, self._variables, objects = dict[str, str](), dict[str, _Variable](), set[int]()
        lines, keepers = variables_kept(file, modules), [*filter(file.has, _KEEPERS)]
        used = {each for keeper in keepers for each in variables_used(file.module, keeper, modules)}
        used |= {(file.module.__name__, name) for name in (*file.modules, *keepers)}
        own_first = sorted(used, key=lambda each: (each[0] != file.module.__name__, each))
        for module, name in dict.fromkeys([*lines, *own_first]):
            variable, line = _Variable(modules[module], name, modules, model), lines.get((module, name))
            if any(variable.value is part for part in model.modules()):  # its tensors are in other components
                continue
            is_kept = line or _holds_generator(variable.value)
            if is_kept or (variable.is_object and id(variable.value) not in objects):
                objects.add(id(variable.value))
                variable.start()
                place = [] if modules[module] is file.module else user_module(module).split(".")
                label = "/".join([*place, name])  # without a dot: no key of a checkpoint begins with another one
                self._variables[label] = variable
                line = line or variable.function_line
                self._lines |= {label: line} if line else {}
        self.names = self._variables.keys()
        self.lost: list[str] = []

    def state_dict(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield a record of each variable that has changed; its entries begin with the number of the stage."""
        for name, variable in self._variables.items():
            values, is_lost = variable.changed()
            is_lost &= name in self._lines
            if values or is_lost:
                on_cpu = tensors_on_cpu(values, self._device)
                record = {"stages": len(self._stages), "values": values, "on_cpu": on_cpu, "is_lost": is_lost}
                record |= {"classes": variable.classes(), "replaced": variable.replaced(values)}
                for key, tensor in pack(record):
                    yield name, f"{self._number}.{key}" if key else f"{self._number}", tensor

    def load_state_dict(self, state: Mapping[str, _Entries]) -> None:
        """Set the values that had changed."""
        for name, entries in ((name, entries) for name, entries in state.items() if entries):
            records = _Record.of_stages(entries, self._device)
            values: Mapping[str, Any] | None
            if any(record.stages == len(self._stages) for record in records.values()):  # the same plan
                records = {number: record for number, record in records.items() if number == self._number}
                values = records[self._number].values if records else {}
            else:
                values = self._merged([record.values for record in records.values()])
            classes = {path: kind for record in records.values() for path, kind in record.classes.items()}
            replaced = {part for record in records.values() for part in record.replaced}
            is_set = values is not None and self._variables[name].assign(values, classes, replaced)
            if not is_set or any(record.is_lost for record in records.values()):
                self.lost.append(f"{name} ({self._lines[name]})" if name in self._lines else name)

    def _merged(self, of_stages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return this stage's values of a variable, by path, from those of another plan's stages; None if they differ.

        A dict of parameters is put together from all stages.
        """
        merged = {}
        for path in dict.fromkeys(path for values in of_stages for path in values):
            found = [values[path] for values in of_stages if path in values]
            entries = {key: value for each in found if isinstance(each, dict) for key, value in each.items()}
            if all(isinstance(each, dict) for each in found) and entries.keys() <= self._all_parameters:
                merged[path] = {key: value for key, value in entries.items() if key in self._stages[self._number]}
            else:
                first, *others = (dict(pack({"value": each})) for each in found)
                if not all(_are_same(first, other) for other in others):
                    return None
                merged[path] = found[0]
        return merged

    @property
    def _all_parameters(self) -> set[str]:
        return {name for names in self._stages for name in names}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all values at the end of this context, except parameters of the user's modules."""
        with ExitStack() as opened:
            for variable in self._variables.values():
                opened.enter_context(variable.restored())
            yield


class _Record(NamedTuple):
    """What a stage has saved of a variable.

    Attributes:
        stages: the number of stages of its plan.
        values: those that had changed, by path.
        is_lost: whether there were others that cannot be saved.
        classes: the name of the class of each object, by path.
        replaced: ids of the values, and of parts of them, that training had made anew.
    """

    stages: int
    values: Mapping[str, Any]
    is_lost: bool
    classes: Mapping[str, str]
    replaced: Collection[int]

    @classmethod
    def of_stages(cls, entries: _Entries, device: torch.device) -> dict[int, _Record]:
        """Return the record of each stage, by its number, with its tensors on the device that they were on."""
        by_stage: dict[int, dict[str, Tensor]] = {}
        for entry, tensor in entries.items():
            number, _, key = entry.partition(".")
            by_stage.setdefault(int(number), {})[key] = tensor
        return {number: cls._of(unpack(of_stage), device) for number, of_stage in by_stage.items()}

    @classmethod
    def _of(cls, record: Mapping[str, Any], device: torch.device) -> _Record:
        values = moved_to(device, record["values"], record["on_cpu"])
        replaced = {
            id(part)
            for path, flags in record.get("replaced", {}).items()
            for part, is_replaced in zip(_parts_of(values[path]), flags, strict=False)
            if is_replaced
        }
        return cls(record["stages"], values, record["is_lost"], record.get("classes", {}), replaced)


class _Snapshot(NamedTuple):
    """What shows a change of a value: its entries in a checkpoint, and the versions of parameters among them, which may
    be too large to be copied."""

    entries: dict[str, Tensor]
    versions: list[int]

    def copied(self) -> _Snapshot:
        """Return the same, with copies of tensors that may change."""
        copies = {k: t if isinstance(t, nn.Parameter) else t.detach().clone() for k, t in self.entries.items()}
        return self._replace(entries=copies)

    def is_same(self, other: _Snapshot) -> bool:
        """Whether the value is that of another moment."""
        return self.versions == other.versions and _are_same(self.entries, other.entries)


class _Location(NamedTuple):
    """A place of a value: under `name` in a dict, such as that of an object's attributes.

    Attributes:
        path: `meter.average` for an attribute of an object in the variable; "" for the variable's own value.
    """

    path: str
    owner: dict[str, Any]
    name: str

    @property
    def value(self) -> Any:
        return self.owner[self.name]


class _Variable:
    """A variable of the user's: its value or, of an object, the values of its attributes and of those of objects in it.
    Of a function, also the values that are bound to it.

    Args:
        module: the module that has the variable.
        modules: the user's modules, by name: attributes of objects of their classes, and of torch's modules, count.
        model: values that share memory with it cannot be saved.
    """

    def __init__(self, module: ModuleType, name: str, modules: Collection[str], model: nn.Module) -> None:
        self._module, self._name, self._modules, self._model = module, name, modules, model
        self._first: dict[str, _Snapshot | None] = {}
        self._parts: dict[int, Any] = {}  # id -> container, tensor or array of the start

    def start(self) -> None:
        """Take the present values as those of the start."""
        for location, state in self._states():
            self._first[location.path] = state and state.copied()
            self._parts |= {id(part): part for part in _parts_of(location.value)} if state else {}

    @property
    def value(self) -> Any:
        """Its value; of a bound method the object."""
        value = getattr(self._module, self._name, None)
        return value.__self__ if isinstance(value, MethodType) else value

    @property
    def function_line(self) -> str:
        """Return `model.py:12`, the definition of the function that it is; "" if it is none."""
        function = self.value.func if isinstance(self.value, partial) else self.value
        code = getattr(inspect.unwrap(function), "__code__", None) if isinstance(function, FunctionType) else None
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""

    @property
    def is_object(self) -> bool:
        """Whether its attributes count."""
        return bool(self._owners(self.value, {id(module) for module in self._model.modules()}))

    def changed(self) -> tuple[dict[str, Any], bool]:
        """Return the values that have changed since the start, and whether there are others that cannot be saved."""
        values, is_lost = {}, False
        for (path, owner, name), state in self._states():
            first = self._first.get(path)
            if state and not (first and state.is_same(first)):
                values[path] = owner[name]
            is_lost |= state is None and bool(not path or first)
        return values, is_lost

    def replaced(self, values: Mapping[str, Any]) -> dict[str, list[bool]]:
        """Return, by path, which containers, tensors and arrays in the values are no objects of the start."""
        return {path: [id(part) not in self._parts for part in _parts_of(value)] for path, value in values.items()}

    def classes(self) -> dict[str, str]:
        """Return the name of the class of each object, by path."""
        return {path: type(each).__qualname__ for path, each in self._places()[1].items()}

    def assign(self, values: Mapping[str, Any], classes: Mapping[str, str], replaced: Collection[int]) -> bool:
        """Set values, by path.

        Args:
            classes, replaced: see _Record.

        Returns:
            Whether the variable has a place for each, in an object of the same class. It may not if the user's file was
            edited, or an object was replaced in training.
        """
        (places, objects), has_all = self._places(), True
        locations = {location.path: location for location in places}
        for path, value in values.items():
            inner, _, name = path.rpartition(".")
            kind = type(objects[inner]).__qualname__ if inner in objects else ""
            if classes.get(inner, kind) != kind:
                has_all = False
            elif path in locations:
                current = locations[path].value
                locations[path].owner[locations[path].name] = made = _updated(current, value, replaced)
                if is_bound(name) and made is not current:
                    has_all &= set_in_closure(objects[inner], name, made)
            elif path and inner in objects and not is_bound(name):  # an attribute that a call makes
                vars(objects[inner])[name] = value
            else:
                has_all &= inner in objects and set_in_closure(objects[inner], name, value)
        return has_all

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore its values at the end of this context, except parameters."""
        locations, objects = self._places()
        attributes = [(vars(each), {**vars(each)}) for each in objects.values()]
        bound = [(each, bound_values(each)) for each in objects.values() if isinstance(each, FunctionType)]
        saved = [location for location in locations if self._first.get(location.path)]
        values = [(location, location.value) for location in saved if not isinstance(location.value, nn.Parameter)]
        contents = {id(part): (part, _copied(part)) for _, value in values for part in _parts_of(value)}
        yield
        for owner, before in attributes:
            owner.clear()
            owner.update(before)
        for function, before in bound:
            for name, value in before.items():
                set_in_closure(function, name, value)
        for location, value in values:
            location.owner[location.name] = value
        for value, copied in contents.values():
            _fill(value, copied)

    def _places(self) -> tuple[list[_Location], dict[str, Any]]:
        """Return the places of all values, and each object by its path."""
        places, objects = list[_Location](), dict[str, Any]()
        own = {id(module) for module in self._model.modules()}
        seen: set[int] = set()
        root = vars(self._module) if self._name in vars(self._module) else {self._name: None}
        left = [(_Location("", root, self._name), self.value)]
        while left:
            location, value = left.pop()
            value = value.__self__ if isinstance(value, MethodType) else value
            if not (owners := self._owners(value, own)):
                places.append(location)
            elif id(value) not in seen:
                seen.add(id(value))
                objects[location.path] = value
                prefix = f"{location.path}." if location.path else ""
                inner = [
                    (_Location(f"{prefix}{name}", owner, name), each)
                    for owner in owners
                    for name, each in owner.items()
                    if not isinstance(value, nn.Module) or name not in _OF_MODULES
                ]
                left += reversed(inner)
        return places, objects

    def _owners(self, value: Any, own: Collection[int]) -> list[dict[str, Any]]:
        """The dicts of an object's attributes; none if its attributes do not count.

        Args:
            own: ids of the model's modules.
        """
        if isinstance(value, nn.Module):
            of_module: list[dict[str, Any]] = [value._parameters, value._buffers, value._modules, vars(value)]
            return [] if id(value) in own else of_module
        if isinstance(value, partial) or (isinstance(value, FunctionType) and value.__module__ in self._modules):
            return [vars(value), bound_values(value)]
        is_of_user = type(value).__module__ in self._modules and not isinstance(value, _NO_OBJECTS)
        return [vars(value)] if is_of_user and hasattr(value, "__dict__") else []

    def _states(self) -> Iterator[tuple[_Location, _Snapshot | None]]:
        """Yield the place of each value, and its state; None: it cannot be saved."""
        of_model = {tensor.untyped_storage().data_ptr() for tensor in self._model.state_dict().values()} - {0}
        for location in self._places()[0]:
            yield location, _state_of(location.value, of_model)


def _holds_generator(value: object, depth: int = 4) -> bool:
    """Whether it is a generator of random numbers, or a container with some: each call of one changes it."""
    if isinstance(value, _CONTAINERS) and depth and len(value) <= _MOST_SEARCHED:
        return any(_holds_generator(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value))
    return has_known_state(value)


def _kind_of(generator: Any) -> tuple[type, type]:
    """The kind of a generator, whose state another one of this kind can take."""
    return type(generator), type(getattr(generator, "_bit_generator", None))


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield the containers, tensors, arrays and generators of random numbers in a value, from the outside in."""
    if isinstance(value, (*_CONTAINERS, Tensor, np.ndarray)) or has_known_state(value):
        yield value
        if isinstance(value, _CONTAINERS):
            for each in value.values() if isinstance(value, dict) else value:
                yield from _parts_of(each)


def _copied(part: Any) -> Any:
    """Return a copy of a container, tensor, array or generator, without copies of what a container holds."""
    if isinstance(part, Tensor):
        return part.detach().clone()
    return copy.deepcopy(part) if has_known_state(part) else copy.copy(part)


def _updated(current: Any, value: Any, replaced: Collection[int]) -> Any:
    """Return `current` with the content of `value`, also in what it contains.

    Args:
        replaced: ids of values that are used themselves; so is one that does not fit into what is there.
    """
    is_replaced = id(value) in replaced
    match current, value:
        case (Tensor(), Tensor()) | (np.ndarray(), np.ndarray()):
            is_replaced |= (current.shape, current.dtype) != (value.shape, value.dtype)
        case (list(), list()):
            more = [None] * (len(value) - len(current))
            value = [_updated(*pair, replaced) for pair in zip([*current, *more], value, strict=False)]
        case (dict(), dict()):
            value = {key: _updated(current.get(key), each, replaced) for key, each in value.items()}
        case (set(), set()) | (deque(), deque()):
            pass
        case _ if has_known_state(current) and has_known_state(value) and _kind_of(current) == _kind_of(value):
            pass
        case _:
            return value
    if is_replaced:
        return value
    _fill(current, value)
    return current


def _fill(current: Any, value: Any) -> None:
    """Give a container, tensor or array the content of another one of its kind, if it can be written."""
    match current:
        case Tensor() if current.shape != value.shape:  # it was resized
            current.data = value
        case Tensor() if not _equal(current, value):
            with torch.no_grad():
                without_repetition(current).copy_(without_repetition(value, current))
        case np.ndarray() if current.flags.writeable:
            current[...] = value
        case list():
            current[:] = value
        case dict() | set():
            current.clear()
            current.update(value)
        case deque():
            current.clear()
            current.extend(value)
        case _ if has_known_state(current):
            set_generator_state(current, generator_state(value))


def variables_kept(file: ModelFile, modules: Mapping[str, ModuleType]) -> dict[tuple[str, str], str]:
    """Return the line where the user's functions change each variable that they keep from one update to the next.

    Args:
        modules: the user's modules, by name.

    Returns:
        (name of the module, variable) -> line.
    """
    kept: dict[tuple[str, str], str] = {}
    for function, readers in _READERS.items():
        for reader in filter(file.has, readers if file.has(function) else ()):
            for line, variable in collected(file.module, function, reader):
                kept.setdefault((file.module.__name__, variable.partition(".")[0]), line)  # of an attribute, the object
    for line, module, variable in kept_between_calls(file.module, [*filter(file.has, _KEEPERS)], modules):
        kept.setdefault((module, variable), line)
    return kept


def _state_of(value: Any, of_model: Collection[int]) -> _Snapshot | None:
    """Return the state of a value; None if it cannot be saved.

    Args:
        of_model: addresses of the model's tensors.
    """
    with suppress(CannotPackError, RecursionError):
        for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)):
            is_dense = tensor.layout is torch.strided and not (
                tensor.is_quantized or tensor.is_meta or tensor.is_nested
            )
            if type(tensor) not in (Tensor, nn.Parameter) or not is_dense or tensor.is_inference():
                return None
            if tensor.untyped_storage().data_ptr() in of_model:
                return None
        entries = dict(pack({"value": value}))
        return _Snapshot(entries, [t._version for t in entries.values() if isinstance(t, nn.Parameter)])
    return None


def _are_same(entries: _Entries, other: _Entries) -> bool:
    """Whether two dicts have the same tensors; user code may have moved some to another device."""
    if entries.keys() != other.keys():
        return False
    pairs = [(tensor, other[key]) for key, tensor in entries.items()]
    return all(a is b or (a.dtype == b.dtype and _equal(a.cpu(), b.cpu())) for a, b in pairs)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))
