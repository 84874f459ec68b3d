"""Types of the fields of artifacts: the numbers and the names that one may hold.

A number outside of its limits is a slip or an attack. Within them, sums and ratios of all that is written or measured
stay far below what a float can hold, so that nothing overflows in the middle of a search.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from pdtool.cluster import MAX_WORKERS

_MAX_SECONDS, _MIN_SECONDS = 1e9, 1e-30
_MAX_BYTES = 10**18
_MAX_COUNT = 10**9
_MAX_FIGURE, _MIN_FIGURE = 1e100, 1e-100


def _as_integer(value: object) -> object:
    """Read 1.6e10, as people write bytes, as the integer that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _zero_or_from(minimum: float) -> AfterValidator:
    """Refuse smaller numbers than this but 0: what is divided by them would overflow."""

    def check(value: float) -> float:
        if 0 < value < minimum:
            raise ValueError(f"should be 0 or at least {minimum}")
        return value

    return AfterValidator(check)


# What is measured or written by hand. Flops are counted as bytes are.
Seconds = Annotated[float, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False), _zero_or_from(_MIN_SECONDS)]
Bytes = Annotated[int, BeforeValidator(_as_integer), Field(ge=0, le=_MAX_BYTES)]
PositiveBytes = Annotated[int, BeforeValidator(_as_integer), Field(ge=1, le=_MAX_BYTES)]
Count = Annotated[int, BeforeValidator(_as_integer), Field(ge=1, le=_MAX_COUNT)]
Number = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Rate = Annotated[float, Field(ge=1e-3, le=1e18, allow_inf_nan=False)]  # of bytes or floating-point operations a second
StageIndex = Annotated[int, Field(ge=-MAX_WORKERS, lt=MAX_WORKERS)]  # a negative one counts from the end
# What is computed from them: seconds, rates, ratios; and bytes.
Figure = Annotated[float, Field(ge=0, le=_MAX_FIGURE, allow_inf_nan=False), _zero_or_from(_MIN_FIGURE)]
FigureBytes = Annotated[int, BeforeValidator(_as_integer), Field(ge=0, le=10**100)]

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# Node, module and parameter names: dotted words, so that none can carry code into a generated file.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(@[0-9]+)?$", max_length=500)]
ModulePath = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)?$", max_length=500)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=500)]
# What an artifact calls itself: it stands in the docstring of generated files, so nothing in it may end a string or
# reverse the direction of writing.
_TITLE = r"""^[^\x00-\x1f"'\\/\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$"""
Title = Annotated[str, StringConstraints(pattern=_TITLE, max_length=500)]
Label = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]*$", max_length=500)]
