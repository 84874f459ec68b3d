"""What the page shows of one subject: the template's data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from markupsafe import Markup

from pdtool.report.bars import Bar
from pdtool.report.drawings.picture import Picture
from pdtool.report.measured import ExtraTime
from pdtool.report.subjects import Subject

WIDE, HALF, NARROW = 1120.0, 540.0, 358.0  # pixels, of drawings


@dataclass(frozen=True)
class Pictures:
    """A drawing for wide and one for narrow screens."""

    wide: Markup
    narrow: Markup


def pictures_of(drawings: Iterator[Picture]) -> Pictures:
    """Return a drawing that was made for wide and then for narrow screens."""
    wide, narrow = drawings
    return Pictures(Markup(wide.inline()), Markup(narrow.inline()))


@dataclass(frozen=True)
class StageSection:
    """One stage: what it holds, how it spends a minibatch's time, and its memory."""

    number: int
    colour: str
    holds: str
    workers: str
    bars: list[Bar]


@dataclass
class SubjectSection:
    """All that the page shows of one subject; what it does not have is empty."""

    subject: Subject
    title: str
    sentence: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graph: Pictures | None = None
    stages: list[StageSection] = field(default_factory=list)
    gain: Pictures | None = None
    rivals: list[Bar] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    rejected: list[tuple[str, str, str]] = field(default_factory=list)
    bottleneck: str = ""
    certificate: str = ""
    differences: list[ExtraTime] = field(default_factory=list)
    is_measured: bool = False
    emulated: list[Bar] = field(default_factory=list)
