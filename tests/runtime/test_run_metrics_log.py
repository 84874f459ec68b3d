"""metrics.jsonl is read as it grows, each line once, and refused where it holds something else."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import harness
import pytest

from pdtool.artifacts import metrics as metrics_log
from pdtool.artifacts.metrics import (
    GrowingFile,
    MetricsLine,
    MetricsLog,
    UpdateLine,
    ValidationLine,
    following_metrics,
    read_metrics,
    unix_time,
)
from pdtool.errors import ArtifactError, PdtoolError
from pdtool.runtime.launch.launcher import launch


def write(out: Path, *updates: tuple[int, int], epochs_done: int = 0) -> None:
    with closing(MetricsLog(out / "metrics.jsonl", epochs_done=epochs_done)) as log:
        for epoch, step in updates:
            add(log, epoch, step)


def add(log: MetricsLog, epoch: int, step: int) -> None:
    line = UpdateLine(epoch=epoch, step=step, samples=8, loss=0.5, time=unix_time(), lr=0.1, samples_per_s=log.rate(8))
    log.add(line)


def updates(lines: Sequence[MetricsLine]) -> list[tuple[int, int]]:
    return [(line.epoch, line.step) for line in lines]


def test_each_line_is_read_once_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path)
    assert file.new_lines() == []
    with path.open("w", buffering=1) as writer:
        writer.write("first\nsec")
        writer.flush()
        assert file.new_lines() == [b"first"]
        writer.write("ond\n")
        assert file.new_lines() == [b"second"]
        assert file.new_lines() == []


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a line does not grow with the number of lines before it: each is parsed once."""
    parsed = []
    parse = metrics_log._parse
    monkeypatch.setattr(metrics_log, "_parse", lambda text, *place: parsed.append(text) or parse(text, *place))
    monkeypatch.setattr(metrics_log, "_POLL_S", 0.001)
    seen = []
    with following_metrics(tmp_path / "metrics.jsonl", seen.append, after=0):
        write(tmp_path, *((1, step) for step in range(300)))
    assert updates(seen) == [(1, step) for step in range(300)]
    assert len(parsed) == 300


def test_a_resumed_run_tells_of_its_own_lines_only(tmp_path: Path) -> None:
    """Epoch 2 was begun and is trained again: its old lines are dropped, and not told a second time."""
    write(tmp_path, (1, 1), (2, 2), (2, 3))
    seen = []
    with following_metrics(tmp_path / "metrics.jsonl", seen.append, after=1):
        write(tmp_path, (2, 20), epochs_done=1)
    assert updates(seen) == [(2, 20)]
    assert updates(read_metrics(tmp_path / "metrics.jsonl")) == [(1, 1), (2, 20)]


@pytest.mark.parametrize(
    "garbage", ["no json", "[" * 100_000, '"a text"', "{}", '{"epoch": "1"}', "\x00\x01", '{"epoch": 1' + "0" * 5000]
)
def test_garbage_in_the_file_of_a_resumed_run_is_refused(tmp_path: Path, garbage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps({'split': 'train', 'epoch': 1, 'step': 1, 'loss': 1})}\n{garbage}\n")
    with pytest.raises(
        ArtifactError, match=r"metrics.jsonl: line 2: is not a line of metrics .*; remove this line"
    ) as e:
        MetricsLog(path, epochs_done=1)
    assert len(str(e.value)) < 1000


def test_the_command_says_so_too(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, harness.CONV1)
    launch(spec)
    with (spec.out / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    with pytest.raises(PdtoolError, match=r"metrics.jsonl: line \d+: is not a line of metrics") as raised:
        launch(replace(spec, epochs=2, resume=spec.out))
    assert raised.value.exit_code == ArtifactError.exit_code


def test_a_file_that_was_removed_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, epochs_done=0)
    add(log, 1, 1)
    path.unlink()
    add(log, 1, 2)  # it is written with the next
    with pytest.raises(PdtoolError, match=r"metrics.jsonl was removed while the run wrote to it"):
        log.close()


@pytest.mark.parametrize("lines", [1, 500])
def test_a_full_disk_is_named_with_the_file(tmp_path: Path, lines: int) -> None:
    """Also if some lines are left over, which closing the file would try to write once more."""
    path = tmp_path / "metrics.jsonl"
    named = pytest.raises(PdtoolError, match=r"metrics.jsonl cannot be written \(No space left on device\); free some")
    with named, closing(MetricsLog(path, epochs_done=0)) as log:
        log._file.close()
        log._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115
        log._flushed_s = math.inf  # nothing is written before the end
        for step in range(lines):
            add(log, 1, step)


def test_updates_that_come_quickly_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update costs no write; one that takes long is read at once, and so is a validation."""
    path, clock = tmp_path / "metrics.jsonl", [100.0]
    monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: clock[0])
    with closing(MetricsLog(path, epochs_done=0)) as log:
        log.epoch_begins()
        for step in range(1, 6):
            clock[0] += 0.03
            add(log, 1, step)
        assert updates(read_metrics(path)) == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
        add(log, 1, 6)
        assert len(read_metrics(path)) == 5
        validation = ValidationLine(epoch=1, step=6, time=unix_time(), loss=0.25, metrics={"accuracy": 0.5})
        log.add(validation)
    lines = read_metrics(path)
    rates = [line.samples_per_s for line in lines if isinstance(line, UpdateLine)]
    assert rates[:5] == [pytest.approx(8 / 0.03, abs=1e-2)] * 5
    assert lines[-1] == validation
    assert abs(lines[-1].time - time.time()) < 60


def test_metrics_have_a_place_of_their_own_and_lines_of_older_runs_are_read(tmp_path: Path) -> None:
    """Scripts read the file; once a metric called `time` took the place of the time at which its line was written."""
    path, figures = tmp_path / "metrics.jsonl", {"top 5": 0.75, "time": 7.0, "lr": 8.0, "metrics": 9.0}
    with closing(MetricsLog(path, epochs_done=0)) as log:
        log.add(UpdateLine(epoch=1, step=2, samples=8, loss=0.5, time=3.0, lr=0.1, samples_per_s=9.0))
        log.add(ValidationLine(epoch=1, step=2, time=4.0, loss=0.25, metrics=figures))
    update, validation = map(json.loads, path.read_text().splitlines())
    assert [*update] == ["split", "epoch", "step", "samples", "loss", "time", "lr", "samples_per_s"]
    assert validation == {"split": "valid", "epoch": 1, "step": 2, "time": 4.0, "loss": 0.25, "metrics": figures}
    assert read_metrics(path)[1].metrics == figures
    older = {"split": "valid", "epoch": 1, "step": 1, "loss": 3.0}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in ({**older, "split": "train"}, older, older | figures)))
    beside = {name: value for name, value in figures.items() if name != "time"}
    assert read_metrics(path) == [
        UpdateLine(epoch=1, step=1, loss=3),
        ValidationLine(epoch=1, step=1, loss=3),
        ValidationLine(epoch=1, step=1, loss=3, time=7.0, metrics=beside),
    ]
