"""What an optimizer keeps, as tensors of a checkpoint: of any type, by the names of parameters.

    optimizer.features.0.weight                  JSON, as bytes: updates, state of the parameter and of its group
    optimizer.features.0.weight.state.exp_avg    a tensor in it, which the JSON names: ["tensor", "state.exp_avg"]

`pack` and `unpack` go between values and JSON. Checkpoints of pdtool before 0.1 have a key for each entry of the state
instead, which `unpack` reads as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdtool.errors import with_article

_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_NUMBER = ":number"  # how an older checkpoint marks an entry that is a Python number


class CannotPackError(ValueError):
    """A value is neither a tensor, a number, a text nor a container of these."""


def pack(record: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the key `prefix` with a record as JSON, and the key of each tensor in it.

    Raises:
        CannotPackError: it holds something that cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(dict(record), "", tensors))
    yield prefix, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    for key, tensor in tensors.items():
        yield f"{prefix}.{key}", tensor


def unpack(saved: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Return the record that was packed; raises KeyError or ValueError where the keys are not as `pack` made them."""
    below = {key.removeprefix(f"{prefix}."): value for key, value in saved.items() if key.startswith(f"{prefix}.")}
    if prefix not in saved:
        return _record_of_entries(below)
    return dict(_unpacked(json.loads(bytes(saved[prefix].numpy()).decode()), below))


def _record_of_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """The record of a parameter in an older checkpoint, which has a key for each entry of the state."""
    record = {key: entries.pop(key) for key in ("last_step",) if key in entries}
    updates = int(entries.pop("updates", 0))
    state = {key.removesuffix(_NUMBER): v.item() if key.endswith(_NUMBER) else v for key, v in entries.items()}
    return {"updates": updates, "state": state, **record}


def _packed(value: object, key: str, tensors: dict[str, Tensor]) -> Any:
    """JSON of a value: None, texts, whole numbers and True stand for themselves, all else is [type, content].

    Args:
        key: of the value, if it is a tensor.
        tensors: those inside of the value by their keys; filled here.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Tensor):
        while key in tensors:
            key += "'"
        tensors[key] = value
        return ["tensor", key]
    if isinstance(value, np.generic):
        return _packed(value.item(), key, tensors)
    if type(value) in (float, complex):
        return [type(value).__name__, repr(value)]  # exact, and also where it is infinite
    dot = "." if key else ""
    if isinstance(value, dict):
        items = [(_packed(k, key, tensors), _packed(v, f"{key}{dot}{k}", tensors)) for k, v in value.items()]
        return ["dict", items]
    if type(value) in _CONTAINERS.values() and isinstance(value, (list, tuple, set, frozenset)):
        return [type(value).__name__, [_packed(v, f"{key}{dot}{i}", tensors) for i, v in enumerate(value)]]
    raise CannotPackError(with_article(type(value).__name__))


def _unpacked(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, content = packed
    match kind:
        case "tensor":
            return tensors[content]
        case "float":
            return float(content)
        case "complex":
            return complex(content)
        case "dict":
            return {_unpacked(key, tensors): _unpacked(value, tensors) for key, value in content}
    return _CONTAINERS[kind](_unpacked(value, tensors) for value in content)
