"""The folder of a run: one run at a time, the same folder on all machines, and the same job on all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import harness
import pytest
from harness import CONV2, faulty
from launches import end, machines
from test_run_nodes import ended, start

from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import ArtifactError, ModelError, PdtoolError, UsageError
from pdtool.runtime import groups
from pdtool.runtime.config import RunConfig
from pdtool.runtime.groups import describe_differences
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.status import Status

HOLDER = """
import os, sys, time
from pathlib import Path
from pdtool.artifacts.run_dir import RunDir
with RunDir(Path(sys.argv[1])).held():
    if os.fork():
        print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a run's folder, with a child that was forked from it and outlives it."""
    process = start([sys.executable, "-c", HOLDER, str(folder)])
    try:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        subprocess.run(["pkill", "-9", "-f", str(folder)], check=False)
        process.communicate(timeout=20)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second is refused before it touches anything; a run that was killed keeps nothing."""
    spec = harness.job(tmp_path, CONV2)
    spec.out.mkdir()
    (spec.out / "notes.txt").write_text("of the first run")
    with holder(spec.out) as process:
        with pytest.raises(
            UsageError, match=rf"run is in use by a run \(process {process.pid} on .*\); wait for it, or"
        ):
            launch(spec)
        assert (spec.out / "notes.txt").read_text() == "of the first run"
        process.kill()
        process.wait(timeout=20)
        launch(spec)
    assert RunDir(spec.out).checkpoints()


def test_a_lock_ends_with_its_context(tmp_path: Path) -> None:
    """Also where the process that holds it looks whether anybody does."""
    take = f"import pathlib, pdtool.artifacts.run_dir as f\nwith f.RunDir(pathlib.Path({str(tmp_path)!r})).held(): pass"
    with RunDir(tmp_path).held():
        assert RunDir(tmp_path).is_running()
        of_machine = "; another machine of that run needs its own --node-rank"
        with pytest.raises(UsageError, match=f"is in use by a run .*{of_machine}$"), RunDir(tmp_path).held(of_machine):
            pass
        code, _, errors = ended(start([sys.executable, "-c", take]))
        assert code != 0
        assert f"is in use by a run (process {os.getpid()} on " in errors
    assert ended(start([sys.executable, "-c", take]))[0] == 0


def test_workers_of_other_versions_are_told_to_install_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [("machine 0 (a)", {"torch's version": "2.13.0"}), ("machine 1 (b)", {"torch's version": "2.12.0"})]
    monkeypatch.setattr(groups, "all_gather", lambda *_: workers)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 0)
    with pytest.raises(UsageError, match=r"2\.12\.0 on machine 1.*; install the same versions of pdtool and torch on"):
        groups.check_agreement({}, None)


def test_differences_are_told_with_the_machine() -> None:
    workers = [
        ("machine 0 (a)", {"--seed": "0", "--epochs": "2"}),
        ("machine 0 (a)", {"--seed": "0", "--epochs": "2"}),
        ("machine 1 (b)", {"--seed": "1", "--epochs": "2", "--resume": "abc"}),
    ]
    assert describe_differences(workers[:2]) == []
    assert describe_differences(workers) == [
        "--seed is 0 on machine 0 (a), 1 on machine 1 (b)",
        "--resume is none on machine 0 (a), abc on machine 1 (b)",
    ]
    assert describe_differences(workers, missing=None) == ["--seed is 0 on machine 0 (a), 1 on machine 1 (b)"]


@pytest.mark.parametrize(
    "name", ["plan.yaml", "run.json", "report.json", "trace.json", "metrics.jsonl", "stages/notes"]
)
def test_a_run_replaces_nothing_that_is_not_of_a_run(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine\n", encoding="utf-8")
    message = f"is not the folder of a run, but contains {Path(name).parts[0]}, which a run would replace; name another"
    with pytest.raises(UsageError, match=message):
        RunDir(tmp_path).check_no_other_run(None)
    assert mine.read_text(encoding="utf-8") == "mine\n"


def test_a_run_does_not_train_over_one_that_ended_after_its_first_check(tmp_path: Path) -> None:
    """The first check was before the lock, so `launch` checks again when it holds the folder."""
    spec = harness.job(tmp_path, CONV2, (1, 1), epochs=1)
    launch(spec)
    before = {path: path.read_bytes() for path in spec.out.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="run already contains a run; continue it with --resume, or name"):
        launch(spec)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_that_another_command_ended_is_not_resumed(tmp_path: Path) -> None:
    """As when the last epoch ended after the first check: the report stays."""
    spec = harness.job(tmp_path, CONV2, (1, 1), epochs=1)
    launch(spec)
    before = {path: path.read_bytes() for path in spec.out.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="run has already trained its 1 epoch; pass a larger --epochs"):
        launch(replace(spec, resume=spec.out))
    assert {path: path.read_bytes() for path in spec.out.rglob("*") if path.is_file()} == before


def test_a_training_set_that_grows_is_refused_at_the_start_of_the_epoch(tmp_path: Path) -> None:
    """A plain loop would train more minibatches, but the schedule of the run is made."""
    grows = """
