"""The page: one HTML file without a server or scripts, of one subject or of several beside each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pdtool import __version__
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.report import Emulation, Report, StageReport
from pdtool.errors import PdtoolError
from pdtool.partition.comparison import THIS_PLAN, ComparedPlan
from pdtool.printable import printable
from pdtool.report.drawings.chart import curve_chart, gain_chart
from pdtool.report.drawings.graph_drawing import graph_drawing
from pdtool.report.drawings.picture import Picture, stage_class, stylesheet
from pdtool.report.drawings.timeline_drawing import TimelineGroup, timeline_drawing
from pdtool.report.measured import ExtraTime, differences, measured_group, metric_charts
from pdtool.report.sentences import device_name, emulation_sentence, plan_sentence, run_sentence, scaling_phrase
from pdtool.report.simulated import SimulatedPlan, StageShares, simulated_group
from pdtool.report.subjects import RunPhase, Subject
from pdtool.units import format_bits_rate, format_bytes, format_seconds

GENERATOR = '<meta name="generator" content="pdtool report">'  # by which a page is known
REFRESH_S = 5  # seconds after which the page of an unfinished run is loaded again
_WIDE, _HALF, _NARROW = 1120.0, 540.0, 358.0  # pixels, of drawings
_MAX_LISTED = 8  # names of what a stage holds


@dataclass(frozen=True)
class Pictures:
    """A drawing for wide and one for narrow screens."""

    wide: Markup
    narrow: Markup


@dataclass(frozen=True)
class BarPart:
    """A part of a bar: a class of page.css, its share of the whole bar, and what it says."""

    style: str
    share: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A named bar, with a figure at its end; `is_own`: of the plan that the page is about."""

    name: str
    parts: list[BarPart]
    figure: str
    note: str = ""
    is_own: bool = False


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
        is_repeated = any(subject.plan and view.plan and _digests(view.subject) == _digests(subject) for view in views)
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
            _pictures(curve_chart(c.curves, w, c.title, "updates") for w in (_HALF, _NARROW))
            for c in metric_charts(runs)
        ],
        drawing_css=Markup(stylesheet()),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def is_unfinished(subject: Subject) -> bool:
    """Whether a run goes on."""
    return subject.run is not None and subject.run.state is RunPhase.RUNNING


def _digests(subject: Subject) -> tuple[str, ...]:
    """What the predictions depend on."""
    plan, profile = subject.plan, subject.profile
    return (plan.plan_sha256, profile.content_sha256) if plan and profile else ()


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


def _pictures(drawings: Iterator[Picture]) -> Pictures:
    wide, narrow = drawings
    return Pictures(Markup(wide.inline()), Markup(narrow.inline()))


def _timeline_pictures(groups: Sequence[TimelineGroup]) -> Pictures | None:
    return _pictures(timeline_drawing(groups, width) for width in (_WIDE, _NARROW)) if groups else None


class SubjectView:
    """Computes the section of one subject.

    Args:
        simulations: of plans that were simulated already.
        is_repeated: whether the plan was drawn for another subject already.
    """

    def __init__(self, subject: Subject, simulations: dict[str, SimulatedPlan], *, is_repeated: bool) -> None:
        self.subject, self.plan, self.profile, self.run = subject, subject.plan, subject.profile, subject.run
        self.notes = [subject.missing] if subject.missing else []
        self.simulations, self.is_repeated = simulations, is_repeated

    @cached_property
    def simulated(self) -> SimulatedPlan | None:
        """What simulations say; None where there is no plan, or the plan of a run cannot be simulated."""
        if not self.plan or not self.profile:
            return None
        key = " ".join(_digests(self.subject))
        try:
            if key not in self.simulations:
                self.simulations[key] = SimulatedPlan.of(self.plan, self.profile)
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
            section.graph = _pictures(graph_drawing(self.plan, self.profile, w) for w in (_WIDE, _NARROW))
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
            group = measured_group(self.run.events, report.schedule, length_s, title)
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
            yield f"links of {plan.cluster.cluster().topology}", ", ".join(rates)
        if self.profile:
            yield "device", device_name(self.profile)

    def _run_facts(self) -> Iterator[tuple[str, str]]:
        if not self.run:
            return
        report = self.run.report
        yield "run", str(self.run.state)
        if report:
            yield "per minibatch", format_seconds(report.measured.bottleneck_s)
            yield "samples/s", f"{report.throughput_samples_per_s:,.0f}"
            yield "epochs", ", ".join(f"{n} × {minibatches or '?'}" for n, minibatches in report.epochs_by_length)
        last: dict[str, Any] = next((line for line in reversed(self.run.metrics) if line.get("split") == "valid"), {})
        for name, value in last.items():
            if isinstance(value, float) and name not in ("time", "lr", "samples_per_s"):
                yield f"{name}, validation", f"{value:.4g}"

    def _add_predictions(self, section: SubjectSection, plan: Plan, simulated: SimulatedPlan) -> None:
        section.rivals = _rival_bars(simulated)
        section.left_out = simulated.comparison.left_out
        if simulated.points and len(plan.stages) > 1:
            own = plan.cluster.levels[0].bandwidth_bytes_per_s
            section.gain = _pictures(gain_chart(simulated.points, width, own) for width in (_HALF, _NARROW))
        if plan.why:
            section.bottleneck = plan.why.bottleneck
            section.rejected = [(r.plan, format_seconds(r.bottleneck_s), r.why) for r in plan.why.rivals]
            if plan.why.lower_bound_s is not None:
                section.certificate = (
                    f"by the formulas no plan takes less than {format_seconds(plan.why.lower_bound_s)} per minibatch; "
                    f"this one is within {plan.why.gap or 0:.1%} of that ({plan.why.proof})"
                )

    def _stages(self, report: Report | None, longest_s: float) -> list[StageSection]:
        """Predicted and measured bars of each stage, as long as their time per minibatch."""
        simulated = self.simulated
        predicted_s = simulated.result.time_per_minibatch_s if simulated else 0.0
        depth = self.plan.pipeline_depth if self.plan else len(report.stages) if report else 0
        sections = []
        for s in range(depth):
            bars = []
            if simulated:
                name = "predicted" if report else "time"
                bars.append(_predicted_bar(name, simulated.stages[s], predicted_s, longest_s))
            if report and s < len(report.stages):
                bars.append(_measured_bar(report.stages[s], longest_s))
            measured = report.stages[s] if report and s < len(report.stages) else None
            bars += self._memory_bars(simulated.stages[s] if simulated else None, measured)
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

    def _memory_bars(self, simulated: StageShares | None, measured: StageReport | None) -> Iterator[Bar]:
        limit = self.plan.cluster.memory_bytes if self.plan else None
        peaks = [
            ("memory", simulated.memory_bytes if simulated else None),
            ("memory, measured", measured.peak_memory_bytes if measured else None),
        ]
        whole = limit or max((peak for _, peak in peaks if peak), default=0) or 1
        for name, peak in peaks:
            if peak is not None:
                share = min(1.0, peak / whole)
                of = f" of {format_bytes(limit)}" if limit else ""
                label = f"{share:.0%}" if limit else ""
                yield Bar(name, [BarPart("memory", share, label)], format_bytes(peak) + of)


