"""The page of `pdtool report`: one HTML file without a server or scripts, about one subject or several side by side.

A subject is a plan, a run with what it was planned to be, or an emulation. `SubjectView` makes its section from what
was planned, simulated and measured. The template page.html.j2 lays out the sections.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pdtool import __version__
from pdtool.artifacts.metrics import ValidationLine
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Emulation, Report
from pdtool.artifacts.run_dir import RunPhase, RunRecord
from pdtool.errors import PdtoolError, printable
from pdtool.planner.choice.comparison import Simulation, simulated_for_report
from pdtool.reports.chart import curve_chart, gain_chart
from pdtool.reports.figures import (
    Bar,
    ExtraTime,
    differences,
    emulation_bars,
    measured_bar,
    measured_group,
    memory_bars,
    metric_charts,
    predicted_bar,
    rival_bars,
    simulated_group,
)
from pdtool.reports.graph_drawing import graph_drawing
from pdtool.reports.picture import Picture, stage_class, stylesheet
from pdtool.reports.sentences import device_name, emulation_sentence, plan_sentence, run_sentence, scaling_phrase
from pdtool.reports.timeline_drawing import TimelineGroup, timeline_drawing
from pdtool.units import format_bits_rate, format_seconds

GENERATOR = '<meta name="generator" content="pdtool report">'  # by which a page is known
REFRESH_S = 5  # seconds after which the page of an unfinished run is loaded again
WIDE, HALF, NARROW = 1120.0, 540.0, 358.0  # pixels, of drawings
_MAX_LISTED = 8  # names of what a stage holds


@dataclass(frozen=True)
class Subject:
    """A plan, a run or an emulation.

    Attributes:
        name: as it was named on the command line.
        profile: that the plan was made from; None where it is no longer there.
        missing: why there is no plan or profile, for the reader of the page.
    """

    name: str
    plan: Plan | None = None
    profile: Profile | None = None
    run: RunRecord | None = None
    emulation: Emulation | None = None
    missing: str = ""

    @property
    def digests(self) -> tuple[str, ...]:
        """What the predictions depend on; empty where there is no plan or profile."""
        return (self.plan.plan_sha256, self.profile.content_sha256) if self.plan and self.profile else ()


def page(subjects: Sequence[Subject], simulations: dict[str, Simulation] | None = None) -> str:
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
    return subject.run is not None and subject.run.phase is RunPhase.RUNNING


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pdtool.reports", ""),
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


class SubjectView:
    """Computes the section of one subject.

    Args:
        simulations: of plans that were simulated already.
        is_repeated: whether the plan was drawn for another subject already.
    """

    def __init__(self, subject: Subject, simulations: dict[str, Simulation], *, is_repeated: bool) -> None:
        self.subject, self.plan, self.profile, self.run = subject, subject.plan, subject.profile, subject.run
        self.notes = [subject.missing] if subject.missing else []
        self.simulations, self.is_repeated = simulations, is_repeated

    @cached_property
    def simulated(self) -> Simulation | None:
        """What simulations say; None where there is no plan, or the plan of a run cannot be simulated."""
        if not self.plan or not self.profile:
            return None
        key = " ".join(self.subject.digests)
        try:
            if key not in self.simulations:
                self.simulations[key] = simulated_for_report(self.plan, self.profile)
            return self.simulations[key]
        except PdtoolError as error:
            if not self.run:
                raise
            self.notes.append(f"the plan cannot be simulated: {error}")
            return None

    @property
    def time_s(self) -> float:
        """The longest time per minibatch of all stages, predicted or measured."""
        report = self.run.report if self.run else None
        measured_s = [stage.time_s for stage in report.stages] if report else []
        return max([self.simulated.result.time_per_minibatch_s if self.simulated else 0.0, *measured_s])

    def section(self, longest_s: float) -> SubjectSection:
        """Return all that the page shows of the subject but what all subjects share.

        Args:
            longest_s: time per minibatch that is as long as a bar can be.
        """
        if self.subject.emulation:
            return _emulation_section(self.subject, self.subject.emulation)
        name = self.plan.name if self.plan else self.subject.name
        section = SubjectSection(self.subject, self.subject.name if self.run else name, self._sentence())
        if self.plan and self.profile and not self.is_repeated:
            section.graph = pictures_of(graph_drawing(self.plan, self.profile, w) for w in (WIDE, NARROW))
        if self.plan and self.simulated and not self.is_repeated:
            self._add_predictions(section, self.plan, self.simulated)
        report = self.run.report if self.run else None
        section.stages, section.is_measured = self._stages(report, longest_s), report is not None
        if report and self.simulated:
            simulated_s = self.simulated.result.time_per_minibatch_s
            section.differences = differences(report, self.simulated.stages, simulated_s)
        section.facts = [*self._run_facts(), *self._plan_facts()]
        section.notes = self.notes + list(_report_notes(report))
        return section

    def timelines(self, *, named: bool) -> Iterator[TimelineGroup]:
        """Return what was simulated and what was measured, over the same length of time."""
        of = f"{self.subject.name}: " if named else ""
        predicted = None
        if self.simulated and self.plan:
            predicted = simulated_group(
                self.simulated.result, self.simulated.shape, self.plan.schedule, f"{of}simulated, {self.plan.schedule}"
            )
            if not self.is_repeated:
                yield predicted
        report = self.run.report if self.run else None
        if self.run and report:
            length_s = self._measured_length_s(report, predicted)
            title = f"{of}measured, as the last epoch began"
            group = measured_group(self.run.workers, report.schedule, length_s, title)
            if group:
                yield group

    def _measured_length_s(self, report: Report, predicted: TimelineGroup | None) -> float:
        """Return how much of a run is drawn: what was simulated, or up to three times that where the run is slower."""
        measured_s = report.measured.bottleneck_s
        if not predicted or not self.simulated:
            return 12 * measured_s
        slower = measured_s / (self.simulated.result.time_per_minibatch_s or measured_s or 1.0)
        return predicted.end_s * max(1.0, min(3.0, slower))

    def _sentence(self) -> str:
        if self.run:
            return run_sentence(self.run, self.plan)
        return plan_sentence(self.plan, self.profile) if self.plan and self.profile else ""

    def _plan_facts(self) -> Iterator[tuple[str, str]]:
        plan, predicted = self.plan, self.plan.predicted if self.plan else None
        if plan and self.simulated and predicted:
            result = self.simulated.result
            if not self.run:
                yield "per minibatch", format_seconds(result.time_per_minibatch_s)
                yield "samples/s", f"{result.throughput_samples_per_s:,.0f}"
                yield "× data parallelism", f"{predicted.gain_over_data_parallel:.3g}"
            yield "schedule", plan.schedule
            yield "minibatch", f"{plan.batch_size}"
            yield "samples per update", f"{self.simulated.comparison.plans[0].samples_per_update:,}"
            rates = [format_bits_rate(level.bandwidth_bytes_per_s) for level in plan.cluster.levels]
            yield f"links of {plan.cluster.topology}", ", ".join(rates)
        if self.profile:
            yield "device", device_name(self.profile)

    def _run_facts(self) -> Iterator[tuple[str, str]]:
        if not self.run:
            return
        report = self.run.report
        yield "run", str(self.run.phase)
        if report:
            yield "per minibatch", format_seconds(report.measured.bottleneck_s)
            yield "samples/s", f"{report.throughput_samples_per_s:,.0f}"
            yield "epochs", ", ".join(f"{n} × {minibatches or '?'}" for n, minibatches in report.epochs_by_length)
        validations = (line for line in reversed(self.run.metrics) if isinstance(line, ValidationLine))
        for validation in islice(validations, 1):
            for name, value in validation.figures.items():
                yield f"{name}, validation", f"{value:.4g}"

    def _add_predictions(self, section: SubjectSection, plan: Plan, simulated: Simulation) -> None:
        section.rivals = rival_bars(simulated)
        section.left_out = simulated.comparison.left_out
        if simulated.sweep and len(plan.stages) > 1:
            own = plan.cluster.levels[0].bandwidth_bytes_per_s
            section.gain = pictures_of(gain_chart(simulated.sweep, width, own) for width in (HALF, NARROW))
        if plan.why:
            section.bottleneck = plan.why.bottleneck
            section.rejected = [(r.plan, format_seconds(r.bottleneck_s), r.why) for r in plan.why.rivals]
            if certificate := plan.why.certificate:
                section.certificate = (
                    f"by the formulas no plan takes less than {format_seconds(certificate.bound_s)} per minibatch; "
                    f"this one is within {certificate.gap or 0:.1%} of that ({certificate.sentence()})"
                )

    def _stages(self, report: Report | None, longest_s: float) -> list[StageSection]:
        """Predicted and measured bars of each stage, as long as their time per minibatch."""
        simulated = self.simulated
        predicted_s = simulated.result.time_per_minibatch_s if simulated else 0.0
        limit = self.plan.cluster.memory_bytes if self.plan else None
        depth = self.plan.pipeline_depth if self.plan else len(report.stages) if report else 0
        sections = []
        for s in range(depth):
            bars = []
            if simulated:
                name = "predicted" if report else "time"
                bars.append(predicted_bar(name, simulated.stages[s], predicted_s, longest_s))
            if report and s < len(report.stages):
                bars.append(measured_bar(report.stages[s], longest_s))
            measured = report.stages[s] if report and s < len(report.stages) else None
            bars += memory_bars(limit, simulated.stages[s] if simulated else None, measured)
            sections.append(StageSection(s, stage_class(s), *self._stage_texts(s, report), bars=bars))
        return sections

    def _stage_texts(self, s: int, report: Report | None) -> tuple[str, str]:
        if not self.plan:
            replicas = report.stages[s].replicas if report else 1
            return "", f"{replicas} worker{'s' * (replicas != 1)}"
        stage = self.plan.stages[s]
        names = [name for other in self.plan.stages[s :: self.plan.pipeline_depth] for name in other.nodes]
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        workers = f"{stage.replicas} worker{'s' * (stage.replicas != 1)}, {stage.in_flight} in flight"
        return ", ".join(names[:_MAX_LISTED]) + more, workers


def _report_notes(report: Report | None) -> Iterator[str]:
    if report and not report.measured.is_steady:
        yield (
            f"epochs of {report.minibatches} minibatches have no steady state: filling and draining the pipeline are "
            "measured, too"
        )
    if report and report.is_crowded:
        yield (
            f"{report.local_workers} workers shared {report.cores} cores; the prediction is for devices of their own, "
            "on which they would be faster"
        )


def _emulation_section(subject: Subject, emulation: Emulation) -> SubjectSection:
    section = SubjectSection(subject, emulation.plan, emulation_sentence(emulation))
    section.emulated = emulation_bars(emulation)
    cluster = emulation.cluster
    rates = [format_bits_rate(level.bandwidth_bytes_per_s) for level in cluster.levels]
    section.facts = [
        ("workers", "slept the times of the profile" if emulation.compute == "sleep" else "trained the model"),
        (f"links of {cluster.topology}", ", ".join(rates)),
        ("minibatch", str(emulation.batch_size)),
    ]
    for plan in emulation.plans if emulation.compute == "sleep" else ():
        section.facts.append((f"scale of {plan.name}", scaling_phrase(emulation, plan)))
    return section
