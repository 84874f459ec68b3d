"""The components of a stage's checkpoint, and values of any type as tensors in it.

Each `Component` writes and reads its own part of a stage's checkpoint. A part has names of parameters or buffers, and
entries for each. worker/checkpoint.py puts the parts into files, with these keys:

    COMPONENT.NAME.ENTRY
    model.features.0.weight                      the parameter itself, by ModuleState: its only entry has no name
    optimizer.features.0.weight                  by NamedOptimizer: JSON, as bytes, of the state of the parameter
    optimizer.features.0.weight.state.exp_avg    a tensor in that, which the JSON names: ["tensor", "state.exp_avg"]

`ModuleState` is the component of the module itself. `pack` and `unpack` go between such records and entries.
Checkpoints of pdtool before 0.1 have an entry for each value of the state instead, which `unpack` reads as well.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pdtool.artifacts.bundle import Bundle
from pdtool.errors import FieldError, with_article
from pdtool.frontend.random_numbers import GENERATORS, generator_state, generator_with_state, has_known_state
from pdtool.runtime.stage.averaging import without_repetition
from pdtool.runtime.stage.pipeline_stage import PipelineStage

MODEL_KEY = "model"  # the component whose entries are the model itself, which can be exported
_NUMBERS: dict[str, type] = {"float": float, "complex": complex}
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_NUMBER = ":number"  # how an older checkpoint marks an entry that is a Python number


class Component(Protocol):
    """An object with a part of its own in the checkpoint of a stage."""

    @property
    def key(self) -> str:
        """The prefix of its keys in the file, without a dot."""

    @property
    def names(self) -> Collection[str]:
        """The parameters and buffers for which it reads entries, as the file names them."""

    def state_dict(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield its part: the name of a parameter or buffer, the entry ("" for the only one), and a tensor."""

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load its part, which another plan's run may have written.

        Args:
            state: each of `names` -> entry -> tensor; {} if the checkpoint has nothing of that name.

        Raises:
            FieldError: it belongs to another model; the field says what the model has, the text what the checkpoint
                has.
        """


class ModuleState:
    """The parameters and persistent buffers of a stage.

    It also writes entries that no stage reads: second names of the stage's parameters and buffers and, at the first
    stage, tensors that no operator uses.

    Args:
        model_state: state of the whole model.
        first_names: name of a parameter or buffer -> its first name in the model.
    """

    key = MODEL_KEY

    def __init__(
        self,
        stage: PipelineStage,
        bundle: Bundle,
        number: int,
        model_state: Mapping[str, Tensor],
        first_names: Mapping[str, str],
    ) -> None:
        self._stage = stage
        self.names: Sequence[str] = [name for name in stage.module.state_dict() if name in model_state]
        name_here = {first_names.get(name, name): name for name in self.names}
        held = stage.weights.by_name | dict(stage.module.named_buffers(remove_duplicate=False))
        used = {name for described in bundle.stages for name in (*described.parameters, *described.buffers)}
        used_first = {first_names.get(name, name) for name in used}
        self._unread: dict[str, Tensor] = {}
        for name in model_state.keys() - used:
            first_name = first_names.get(name, name)
            if first_name in name_here:
                self._unread[name] = held[name_here[first_name]]
            elif number == 0 and first_name not in used_first:
                self._unread[name] = model_state[name].detach()

    def state_dict(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the newest values, by name."""
        state = self._stage.module.state_dict()
        for name, value in ({name: state[name] for name in self.names} | self._unread).items():
            yield name, "", value

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the values into the newest parameters and buffers; raises FieldError if a shape differs."""
        self._stage.weights.bind_newest()
        current = self._stage.module.state_dict() | self._stage.weights.by_name
        for name in self.names:
            value, shape = state[name].get(""), list(current[name].shape)
            if value is None or list(value.shape) != shape:
                described = "no such tensor" if value is None else f"shape {list(value.shape)}"
                raise FieldError(f"{name} has shape {shape}", described)
            with torch.no_grad():
                without_repetition(current[name]).copy_(without_repetition(value, current[name]))


def tensors_on_cpu(values: Any, device: torch.device) -> list[bool]:
    """For each tensor in the values of a stage on a GPU, return whether it is on the CPU; [] for a stage on the CPU."""
    return [] if device.type == "cpu" else [leaf.is_cpu for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def moved_to(device: torch.device, values: Any, on_cpu: Iterable[bool]) -> Any:
    """Return loaded values, with their tensors on `device` or, by `tensors_on_cpu`, on the CPU."""
    stay = iter(on_cpu)
    return tree_map(lambda leaf: leaf if not isinstance(leaf, Tensor) or next(stay, False) else leaf.to(device), values)


class CannotPackError(ValueError):
    """A value is neither a tensor, a number, a text nor a container of these."""


def pack(record: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the entry "" with a record as JSON, and an entry for each tensor in it.

    Raises:
        CannotPackError: it holds something that cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(dict(record), "", tensors))
    yield "", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    yield from tensors.items()


def unpack(saved: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the packed record; raises KeyError or ValueError if `pack` did not make the entries."""
    if "" not in saved:
        return _record_of_entries(dict(saved))
    return dict(_unpacked(json.loads(bytes(saved[""].numpy()).decode()), saved))


