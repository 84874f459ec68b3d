"""Timelines of workers, as rows of boxes on one time axis, for simulations and runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pdtool.artifacts.chrome_trace import TraceEvent, WorkerTrace
from pdtool.reports.picture import AxisScale, Picture, fitted, stage_class, text_width, time_labels
from pdtool.units import format_seconds

COMPUTING = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, of inputs",
    "backward_weight": "backward, of weights",
    "update": "update",
    "data": "loading",
}
MESSAGES = {"all-reduce": "all-reduce", "send": "send"}
_ROW, _BOX, _THIN = 24, 16, 3  # pixels
_NARROW = 600  # pixels; a drawing below it has short labels
_MAX_ROWS = 24  # rows of a group; other replicas are left out


@dataclass(frozen=True)
class TimelineGroup:
    """Workers of one simulation or run, drawn from `start_s` to `end_s`.

    Attributes:
        steady_s: when the pipeline is full; idle time counts from there.
    """

    title: str
    rows: Sequence[WorkerTrace]
    start_s: float
    end_s: float
    steady_s: float

    @property
    def bubble(self) -> float:
        """The share of the workers' time, from `steady_s` on, in which they do not compute."""
        return 1 - sum(map(self.busy, self.rows)) / max(1, len(self.rows))

    def busy(self, row: WorkerTrace) -> float:
        """Return the share of a worker's time, from `steady_s` on, in which it computes."""
        computing = (event for event in row.events if event.kind in COMPUTING)
        busy_s = sum(
            max(0.0, min(e.start_s + e.length_s, self.end_s) - max(e.start_s, self.steady_s)) for e in computing
        )
        return busy_s / ((self.end_s - self.steady_s) or 1.0)


def timeline_drawing(groups: Sequence[TimelineGroup], width: float, title: str = "") -> Picture:
    """Draw a row per worker, with the groups below each other on one time axis that starts at each group's start.

    A box shows the number of its minibatch if there is room; thin bars below are messages. On the right is the share of
    its time in which a worker computes, once the pipeline is full.
    """
    picture = Picture(width, title or "; ".join(group.title for group in groups))
    left, right = (52, 38) if width < _NARROW else (122, 52)
    length_s = max((group.end_s - group.start_s for group in groups), default=0.0) or 1.0
    scale = AxisScale(0.0, length_s, left, width - right)
    kinds = {event.kind for group in groups for row in group.rows for event in row.events}
    labels = ((kind, label) for kind, label in {**COMPUTING, **MESSAGES}.items() if kind in kinds)
    y = picture.legend(labels, 20 if title else 4) + 8
    if title:
        picture.text(0, 13, fitted(title, width, 13), "title")
    for group in groups:
        y = _group(picture, group, scale, y)
    return picture


def _group(picture: Picture, group: TimelineGroup, scale: AxisScale, y: float) -> float:
    """Draw one group below y, with its own axis; return where it ends."""
    rows = _shown(group.rows)
    note = f"bubble {group.bubble:.0%}"
    if picture.width >= _NARROW:
        part = "these rounds" if group.steady_s > group.start_s else "the time"
        note += f" of {part}; right: the share in which each worker computes"
    picture.text(0, y + 18, fitted(group.title, picture.width - text_width(note) - 16), "strong")
    picture.text(picture.width, y + 18, note, "soft small", anchor="end")
    top, end_x = y + 28, scale(group.end_s - group.start_s)
    ticks = scale.ticks(4 if picture.width < _NARROW else 10)
    for tick in ticks:
        picture.line(scale(tick), top, scale(tick), top + len(rows) * _ROW, "grid")
    for stage, of_stage in groupby(enumerate(rows), key=lambda pair: pair[1].stage):
        numbered = list(of_stage)
        first_y = top + numbered[0][0] * _ROW
        picture.box(scale.start - 6, first_y + 1, 3, len(numbered) * _ROW - 4, f"fill {stage_class(stage)}", radius=1)
        if picture.width >= _NARROW:
            picture.text(0, first_y + 13, f"stage {stage}", "strong small")
    for number, row in enumerate(rows):
        _row(picture, group, row, scale, top + number * _ROW, end_x)
    y = top + len(rows) * _ROW
    if len(rows) < len(group.rows):
        picture.text(scale.start, y + 11, f"and {len(group.rows) - len(rows)} more replicas", "soft small")
        y += 16
    return _time_axis(picture, scale, ticks, y)


def _shown(rows: Sequence[WorkerTrace]) -> list[WorkerTrace]:
    """Return all rows, or if there are too many, the first replicas of each stage, in proportion."""
    share = min(1.0, _MAX_ROWS / max(1, len(rows)))
    shown = []
    for _, of_stage in groupby(rows, key=lambda row: row.stage):
        replicas = list(of_stage)
        shown += replicas[: max(1, int(len(replicas) * share))]
    return shown


def _row(picture: Picture, group: TimelineGroup, row: WorkerTrace, scale: AxisScale, y: float, end_x: float) -> None:
    """Draw one worker, cut off at the limits of the group's time."""
    label = f"s{row.stage} w{row.worker}" if picture.width < _NARROW else f"worker {row.worker}"
    picture.text(scale.start - 11, y + 13, label, "soft small", anchor="end")
    picture.box(scale.start, y, end_x - scale.start, _BOX, "rail", radius=2)
    for event in row.events:
        start_s, end_s = max(event.start_s, group.start_s), min(event.start_s + event.length_s, group.end_s)
        if end_s > start_s:
            _event(picture, event, scale(start_s - group.start_s), scale(end_s - group.start_s), y)
    picture.text(picture.width, y + 13, f"{group.busy(row):.0%}", "soft small", anchor="end")


def _event(picture: Picture, event: TraceEvent, x: float, end_x: float, y: float) -> None:
    """Draw an event from x to end_x: a box if it computes, a thin bar if it is a message."""
    tooltip = f"{event.name} {event.kind.replace('_', ' ')}, {format_seconds(event.length_s)}"
    if event.kind in MESSAGES:
        picture.box(x, y + _BOX + 1, end_x - x, _THIN, event.kind, tooltip=tooltip)
    elif event.kind in COMPUTING:
        gap = 0.6 if end_x - x > 3 else 0.0
        picture.box(x, y, end_x - x - gap, _BOX, event.kind, radius=1.5 if end_x - x > 5 else 0, tooltip=tooltip)
        number = re.sub(r"^[0-9]+[A-Z]", "", event.name)
        if event.kind not in ("update", "data") and end_x - x > text_width(number, 10) + 2:
            style = "on-forward" if event.kind == "forward" else "on-backward"
            picture.text((x + end_x - gap) / 2, y + 12, number, style, anchor="middle")


def _time_axis(picture: Picture, scale: AxisScale, ticks: Sequence[float], y: float) -> float:
    """Write the ticks below y; return where the drawing goes on."""
    picture.line(scale.start, y, scale.end, y, "axis")
    for tick, label in zip(ticks, time_labels(ticks), strict=True):
        picture.line(scale(tick), y, scale(tick), y + 4, "axis")
        picture.text(scale(tick), y + 15, label, "soft small", anchor="middle")
    return y + 26