def _predicted_bar(name: str, shares: StageShares, time_s: float, longest_s: float) -> Bar:
    parts = (("computing", shares.computing), ("communicating", shares.communicating), ("idle", shares.idle))
    scale = time_s / longest_s
    return Bar(name, [_part(style, share * scale, share * time_s) for style, share in parts], format_seconds(time_s))


def _measured_bar(stage: StageReport, longest_s: float) -> Bar:
    parts = (
        ("computing", stage.busy_s),
        ("waiting", stage.wait_s),
        ("averaging", stage.allreduce_s),
        ("loading", stage.data_s),
        ("rest", stage.rest_s),
    )
    drawn = [_part(style, seconds / longest_s, seconds) for style, seconds in parts if seconds]
    return Bar("measured", drawn, format_seconds(stage.time_s))


def _part(style: str, share: float, seconds: float) -> BarPart:
    return BarPart(style, share, format_seconds(seconds))


def _rival_bars(simulated: SimulatedPlan) -> list[Bar]:
    """Samples per second of the plan and its rivals, the fastest first."""
    own = next(plan for plan in simulated.comparison.plans if plan.label == THIS_PLAN)
    rivals = [plan for plan in simulated.comparison.plans if plan is own or not _is_same(plan, own)]
    plans = sorted(rivals, key=lambda plan: -plan.throughput_samples_per_s)
    fastest = plans[0].throughput_samples_per_s or 1.0
    bars = []
    for plan in plans:
        ratio = own.throughput_samples_per_s / (plan.throughput_samples_per_s or 1.0)
        note = f"{plan.samples_per_update:,} samples per update, {format_bytes(plan.memory_bytes)} at most"
        note += "" if plan.fits else ", does not fit"
        label = plan.label if plan.label != THIS_PLAN else f"{THIS_PLAN}, {plan.config}"
        figure = f"{plan.throughput_samples_per_s:,.0f} samples/s" + ("" if plan is own else f", {ratio:.3g} ×")
        parts = [BarPart("speed", plan.throughput_samples_per_s / fastest, "")]
        bars.append(Bar(label, parts, figure, note, is_own=plan is own))
    return bars


def _is_same(plan: ComparedPlan, own: ComparedPlan) -> bool:
    """Whether a rival is the plan itself, as when a straight pipeline was asked for."""
    return (plan.config, plan.time_per_minibatch_s) == (own.config, own.time_per_minibatch_s)


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
    slowest_s = max(plan.bottleneck_s for plan in emulation.plans) or 1.0
    for number, plan in enumerate(emulation.plans):
        for name, seconds in (("emulated", plan.bottleneck_s), ("simulated", plan.simulated_s)):
            label = f"{plan.name} ({plan.config}), {name}"
            parts = [BarPart("speed" if name == "emulated" else "idle", min(1.0, seconds / slowest_s), "")]
            section.emulated.append(Bar(label, parts, format_seconds(seconds), is_own=number == 0))
    cluster = emulation.cluster.cluster()
    rates = [format_bits_rate(level.bandwidth_bytes_per_s) for level in cluster.levels]
    section.facts = [
        ("workers", "slept the times of the profile" if emulation.compute == "sleep" else "trained the model"),
        (f"links of {cluster.topology}", ", ".join(rates)),
        ("minibatch", str(emulation.batch_size)),
    ]
    for plan in emulation.plans if emulation.compute == "sleep" else ():
        section.facts.append((f"scale of {plan.name}", scaling_phrase(emulation, plan)))
    return section
