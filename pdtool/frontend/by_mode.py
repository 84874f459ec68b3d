"""Merge a model's operators in training and in evaluation mode into one list.

Usually both modes run the same operators, and some of these take different arguments (`ByMode`). If they run different
ones, as after `if self.training:`, all operators between two common ones become a single operator that holds both
sequences (`Branch`). Operators of the two modes are the same if they stand in the same line of the same module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import takewhile
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdtool.frontend.leaf_calls import running
from pdtool.frontend.operators import Branch, ByMode, Operator, State, Traced, Value, unique_name

TRAINING, EVALUATION = 0, 1  # a mode, as an index


@contextmanager
def asks_for_mode(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether the model may have asked for its mode since then.

    It may have if code read `training` of a module, except in a leaf module that is one operator in both modes. If it
    has not, it has the same operators in both.
    """
    if any(map(_has_unusual_mode, model.modules())) or nn.Module.train.__module__ != nn.Module.__module__:
        yield lambda: True
        return
    mode = _Mode({type(module) for module in model.modules()})
    with patch.object(nn.Module, "training", mode, create=True):
        yield lambda: mode.was_asked_for


def _has_unusual_mode(module: nn.Module) -> bool:
    """Whether the mode may be read, or do something, where `_Mode` does not see it: train() may do more than set
    `training`, which may be a property, or be read from `__dict__`. TorchScript reads it outside Python."""
    kind = type(module)
    own = [vars(base).values() for base in kind.__mro__ if base.__module__.partition(".")[0] != "torch"]
    codes = [value.__code__ for values in own for value in values if isinstance(value, FunctionType)]
    return (
        hasattr(kind, "training")
        or getattr(module.train, "__func__", None) is not nn.Module.train
        or kind.__setattr__ is not nn.Module.__setattr__
        or kind.__getattribute__ is not object.__getattribute__
        or any("training" in code.co_consts or "__dict__" in code.co_names or "vars" in code.co_names for code in codes)
        or isinstance(module, torch.jit.ScriptModule)
    )


class _Mode:
    """Takes the place of `training` of all modules, and notes that it was read of one of these classes."""

    def __init__(self, kinds: set[type]) -> None:
        self._kinds, self.was_asked_for = kinds, False

    def __get__(self, module: nn.Module | None, owner: type) -> bool:
        if module is None:
            raise AttributeError("training")  # as of the class, which has none
        if type(module) in self._kinds and not running:
            self.was_asked_for = True
        try:
            return bool(vars(module)["training"])
        except KeyError:
            raise AttributeError("training") from None

    def __set__(self, module: nn.Module, value: bool) -> None:
        vars(module)["training"] = value


def merge_modes(training: Traced, evaluation: Traced) -> Traced:
    """Return the model in both modes."""
    if _connections(training) == _connections(evaluation):
        pairs = zip(training.operators, evaluation.operators, strict=True)
        return replace(training, operators=tuple(_with_arguments(a, b, _by_mode) for a, b in pairs))
    return _Merger(training, evaluation).merged()


@dataclass(eq=False)
class _Gap:
    """Operators that only one mode runs, between two that both modes run.

    Attributes:
        name, module: of the single operator that they become.
        position: its index among the merged operators.
        sequences: the operators of each mode, with their arguments in the merged graph.
        results: its outputs, each as a tensor in training and one in evaluation; None if a mode does not compute it.
    """

    name: str
    module: str
    position: int
    sequences: tuple[list[Operator], list[Operator]] = field(default_factory=lambda: ([], []))
    results: list[tuple[Value | None, Value | None]] = field(default_factory=list)

    def result(self, training: Value | None, evaluation: Value | None) -> Value:
        """Return the output that is the one tensor in training and the other in evaluation."""
        pair = training, evaluation
        if pair not in self.results:
            self.results.append(pair)
        shown = training or evaluation
        assert shown
        flows = any(value.differentiable for value in pair if value)
        return replace(shown, operator=self.name, index=self.results.index(pair), differentiable=flows)

    def operator(self) -> Operator:
        """Return the operator that it becomes."""
        nested = [op for sequence in self.sequences for op in sequence]
        own = {op.name for op in nested}
        taken = [value for op in nested for value in op.values]
        taken += [value for pair in self.results for value in pair if value]
        return Operator(
            name=self.name,
            op="if training",
            module=self.module,
            args=tuple(dict.fromkeys(value for value in taken if value.operator not in own)),
            outputs=tuple(self.result(*pair) for pair in self.results),
            structure=list(range(len(self.results))) if len(self.results) != 1 else 0,
            parameters=tuple(dict.fromkeys(name for op in nested for name in op.parameters)),
            buffers=tuple(dict.fromkeys(name for op in nested for name in op.buffers)),
            location=next((op.location for op in nested), ""),
            branch=Branch(tuple(self.sequences[TRAINING]), tuple(self.sequences[EVALUATION]), tuple(self.results)),
        )


