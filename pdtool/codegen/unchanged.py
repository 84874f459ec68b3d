"""Find the operators that return what they take: a stage file need not show them.

Such are aliases, casts of integers and masks to the type that they have, and `x * 1.0`. A cast of an activation to
float32 is none of them: under autocast the activation may be of another type than it was when the model was traced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pdtool.frontend.operators import Operator, State, Traced, Value, named_state

Source = Value | State

_CASTS = {"_to_copy", "to"}
_VIEWS = {"alias", "lift", "lift_fresh", "expand"}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}  # the other operand
_MEMORY = ("memory_format", "copy")  # arguments with which a cast does more


def unchanged_values(operators: Sequence[Operator], traced: Traced) -> dict[Value, Source]:
    """Return each tensor that only repeats another one -> the tensor that it repeats.

    What may be written into, by a module or as a buffer, is repeated by none: a copy of it is not left out.

    Args:
        operators: of one stage, in order; what it repeats is taken or computed by the stage, and repeats none there.
        traced: the whole model.
    """
    modifiable = {value for op in traced.operators for part in op.parts if part.target is None for value in part.values}
    state = {name: value for name, value in named_state(traced.model).items() if name not in traced.changed_buffers}
    found: dict[Value, Source] = {}
    for op in operators:
        source = _source(op, state)
        if source and not (_makes_tensor(op) and op.outputs[0] in modifiable):
            found[op.outputs[0]] = found.get(source, source) if isinstance(source, Value) else source
    return found


def views_of_buffers(operators: Sequence[Operator], changed_buffers: Collection[str]) -> set[Value]:
    """Return the tensors that may share the memory of a buffer that is written: the next minibatch changes them.

    Args:
        operators: of one stage, in order.
    """
    views: set[Value] = set()
    for op in operators:
        for part in op.parts:
            if part.target and any(returned.alias_info for returned in part.target._schema.returns):
                taken = pytree.tree_leaves((part.args, part.kwargs))
                is_buffer = any(isinstance(leaf, State) and leaf.name in changed_buffers for leaf in taken)
                if is_buffer or views.intersection(part.values):
                    views.update(part.outputs)
        for output, values in zip(op.outputs, op.branch.results, strict=True) if op.branch else ():
            if views.intersection(value for value in values if value):
                views.add(output)
    return views


def _source(op: Operator, state: Mapping[str, Tensor]) -> Source | None:
    """The tensor that the operator returns as it is, in training and in evaluation; None if it may do something."""
    if op.target is None or len(op.outputs) != 1 or op.target._schema.is_mutable:
        return None
    name = op.target._schema.name.removeprefix("aten::")
    source, output = op.kwargs.get("input" if name == "dropout" else "self"), op.outputs[0]
    if not isinstance(source, Value) and not (isinstance(source, State) and source.name in state):
        return None
    taken: Any = source if isinstance(source, Value) else state[source.name]
    if (tuple(taken.shape), taken.dtype) != (output.shape, output.dtype):
        return None
    is_fixed = isinstance(source, State) or not output.dtype.is_floating_point
    does_nothing = (
        name in _VIEWS
        or (name in _CASTS and is_fixed and not any(op.kwargs.get(argument) for argument in _MEMORY))
        or (name == "dropout" and op.kwargs["p"] == 0)
        or (name in _NEUTRAL and _is_neutral(op, _NEUTRAL[name]))
    )
    return source if does_nothing else None


def _is_neutral(op: Operator, neutral: int) -> bool:
    """Whether the other operand changes nothing; 0 is not neutral for floats, for it makes 0.0 of -0.0."""
    other, alpha = op.kwargs.get("other"), op.kwargs.get("alpha", 1)
    is_number = isinstance(other, (int, float)) and not isinstance(other, bool) and isinstance(alpha, (int, float))
    if op.kwargs.get("rounding_mode") is not None or not is_number or other != neutral:
        return False
    return neutral == 1 or not op.outputs[0].dtype.is_floating_point


def _makes_tensor(op: Operator) -> bool:
    """Whether the operator returns memory of its own, in which a module may write."""
    return op.target._schema.name.removeprefix("aten::") not in _VIEWS | _CASTS
