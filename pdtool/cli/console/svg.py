"""Pictures as SVG text: the timeline of a simulation, and gain against bandwidth."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from statistics import median

from pdtool.artifacts.chrome_trace import TraceEvent
from pdtool.cli.console.printable import printable
from pdtool.partition.comparison import SweepPoint, crossings
from pdtool.partition.simulator.result import SimulationResult
from pdtool.units import format_bits_rate, format_seconds

COLOURS = {
    "forward": "#8ecae6",
    "backward": "#ffb703",
    "backward_input": "#ffb703",
    "backward_weight": "#fb8500",
    "update": "#90be6d",
    "all-reduce": "#b5838d",
    "send": "#adb5bd",
}
_LEFT, _TOP, _ROW, _BOX, _THIN = 150, 44, 34, 20, 5  # pixels
_FORWARD_WIDTH, _MAX_WIDTH = 26, 12_000  # pixels, of a forward's box and of the picture


def _svg(width: float, height: float, parts: Iterable[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    style = "<style>text { font: 11px sans-serif; } .n { text-anchor: middle; } .r { text-anchor: end; }</style>"
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, style, background, *parts, "</svg>\n"])


def timeline_svg(result: SimulationResult, title: str) -> str:
    """Draw a row per worker: boxes with the number of the minibatch (or round), thin bars below for its messages.

    A long simulation is cut where the picture would become too wide; its caption says so.
    """
    events = [event for worker_events in result.events for event in worker_events]
    computing = [e.length_s for e in events if e.track == "compute" and e.kind != "wait" and e.length_s]
    scale = _FORWARD_WIDTH / (median(computing) if computing else 1.0)
    end = min(result.makespan_s, _MAX_WIDTH / scale)
    shortened = f", the first {format_seconds(end)} of them" if end < result.makespan_s else ""
    caption = f"{title}: {result.minibatches} minibatches in {format_seconds(result.makespan_s)}{shortened}"
    parts = [f'<text x="8" y="16">{_escaped(caption)}</text>', *_legend({e.kind for e in events})]
    for row, (usage, worker_events) in enumerate(zip(result.workers, result.events, strict=True)):
        top = _TOP + row * _ROW
        parts.append(f'<text x="8" y="{top + _BOX * 0.7:.0f}">worker {usage.worker}, stage {usage.stage}</text>')
        parts += [_box(event, top, scale) for event in worker_events if event.start_s < end and event.kind in COLOURS]
    return _svg(_LEFT + end * scale + 40, _TOP + len(result.workers) * _ROW + 10, parts)


def _escaped(text: str) -> str:
    """Escape what XML reads as syntax, and what it does not allow."""
    return html.escape(printable(text))


def _legend(kinds: set[str]) -> list[str]:
    parts = []
    for index, kind in enumerate(kind for kind in COLOURS if kind in kinds):
        x = _LEFT + index * 110
        parts.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 14}" y="33">{kind.replace("_", " ")}</text>')
    return parts


def _box(event: TraceEvent, y: float, scale: float) -> str:
    x, width = _LEFT + event.start_s * scale, event.length_s * scale
    ends = f"{format_seconds(event.start_s)} to {format_seconds(event.start_s + event.length_s)}"
    tooltip = f"<title>{_escaped(event.name)} {event.kind}, {ends}</title>"
    fill = f'fill="{COLOURS[event.kind]}"'
    if event.track != "compute":
        y += _BOX + 1 + (_THIN if event.track == "all-reduce" else 0)
        return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_THIN - 1}" {fill}>{tooltip}</rect>'
    position = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BOX}"'
    box = f'<rect {position} {fill} stroke="#555" stroke-width="0.5">{tooltip}</rect>'
    number = re.sub(r"^[0-9]+[A-Z]", "", event.name)
    if event.kind == "update" or width < 7 * len(number):
        return box
    return f'{box}<text class="n" x="{x + width / 2:.2f}" y="{y + 14}">{number}</text>'


def gain_svg(points: Sequence[SweepPoint], title: str) -> str:
    """Draw gain over data parallelism against bandwidth, both on logarithmic scales; dashed where they are equal."""
    width, height, left, top = 640, 400, 60, 40
    rates = [math.log(p.bandwidth_bytes_per_s) for p in points]
    low, high = (limit(1.0, *(p.gain for p in points)) for limit in (min, max))
    low, high = low / 1.1, high * 1.1

    def x(rate: float) -> float:
        return left + (width - left - 30) * (math.log(rate) - rates[0]) / (rates[-1] - rates[0])

    def y(gain: float) -> float:
        return top + (height - top - 60) * math.log(high / gain) / math.log(high / low)

    line = " ".join(f"{x(p.bandwidth_bytes_per_s):.1f},{y(p.gain):.1f}" for p in points)
    parts = [
        f'<text x="8" y="16">{_escaped(title)}</text>',
        f'<line x1="{left}" y1="{y(1):.1f}" x2="{width - 30}" y2="{y(1):.1f}" stroke="#555" stroke-dasharray="4"/>',
        f'<polyline points="{line}" fill="none" stroke="#1d6fa5" stroke-width="2"/>',
        f'<text class="r" x="{width - 30}" y="{height - 8}">bandwidth of the outermost level</text>',
    ]
    for p in points:
        centre, label = x(p.bandwidth_bytes_per_s), format_bits_rate(p.bandwidth_bytes_per_s)
        tooltip, turn = (
            f"<title>{label}: {p.gain:.3g} ×</title>",
            f"translate({centre + 4:.1f},{height - 52}) rotate(-40)",
        )
        parts.append(f'<circle cx="{centre:.1f}" cy="{y(p.gain):.1f}" r="3" fill="#1d6fa5">{tooltip}</circle>')
        parts.append(f'<text class="r" transform="{turn}">{label}</text>')
    ticks = sorted({low * 1.1, 1.0, high / 1.1})
    parts += [f'<text class="r" x="{left - 8}" y="{y(tick) + 4:.1f}">{tick:.3g} ×</text>' for tick in ticks]
    for rate in crossings(points):
        centre = x(rate)
        ends = f'x1="{centre:.1f}" y1="{top}" x2="{centre:.1f}" y2="{height - 60}"'
        parts.append(f'<line {ends} stroke="#c1121f" stroke-dasharray="4"/>')
        parts.append(f'<text class="n" x="{centre:.1f}" y="{top - 6}">as fast at {format_bits_rate(rate)}</text>')
    return _svg(width, height, parts)
