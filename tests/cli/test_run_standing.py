"""`show` says of a run that has not finished where it stands: how far, its last checkpoint, its end, how to go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import samples
from conftest import Folder

from pdtool.artifacts.run_dir import RunDir, RunState

STATE = RunState(plan="net", config="1-1", schedule="1f1b", epochs=4, updates=10, samples=80)


@pytest.fixture
def run(folder: Folder) -> Path:
    """A run that has been trained for two epochs and a bit."""
    out = Path("runs/a")
    manifest = samples.checkpoint_manifest().model_copy(update={"epoch": 2})
    manifest.save(out / "checkpoints" / "epoch-2" / "checkpoint.json")
    (out / "checkpoints" / "epoch-1").mkdir()
    (out / "checkpoints" / ".epoch-3.partial").mkdir()
    lines = [
        {"split": "valid", "epoch": 2, "step": 20, "loss": 0.5, "time": 1.0},
        {"split": "train", "epoch": 3, "step": 23, "loss": 0.25, "time": 2.0, "lr": 0.1, "samples_per_s": 1234.5},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (out / "metrics.jsonl").write_text(text + '{"split": "train", "epo')
    STATE.save(out / "run.json")
    return out


def shown(folder: Folder, **changes: Any) -> list[str]:
    STATE.model_copy(update=changes).save("runs/a/run.json")
    return folder.pdtool("show", "runs/a").stdout.splitlines()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "it ended without a message: it was killed, its disk was full, or its machine went down"),
        ({"end": "stopped", "reason": "SIGTERM"}, "it was stopped by SIGTERM"),
        ({"end": "failed", "reason": "the loss is nan"}, "it failed: the loss is nan"),
    ],
)
def test_how_a_run_ended_and_how_to_go_on(folder: Folder, run: Path, changes: dict[str, str], says: str) -> None:
    assert shown(folder, **changes) == [
        "net: 1-1, schedule 1f1b, 4 epochs in all",
        says,
        "last update: 23/40, in epoch 3/4: training loss 0.2500, 1234 samples/s",
        "last checkpoint: epoch 2, validation loss 0.5000, accuracy 0.7500",
        "continue with `pdtool run -o runs/a --resume`",
    ]


def test_a_run_is_shown_without_a_damaged_report_if_that_is_removed(folder: Folder, run: Path) -> None:
    samples.report().save(run / "report.json")
    folder.write("runs/a/report.json", (run / "report.json").read_text(encoding="utf-8")[:500])
    stderr = folder.pdtool("show", "runs/a", code=3).stderr
    assert stderr.endswith("; to show the run without it: `rm runs/a/report.json`\n")
    (run / "report.json").unlink()
    assert shown(folder)[0] == "net: 1-1, schedule 1f1b, 4 epochs in all"


def test_a_run_that_failed_after_its_last_epoch_is_not_to_be_resumed(folder: Folder, run: Path) -> None:
    """As by a full disk: a resume would be refused."""
    last = shown(folder, end="failed", reason="report.json could not be written", epochs_done=4)[-1]
    assert last == "all epochs are trained: `pdtool export runs/a` writes the weights"


@pytest.mark.parametrize("line", ["[]", "{}", '{"split": "train", "loss": "x", "epoch": 1, "step": 1}', "[" * 9999])
def test_lines_that_no_run_has_written_are_passed_over(folder: Folder, run: Path, line: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    assert shown(folder)[2].startswith("last update: 23/40")


def test_a_run_that_goes_on_says_so(folder: Folder, run: Path) -> None:
    """Its lock is looked at, not taken; by another process, since a process sees none of its own."""
    code = (
        "import fcntl, sys\nlock = open('runs/a/.lock', 'w')\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        lines = shown(folder, resumed_after=1)
        holder.communicate()
    assert lines[:2] == ["net: 1-1, schedule 1f1b, 4 epochs in all, resumed after epoch 1", "it is running"]
    assert not any("continue" in line for line in lines)
    assert "it ended without a message" in "\n".join(shown(folder))


def test_a_run_without_a_checkpoint_is_started_again(folder: Folder) -> None:
    STATE.model_copy(update={"end": "failed", "reason": "no"}).save("runs/b/run.json")
    lines = folder.pdtool("show", "runs/b").stdout.splitlines()
    assert lines[-2:] == [
        "no checkpoint yet: the run writes the first after the first epoch",
        "start it again with `pdtool run -o runs/b --resume`",
    ]
    assert json.loads(folder.pdtool("show", "runs/b", "--json").stdout)["reason"] == "no"


@pytest.mark.usefixtures("stages")
def test_a_run_that_has_reached_its_target_is_not_resumed_for_nothing(road: Folder) -> None:
    """It would train no epoch, and put a report of zeros in place of the one that is there."""
    road.pdtool("run", "-o", "runs/a", "--epochs", "3", "--target", "accuracy>=0")
    before = {path: path.read_bytes() for path in Path("runs/a").rglob("*.json*")}
    refused = road.pdtool("run", "--resume", "runs/a", "--epochs", "5", code=2).stderr
    assert "runs/a has already reached --target 'accuracy>=0': accuracy is 0." in refused
    assert refused.rstrip().endswith("after epoch 1; pass another --target, or --target none")
    assert before == {path: path.read_bytes() for path in Path("runs/a").rglob("*.json*")}
    road.pdtool("run", "--resume", "runs/a", "--epochs", "2", "--target", "accuracy>=1.5", code=6)
    told = road.pdtool("run", "--resume", "runs/a", "--epochs", "3", "--target", "none").stderr
    assert "epoch 3/3: " in told
    assert "target" not in road.pdtool("run", "--resume", "runs/a", "--epochs", "4").stderr


@pytest.mark.usefixtures("stages")
def test_after_a_failed_resume_the_old_report_is_not_shown_as_new(road: Folder) -> None:
    """It is kept under another name; a refusal leaves it where it is, and says nothing of training."""
    road.pdtool("run", "-o", "runs/a")
    refused = road.pdtool("run", "-o", "runs/a", "--resume", code=2).stderr
    assert "has already trained its 1 epoch" in refused
    assert "training on" not in refused
    assert "where the time went" in road.pdtool("show", "runs/a").stdout
    model = Path("model.py").read_text()
    Path("model.py").write_text(model.replace("cross_entropy(output, target)", "cross_entropy(output, target) / 0.0"))
    failed = road.pdtool("run", "-o", "runs/a", "--resume", "--epochs", "2", code=1).stderr
    assert "training on 2 workers" in failed
    lines = road.pdtool("show", "runs/a").stdout.splitlines()
    assert lines[0].endswith("2 epochs in all, resumed after epoch 1")
    assert "the loss is inf" in lines[1]
    assert lines[-1] == "continue with `pdtool run -o runs/a --resume`"
    assert "1 epoch" in road.pdtool("show", "runs/a/report.epoch-1.json").stdout


def test_the_lock_is_free_when_a_run_has_ended(folder: Folder, run: Path) -> None:
    with RunDir(run).held():
        pass
    assert "it ended without a message" in "\n".join(shown(folder))
