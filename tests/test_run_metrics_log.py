"""metrics.jsonl is read as it grows, each line once, and refused where it holds something else."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import harness
import pytest

from pdtool.errors import ArtifactError, PdtoolError
from pdtool.run.measure import metrics_log
from pdtool.run.measure.metrics_log import GrowingFile, MetricsLog, following_metrics, read_metrics
from pdtool.run.processes.launcher import launch


def line(epoch: int, step: int) -> dict[str, object]:
    return {"split": "train", "epoch": epoch, "step": step, "loss": 0.5}


def write(out: Path, *lines: dict[str, object], epochs_done: int = 0) -> None:
    with closing(MetricsLog(out, epochs_done=epochs_done)) as log:
        for content in lines:
            log.write(content)


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
    with following_metrics(tmp_path, seen.append, after=0):
        write(tmp_path, *(line(1, step) for step in range(300)))
    assert seen == [line(1, step) for step in range(300)]
    assert len(parsed) == 300


def test_a_resumed_run_tells_of_its_own_lines_only(tmp_path: Path) -> None:
    """Epoch 2 was begun and is trained again: its old lines are dropped, and not told a second time."""
    write(tmp_path, line(1, 1), line(2, 2), line(2, 3))
    seen = []
    with following_metrics(tmp_path, seen.append, after=1):
        write(tmp_path, line(2, 20), epochs_done=1)
    assert seen == [line(2, 20)]
    assert read_metrics(tmp_path / "metrics.jsonl") == [line(1, 1), line(2, 20)]


@pytest.mark.parametrize(
    "garbage", ["no json", "[" * 100_000, '"a text"', "{}", '{"epoch": "1"}', "\x00\x01", '{"epoch": 1' + "0" * 5000]
)
def test_garbage_in_the_file_of_a_resumed_run_is_refused(tmp_path: Path, garbage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(line(1, 1))}\n{garbage}\n")
    with pytest.raises(
        ArtifactError, match=r"metrics.jsonl: line 2: is not a line of metrics .*; remove this line"
    ) as e:
        MetricsLog(tmp_path, epochs_done=1)
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
    with closing(MetricsLog(tmp_path, epochs_done=0)) as log:
        log.write(line(1, 1))
        (tmp_path / "metrics.jsonl").unlink()
        with pytest.raises(PdtoolError, match=r"metrics.jsonl was removed while the run wrote to it"):
            log.write(line(1, 2))
