"""Views of runs for people: the progress of a training, reports, emulations, checkpoints, unfinished runs.

Progress comes from the lines of metrics.jsonl, so that no worker waits for the display: a bar on a terminal, occasional
lines elsewhere. A report says where each stage's time went, predicted beside measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdtool.api.console import OnEvent
from pdtool.artifacts.metrics import MetricsLine, UpdateLine, ValidationLine, last_update
from pdtool.artifacts.report import EmulatedPlan, Emulation, Report
from pdtool.artifacts.run_dir import Checkpoint, CheckpointManifest, RunDir, RunState
from pdtool.cli.table import Lines, Table
from pdtool.cli.terminal import above, console, doing, is_progress_shown, note
from pdtool.errors import ArtifactError
from pdtool.files import quoted
from pdtool.reports.sentences import caveats, crowded, not_steady, scaling_phrase
from pdtool.reports.slowness import slowness_lines
from pdtool.units import (
    counted,
    format_bits_rate,
    format_bytes,
    format_metric,
    format_number,
    format_ratio,
    format_seconds,
    format_throughput,
)

_NOTE_S = 10.0  # between two lines, without --log-every
_BAR_S = 0.1  # between two changes of the bar
_RATE_S = 10.0  # over which a rate is taken
_DIGITS = 12  # of a digest that are shown


@contextmanager
def training_progress(out: Path, epochs: int, log_every: int | None = None) -> Iterator[OnEvent]:
    """Show the progress of a training on stderr, without making a worker wait.

    Args:
        out: the run's folder, whose run.json has the number of updates in an epoch.
        epochs: total epochs of the run.
        log_every: without a terminal, updates between two lines; None: a line every ten seconds.
    """
    if not is_progress_shown():
        with doing("training"):
            yield _Notes(out, epochs, log_every)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(separator="/"))
    figures = TextColumn("{task.fields[figures]}")
    bar = Progress(*columns, figures, console=console(err=True), transient=True, expand=True, refresh_per_second=5)
    try:
        with above(bar.console):
            yield _TrainingBar(out, epochs, bar)
    finally:
        bar.stop()


@dataclass
class _Training:
    """How far a training is, from its lines of metrics.

    Attributes:
        shown_s: time of the last line that was shown; None before the first.
    """

    out: Path
    epochs: int
    shown_s: float | None = field(default=None, init=False)
    _known: RunState | None = field(default=None, init=False)
    _recent: deque[tuple[float, int]] = field(default_factory=deque, init=False)  # time and step of updates
    _first: tuple[float, int] | None = field(default=None, init=False)
    _losses: list[tuple[float, int]] = field(default_factory=list, init=False)  # of updates, with their samples

    def __call__(self, line: MetricsLine) -> None:
        """Write a line after each validation, and show updates as often as they are due."""
        if isinstance(line, ValidationLine):
            note(self.validation_line(line))
            self.shown_s = line.time
        else:
            self.add(line)
            if self.is_due(line):
                self.shown_s = line.time
                self.show(line)

    def is_due(self, update: UpdateLine) -> bool:
        """Return whether an update is to be shown."""
        raise NotImplementedError

    def show(self, update: UpdateLine) -> None:
        """Show an update."""
        raise NotImplementedError

    def add(self, update: UpdateLine) -> None:
        """Record an update."""
        at = (update.time, update.step)
        self._first = self._first or at
        self._losses.append((update.loss, update.samples))
        self._recent.append(at)
        while at[0] - self._recent[0][0] > _RATE_S:
            self._recent.popleft()

    def end_epoch(self) -> float | None:
        """Start over after a validation; return the mean training loss over the epoch's samples, if it has any."""
        losses, self._losses = self._losses, []
        self._recent.clear()
        return sum(loss * n for loss, n in losses) / sum(n for _, n in losses) if losses else None

    @property
    def state(self) -> RunState | None:
        """The run's state; None until this machine sees it."""
        if self._known is None or self._known.updates is None:
            self._known = RunDir(self.out).state()
        return self._known

    @property
    def total(self) -> int | None:
        """Updates in all epochs; None until the run's state says."""
        return self.state.total_updates if self.state else None

    def rate(self, update: UpdateLine) -> float:
        """Return samples per second, over the last seconds of the epoch."""
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        state = self.state
        if last_s <= first_s or not (state and state.updates and state.samples):
            return update.samples_per_s or 0.0
        return (last - first) * state.samples / state.updates / (last_s - first_s)

    def left(self, update: UpdateLine) -> str:
        """Return an estimate of the remaining time, including validations, as `12:05 left`; "" if unknown."""
        first_s, first = self._first or (0.0, 0)
        if not self.total or update.step <= first:
            return ""
        per_update_s = (update.time - first_s) / (update.step - first)
        return f"{clock(per_update_s * max(0, self.total - update.step))} left"

    def figures(self, update: UpdateLine, lr: str = "") -> Iterator[str]:
        """Return what is known of an update: its loss, learning rate and speed, and the remaining time."""
        loss, rate = f"training loss {format_metric(update.loss)}", format_throughput(self.rate(update))
        return filter(None, (loss, lr, rate, self.left(update)))

    def validation_line(self, validation: ValidationLine) -> str:
        """Write a validation as `epoch 3/10: training loss 0.1301, validation loss 0.1234, accuracy 0.9810`."""
        loss = self.end_epoch()
        trained = "" if loss is None else f"training loss {format_metric(loss)}, "
        return f"epoch {validation.epoch}/{self.epochs}: {trained}{validated(validation.figures)}"