class _Merger:
    """Merges two traces whose operators differ.

    Attributes:
        entries: the merged operators so far, in order; a gap stands for the operator that it becomes.
        merged_values: for each mode, its tensors -> the same tensor in the merged graph, and the position of its
            operator or gap in `entries`; inside a gap, as the gap's own operators see it.
    """

    def __init__(self, training: Traced, evaluation: Traced) -> None:
        self.traces = training, evaluation
        self.entries: list[Operator | _Gap] = []
        self.merged_values: tuple[dict[Value, tuple[Value, int]], ...] = ({}, {})
        self.names = {op.name for op in training.operators} | set(dict(training.model.named_modules()))

    def merged(self) -> Traced:
        """Merge the operators, what the model returns, and what must stand together."""
        training, evaluation = (trace.operators for trace in self.traces)
        begin, evaluated_begin = 0, 0
        for i, j in _pairs_alike(training, evaluation):
            self._append_gap(training[begin:i], evaluation[evaluated_begin:j])
            self._append_pair(training[i], evaluation[j])
            begin, evaluated_begin = i + 1, j + 1
        self._append_gap(training[begin:], evaluation[evaluated_begin:])
        output = self._merged_output()
        operators = [e.operator() if isinstance(e, _Gap) else e for e in self.entries]
        changed = self.traces[TRAINING].changed_buffers | self.traces[EVALUATION].changed_buffers
        return replace(self.traces[TRAINING], operators=tuple(operators), output=output, changed_buffers=changed)

    def _append_pair(self, op: Operator, evaluated: Operator) -> None:
        merged = _with_arguments(op, evaluated, self._joined)
        for a, b in zip(op.outputs, evaluated.outputs, strict=True):
            for mode, value in enumerate((a, b)):
                self.merged_values[mode][value] = a, len(self.entries)
        self.entries.append(replace(merged, constant=op.constant and evaluated.constant))

    def _append_gap(self, *sequences: Sequence[Operator]) -> None:
        modules = [op.module for sequence in sequences for op in sequence]
        if not modules:
            return
        parts = zip(*(module.split(".") for module in modules), strict=False)
        gap = self._new_gap(".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts)))
        for mode, sequence in enumerate(sequences):
            for op in sequence:
                name = op.name if mode == TRAINING else unique_name(op.name, self.names)
                outputs = tuple(replace(value, operator=name) for value in op.outputs)
                args, kwargs = pytree.tree_map(partial(self._seen, mode, gap=gap), (op.args, op.kwargs))
                gap.sequences[mode].append(
                    replace(op, name=name, args=args, kwargs=kwargs, outputs=outputs, constant=False)
                )
                for value, merged in zip(op.outputs, outputs, strict=True):
                    self.merged_values[mode][value] = merged, gap.position

    def _new_gap(self, module: str) -> _Gap:
        gap = _Gap(unique_name(f"{module}.training" if module else "training", self.names), module, len(self.entries))
        self.entries.append(gap)
        return gap

    def _seen(self, mode: int, argument: Any, gap: _Gap | None = None) -> Any:
        """Return an argument of one mode for an operator in `gap`, or outside of any gap if that is None.

        A tensor that only one mode computes is zeros in the other.
        """
        if not isinstance(argument, Value):
            return argument
        value, position = self.merged_values[mode][argument]
        home = self.entries[position]
        if isinstance(home, Operator) or home is gap:
            return value
        return home.result(value, None) if mode == TRAINING else home.result(None, value)

    def _joined(self, a: Any, b: Any) -> Any:
        """Join the training and evaluation arguments of an operator that both modes run."""
        if not isinstance(a, Value) or not isinstance(b, Value):
            return _by_mode(a, b)
        (value, position), (evaluated, evaluated_position) = (
            self.merged_values[mode][tensor] for mode, tensor in enumerate((a, b))
        )
        if value == evaluated:  # both modes run its operator
            return value
        latest = self.entries[max(position, evaluated_position)]
        gap = latest if isinstance(latest, _Gap) else self._new_gap(latest.module)
        return gap.result(self._seen(TRAINING, a, gap), self._seen(EVALUATION, b, gap))

    def _merged_output(self) -> Any:
        """The model's output; ByMode if it has another structure in evaluation."""
        a, b = (trace.output for trace in self.traces)
        if _hold_joinable(a, b):
            return pytree.tree_map(self._joined, a, b)
        return ByMode(*(pytree.tree_map(partial(self._seen, mode), each) for mode, each in enumerate((a, b))))


def _pairs_alike(training: Sequence[Operator], evaluation: Sequence[Operator]) -> Iterator[tuple[int, int]]:
    """Yield the positions of pairs of operators that stand in the same line and can be merged into one."""
    matcher = SequenceMatcher(a=[_key(op) for op in training], b=[_key(op) for op in evaluation], autojunk=False)
    for i, j, size in matcher.get_matching_blocks():
        for k in range(size):
            if _are_alike(training[i + k], evaluation[j + k]):
                yield i + k, j + k


def _key(op: Operator) -> tuple[str, ...]:
    return op.module, op.op, str(op.target), op.location, op.name if op.is_input else ""


def _are_alike(op: Operator, evaluated: Operator) -> bool:
    """Whether two operators of one line can be merged: they take and return the same kinds of things."""
    return (
        op.structure == evaluated.structure
        and [(v.shape, v.dtype) for v in op.outputs] == [(v.shape, v.dtype) for v in evaluated.outputs]
        and _hold_joinable((op.args, op.kwargs), (evaluated.args, evaluated.kwargs))
    )


def _hold_joinable(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure and their leaves can be joined."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(map(_are_joinable, leaves, others))


def _are_joinable(a: Any, b: Any) -> bool:
    if isinstance(a, Value) and isinstance(b, Value):
        return (a.shape, a.dtype) == (b.shape, b.dtype)
    if isinstance(a, (Value, State)) or isinstance(b, (Value, State)):
        return bool(a == b)
    return True


def _connections(traced: Traced) -> tuple[object, ...]:
    """The operators, the shapes that they return, the tensors that they take, and the tensors that the model returns,
    without constants."""
    arguments = [(op.args, op.kwargs) for op in traced.operators]
    leaves, spec = pytree.tree_flatten((arguments, traced.output))
    tensors = [
        (leaf.operator, leaf.index) if isinstance(leaf, Value) else leaf if isinstance(leaf, State) else None
        for leaf in leaves
    ]
    returned = [(op.name, op.target, [(v.shape, v.dtype) for v in op.outputs]) for op in traced.operators]
    return returned, tensors, spec


def _with_arguments(op: Operator, evaluated: Operator, joined: Callable[[Any, Any], Any]) -> Operator:
    """The operator with each argument joined with that of `evaluated`."""
    args, kwargs = pytree.tree_map(joined, (op.args, op.kwargs), (evaluated.args, evaluated.kwargs))
    return replace(op, args=args, kwargs=kwargs)


def _by_mode(a: Any, b: Any) -> Any:
    return a if _is_same(a, b) else ByMode(a, b)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())  # NaN equals itself here
    if isinstance(a, Value) and isinstance(b, Value):
        return (a.operator, a.index) == (b.operator, b.index)
    return type(a) is type(b) and bool(a == b or a != a)  # NaN equals itself here
