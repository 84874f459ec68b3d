"""Values that the user's functions keep from one update to the next, outside the model and the optimizer.

For example:

    AVERAGE = {}             a variable that loss(), metrics(), after_update() or scheduler() changes and reads
    loss = CenterLoss()      buffers, parameters and other attributes of an object that such a function uses or is

Each change is found by comparing a value with what it was when the worker started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.user_modules import CODE, user_module, user_modules
from pdtool.frontend.variable_uses import collected, kept_between_calls, variables_used
from pdtool.runtime.stage.component import CannotPackError, moved_to, pack, tensors_on_cpu, unpack

_READERS = ("loss", "collate", "dataset", "scheduler")  # of variables that after_update() changes
_KEEPERS = ("loss", "metrics", "summarize_metrics", "after_update", "scheduler")
_OF_MODULES = vars(nn.Module()).keys()
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
        for module, name in dict.fromkeys([*lines, *sorted(used)]):
            variable, line = _Variable(modules[module], name, modules, model), lines.get((module, name))
            if line or (variable.is_object and id(variable.value) not in objects):
                objects.add(id(variable.value))
                variable.start()
                label = name if modules[module] is file.module else f"{user_module(module)}.{name}"
                self._variables[label] = variable
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
                for key, tensor in pack(record):
                    yield name, f"{self._number}.{key}" if key else f"{self._number}", tensor

    def load_state_dict(self, state: Mapping[str, _Entries]) -> None:
        """Set the values that had changed."""
        for name, entries in ((name, entries) for name, entries in state.items() if entries):
            by_stage: dict[int, dict[str, Tensor]] = {}
            for entry, tensor in entries.items():
                number, _, key = entry.partition(".")
                by_stage.setdefault(int(number), {})[key] = tensor
            records = {number: unpack(of_stage) for number, of_stage in by_stage.items()}
            values = self._chosen(by_stage, records)
            is_lost = values is None or any(record["is_lost"] for record in records.values())
            for path, value in (values or {}).items():
                try:
                    self._variables[name].assign(path, value)
                except (AttributeError, TypeError):  # model.py was edited: its object has no such attribute now
                    is_lost = True
            if is_lost:
                self.lost.append(f"{name} ({self._lines[name]})" if name in self._lines else name)

    def _chosen(
        self, by_stage: Mapping[int, _Entries], records: Mapping[int, Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        """Return the values of a variable for this stage, by path; None if those of other stages differ."""
        values: dict[int, Any] = {
            number: moved_to(self._device, record["values"], record["on_cpu"]) for number, record in records.items()
        }
        if any(record["stages"] == len(self._stages) for record in records.values()):
            return dict(values.get(self._number, {}))
        chosen = {}
        for path in dict.fromkeys(path for of_stage in values.values() for path in of_stage):
            found = [of_stage[path] for of_stage in values.values() if path in of_stage]
            merged = {key: value for each in found if isinstance(each, dict) for key, value in each.items()}
            if all(isinstance(each, dict) for each in found) and merged.keys() <= self._all_parameters:
                chosen[path] = {key: value for key, value in merged.items() if key in self._stages[self._number]}
            else:
                first, *others = (dict(pack({"value": each})) for each in found)
                if not all(_are_same(first, other) for other in others):
                    return None
                chosen[path] = found[0]
        return chosen

    @property
    def _all_parameters(self) -> set[str]:
        return {name for names in self._stages for name in names}

    def restore_first(self) -> None:
        """Set all values to those of the start."""
        for variable in self._variables.values():
            variable.restore_first()


class _Snapshot(NamedTuple):
    """What shows a change of a value: its numbers and texts, and its tensors."""

    numbers: bytes
    tensors: dict[str, Tensor]
    versions: list[int]  # of parameters, which may be too large to be copied

    @property
    def value(self) -> Any:
        """The value itself, with the tensors of the snapshot."""
        return unpack({"": torch.frombuffer(bytearray(self.numbers), dtype=torch.uint8)} | self.tensors)["value"]

    def copied(self) -> _Snapshot:
        """Return the same, with copies of tensors that may change."""
        copies = {k: t if isinstance(t, nn.Parameter) else t.detach().clone() for k, t in self.tensors.items()}
        return self._replace(tensors=copies)

    def is_same(self, other: _Snapshot) -> bool:
        """Whether the value is that of another moment."""
        are_untouched = (self.numbers, self.versions) == (other.numbers, other.versions)
        return are_untouched and _are_same(self.tensors, other.tensors)


class _Variable:
    """A variable of the user's: its value or, of an object, the values of its attributes and of those of objects in it.

    Values have a path in the variable, such as `meter.average`: "" is its own.

    Args:
        module: the module that has the variable.
        modules: the user's modules, by name: attributes of objects of their classes, and of torch's modules, count.
        model: values that share memory with it cannot be saved.
    """

    def __init__(self, module: ModuleType, name: str, modules: Collection[str], model: nn.Module) -> None:
        self._module, self._name, self._modules, self._model = module, name, modules, model
        self._first: dict[str, _Snapshot | None] = {}

    def start(self) -> None:
        """Take the present values as those of the start."""
        self._first = {path: state and state.copied() for path, (state, _) in self._states().items()}

    @property
    def value(self) -> Any:
        """Its value; of a bound method the object."""
        value = getattr(self._module, self._name, None)
        return value.__self__ if isinstance(value, MethodType) else value

    @property
    def is_object(self) -> bool:
        """Whether its attributes count."""
        return self._attributes(self.value) is not None

    def changed(self) -> tuple[dict[str, Any], bool]:
        """Return the values that have changed since the start, and whether there are others that cannot be saved."""
        states = self._states()
        values = {}
        for path, (state, value) in states.items():
            first = self._first.get(path)
            if state and not (first and state.is_same(first)):
                values[path] = value
        return values, any(state is None and (not path or self._first.get(path)) for path, (state, _) in states.items())

    def assign(self, path: str, value: Any) -> None:
        """Set a value; inside the object that it is in, if that can be changed, because others may refer to it."""
        *outer, name = path.split(".") if path else [self._name]
        owner = reduce(getattr, outer, self.value if path else self._module)
        current: Any = getattr(owner, name, None)
        match current, value:
            case Tensor(), Tensor() if current.shape == value.shape:
                with torch.no_grad():
                    current.copy_(value)
            case list(), list():
                current[:] = value
            case (dict(), dict()) | (set(), set()):
                current.clear()
                current.update(value)
            case deque(), deque():
                current.clear()
                current.extend(value)
            case _:
                setattr(owner, name, value)

    def restore_first(self) -> None:
        """Set the values that have changed to those of the start."""
        for path, (state, _) in self._states().items():
            first = self._first.get(path)
            if first and not (state and state.is_same(first)):
                self.assign(path, first.copied().value)

    def _values(self, value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
        """Yield the path of each value in a value, and the value."""
        attributes = self._attributes(value)
        if attributes is None:
            yield path, value
        elif id(value) not in seen:
            seen.add(id(value))
            for name, each in attributes.items():
                yield from self._values(each, f"{path}.{name}" if path else name, seen)

    def _attributes(self, value: Any) -> dict[str, Any] | None:
        """The attributes of an object, by name; None if its attributes do not count, or it is part of the model."""
        if isinstance(value, nn.Module):
            own = {id(part) for part in (*self._model.modules(), *self._model.parameters())}
            if not own.isdisjoint(map(id, (*value.modules(), *value.parameters()))):
                return None
            others = {name: each for name, each in vars(value).items() if name not in _OF_MODULES}
            return {**value._parameters, **value._buffers, **value._modules, **others}
        is_of_user = type(value).__module__ in self._modules and not isinstance(value, CODE)
        return {**vars(value)} if is_of_user and hasattr(value, "__dict__") else None

    def _states(self) -> dict[str, tuple[_Snapshot | None, Any]]:
        """The state of each value, by path, and the value; None: it cannot be saved."""
        of_model = {tensor.untyped_storage().data_ptr() for tensor in self._model.state_dict().values()} - {0}
        return {path: (_state_of(value, of_model), value) for path, value in self._values(self.value, "", set())}


def variables_kept(file: ModelFile, modules: Mapping[str, ModuleType]) -> dict[tuple[str, str], str]:
    """Return the line where the user's functions change each variable that they keep from one update to the next.

    Args:
        modules: the user's modules, by name.

    Returns:
        (name of the module, variable) -> line.
    """
    kept: dict[tuple[str, str], str] = {}
    for reader in filter(file.has, _READERS if file.has("after_update") else ()):
        for line, variable in collected(file.module, "after_update", reader):
            kept.setdefault((file.module.__name__, variable.partition(".")[0]), line)  # of an attribute, the object
    for function in filter(file.has, _KEEPERS):
        for line, module, variable in kept_between_calls(file.module, function, modules):
            kept.setdefault((module, variable), line)
    return kept


def _state_of(value: Any, of_model: Collection[int]) -> _Snapshot | None:
    """Return the state of a value; None if it cannot be saved.

    Args:
        of_model: addresses of the model's tensors.
    """
    for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)):
        is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
        if type(tensor) not in (Tensor, nn.Parameter) or not is_dense or tensor.is_inference():
            return None
        if tensor.untyped_storage().data_ptr() in of_model:
            return None
    with suppress(CannotPackError, RecursionError):
        tensors = dict(pack({"value": value}))
        numbers = bytes(tensors.pop("").numpy())
        return _Snapshot(numbers, tensors, [t._version for t in tensors.values() if isinstance(t, nn.Parameter)])
    return None


def _are_same(entries: _Entries, other: _Entries) -> bool:
    """Whether two dicts have the same tensors; user code may have moved some to another device."""
    if entries.keys() != other.keys():
        return False
    pairs = [(tensor, other[key]) for key, tensor in entries.items()]
    return all(a is b or (a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())) for a, b in pairs)