def validated(figures: Mapping[str, float]) -> str:
    """Write the figures of a validation as `validation loss 0.1234, accuracy 0.9810`."""
    return ", ".join(
        f"{'validation ' * (name == 'loss')}{name} {format_metric(value)}" for name, value in figures.items()
    )


def clock(seconds: float) -> str:
    """Write seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass
class _Notes(_Training):
    """Writes lines: after validations, and between them every so often."""

    log_every: int | None

    def is_due(self, update: UpdateLine) -> bool:
        if self.log_every:
            return update.step % self.log_every == 0
        self.shown_s = self.shown_s or update.time
        return update.time - self.shown_s >= _NOTE_S

    def show(self, update: UpdateLine) -> None:
        total = f"/{self.total}" if self.total else ""
        lr = "" if update.lr is None else f"lr {update.lr:.3g}"
        place = f"epoch {update.epoch}/{self.epochs}, update {update.step}{total}"
        note(f"{place}: {', '.join(self.figures(update, lr))}")


@dataclass
class _TrainingBar(_Training):
    """Moves a bar, and writes a line above it after each validation."""

    bar: Any

    def __post_init__(self) -> None:
        self._task = self.bar.add_task("starting", total=None, figures="")

    def is_due(self, update: UpdateLine) -> bool:
        self.bar.start()  # with the first update: workers that start print their warnings where a bar would be
        return self._ends_epoch(update) or update.time - (self.shown_s or 0.0) >= _BAR_S

    def show(self, update: UpdateLine) -> None:
        doing = "validating" if self._ends_epoch(update) else f"epoch {update.epoch}/{self.epochs}"
        figures = " ".join(self.figures(update))
        self.bar.update(self._task, description=doing, total=self.total, completed=update.step, figures=figures)

    def _ends_epoch(self, update: UpdateLine) -> bool:
        updates = self.state.updates if self.state else None
        return update.step == (self.total or 0) - (self.epochs - update.epoch) * (updates or 0)


def report_view(report: Report) -> Lines:
    """Show where each stage's time went, and predicted beside measured."""
    yield _time_table(report)
    yield (
        "waits: for messages of other stages; averaging: waits for gradients of other workers; "
        "data: loading, or waiting for loader workers; rest: between actions"
    )
    yield _prediction_table(report)
    yield f"per minibatch: {_compared(report)}"
    yield from slowness_lines(report)
    yield from caveats(report)
    yield f"throughput: {format_throughput(report.throughput_samples_per_s)}, including pipeline fill and drain"
    yield validated(report.metrics)
    if report.target:
        yield f"target {report.target}: {'reached' if report.target_reached else 'not reached'}"