def _record_of_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """The record of a parameter in an older checkpoint, which has an entry for each value of the state."""
    record = {key: entries.pop(key) for key in ("last_step",) if key in entries}
    updates = int(entries.pop("updates", 0))
    state = {key.removesuffix(_NUMBER): v.item() if key.endswith(_NUMBER) else v for key, v in entries.items()}
    return {"updates": updates, "state": state, **record}


def _packed(value: object, key: str, tensors: dict[str, Tensor]) -> Any:
    """JSON of a value: None, texts, integers and booleans stand for themselves, everything else is [type, content].

    Args:
        key: key of the value, if it is a tensor.
        tensors: tensors inside the value by their keys; filled here.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Tensor) and not hasattr(value, "__tensor_flatten__"):  # of tensors that consist of others
        while key in tensors:
            key += "'"
        tensors[key] = value
        return ["tensor", key]
    if isinstance(value, np.generic):
        return _packed(value.item(), key, tensors)
    if type(value) in _NUMBERS.values():
        return [type(value).__name__, repr(value)]  # exact, even for infinity
    if type(value) is np.ndarray and value.dtype.isnative:
        with suppress(TypeError):  # torch has no such dtype
            return ["array", _packed(torch.as_tensor(value.copy()), key, tensors)[1]]
    dot = "." if key else ""
    if isinstance(value, dict):
        if any(isinstance(k, Tensor) for k in value):  # other tensors would be its keys
            raise CannotPackError("a dict with tensors as keys")
        items = [(_packed(k, key, tensors), _packed(v, f"{key}{dot}{k}", tensors)) for k, v in value.items()]
        return ["dict", items]
    if type(value) is deque:
        return ["deque", [value.maxlen, _packed([*value], key, tensors)]]
    if type(value) in _CONTAINERS.values() and isinstance(value, (list, tuple, set, frozenset)):
        return [type(value).__name__, [_packed(v, f"{key}{dot}{i}", tensors) for i, v in enumerate(value)]]
    if has_known_state(value):
        return ["generator", [GENERATORS.index(type(value)), _packed(generator_state(value), key, tensors)]]
    raise CannotPackError(with_article(type(value).__name__))


def _unpacked(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, content = packed
    if kind in ("tensor", "array"):
        return tensors[content] if kind == "tensor" else tensors[content].numpy()
    if kind in _NUMBERS:
        return _NUMBERS[kind](content)
    if kind == "deque":
        maxlen, values = content
        return deque(_unpacked(values, tensors), maxlen)
    if kind == "generator":
        index, state = content
        return generator_with_state(GENERATORS[index], _unpacked(state, tensors))
    if kind == "dict":
        return {_unpacked(key, tensors): _unpacked(value, tensors) for key, value in content}
    return _CONTAINERS[kind](_unpacked(value, tensors) for value in content)
