"""Find the operators that return what they take: a stage file need not show them.

Such are aliases, casts of integers and masks to the type that they have, and `x * 1.0`. A cast of an activation to
float32 is none of them: under autocast the activation may be of another type than it was when the model was traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pdtool.frontend.operators import Operator, State, Value

Source = Value | State

_CASTS = {"_to_copy", "to"}
_VIEWS = {"alias", "lift", "lift_fresh", "expand"}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}  # the other operand
_MEMORY = ("memory_format", "copy")  # arguments with which a cast does more


def unchanged_values(
    operators: Sequence[Operator], model: Sequence[Operator], state: Mapping[str, Tensor]
) -> dict[Value, Source]:
    """Return each tensor that only repeats another one -> the tensor that it repeats.

    Args:
        operators: of one stage, in order; what it repeats is taken or computed by the stage, and repeats none there.
        model: all operators of the model; where one may write into what it takes, a copy is not left out.
        state: parameters, buffers and other tensors of the model by name.
    """
    modifiable = {value for op in model for part in op.parts if part.target is None for value in part.values}
    found: dict[Value, Source] = {}
    for op in operators:
        source = _source(op, state)
        if source and not (_makes_tensor(op) and op.outputs[0] in modifiable):
            found[op.outputs[0]] = found.get(source, source) if isinstance(source, Value) else source
    return found


def _source(op: Operator, state: Mapping[str, Tensor]) -> Source | None:
    """The tensor that the operator returns as it is, in training and in evaluation; None if it may do something."""
    if op.target is None or len(op.outputs) != 1 or op.target._schema.is_mutable:
        return None
    name = op.target._schema.name.removeprefix("aten::")
    source, output = op.kwargs.get("input" if name == "dropout" else "self"), op.outputs[0]
    if not isinstance(source, (Value, State)):
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
