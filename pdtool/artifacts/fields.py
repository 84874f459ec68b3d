"""Types of the fields of artifacts, limits of their numbers and names, and words for faults of a field.

A number outside its limits is a slip or an attack. Within them, sums and ratios of all figures stay far below the
limits of a float, so that nothing overflows in the middle of a search.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StringConstraints, ValidationError

from pdtool.errors import suggestion

MAX_WORKERS = 100_000
_MAX_SECONDS, _MIN_SECONDS = 1e9, 1e-30
_MAX_BYTES = 10**18
_MAX_COUNT = 10**9
_MAX_FIGURE, _MIN_FIGURE = 1e100, 1e-100
_WORDS = {  # by the type of a fault
    "string_pattern_mismatch": "it is empty, or contains a character that is not allowed here",
    "too_short": "at least {min_length} is needed",
    "greater_than_equal": "it must be {ge} or more",
    "less_than_equal": "it must be {le} or less",
}
_UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")  # of a model, of a dataclass


def _as_integer(value: object) -> object:
    """Read 1.6e10, as people write bytes, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _zero_or_from(minimum: float) -> AfterValidator:
    """Refuse numbers below this except 0, because dividing by them would overflow."""

    def check(value: float) -> float:
        if 0 < value < minimum:
            raise ValueError(f"should be 0 or at least {minimum}")
        return value

    return AfterValidator(check)


# Measured or handwritten figures. Flops have the same limits as bytes.
Seconds = Annotated[float, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False), _zero_or_from(_MIN_SECONDS)]
Bytes = Annotated[int, Field(ge=0, le=_MAX_BYTES), BeforeValidator(_as_integer)]
PositiveBytes = Annotated[int, Field(ge=1, le=_MAX_BYTES), BeforeValidator(_as_integer)]
Count = Annotated[int, Field(ge=1, le=_MAX_COUNT), BeforeValidator(_as_integer)]
Number = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Rate = Annotated[float, Field(ge=1e-3, le=1e18, allow_inf_nan=False)]  # of bytes or floating-point operations a second
StageIndex = Annotated[int, Field(ge=-MAX_WORKERS, lt=MAX_WORKERS)]  # a negative one counts from the end
# Computed figures: seconds, rates, ratios; bytes; and counts.
Figure = Annotated[float, Field(ge=0, le=_MAX_FIGURE, allow_inf_nan=False), _zero_or_from(_MIN_FIGURE)]
FigureBytes = Annotated[int, Field(ge=0, le=10**30), BeforeValidator(_as_integer)]
FigureCount = Annotated[int, Field(ge=1, le=10**30), BeforeValidator(_as_integer)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# Node, module and parameter names: dotted words, which cannot carry code into a generated file.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(@[0-9]+)?$", max_length=500)]
ModulePath = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)?$", max_length=500)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=500)]
# An artifact's name stands in the docstring of generated files, so nothing in it may end a string or reverse the
# direction of writing.
_TITLE = r"""^[^\x00-\x1f"'\\/\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$"""
Title = Annotated[str, StringConstraints(pattern=_TITLE, max_length=500)]
Label = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]*$", max_length=500)]


def first_fault(error: ValidationError, artifact: type[BaseModel] | None = None) -> tuple[str, str]:
    """Return (field, what is wrong) of the first fault; an unknown field comes before a missing one that it may stand
    for.

    Args:
        artifact: the content that was read, to name its fields.
    """
    faults = error.errors()
    unknown = [fault for fault in faults if fault["type"] in _UNKNOWN_FIELD]
    first = [*unknown, *faults][0]
    *parents, name = first["loc"] or ("",)
    if unknown:
        missing = [str(f["loc"][-1]) for f in faults if f["type"] == "missing" and f["loc"][:-1] == first["loc"][:-1]]
        known = _field_names(artifact, parents)
        otherwise = f"known are {', '.join(known)}" if known else ""
        what, meant = "is not a field here", suggestion(str(name), missing) or suggestion(str(name), known, otherwise)
    elif first["type"] == "missing":
        what, meant = "is missing", ""
    else:
        allowed = re.findall(r"'([^']*)'", str(first.get("ctx", {}).get("expected", "")))
        value = first.get("input")
        what, meant = f"{_in_words(dict(first))} (got {repr(value)[:80]})", suggestion(str(value), allowed)
    return _path((*parents, name)), f"{what}; {meant}" if meant else what


def _path(parts: Iterable[int | str]) -> str:
    """Write the place of a field as `stages[0].replicas`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:80]}" for part in parts)
    return path.removeprefix(".")


def _in_words(fault: Mapping[str, Any]) -> str:
    """Say what is wrong with a value, and what would be right, in the words of a plan, not of its classes."""
    value = fault.get("input")
    if fault["type"] == "string_type" and isinstance(value, int | float):
        return f"a string is needed: write it in quotes, '{value}'"
    return _WORDS.get(fault["type"], "{msg}").format_map({**fault.get("ctx", {}), "msg": fault["msg"]})


def _field_names(artifact: type[BaseModel] | None, path: Sequence[int | str]) -> list[str]:
    """The fields of the part of an artifact at `path`, as ("stages", 0)."""
    kind: Any = artifact
    for part in path:
        types = _field_types(kind)
        if part in types:
            kind = _model_in(types[str(part)])
    return [name for name in _field_types(kind) if name != "sha256"]


def _field_types(kind: Any) -> dict[str, Any]:
    """Return the type of each field of a part of an artifact, a model or a dataclass; none of None."""
    if is_dataclass(kind):
        return get_type_hints(kind)
    return {name: field.annotation for name, field in kind.model_fields.items()} if kind else {}


def _model_in(annotation: Any) -> type[Any] | None:
    """The part of an artifact in a field's annotation, as Stage in tuple[Stage, ...]."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
