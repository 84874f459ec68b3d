"""What a checkpoint holds of an optimizer: the state of each parameter, and settings that updates have changed.

Settings are the values of parameter groups, and numbers and texts in attributes. A setting is saved only if it is no
longer what optimizer() and scheduler() of model.py made it. So edits of model.py take effect in a resumed run.

The record of a parameter has these entries:

    state       the optimizer's state of the parameter
    on_cpu      for each tensor in it, whether it was on the CPU although the parameter was not
    group       changed settings of its parameter group
    optimizer   of the whole optimizer, and equal in all records: its class, its number of groups, its state of no
                parameter, and its changed attributes
    wrapped     attribute -> state of the parameter in the optimizer that this attribute holds, as in Lookahead
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import tensors_in
from pdtool.frontend.update_proof import NAMES_OF_GROUP, wrapped_optimizers
from pdtool.runtime.stage.component import CannotPackError, pack, tensors_on_cpu

NO_STATE: Mapping[str, Any] = {"state": {}, "group": {}, "optimizer": {}}  # the record of a parameter that never moves
_PLAIN = (bool, int, float, str)
_SAVED_APART = {"state", "param_groups", "defaults"}  # attributes that are no settings


class OptimizerState:
    """Makes the records of an optimizer's parameters, and loads them.

    Args:
        optimizer: as optimizer() and scheduler() have made it.
        steps_by_user: whether code outside torch takes part in its steps. Only then may these change settings.
    """

    def __init__(self, file: ModelFile, optimizer: Optimizer, *, steps_by_user: bool) -> None:
        self._file, self._optimizer, self._steps_by_user = file, optimizer, steps_by_user
        self._kind, self._has_warned = type(optimizer).__name__, False
        self._wrapped = wrapped_optimizers(optimizer)
        self._first_attributes = copy.deepcopy(_attributes(optimizer))
        self._first_groups = [copy.deepcopy(_settings(group)) for group in optimizer.param_groups]

    def records(
        self, parameters: Iterable[nn.Parameter], set_by_schedule: Collection[str]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the record of each parameter; warn once if a checkpoint cannot hold some state.

        Args:
            set_by_schedule: keys of parameter groups that only the learning-rate schedule sets, which sets them again.
        """
        whole = self._of_whole_optimizer()
        group_of = self._changed_settings(set_by_schedule)
        records = {}
        for p in parameters:
            state = self._packable(self._optimizer.state.get(p, {}))
            group, on_cpu = group_of.get(p, {}), tensors_on_cpu(state, p.device)
            records[p] = {"state": state, "on_cpu": on_cpu, "group": group, "optimizer": whole}
            if self._wrapped:
                states = {attribute: wrapped.state.get(p, {}) for attribute, wrapped in self._wrapped.items()}
                records[p]["wrapped"] = {attribute: self._packable(state) for attribute, state in states.items()}
        return records

    def _of_whole_optimizer(self) -> dict[str, Any]:
        saved = {id(wrapped.state) for wrapped in self._wrapped.values()}  # Lookahead has another name for it
        for name, value in vars(self._optimizer).items():
            if name in _SAVED_APART or id(value) in saved:
                continue
            if any(not isinstance(t, nn.Parameter) for t in tensors_in(value)):
                self._warn_once(
                    f"keeps tensors in its attribute {name}, which no checkpoint holds: a resumed run starts without "
                    "them; keep them in self.state[parameter]"
                )
        state = {key: value for key, value in self._optimizer.state.items() if not isinstance(key, Tensor)}
        return {
            "kind": self._kind,
            "groups": len(self._optimizer.param_groups),
            "state": self._packable(state),
            "attributes": _changed(_attributes(self._optimizer), self._first_attributes),
        }

    def _changed_settings(self, set_by_schedule: Collection[str]) -> dict[nn.Parameter, dict[str, Any]]:
        """For each parameter the settings of its group that steps have changed; of a later group, all settings."""
        group_of: dict[nn.Parameter, dict[str, Any]] = {}
        if self._steps_by_user:
            groups, of_later_group = self._optimizer.param_groups, dict[str, Any]()
            for group, first in zip_longest(groups, self._first_groups, fillvalue=of_later_group):
                changed = _changed(_settings(group), first)
                kept = self._packable({key: value for key, value in changed.items() if key not in set_by_schedule})
                group_of |= dict.fromkeys(group["params"], kept)
        return group_of

    def _packable(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the values that a checkpoint can hold."""
        packable = {}
        for key, value in values.items():
            try:
                list(pack({key: value}))
                packable[key] = value
            except CannotPackError as error:
                self._warn_once(
                    f"keeps {key!r}, {error}: checkpoints hold tensors, numbers, strings and containers of them, so a "
                    "resumed run starts without it"
                )
        return packable

    def _warn_once(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            sys.stderr.write(f"warning: {self._kind} {what}\n")

    def load(self, records: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Load the records of parameters; older checkpoints have only their states.

        An optimizer of another class begins with an empty state, and a warning says so.

        Raises:
            ModelError: the optimizer had another number of parameter groups.
        """
        whole: Mapping[str, Any] = next((record.get("optimizer", {}) for record in records.values()), {})
        if whole.get("kind", self._kind) != self._kind:
            sys.stderr.write(
                f"warning: optimizer() makes {self._kind}, but the run to resume was trained with {whole['kind']}: the "
                f"state of {whole['kind']} is left out\n"
            )
            return
        if whole:
            self._load_whole_optimizer(whole)
        for p, record in records.items():
            if record["state"]:
                self._optimizer.state[p] = self._placed(record["state"], p, iter(record.get("on_cpu", ())))
            for attribute, state in record.get("wrapped", {}).items():
                if state and attribute in self._wrapped:
                    self._wrapped[attribute].state[p] = self._placed(state, p, iter(()))
        for group in self._optimizer.param_groups:
            changed: Mapping[str, Any] = next(
                (records[p].get("group", {}) for p in group["params"] if p in records), {}
            )
            for key, value in changed.items():
                are_tensors = isinstance(value, Tensor) and isinstance(group.get(key), Tensor)
                group[key] = value.to(group[key].device) if are_tensors else value

    def _load_whole_optimizer(self, saved: Mapping[str, Any]) -> None:
        groups = len(self._optimizer.param_groups)
        if saved["groups"] != groups:
            what = f"optimizer() makes {groups} parameter groups, but the run to resume had {saved['groups']}"
            remedy = "make all groups in optimizer() and freeze those that train later, or start a new run"
            raise self._file.error_in("optimizer", what, remedy)
        self._optimizer.state.update(saved["state"])
        vars(self._optimizer).update(saved["attributes"])

    def _placed(self, value: Any, parameter: nn.Parameter, on_cpu: Iterator[bool], key: Any = None) -> Any:
        """Move a value of a state, by its key, to where the optimizer had it: its parameter's device, with its
        strides, or the CPU.

        Args:
            on_cpu: for each tensor whether it was on the CPU; at its end, numbers of larger parameters were.
        """
        if isinstance(value, dict):
            return {key: self._placed(v, parameter, on_cpu, key) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._placed(v, parameter, on_cpu) for v in value)
        if isinstance(value, deque):
            return deque((self._placed(v, parameter, on_cpu) for v in value), value.maxlen)
        if not isinstance(value, Tensor):
            return value
        is_count = not value.dim() and (parameter.dim() > 0 or key == "step")
        is_usual = is_count and not self._keeps_counts_on_device(parameter)
        was_there = next(on_cpu, is_usual)
        if is_usual if key == "step" and is_count else was_there:  # settings decide where a step count is
            return value
        if value.shape != parameter.shape:
            return value.to(parameter.device)
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)

    def _keeps_counts_on_device(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's step count is on the parameter's device. Adam and its kind keep it on the CPU, unless
        they are fused or capturable."""
        own = (group for group in self._optimizer.param_groups if any(p is parameter for p in group["params"]))
        return any(group.get("fused") or group.get("capturable") for group in own)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in NAMES_OF_GROUP}


def _changed(values: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """The values that differ from the first ones, or are new."""
    return {key: value for key, value in values.items() if not _is_same(value, first.get(key))}


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The numbers and texts, and lists, tuples and dicts of them, in an optimizer's own attributes."""
    is_of_torch = type(optimizer).__module__.startswith("torch.")
    own = {
        k: v for k, v in vars(optimizer).items() if k not in _SAVED_APART and not (is_of_torch and k.startswith("_"))
    }
    return {k: v for k, v in own.items() if all(map(is_plain, v.values() if _is_dict_by_text(v) else [v]))}


def _is_dict_by_text(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    try:
        return bool(value == other)
    except Exception:  # for a value that cannot be compared
        return False


def is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (isinstance(value, (tuple, list)) and all(map(is_plain, value)))
