"""One line of the benchmark: a figure beside what is wanted of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

COLUMNS = "{:<2} {:<20} {:<46} {:>9}  {:<12} {:<12} {}\n"
HEADS = ("", "case", "figure", "median", "wanted", "repeats", "detail")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure.

    Attributes:
        part: `a` to `e`.
        case: what ran.
        figure: what `values` are, one for each repeat.
        least, most: what is wanted of their median.
        detail: other figures that explain it, medians of the repeats.
    """

    part: str
    case: str
    figure: str
    values: Sequence[float]
    least: float | None = None
    most: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The median."""
        return median(self.values)

    def wanted(self) -> str:
        """`>= 0.97: met`."""
        if self.least is None and self.most is None:
            return ""
        least, most = self.least if self.least is not None else -float("inf"), self.most
        met = least <= self.value and (most is None or self.value <= most)
        bounds = (
            f"{least:g}..{most:g}"
            if self.least is not None and most
            else f">={least:g}"
            if most is None
            else (f"<={most:g}")
        )
        return f"{bounds} {'met' if met else 'MISSED'}"

    def show(self) -> None:
        """Print it."""
        spread = f"{min(self.values):.3g}..{max(self.values):.3g}" if len(self.values) > 1 else ""
        detail = "  ".join(f"{name} {_short(value)}" for name, value in self.detail.items())
        line = (self.part, self.case, self.figure, f"{self.value:.3f}", self.wanted(), spread, detail)
        sys.stdout.write(COLUMNS.format(*line))
        sys.stdout.flush()


def heading(text: str) -> None:
    """Begin a table."""
    sys.stdout.write(f"\n{text}\n{COLUMNS.format(*HEADS)}")
    sys.stdout.flush()


def medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Name -> median over the repeats that have it."""
    names = dict.fromkeys(name for each in found for name in each)
    return {name: median(each[name] for each in found if name in each) for name in names}


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
