"""Charts: curves over updates, and the gain over data parallelism against bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdtool.planner.choice.comparison import SweepPoint, crossings
from pdtool.reports.picture import SMALL, AxisScale, Picture, fitted, number_label, stage_class, text_width
from pdtool.units import format_bits_rate, format_ratio

_HEIGHT, _GAIN_HEIGHT = 230, 250  # pixels, for a chart of curves, and for the gain
_BOTTOM, _RIGHT = 40, 14  # pixels
_DECADES_OF_LOG = 20.0  # curves that differ by more than this factor get a logarithmic scale


@dataclass(frozen=True)
class Curve:
    """Points of one colour; `is_thin`: a background, such as losses of single updates; `is_dotted`: a dot at each
    point."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    is_thin: bool = False
    is_dotted: bool = False

    @property
    def style(self) -> str:
        return f"{'thin' if self.is_thin else 'curve'} {stage_class(self.colour)}"


@dataclass(frozen=True)
class _Frame:
    """The two axes of a chart."""

    x: AxisScale
    y: AxisScale

    def pixels(self, points: Sequence[tuple[float, float]]) -> list[str]:
        return [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points]


def curve_chart(curves: Sequence[Curve], width: float, title: str, below: str) -> Picture:
    """Draw curves on common axes; `title` names y, `below` names x. Large ranges get a logarithmic y."""
    picture = Picture(width, f"{title}, over {below}")
    points = [point for curve in curves for point in curve.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    is_log = low > 0 and high / low > _DECADES_OF_LOG
    if not is_log:
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = (0.0 if 0 <= low < 0.3 * high else low - margin), high + margin
    picture.text(0, 14, f"{title}{', logarithmic' if is_log else ''}", "strong")
    top = picture.legend(((curve.style, curve.label) for curve in curves if curve.label), 20, is_of_lines=True) + 12
    y = AxisScale(low, high, _HEIGHT - _BOTTOM, top, is_log)
    frame = _Frame(AxisScale(min(xs), max(xs), _y_axis(picture, y, number_label), width - _RIGHT), y)
    _x_axis(picture, frame, frame.x.ticks(max(2, int(width / 90))), number_label, below)
    for curve in sorted(curves, key=lambda curve: not curve.is_thin):
        _draw_curve(picture, frame, curve)
    return picture


def gain_chart(points: Sequence[SweepPoint], width: float, own: float | None = None, title: str = "") -> Picture:
    """Draw gain over data parallelism against bandwidth, both logarithmic; dashed where both are equally fast.

    Args:
        own: the plan's own bandwidth in bytes/s, to mark if the chart contains it.
    """
    picture = Picture(width, title or "gain over data parallelism against bandwidth")
    line = [(point.bandwidth_bytes_per_s, point.gain) for point in points]
    rates, gains = zip(*line, strict=True)
    own = own if own and rates[0] <= own <= rates[-1] else None
    low, high = min(1.0, *gains) / 1.4, max(1.0, *gains) * 1.15
    picture.text(0, 14, fitted(title or "times as fast as data parallelism", width), "strong")
    y = AxisScale(low, high, _GAIN_HEIGHT - _BOTTOM, 40 if own else 28, is_log=True)
    left = _y_axis(picture, y, lambda tick: f"{format_ratio(tick)} ×")
    frame = _Frame(AxisScale(rates[0], rates[-1], left, width - _RIGHT, is_log=True), y)
    bits = AxisScale(rates[0] * 8, rates[-1] * 8, frame.x.start, frame.x.end, is_log=True)
    ticks = [tick / 8 for tick in bits.ticks(max(3, int(width / 90)))]
    _x_axis(picture, frame, ticks, format_bits_rate, "bandwidth, outermost level")
    picture.line(frame.x.start, frame.y(1), frame.x.end, frame.y(1), "even")
    area = [*frame.pixels(line), f"{frame.x.end:.1f},{frame.y(1):.1f}", f"{frame.x.start:.1f},{frame.y(1):.1f}"]
    picture.path(f"M{' L'.join(area)} Z", f"under {stage_class(0)}")
    _draw_curve(
        picture, frame, Curve("", line, is_dotted=True), lambda x, y: f"{format_bits_rate(x)}: {format_ratio(y)} ×"
    )
    _bandwidth_marks(picture, frame, own, crossings(points))
    return picture


def _bandwidth_marks(picture: Picture, frame: _Frame, own: float | None, equal: Sequence[float]) -> None:
    """Mark the plan's bandwidth by a line up to a label above the chart, and bandwidths of equal speed by rings with
    one label."""
    if own:
        label = f"this plan, {format_bits_rate(own)}"
        x, half = frame.x(own), text_width(label, SMALL) / 2
        picture.line(x, frame.y.end, x, frame.y.start, "mark")
        centre = min(max(x, half), picture.width - half)
        picture.text(centre, frame.y.end - 6, label, "accent small", anchor="middle")
    for rate in equal:
        picture.dot(frame.x(rate), frame.y(1), 4.5, "ring", f"equal at {format_bits_rate(rate)}")
    if equal:
        ends = " and ".join(format_bits_rate(rate) for rate in (equal[0], *equal[1:][-1:]))
        label = f"equal at {ends}" if len(equal) <= 2 else f"equal at {len(equal)} bandwidths between {ends}"
        half = text_width(label, SMALL) / 2
        middle = (frame.x(equal[0]) + frame.x(equal[-1])) / 2
        centre = min(max(middle, frame.x.start + half + 4), frame.x.end - half)
        picture.text(centre, frame.y(1) + 16, label, "soft small", anchor="middle")


def _y_axis(picture: Picture, y: AxisScale, label_of: Callable[[float], str]) -> float:
    """Draw the y axis; return where x begins, which its labels decide."""
    labels = {tick: label_of(tick) for tick in y.ticks(6)}
    left = max(text_width(label, SMALL) for label in labels.values()) + 8
    for tick, label in labels.items():
        picture.line(left, y(tick), picture.width - _RIGHT, y(tick), "grid")
        picture.text(left - 6, y(tick) + 4, label, "soft small", anchor="end")
    return left


def _x_axis(
    picture: Picture, frame: _Frame, ticks: Sequence[float], label_of: Callable[[float], str], name: str
) -> None:
    y, free_from = frame.y.start, 0.0
    picture.line(frame.x.start, y, frame.x.end, y, "axis")
    for tick in ticks:
        label = label_of(tick)
        half = text_width(label, SMALL) / 2
        centre = min(max(frame.x(tick), half), picture.width - half)
        picture.line(frame.x(tick), y, frame.x(tick), y + 4, "axis")
        if centre - half >= free_from:
            picture.text(centre, y + 16, label, "soft small", anchor="middle")
            free_from = centre + half + 6
    picture.text(frame.x.end, y + 33, name, "soft small", anchor="end")


def _draw_curve(
    picture: Picture,
    frame: _Frame,
    curve: Curve,
    tooltip: Callable[[float, float], str] = lambda x, y: f"{x:g}: {y:.4g}",
) -> None:
    if len(curve.points) > 1:
        picture.path(f"M{' L'.join(frame.pixels(curve.points))}", curve.style)
    if curve.is_dotted or len(curve.points) == 1:
        for x, y in curve.points:
            picture.dot(frame.x(x), frame.y(y), 3, f"fill {stage_class(curve.colour)}", tooltip(x, y))
