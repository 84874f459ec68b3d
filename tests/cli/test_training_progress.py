"""What people see of a training, from the lines of metrics.jsonl and from run.json: a bar, or lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdtool.artifacts.metrics import MetricsLine, UpdateLine, ValidationLine
from pdtool.artifacts.run_dir import RunState
from pdtool.cli import terminal
from pdtool.cli.run_view import clock, training_progress, validated
from pdtool.cli.terminal import Verbosity

EPOCHS, UPDATES, SAMPLES = 3, 40, 320


def record(out: Path) -> None:
    RunState(plan="net", config="1-1", schedule="1f1b", epochs=EPOCHS, updates=UPDATES, samples=SAMPLES).save(
        out / "run.json"
    )


def events(epochs: int = EPOCHS, update_s: float = 0.5) -> Iterator[MetricsLine]:
    """Lines of metrics of a run whose updates of 8 samples take half a second, and validations two seconds.

    The last update of an epoch has one sample.
    """
    now, step = 1000.0, 0
    for epoch in range(1, epochs + 1):
        for update in range(UPDATES):
            now, step = now + update_s, step + 1
            samples = 1 if update == UPDATES - 1 else 8
            loss = 10.0 if samples == 1 else 1 / step
            yield UpdateLine(epoch=epoch, step=step, samples=samples, loss=loss, time=now, lr=0.1, samples_per_s=99.0)
        now += 2
        yield ValidationLine(epoch=epoch, step=step, time=now, loss=0.5, metrics={"accuracy": 0.75})


def shown(out: Path, capsys: pytest.CaptureFixture[str], log_every: int | None = None, **made: Any) -> list[str]:
    with training_progress(out, EPOCHS, log_every) as on_event:
        for event in events(**made):
            on_event(event)
    return capsys.readouterr().err.splitlines()


def test_without_a_terminal_there_is_a_line_every_so_many_updates(tmp_path: Path, capsys: Any) -> None:
    """With loss, learning rate, samples per second over the last seconds, and the time left, validations included."""
    record(tmp_path)
    lines = shown(tmp_path, capsys, log_every=30)
    assert [line.partition(": ")[0] for line in lines] == [
        "epoch 1/3, update 30/120",
        "epoch 1/3",
        "epoch 2/3, update 60/120",
        "epoch 2/3",
        "epoch 3/3, update 90/120",
        "epoch 3/3, update 120/120",
        "epoch 3/3",
    ]
    assert lines[0].endswith(": training loss 0.0333, lr 0.1, 16 samples/s, 0:45 left")
    assert lines[2].endswith("samples/s, 0:32 left")
    assert lines[-1] == "epoch 3/3: training loss 0.0420, validation loss 0.5000, accuracy 0.7500"


def test_by_default_there_is_a_line_every_ten_seconds(tmp_path: Path, capsys: Any) -> None:
    record(tmp_path)
    lines = [line for line in shown(tmp_path, capsys) if "update" in line]
    assert len(lines) == 5, "of 20 seconds in each epoch, the first update of all not counted"
    assert not [line for line in shown(tmp_path, capsys, update_s=0.05) if "update" in line], "a quick run is quiet"


def test_without_a_record_the_total_is_left_out(tmp_path: Path, capsys: Any) -> None:
    """As where a file system shows it late."""
    line = shown(tmp_path, capsys, log_every=30)[0]
    assert line == "epoch 1/3, update 30: training loss 0.0333, lr 0.1, 99 samples/s"


def test_on_a_terminal_there_is_a_bar_with_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns; its lines are few, however many updates there are."""
    record(tmp_path)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for name, value in {"COLUMNS": "80", "LINES": "25", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    with training_progress(tmp_path, EPOCHS) as on_event:
        bar = on_event.bar  # type: ignore[attr-defined]
        terminal.note("warning: above the bar, which comes with the first update " + "x" * 30)
        assert "first update\nxxx" in capsys.readouterr().err, "lines are broken between words"
        for event in events(2):
            on_event(event)
            if event.step == 77:
                [task] = bar.tasks
                assert (task.completed, task.total, task.description) == (77, 120, "epoch 2/3")
                assert task.fields["figures"] == "training loss 0.0130 16 samples/s 0:23 left"
                screen = Console(width=80, force_terminal=True, no_color=True)
                with screen.capture() as capture:
                    screen.print(bar.get_renderable())
                text = capture.get().rstrip("\n")
                assert text.endswith(" 77/120 training loss 0.0130 16 samples/s 0:23 left")
                assert len(text) <= 80
        assert bar.tasks[0].description == "validating"
    assert "epoch 2/3: training loss" in capsys.readouterr().err


def test_a_quiet_command_draws_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With -q, on a terminal too."""
    record(tmp_path)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(Verbosity, "is_quiet", True)
    assert shown(tmp_path, capsys) == []
    with terminal.progress("profiling") as on_progress, terminal.status("searching") as on_step:
        on_progress(1, 2)
        on_step("more")
    assert capsys.readouterr().err == ""


def test_times_and_figures_as_people_read_them() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.6, 3599, 3723)] == ["0:00", "1:00", "59:59", "1:02:03"]
    assert validated({"loss": 0.12345, "bleu": 20.0}) == "validation loss 0.1235, bleu 20.0000"
