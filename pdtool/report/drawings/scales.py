"""Scales of axes: from values to pixels, and where the round ticks are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True)
class AxisScale:
    """Values from `low` to `high` on pixels from `start` to `end`; `is_log`: as many pixels for equal ratios."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * ((value - low) / ((high - low) or 1.0))

    def ticks(self, most: int) -> list[float]:
        """Return round values within the scale: about `most` of them, never more than that and one."""
        if self.is_log:
            return _log_ticks(self.low, self.high, most)
        return _linear_ticks(self.low, self.high, most)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first <= most:
            break
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2 and 5 of each power of ten, or fewer of them; over a narrow range multiples as on a linear scale."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    spacing = max(1, math.ceil((last - first) / most))
    for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), spacing)):
        ticks = [10.0**power * factor for power in range(first, last + 1, every) for factor in factors]
        within = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(within) <= most + 1:
            break
    return within if len(within) > 2 else _linear_ticks(low, high, most)


def time_labels(ticks: Sequence[float]) -> list[str]:
    """Write times, all in the unit of the longest, as `0`, `20 ms`, `40 ms`."""
    longest = max(map(abs, ticks), default=0.0)
    scale, unit = next((pair for pair in _TIME_UNITS if longest >= pair[0] * 0.9999), _TIME_UNITS[-1])
    return [f"{tick / scale:g} {unit}" if tick else "0" for tick in ticks]


def number_labels(ticks: Sequence[float]) -> list[str]:
    """Write numbers shortly: `0.05`, `20`, `1e-05`, `20,000`."""
    return [f"{tick:,.0f}" if 1000 <= abs(tick) < 1e7 else f"{tick:.6g}" for tick in ticks]