def _time_table(report: Report) -> Table:
    """List each stage's shares of the whole time, and its times per minibatch."""
    rows = []
    for s, stage in enumerate(report.stages):
        parts = (stage.busy_s, stage.wait_s, stage.allreduce_s, stage.data_s, stage.rest_s)
        shares = (f"{part / (stage.time_s or 1.0):.0%}" for part in parts)
        times = map(format_seconds, (stage.forward_s, stage.backward_s, stage.update_s, stage.send_s))
        rows.append([s, stage.replicas, *shares, *times])
    share_columns = ("busy", "waits", "averaging", "data", "rest")
    columns = ("stage", "replicas", *share_columns, "forward", "backward", "update", "sending")
    epochs = ", ".join(f"{counted(n, 'epoch')} of {minibatches or '?'}" for n, minibatches in report.epochs_by_length)
    epochs += " minibatch" if report.epochs_by_length[-1][1] == 1 else " minibatches"
    if report.resumed_after:
        epochs = f"resumed after epoch {report.resumed_after}, {epochs}"
    title = (
        f"{report.plan}: {report.config}, schedule {report.schedule}, {epochs} of {report.batch_size}\n"
        "where the time went, and times per minibatch:"
    )
    return Table(columns, rows, title=title, drop=("sending", "rest", "update", "backward", "forward", "replicas"))


def _prediction_table(report: Report) -> Table:
    """List each stage's predicted and measured needs; a worker's chunks share a row."""
    predicted, depth = report.predicted, len(report.stages)
    rows = []
    for s, stage in enumerate(report.stages):
        compute, memory = "?", "?"
        if predicted:
            compute = format_seconds(sum(predicted.compute_s[s::depth]))
            memory = format_bytes(predicted.memory_bytes[s])  # of the worker, with all its chunks
        peak = "?" if stage.peak_memory_bytes is None else format_bytes(stage.peak_memory_bytes)
        if stage.peak_reserved_bytes is not None:
            peak += f" ({format_bytes(stage.peak_reserved_bytes)} reserved)"
        busy, sent = format_seconds(stage.busy_s), format_bytes(stage.sent_bytes)
        rows.append([s, compute, busy, memory, peak, stage.peak_versions, stage.peak_stashed, sent])
    columns = ("stage", "busy predicted", "measured", "memory predicted", "measured", "versions", "stashed", "sent")
    is_on_gpu = any(stage.peak_reserved_bytes is not None for stage in report.stages)
    kept = "" if is_on_gpu else " (measured: includes freed memory that workers keep)"
    title = f"busy time per minibatch, and peak memory{kept}:"
    return Table(columns, rows, title=title, drop=("sent", "stashed", "versions"))


def _compared(report: Report) -> str:
    """Compare measured seconds with those of the simulation, or of the formulas if the plan was not simulated.

    It shows no error if workers shared cores or epochs had no steady state, because the prediction assumes neither.
    """
    predicted, measured_s = report.predicted, report.measured.bottleneck_s
    if not predicted:
        return f"measured {format_seconds(measured_s)}"
    is_comparable = report.measured.is_steady and not (report.is_crowded or report.includes_compilation)
    source, predicted_s = "predicted" if predicted.simulated_s is None else "simulated", predicted.time_s
    ratio = f" ({measured_s / predicted_s - 1:+z.0%})" if predicted_s and is_comparable else ""
    return f"{source} {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}{ratio}"


def checkpoint_view(manifest: CheckpointManifest) -> Lines:
    """List the metrics of the epoch, and the files."""
    title = f"epoch {manifest.epoch}, seed {manifest.seed}: {validated(manifest.metrics)}"
    rows = [[name, format_bytes(file.bytes), file.sha256[:_DIGITS]] for name, file in manifest.files.items()]
    yield Table(("file", "bytes", "sha256"), rows, title=title)


def emulation_view(emulation: Emulation) -> Lines:
    """Show each plan's time per minibatch, emulated beside simulated, and the gain of the first over each."""
    own = emulation.plans[0]
    rows = []
    for plan in emulation.plans:
        error = f"{plan.error:+z.1%}" if plan.is_steady and not _is_crowded(emulation, plan) else ""
        has_gain = plan is not own and own.bottleneck_s
        gain = f"{format_ratio(plan.bottleneck_s / own.bottleneck_s)} ×" if has_gain else ""
        times = map(format_seconds, (plan.bottleneck_s, plan.simulated_s))
        speed = format_number(plan.throughput_samples_per_s)
        rows.append([plan.name, plan.config, *times, error, speed, gain, format_bytes(plan.sent_bytes)])
    columns = ("emulated", "plan", "per minibatch", "simulated", "error", "samples/s", "gain", "sent")
    cluster = emulation.cluster
    speeds = ", ".join(format_bits_rate(level.bandwidth_bytes_per_s) for level in cluster.levels)
    title, drop = f"{emulation.plan}: {cluster.topology} at {speeds}", ("sent", "samples/s", "simulated")
    yield Table(columns, rows, names=2, title=title, drop=drop)
    if emulation.compute == "sleep":
        yield "workers slept for the times in the profile"
        yield from _scalings(emulation)
    else:
        yield "workers trained the model on this machine"
    if any(level.latency_s for level in cluster.levels):
        yield "the links had no latency, and the simulated times have none either"
    yield from map(not_steady, {plan.minibatches for plan in emulation.plans if not plan.is_steady})
    if emulation.target:
        yield from _target_lines(emulation)
    if any(_is_crowded(emulation, plan) for plan in emulation.plans):
        yield crowded(max(plan.workers for plan in emulation.plans), emulation.cores)


