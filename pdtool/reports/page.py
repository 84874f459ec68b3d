"""The page of `pdtool report`: one HTML file without a server or scripts, about one subject or several side by side.

A subject is a plan, a run with its plan, or an emulation. `SubjectView` has its data. FIGURES lists the figures of the
page: to add one, add a function there. page.html.j2 lays them out, and the macros of blocks.html.j2 write everything
but drawings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pdtool import __version__
from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.metrics import ValidationLine
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Emulation, Report
from pdtool.artifacts.run_dir import RunRecord
from pdtool.errors import PdtoolError, printable
from pdtool.planner.choice.comparison import SimulatedPlan, simulated_for_report
from pdtool.reports.chart import curve_chart, gain_chart
from pdtool.reports.figures import (
    Bar,
    emulation_bars,
    measured_bar,
    measured_group,
    memory_bars,
    metric_curves,
    predicted_bar,
    rival_bars,
    simulated_group,
)
from pdtool.reports.graph_drawing import graph_drawing
from pdtool.reports.picture import Picture, stage_class, stylesheet
from pdtool.reports.sentences import (
    caveats,
    device_name,
    emulation_sentence,
    plan_sentence,
    run_sentence,
    scaling_phrase,
)
from pdtool.reports.slowness import differences
from pdtool.reports.timeline_drawing import TimelineGroup, timeline_drawing
from pdtool.units import counted, format_bits_rate, format_number, format_seconds, format_speedup

GENERATOR = '<meta name="generator" content="pdtool report">'  # identifies a page of pdtool
REFRESH_S = 5  # seconds after which the browser reloads the page of an unfinished run
WIDE, HALF, NARROW = 1120.0, 540.0, 358.0  # pixels, of drawings
_MAX_LISTED = 8  # names of a stage's content


@dataclass(frozen=True)
class Subject:
    """A plan, a run or an emulation.

    Attributes:
        name: its name on the command line.
        profile: the plan's profile; None if it no longer exists.
        missing: why there is no plan or profile, for the reader of the page.
    """

    name: str
    plan: Plan | None = None
    profile: Profile | None = None
    run: RunRecord | None = None
    emulation: Emulation | None = None
    missing: str = ""

    @property
    def digest(self) -> str:
        """Digests of the inputs of the predictions; "" without a plan or profile."""
        return f"{self.plan.plan_sha256} {self.profile.content_sha256}" if self.plan and self.profile else ""


class PageFigure(NamedTuple):
    """A figure of the page: its heading, a sentence about it, and its HTML."""

    title: str
    about: str
    body: Markup


def page(subjects: Sequence[Subject], simulations: dict[str, SimulatedPlan]) -> str:
    """Return the page as HTML.

    Args:
        simulations: cache of earlier pages' simulations, by the digest of the plan.

    Raises:
        PdtoolError: a plan cannot be simulated.
    """
    digests = [subject.digest for subject in subjects]
    views = [SubjectView(s, simulations, is_repeated=s.digest in digests[:i]) for i, s in enumerate(subjects)]
    figures = [figure for figures_of in FIGURES for figure in figures_of(views)]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            generator=Markup(GENERATOR),
            refresh_s=REFRESH_S if any(map(is_unfinished, subjects)) else 0,
            title=printable(" and ".join(view.title for view in views)),
            views=views,
            figures=figures,
            drawing_css=Markup(stylesheet()),
            version=__version__,
            made=time.strftime("%Y-%m-%d %H:%M:%S"),
        )
    )


def is_unfinished(subject: Subject) -> bool:
    """Whether a run goes on."""
    return subject.run is not None and subject.run.is_running


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pdtool.reports", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["seconds"] = format_seconds
    return environment


def _html(block: str, *values: object) -> Markup:
    """Apply a macro of blocks.html.j2 to some values."""
    return Markup(getattr(_environment().get_template("blocks.html.j2").module, block)(*values))


def pictures(draw: Callable[[float], Picture], wide: float = WIDE) -> Markup:
    """Return a drawing twice, for wide and for narrow screens."""
    return _html("pictures", *(Markup(draw(width).inline()) for width in (wide, NARROW)))


class StageSection(NamedTuple):
    """One stage: its content, how it spends a minibatch's time, and its memory."""

    number: int
    colour: str
    holds: str
    workers: str
    bars: list[Bar]