class Growing:
    def __init__(self, data): self.data, self.asked = data, 0
    def __getitem__(self, index): self.asked += 1; return self.data[index % len(self.data)]
    def __len__(self): return len(self.data) + (self.asked > len(self.data))
fixed = dataset
def dataset(split): return Growing(fixed(split)) if split == "train" else fixed(split)
"""
    spec = harness.job(tmp_path, replace(CONV2, model=CONV2.model + grows), (1, 1), epochs=2)
    where = r"stage 0, replica 0\), at the start of epoch 2: model.py: dataset\('train'\) has 27 samples at the start "
    with pytest.raises(ModelError, match=f"{where}of epoch 2, but had 26; keep its length, .* or set --steps"):
        launch(spec)
    launch(replace(spec, steps=2, out=tmp_path / "other"))


def changed_model(spec: RunConfig, folder: Path) -> RunConfig:
    path = folder / "other.py"
    path.write_text(Path(spec.model.source).read_text() + "\n# another learning rate\n")
    return replace(spec, model=spec.model.model_copy(update={"source": str(path)}))


CHANGES: dict[str, tuple[Callable[[RunConfig, Path], RunConfig], str]] = {
    "seed": (lambda spec, _: replace(spec, seed=1), "--seed is 0 on machine 0 .*, 1 on machine 1 "),
    "epochs": (lambda spec, _: replace(spec, epochs=2), "--epochs is 1 on machine 0 .*, 2 on machine 1 "),
    "dtype": (
        lambda spec, _: replace(spec, plan=spec.plan.model_copy(update={"wire_dtype": "bf16"})),
        "--wire-dtype is fp32 on machine 0 .*, bf16 on machine 1 .*; the plan is ",
    ),
    "weights": (
        lambda spec, _: replace(spec, plan=spec.plan.model_copy(update={"weights": "none"})),
        "--weights is stash on machine 0 .*, none on machine 1 .*; the plan is ",
    ),
    "trust": (lambda spec, _: replace(spec, trust=True), "--trust is False on machine 0 .*, True on machine 1 "),
    "model": (changed_model, "the model's file is [0-9a-f]* on machine 0 "),
}


@pytest.mark.parametrize("what", CHANGES)
def test_machines_that_run_different_things_are_refused(tmp_path: Path, what: str) -> None:
    """When they meet, on both, with exit code 2; neither leaves a checkpoint."""
    spec = harness.job(tmp_path, CONV2, (1, 1))
    change, message = CHANGES[what]
    for code, _, errors in end(machines(tmp_path, spec, change(spec, tmp_path))):
        assert code == 2, errors
        assert re.search(message, errors), errors
        assert "run the same command with the same files on every machine" in errors
    assert not RunDir(spec.out).checkpoints()


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("timeout_s", [5.0, 60.0])
def test_a_folder_that_machines_do_not_share_is_refused(tmp_path: Path, timeout_s: float) -> None:
    spec = harness.job(tmp_path, CONV2, (1, 1), timeout_s=timeout_s)
    for code, _, errors in end(machines(tmp_path, *(replace(spec, out=tmp_path / f"run-{k}") for k in (0, 1)))):
        assert code == 2, errors
        assert "is not one folder for all workers: files that rank 0 on" in errors
        assert "are not seen by rank 1 on" in errors


@pytest.mark.parametrize("what", ["", "metrics.jsonl"])
def test_what_is_removed_during_a_run_is_an_error(tmp_path: Path, what: str) -> None:
    """When it is next written; not a new folder that holds half of the run."""
    removed = tmp_path / "run" / what
    remove = f"__import__('subprocess').run(['rm', '-r', {str(removed)!r}]) if self.n == 13 else 0"
    spec = harness.job(tmp_path, faulty(remove), epochs=3)
    with pytest.raises(PdtoolError, match=rf"{removed} was removed (while|during)") as raised:
        launch(spec)
    assert raised.value.exit_code == 1
    assert not removed.exists()


def links_to(target: Path) -> dict[str, Callable[[Path], None]]:
    return {
        "symbolic link": lambda path: path.symlink_to(target),
        "link to nothing": lambda path: path.symlink_to(target.with_name("new")),
        "fifo": os.mkfifo,
    }


RUN_FILES = (
    ".lock",
    ".token",
    "run.json",
    "plan.yaml",
    "metrics.jsonl",
    "trace.json",
    "report.json",
    "emulation.json",
    "failure.txt",
)


@pytest.mark.parametrize("kind", links_to(Path()))
@pytest.mark.parametrize("name", [*RUN_FILES, ".workers", "checkpoints"])
def test_a_run_writes_through_no_link_of_its_folder(tmp_path: Path, name: str, kind: str) -> None:
    """Once, a stranger's folder emptied the file that its `.lock` led to."""
    spec = harness.job(tmp_path, CONV2, epochs=1)
    spec.out.mkdir()
    target = tmp_path / "mine"
    target.write_text("mine")
    links_to(target)[kind](spec.out / name)
    with pytest.raises(ArtifactError, match=rf"run/{name}: is (a link|not ).*; remove it, or name another folder"):
        launch(spec)
    assert target.read_text() == "mine"
    assert not target.with_name("new").exists()


