"""The page: one HTML file without a server or scripts, of one subject or of several beside each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pdtool import __version__
from pdtool.artifacts.run_dir import RunPhase
from pdtool.errors import printable
from pdtool.planner.choice.comparison import SimulatedPlan
from pdtool.report.drawings.chart import curve_chart
from pdtool.report.drawings.picture import stylesheet
from pdtool.report.drawings.timeline_drawing import TimelineGroup, timeline_drawing
from pdtool.report.measured import metric_charts
from pdtool.report.sections import HALF, NARROW, WIDE, Pictures, pictures_of
from pdtool.report.subject_view import SubjectView
from pdtool.report.subjects import Subject
from pdtool.units import format_seconds

GENERATOR = '<meta name="generator" content="pdtool report">'  # by which a page is known
REFRESH_S = 5  # seconds after which the page of an unfinished run is loaded again


def page(subjects: Sequence[Subject], simulations: dict[str, SimulatedPlan] | None = None) -> str:
    """Return the page as HTML.

    Args:
        simulations: those of earlier pages, by the digest of the plan; new ones are put into it.

    Raises:
        PdtoolError: a plan cannot be simulated.
    """
    simulations = {} if simulations is None else simulations
    views: list[SubjectView] = []
    for subject in subjects:
        is_repeated = any(subject.digests and view.subject.digests == subject.digests for view in views)
        views.append(SubjectView(subject, simulations, is_repeated=is_repeated))
    longest_s = max(view.time_s for view in views) or 1.0
    sections = [view.section(longest_s) for view in views]
    groups = [group for view in views for group in view.timelines(named=len(views) > 1)]
    runs = [(s.name, s.run.metrics) for s in subjects if s.run and s.run.metrics]
    template = _environment().get_template("page.html.j2")
    return template.render(
        generator=Markup(GENERATOR),
        refresh_s=REFRESH_S if any(is_unfinished(s) for s in subjects) else 0,
        title=printable(" and ".join(section.title for section in sections)),
        sections=sections,
        timeline=_timeline_pictures(groups),
        charts=[
            pictures_of(curve_chart(c.curves, w, c.title, "updates") for w in (HALF, NARROW))
            for c in metric_charts(runs)
        ],
        drawing_css=Markup(stylesheet()),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def is_unfinished(subject: Subject) -> bool:
    """Whether a run goes on."""
    return subject.run is not None and subject.run.state is RunPhase.RUNNING


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pdtool.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters.update(seconds=format_seconds, percent=lambda share: f"{share:.4f}")
    return environment


def _timeline_pictures(groups: Sequence[TimelineGroup]) -> Pictures | None:
    return pictures_of(timeline_drawing(groups, width) for width in (WIDE, NARROW)) if groups else None