class SubjectView:
    """The data of one subject.

    Args:
        simulations: cache of simulations.
        is_repeated: whether the plan was already drawn for another subject.

    Attributes:
        simulated: the simulations; None without a plan, or if a run's plan cannot be simulated.

    Raises:
        PdtoolError: a plan cannot be simulated.
    """

    def __init__(self, subject: Subject, simulations: dict[str, SimulatedPlan], *, is_repeated: bool) -> None:
        self.subject, self.plan, self.profile, self.run = subject, subject.plan, subject.profile, subject.run
        self.emulation, self.report = subject.emulation, subject.run.report if subject.run else None
        self.is_repeated, self.missing = is_repeated, [subject.missing] if subject.missing else []
        self.simulated = simulations.get(subject.digest)
        if self.plan and self.profile and not self.simulated:
            try:
                self.simulated = simulations[subject.digest] = simulated_for_report(self.plan, self.profile)
            except PdtoolError as error:
                if not self.run:
                    raise
                self.missing.append(f"the plan cannot be simulated: {error}")

    @property
    def time_s(self) -> float:
        """The longest time per minibatch of all stages, predicted or measured."""
        measured_s = [stage.time_s for stage in self.report.stages] if self.report else []
        return max([self.simulated.result.time_per_minibatch_s if self.simulated else 0.0, *measured_s])

    @property
    def title(self) -> str:
        """The name of an emulation's plan or of a plan, else the name on the command line."""
        if self.emulation:
            return self.emulation.plan
        return self.plan.name if self.plan and not self.run else self.subject.name

    @property
    def sentence(self) -> str:
        """The subject in one sentence."""
        if self.emulation:
            return emulation_sentence(self.emulation)
        if self.run:
            return run_sentence(self.run, self.plan)
        return plan_sentence(self.plan, self.profile) if self.plan and self.profile else ""

    @property
    def notes(self) -> list[str]:
        """What is missing, and what a reader has to know of the figures."""
        return [*self.missing, *(caveats(self.report) if self.report else ())]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values of the key figures at the top."""
        return [*_emulation_facts(self.emulation), *self._run_facts(), *self._plan_facts()]

    def stages(self, longest_s: float) -> list[StageSection]:
        """Return predicted and measured bars of each stage, as long as their time per minibatch.

        Args:
            longest_s: time per minibatch of the longest possible bar.
        """
        simulated, report = self.simulated, self.report
        predicted_s = simulated.result.time_per_minibatch_s if simulated else 0.0
        limit = self.plan.cluster.memory_bytes if self.plan else None
        depth = self.plan.pipeline_depth if self.plan else len(report.stages) if report else 0
        sections = []
        for s in range(depth):
            bars = []
            if simulated:
                name = "predicted" if report else "time"
                bars.append(predicted_bar(name, simulated.stages[s], predicted_s, longest_s))
            measured = report.stages[s] if report and s < len(report.stages) else None
            if measured:
                bars.append(measured_bar(measured, longest_s))
            bars += memory_bars(limit, simulated.stages[s] if simulated else None, measured)
            sections.append(StageSection(s, stage_class(s), *self._stage_texts(s), bars=bars))
        return sections

    def _stage_texts(self, s: int) -> tuple[str, str]:
        if not self.plan:
            replicas = self.report.stages[s].replicas if self.report else 1
            return "", counted(replicas, "worker")
        stage = self.plan.stages[s]
        names = [name for other in self.plan.stages[s :: self.plan.pipeline_depth] for name in other.nodes]
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        workers = f"{counted(stage.replicas, 'worker')}, {stage.in_flight} in flight"
        return ", ".join(names[:_MAX_LISTED]) + more, workers

    def timelines(self, *, named: bool) -> Iterator[TimelineGroup]:
        """Return the simulated and the measured timeline, over the same length of time."""
        of = f"{self.subject.name}: " if named else ""
        predicted = None
        if self.simulated and self.plan:
            predicted = simulated_group(
                self.simulated.result, self.simulated.shape, self.plan.schedule, f"{of}simulated, {self.plan.schedule}"
            )
            if not self.is_repeated:
                yield predicted
        if self.run and self.report:
            length_s = self._measured_length_s(self.report, predicted)
            title = f"{of}measured, as the last epoch began"
            if group := measured_group(self.run.workers, self.report.schedule, length_s, title):
                yield group

    def _measured_length_s(self, report: Report, predicted: TimelineGroup | None) -> float:
        """Return how much of a run to draw: the simulated length, or up to three times that if the run is slower."""
        measured_s = report.measured.bottleneck_s
        if not predicted or not self.simulated:
            return 12 * measured_s
        slower = measured_s / (self.simulated.result.time_per_minibatch_s or measured_s or 1.0)
        return predicted.end_s * max(1.0, min(3.0, slower))

    def _plan_facts(self) -> Iterator[tuple[str, str]]:
        plan, predicted = self.plan, self.plan.predicted if self.plan else None
        if plan and self.simulated and predicted:
            result = self.simulated.result
            if not self.run:
                yield "per minibatch", format_seconds(result.time_per_minibatch_s)
                yield "samples/s", format_number(result.throughput_samples_per_s)
                if plan.has_gain:
                    yield "times as fast as data parallelism", format_speedup(predicted.gain_over_data_parallel)
            yield "schedule", plan.schedule
            yield "minibatch", f"{plan.batch_size}"
            yield "samples per update", f"{self.simulated.comparison.plans[0].samples_per_update:,}"
            yield _links(plan.cluster)
        if self.profile:
            yield "device", device_name(self.profile)

    def _run_facts(self) -> Iterator[tuple[str, str]]:
        if not self.run:
            return
        yield "run", self.run.phase
        if report := self.report:
            yield "per minibatch", format_seconds(report.measured.bottleneck_s)
            yield "samples/s, with fill and drain", format_number(report.throughput_samples_per_s)
            earlier = [f"{report.resumed_after} earlier"] if report.resumed_after else []
            trained = [f"{n} × {minibatches or '?'}" for n, minibatches in report.epochs_by_length]
            yield "epochs", ", ".join(earlier + trained)
        validations = [line for line in self.run.metrics if isinstance(line, ValidationLine)]
        for validation in validations[-1:]:
            for name, value in validation.figures.items():
                yield f"{name}, validation", f"{value:.4g}"


def _emulation_facts(emulation: Emulation | None) -> Iterator[tuple[str, str]]:
    if not emulation:
        return
    yield "workers", "slept for the times in the profile" if emulation.compute == "sleep" else "trained the model"
    yield _links(emulation.cluster)
    yield "minibatch", str(emulation.batch_size)
    for plan in emulation.plans if emulation.compute == "sleep" else ():
        yield f"scale of {plan.name}", scaling_phrase(emulation, plan)


def _links(cluster: Cluster) -> tuple[str, str]:
    rates = (format_bits_rate(level.bandwidth_bytes_per_s) for level in cluster.levels)
    return f"links of {cluster.topology}", ", ".join(rates)


def _of(view: SubjectView, views: Sequence[SubjectView]) -> str:
    return f", {view.title}" if len(views) > 1 else ""


def _training(views: Sequence[SubjectView]) -> Iterator[PageFigure]:
    runs = [(view.subject.name, view.run.metrics) for view in views if view.run and view.run.metrics]
    charts = [
        pictures(partial(curve_chart, curves, title=title, below="updates"), HALF)
        for title, curves in metric_curves(runs).items()
    ]
    if charts:
        yield PageFigure("Training", "", _html("charts", charts))


def _graphs(views: Sequence[SubjectView]) -> Iterator[PageFigure]:
    about = (
        "Modules from left to right. A taller module costs more. Times are forward and backward of one minibatch on "
        "one worker. Borders show the activations of a minibatch."
    )
    for view in views:
        if view.plan and view.profile and not view.is_repeated:
            drawing = pictures(partial(graph_drawing, view.plan, view.profile))
            yield PageFigure(f"The model by stage{_of(view, views)}", about, drawing)


def _stages(views: Sequence[SubjectView]) -> Iterator[PageFigure]:
    longest_s = max(view.time_s for view in views) or 1.0
    columns = [(view, stages) for view in views if (stages := view.stages(longest_s))]
    if columns:
        legend = _html("legend", any(view.report for view, _ in columns))
        body = _html("columns", [(view.title, _html("stages", stages)) for view, stages in columns])
        about = "How the workers of each stage spend the time of a minibatch, and how much memory one worker needs."
        yield PageFigure("Stages", about, legend + body)


def _differences(views: Sequence[SubjectView]) -> Iterator[PageFigure]:
    reports = [(view.title, differences(view.report)) for view in views if view.report]
    columns = [(title, _html("differences", parts)) for title, parts in reports if parts]
    if columns:
        about = "What took longer or shorter than predicted, per minibatch at the busiest stage."
        yield PageFigure("Why measured differs from predicted", about, _html("columns", columns))


def _timeline(views: Sequence[SubjectView]) -> Iterator[PageFigure]:
    groups = [group for view in views for group in view.timelines(named=len(views) > 1)]
    if groups:
        about = "What each worker computes. Numbers are minibatches. The pipeline fills, then steady rounds follow."
        yield PageFigure("Timeline", about, pictures(partial(timeline_drawing, groups)))


def _rivals(views: Sequence[SubjectView]) -> Iterator[PageFigure]:
    for view in views:
        plan, simulated = view.plan, view.simulated
        if plan and simulated and not view.is_repeated:
            gain, own = None, plan.cluster.levels[0].bandwidth_bytes_per_s
            if simulated.sweep and len(plan.stages) > 1:
                gain = pictures(partial(gain_chart, simulated.sweep, own=own), HALF)
            bars, left_out = rival_bars(simulated), simulated.comparison.left_out
            body = _html("rivals", gain, bars, left_out) + _reasons(plan)
            yield PageFigure(f"Compared with other plans{_of(view, views)}", "", body)


def _sentence(line: str) -> str:
    """Begin a line with a capital."""
    return line[:1].upper() + line[1:]


def _reasons(plan: Plan) -> Markup:
    if not plan.why:
        return Markup()
    rejected = [(r.plan, format_seconds(r.bottleneck_s), r.why) for r in plan.why.rivals]
    return _html("reasons", plan.why.bottleneck, ". ".join(map(_sentence, plan.certificate_lines)), rejected)


def _emulated(views: Sequence[SubjectView]) -> Iterator[PageFigure]:
    for view in views:
        if view.emulation:
            yield PageFigure("Emulated, time per minibatch", "", _html("bars", emulation_bars(view.emulation)))


# The figures of the page, in order. Each function yields those of all subjects, if there are any.
FIGURES: tuple[Callable[[Sequence[SubjectView]], Iterator[PageFigure]], ...] = (
    _training,
    _graphs,
    _stages,
    _differences,
    _timeline,
    _rivals,
    _emulated,
)