def test_a_second_name_of_a_file_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".lock").hardlink_to(tmp_path / "mine")
    refused = pytest.raises(ArtifactError, match=r"\.lock: is a hard link to another file; remove it")
    with refused, RunDir(tmp_path).held():
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("kind", links_to(Path()))
def test_what_an_earlier_run_left_of_its_workers_is_removed(tmp_path: Path, kind: str) -> None:
    """Whatever it is, and whoever put it there."""
    spec = harness.job(tmp_path, CONV2, epochs=1)
    (spec.out / ".workers").mkdir(parents=True)
    target = tmp_path / "mine"
    target.write_text("mine")
    for name in ("0.status", "1.failure", "node-0"):
        links_to(target)[kind](spec.out / ".workers" / name)
    launch(spec)
    assert target.read_text() == "mine"
    assert not target.with_name("new").exists()


@pytest.mark.parametrize("name", ["0.status", "0.failure"])
def test_a_worker_of_torchrun_writes_through_no_link(tmp_path: Path, name: str) -> None:
    """No launcher has made the folder of the workers for it."""
    (tmp_path / ".workers").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".workers" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ArtifactError, match=f"{name}: is a link"):
        Status.begin(tmp_path, 0)
    assert (tmp_path / "mine").read_text() == "mine"


@contextmanager
def small_disk(folder: Path, files: int) -> Iterator[None]:
    """A file system at `folder` that holds so many files and folders."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size=50m,nr_inodes={files}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("files", [4, 7, 9, 11, 13, 16, 18])
def test_a_disk_that_holds_no_more_files_is_an_error(tmp_path: Path, files: int) -> None:
    """From the first file to the checkpoints: never a worker that died without a word."""
    with small_disk(tmp_path / "disk", files):
        spec = harness.job(tmp_path, CONV2, epochs=3, out=tmp_path / "disk" / "run")
        with pytest.raises(PdtoolError, match="No space left on device") as raised:
            launch(spec)
        assert raised.value.exit_code == 1