def _scalings(emulation: Emulation) -> Lines:
    """The scaling of bytes and times, per plan if it differs."""
    names: dict[str, list[str]] = {}
    for plan in emulation.plans:
        names.setdefault(scaling_phrase(emulation, plan), []).append(plan.name)
    for scaling, of_plans in names.items():
        yield scaling if len(names) == 1 else f"{', '.join(of_plans)}: {scaling}"


def _target_lines(emulation: Emulation) -> Lines:
    """How long each plan trained until it reached the target."""
    own = emulation.plans[0]
    for plan in emulation.plans:
        took = f"{counted(plan.epochs, 'epoch')}, {format_seconds(plan.training_s)} of training"
        if not plan.target_reached:
            yield f"{plan.name}: {emulation.target} not reached in {took}"
        elif plan is own or not own.target_reached:
            yield f"{plan.name}: {emulation.target} after {took}"
        else:
            ratio = plan.training_s / own.training_s
            yield f"{plan.name}: {emulation.target} after {took}: {own.name} was {format_ratio(ratio)} times as fast"


def _is_crowded(emulation: Emulation, plan: EmulatedPlan) -> bool:
    """Whether it had more computing workers than cores."""
    return emulation.compute == "real" and plan.workers > emulation.cores


def run_view(state: RunState, folder: Path | None) -> Iterator[str]:
    """Say where a run stands.

    Args:
        folder: folder of the run; None if only its state is known.
    """
    resumed = f", resumed after epoch {state.resumed_after}" if state.resumed_after else ""
    yield f"{state.plan}: {state.config}, schedule {state.schedule}, {counted(state.epochs, 'epoch')} in all{resumed}"
    if folder is None:
        yield _end(state, is_running=False)
        return
    run_dir = RunDir(folder)
    goes_on = state.end is None and run_dir.is_running()
    yield _end(state, is_running=goes_on)
    if update := last_update(run_dir.metrics_file):
        yield _place(state, update)
    checkpoints = run_dir.checkpoints()
    yield _last_checkpoint(checkpoints)
    if state.epochs_done == state.epochs and state.end != "done":
        yield f"all epochs are trained: `pdtool export {quoted(folder)}` writes the weights"
    elif not goes_on and state.end != "done":
        yield f"{'continue' if checkpoints else 'start it again'} with `{run_dir.resume_command()}`"


def _end(state: RunState, *, is_running: bool) -> str:
    if is_running:
        return "it is running"
    match state.end:
        case "done":
            return "it has finished"
        case "stopped":
            return f"it was stopped by {state.reason}" if state.reason else "it was stopped"
        case "failed":
            return f"it failed: {state.reason}"
    return "it ended without a message: it was killed, its disk was full, or its machine went down"


def _place(state: RunState, update: UpdateLine) -> str:
    total = f"/{state.total_updates}" if state.total_updates else ""
    rate = f", {format_throughput(update.samples_per_s)}" if update.samples_per_s else ""
    place = f"{update.step}{total}, in epoch {update.epoch}/{state.epochs}"
    return f"last update: {place}: training loss {format_metric(update.loss)}{rate}"


def _last_checkpoint(checkpoints: dict[int, Checkpoint]) -> str:
    if not checkpoints:
        return "no checkpoint yet: the run writes the first after the first epoch"
    epoch = max(checkpoints)
    try:
        manifest = CheckpointManifest.load(checkpoints[epoch].manifest_file)
    except ArtifactError as error:
        return f"last checkpoint: epoch {epoch}, which is damaged ({error.what})"
    return f"last checkpoint: epoch {epoch}, {validated(manifest.metrics)}"
