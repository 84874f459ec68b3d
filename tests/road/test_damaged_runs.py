"""What stands in a run's folder may be anything: pages and tables are made without it, or say what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import samples

from pdtool.artifacts.metrics import last_update
from pdtool.artifacts.run_dir import RunDir, RunState
from pdtool.cli.commands import show as reporting


@pytest.fixture
def run(folder):
    """The folder of a run that has finished."""
    run = folder.path / "run"
    samples.report().save(run / "report.json")
    return run


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "pid": 1, "tid": 1, "name": "0F0", "cat": "forward", "ts": 10**400, "dur": 1},
        {
            "ph": "M",
            "pid": 1,
            "tid": 1,
            "name": "process_name",
            "args": {"name": f"rank {'9' * 5000} (stage 0, replica 0)"},
        },
    ],
)
def test_a_page_does_without_a_trace_of_impossible_numbers(event, run, folder):
    """Once: OverflowError and ValueError."""
    names = [
        {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": "rank 0 (stage 0, replica 0)"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "forward"}},
    ]
    last = {"ph": "X", "pid": 1, "tid": 1, "name": "0F0", "cat": "forward", "ts": 1, "dur": 1}
    (run / "trace.json").write_text(json.dumps({"traceEvents": [*names, event, last]}))
    folder.pdtool("report", "run")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "trace.json"])
def test_no_file_of_a_run_is_waited_for(make, name, run):
    """Once: for ever for a FIFO, and all memory for a device."""
    make(run / name)
    assert RunDir(run).read().phase == "finished"
    assert last_update(run / "metrics.jsonl") is None


def test_numbers_of_an_update_are_numbers(run):
    (run / "metrics.jsonl").write_text('{"split": "train", "epoch": true, "step": true, "loss": true}\n')
    assert last_update(run / "metrics.jsonl") is None


def test_the_record_of_a_run_stands_for_its_folder(run, folder):
    RunState(plan="net", config="1-1", schedule="1f1b", epochs=2, end="done").save(run / "run.json")
    folder.pdtool("report", "run/run.json")


def test_a_run_that_is_removed_while_it_is_watched_is_named(run, folder, monkeypatch):
    (run / "report.json").unlink()
    (run / "metrics.jsonl").write_text('{"split": "train", "epoch": 1, "step": 1, "loss": 1.0}\n')
    monkeypatch.setattr("pdtool.reports.page.is_unfinished", lambda subject: True)
    monkeypatch.setattr(reporting.time, "sleep", lambda seconds: shutil.rmtree(run))
    error = folder.pdtool("report", "run", "--watch", code=1).stderr
    assert "run was removed and is no longer watched; report.html is unchanged" in error
    assert Path("report.html").exists()


@pytest.mark.parametrize("more", [["-"], ["--watch"]])
def test_stdin_is_read_once(more, folder):
    assert "stdin can be read only once" in folder.pdtool("report", "-", *more, code=2, stdin="").stderr
