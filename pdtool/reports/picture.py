"""An SVG drawing in the making: boxes, lines and texts in pixels, and the scales of its axes.

The width of a text is known before a browser draws it. A scale maps values to pixels and knows its round ticks.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pdtool.errors import printable
from pdtool.units import TIME_UNITS

FONT_SIZE, SMALL = 12.0, 10.5  # pixels; classes of drawings.css
STAGE_COLOURS = 8  # drawings.css has as many
# Widths of DejaVu Sans, the widest of the usual sans-serif fonts, in ems.
_WIDTHS = {
    **dict.fromkeys("ijl'|", 0.28),
    **dict.fromkeys(" .,:;fI!/\\()[]-·", 0.37),
    **dict.fromkeys("rt", 0.41),
    **dict.fromkeys("csxzvky_", 0.57),
    **dict.fromkeys("mwMW@%…", 0.98),
    **dict.fromkeys("ABCDEFGHJKLNOPQRSTUVXYZ×+=<>", 0.76),
}
_OTHER_WIDTH = 0.64


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return an upper bound on the pixels of a text."""
    return size * sum(_WIDTHS.get(character, _OTHER_WIDTH) for character in text)


def fitted(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Return the text, with its beginning cut off if it is wider than `width` pixels: a path's end says most."""
    if text_width(text, size) <= width:
        return text
    start = next((i for i in range(1, len(text)) if text_width(f"…{text[i:]}", size) <= width), len(text))
    return f"…{text[start:]}" if start < len(text) else ""


def stage_class(stage: int) -> str:
    """Return the class with a stage's colour."""
    return f"stage-{stage % STAGE_COLOURS}"


@cache
def stylesheet() -> str:
    """Return the colours of all drawings, light and dark."""
    return (files(__package__) / "drawings.css").read_text(encoding="utf-8")


class Picture:
    """A drawing of a certain width in pixels, whose height grows with its content.

    Each `style` argument is one or more classes of drawings.css; browsers show `tooltip`.
    """

    def __init__(self, width: float, description: str) -> None:
        self.width, self.height, self.description = width, 0.0, description
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, style: str, *, radius: float = 0, tooltip: str = ""
    ) -> None:
        """Draw a rectangle."""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.2f}" height="{height:.1f}"'
        corners = f' rx="{radius:g}"' if radius else ""
        self._add(f'<rect class="{style}" {size}{corners}', "rect", tooltip)
        self._reach(y + height)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        """Draw a straight line."""
        self._add(f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"', "line")
        self._reach(max(y1, y2))

    def path(self, commands: str, style: str) -> None:
        """Draw a path of SVG commands, which stays within the height so far."""
        self._add(f'<path class="{style}" d="{commands}"', "path")

    def dot(self, x: float, y: float, radius: float, style: str, tooltip: str = "") -> None:
        """Draw a circle."""
        self._add(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"', "circle", tooltip)

    def text(self, x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> None:
        """Write a text on the baseline y; `anchor` is start, middle or end."""
        attributes = f' class="{style}"' if style else ""
        attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escaped(text)}</text>')
        self._reach(y + 4)

    def legend(self, entries: Iterable[tuple[str, str]], y: float, *, is_of_lines: bool = False) -> float:
        """Write (style, label) of each entry after a box or a line, in as many rows as needed.

        Returns:
            The baseline of the last row.
        """
        x, baseline, swatch = 0.0, y + 12, 14 if is_of_lines else 10
        for style, label in entries:
            label = fitted(label, self.width - 30, SMALL)
            needed = swatch + 6 + text_width(label, SMALL)
            if x + needed > self.width:
                x, baseline = 0.0, baseline + 16
            if is_of_lines:
                self.line(x, baseline - 4, x + swatch, baseline - 4, style)
            else:
                self.box(x, baseline - 9, swatch, 10, style, radius=2)
            self.text(x + swatch + 5, baseline, label, "soft small")
            x += needed + 14
        return baseline

    def inline(self) -> str:
        """Return the drawing for a page with the stylesheet."""
        return self._svg("", [])

    def standalone(self) -> str:
        """Return the drawing as a file of its own."""
        paper = '<rect class="paper" width="100%" height="100%"/>'
        return self._svg(' xmlns="http://www.w3.org/2000/svg"', [f"<style>{stylesheet()}</style>", paper]) + "\n"

    def _svg(self, namespace: str, parts: list[str]) -> str:
        width, height = f"{self.width:.0f}", f"{math.ceil(self.height)}"
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = f'<svg{namespace} class="drawing" {size} role="img" aria-label="{escaped(self.description)}">'
        return "\n".join([head, *parts, *self._parts, "</svg>"])

    def _add(self, element: str, name: str, tooltip: str = "") -> None:
        end = f"><title>{escaped(tooltip)}</title></{name}>" if tooltip else "/>"
        self._parts.append(element + end)

    def _reach(self, y: float) -> None:
        self.height = max(self.height, y)


def escaped(text: str) -> str:
    """Escape XML's syntax and characters that it does not allow."""
    return html.escape(printable(text))


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
        """Return about `most` round values within the scale, at most one more."""
        return (_log_ticks if self.is_log else _linear_ticks)(self.low, self.high, most)


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
    scale, unit = next((pair for pair in TIME_UNITS if longest >= pair[0] * 0.9999), TIME_UNITS[-1])
    return [f"{number_label(tick / scale)} {unit}" if tick else "0" for tick in ticks]


def number_label(tick: float) -> str:
    """Write a number in short form: `0.05`, `20`, `1e-05`, `20,000`."""
    return f"{tick:,.0f}" if 1000 <= abs(tick) < 1e7 else f"{tick:.6g}"
