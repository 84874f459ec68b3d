"""What people see of a training: a bar on a terminal, else a line every so often, and one after each validation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdtool.artifacts.run_dir import RunState
from pdtool.cli.console.terminal import above, console, is_progress_shown, note
from pdtool.errors import PdtoolError

OnEvent = Callable[[dict[str, Any]], None]  # called with each line of metrics.jsonl
_NOTE_S = 10.0  # between two lines, where no number of updates is asked for
_BAR_S = 0.1  # between two changes of the bar
_NO_METRICS = ("split", "epoch", "step", "time")  # of the line of a validation
_RATE_S = 10.0  # over which a rate is taken


@contextmanager
def training_progress(out: Path, epochs: int, log_every: int | None = None) -> Iterator[OnEvent]:
    """Show how a training goes on, on stderr; nothing that a worker would wait for.

    Args:
        out: the run's folder, whose run.json says how many updates an epoch has.
        epochs: that the run is to have in all.
        log_every: without a terminal, updates between two lines; None: a line every ten seconds.
    """
    training = _Training(out, epochs)
    if not is_progress_shown():
        yield _Notes(training, log_every)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(separator="/"))
    figures = TextColumn("{task.fields[figures]}")
    bar = Progress(*columns, figures, console=console(err=True), transient=True, expand=True, refresh_per_second=5)
    try:
        with above(bar.console):
            yield _TrainingBar(training, bar)
    finally:
        bar.stop()


@dataclass
class _Training:
    """How far a training is, from the lines of metrics.jsonl.

    Attributes:
        updates: of an epoch; None until run.json says.
        samples: of an update, on average.
    """

    out: Path
    epochs: int
    updates: int | None = None
    samples: float = 0.0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)  # time and step of updates of this epoch
    _first: tuple[float, int] | None = None
    _losses: list[float] = field(default_factory=list)  # of this epoch

    def add(self, event: dict[str, Any]) -> None:
        """Take note of an update."""
        at = (event["time"], event["step"])
        self._first = self._first or at
        self._losses.append(event["loss"])
        self._recent.append(at)
        while at[0] - self._recent[0][0] > _RATE_S:
            self._recent.popleft()

    def end_epoch(self) -> float | None:
        """Begin anew after a validation; return the mean training loss of the epoch, if there was an update."""
        losses, self._losses = self._losses, []
        self._recent.clear()
        return sum(losses) / len(losses) if losses else None

    @property
    def total(self) -> int | None:
        """Updates in all epochs."""
        if self.updates is None:
            try:
                state = RunState.load(self.out / "run.json")
            except PdtoolError:  # on another machine it may be seen later
                return None
            self.updates, self.samples = state.updates, (state.samples or 0) / (state.updates or 1)
        return self.updates and self.updates * self.epochs

    def rate(self, event: dict[str, Any]) -> float:
        """Return samples per second, over the last seconds of the epoch."""
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        if last_s <= first_s or not self.samples:
            return float(event["samples_per_s"])
        return (last - first) * self.samples / (last_s - first_s)

    def left(self, event: dict[str, Any]) -> str:
        """Return about how long the rest will take, validations so far included, as `12:05 left`; "" if unknown."""
        first_s, first = self._first or (0.0, 0)
        if not self.total or event["step"] <= first:
            return ""
        per_update_s = (event["time"] - first_s) / (event["step"] - first)
        return f"{clock(per_update_s * max(0, self.total - event['step']))} left"

    def is_epoch_over(self, event: dict[str, Any]) -> bool:
        """Whether this was the last update of its epoch."""
        return bool(self.updates) and event["step"] == event["epoch"] * (self.updates or 0)

    def validation_line(self, event: dict[str, Any]) -> str:
        """Write a validation as `epoch 3/10: training loss 0.1301, validation loss 0.1234, accuracy 0.9810`."""
        loss = self.end_epoch()
        trained = "" if loss is None else f"training loss {loss:.4f}, "
        return f"epoch {event['epoch']}/{self.epochs}: {trained}{validated(event)}"


def validated(metrics: Mapping[str, Any]) -> str:
    """Write the figures of a validation as `validation loss 0.1234, accuracy 0.9810`."""
    figures = {name: value for name, value in metrics.items() if name not in _NO_METRICS}
    return ", ".join(f"{'validation ' * (name == 'loss')}{name} {value:.4f}" for name, value in figures.items())


def clock(seconds: float) -> str:
    """Write seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Notes:
    """Writes lines: after validations, and between them every so often."""

    def __init__(self, training: _Training, log_every: int | None) -> None:
        self._training, self._log_every = training, log_every
        self._noted_s: float | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        if event["split"] == "valid":
            note(self._training.validation_line(event))
            self._noted_s = event["time"]
            return
        self._training.add(event)
        if self._is_due(event):
            self._noted_s = event["time"]
            note(self._line(event))

    def _is_due(self, event: dict[str, Any]) -> bool:
        if self._log_every:
            return bool(event["step"] % self._log_every == 0)
        self._noted_s = self._noted_s or event["time"]
        return bool(event["time"] - self._noted_s >= _NOTE_S)

    def _line(self, event: dict[str, Any]) -> str:
        training = self._training
        total = f"/{training.total}" if training.total else ""
        figures = [f"training loss {event['loss']:.4f}"]
        figures += [f"lr {event['lr']:.3g}"] if event["lr"] is not None else []
        figures += [f"{training.rate(event):.4g} samples/s", training.left(event)]
        place = f"epoch {event['epoch']}/{training.epochs}, update {event['step']}{total}"
        return f"{place}: {', '.join(filter(None, figures))}"


class _TrainingBar:
    """Moves a bar, and writes a line above it after each validation."""

    def __init__(self, training: _Training, bar: Any) -> None:
        self._training, self._bar = training, bar
        self._task = bar.add_task("starting", total=None, figures="")
        self._moved_s = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        training = self._training
        if event["split"] == "valid":
            note(training.validation_line(event))
            return
        self._bar.start()  # with the first update: workers that start print their warnings where a bar would be
        training.add(event)
        over = training.is_epoch_over(event)
        if not over and event["time"] - self._moved_s < _BAR_S:
            return
        self._moved_s = event["time"]
        doing = "validating" if over else f"epoch {event['epoch']}/{training.epochs}"
        figures = f"training loss {event['loss']:.4f} {training.rate(event):.4g} samples/s {training.left(event)}"
        self._bar.update(
            self._task, description=doing, total=training.total, completed=event["step"], figures=figures.rstrip()
        )
