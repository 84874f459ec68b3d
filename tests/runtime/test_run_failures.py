"""Whatever fails, the run ends within seconds with an error that names the place, and no worker is left."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from harness import CONV2, CONV3, faulty

from pdtool.artifacts.metrics import read_metrics
from pdtool.artifacts.run_dir import RunDir
from pdtool.errors import ModelError, PdtoolError, ScheduleError, StaleError, UsageError, WorkerDiedError
from pdtool.machines import Machines
from pdtool.options.target import Target
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch import worker_main
from pdtool.runtime.launch.diagnosis import diagnose
from pdtool.runtime.launch.launcher import launch, local_assignments
from pdtool.runtime.ranks import assign_ranks
from pdtool.runtime.status import PeerError, Status, WorkerFailure, prepare_folder, read_failure, write_failure
from pdtool.runtime.worker import checkpoint


def workers_left() -> list[int]:
    """Processes that the fork server has started and that are still there."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return [pid for pid, parent, _ in processes() if parent == server]


def processes() -> list[tuple[int, int, int]]:
    """(pid, parent, session) of every process that is not a zombie."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            found.append((int(path.parent.name), int(parent), int(session)))
    return found


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("statement", "error", "message"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL) if self.n == 4 else 0",
            WorkerDiedError,
            r"rank 1 \(stage 1, replica 0\) (was killed by SIGKILL|died); it was last at 1F4 of epoch 1",
            id="sigkill",
        ),
        pytest.param(
            "a = 1 / 0 if self.n == 4 else a",
            ModelError,
            r"^rank 1 \(stage 1, replica 0\), at 1F4 of epoch 1: stage_1.py:\d+: `.*` raised ZeroDivisionError: "
            r"division by zero; let dataset\(\) return only what forward accepts, or change forward so that it ",
            id="exception",
        ),
        pytest.param(
            "a = a * float('nan') if self.n == 4 else a",
            PdtoolError,
            r"rank 2 \(stage 2, replica 0\), at 2U4 of epoch 1: the loss is nan in minibatch 4 of epoch 1; try a lower",
            id="nan",
        ),
        pytest.param(
            "time.sleep(600) if self.n == 4 else 0",
            WorkerDiedError,
            r"^rank 1 \(stage 1, replica 0\) did not answer for 3 s; it was last at 1F4 of epoch 1; if it is only",
            id="hangs",
        ),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP) if self.n == 9 else 0",
            WorkerDiedError,
            r"^rank 1 .* is stopped \(SIGSTOP\); it was last at 1F2 of the validation after epoch 1",
            id="stopped",
        ),
    ],
)
def test_a_failing_worker_is_named_and_takes_all_others_with_it(
    tmp_path: Path, statement: str, error: type[PdtoolError], message: str
) -> None:
    spec = harness.job(
        tmp_path, faulty(statement), timeout_s=3.0 if "SIGSTOP" in statement or "sleep" in statement else 60.0
    )
    start = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        launch(spec)
    assert caught.value.exit_code == error.exit_code
    assert time.monotonic() - start < 20
    assert workers_left() == []


def test_a_worker_that_others_wait_for_with_the_norm_of_all_stages_is_named(tmp_path: Path) -> None:
    """The last stage has done its backwards, and waits for the sum over all workers."""
    toy = faulty("a.register_hook(lambda gradient: time.sleep(600)) if self.n == 4 else 0")
    spec = harness.job(
        tmp_path,
        replace(toy, model=toy.model + "\nMAX_GRAD_NORM = 1.0\n"),
        schedule="1f1b-flush",
        microbatches=2,
        timeout_s=3.0,
    )
    message = r"^rank 1 .* did not answer for 3 s; it was last at 1B4 of epoch 1"
    with pytest.raises(WorkerDiedError, match=message):
        launch(spec)
    assert "the norm of the gradients was not summed over all workers" in (spec.out / "failure.txt").read_text()
    assert workers_left() == []


SCRIPT = """
import sys, pickle
from pathlib import Path
from pdtool.runtime.launch.launcher import launch
if __name__ == "__main__":
    launch(pickle.loads(Path(sys.argv[1]).read_bytes()), on_metrics=lambda line: print(line, flush=True))
"""


def test_no_worker_outlives_a_program_that_ctrl_c_ends(tmp_path: Path) -> None:
    """In the middle of an epoch; `kill` and `kill -9`: test_run_endings.py."""
    spec = harness.job(tmp_path, faulty("time.sleep(0.05)"), epochs=1000)
    (tmp_path / "spec").write_bytes(pickle.dumps(spec))
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "spec")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        assert "train" in process.stdout.readline()
        assert len([session for _, _, session in processes() if session == process.pid]) >= 4
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
    deadline = time.monotonic() + 5
    while left := [pid for pid, _, session in processes() if session == process.pid]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.05)


def test_a_killed_run_goes_on_from_its_last_epoch_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Law 7: the worker is killed in epoch 2; what the second half trains is what an uninterrupted run trains."""
    whole = harness.job(tmp_path / "whole", CONV3, epochs=2)
    launch(whole)
    out = tmp_path / "run"
    killed = harness.job(
        tmp_path / "killed", faulty("os.kill(os.getpid(), 9) if self.n == 13 else 0"), epochs=2, out=out
    )
    with pytest.raises(WorkerDiedError, match=r"it was last at 1F3 of epoch 2"):
        launch(killed)
    launch(harness.job(tmp_path / "again", CONV3, epochs=2, out=out, resume=out))
    for run in (whole.out, out):
        checkpoint.export(run, run / "model.pt")
    expected, found = (torch.load(run / "model.pt", weights_only=True) for run in (whole.out, out))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert harness.logged(out) == harness.logged(whole.out)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """A file stands where the folder of epoch 2 is to be written."""
    spec = harness.job(tmp_path, CONV3)
    launch(spec)
    old = {path.name: path.read_bytes() for path in RunDir(spec.out).latest_checkpoint().path.iterdir()}
    (spec.out / "checkpoints" / ".epoch-2.partial").write_text("in the way")
    message = r"at the checkpoint of epoch 2: the checkpoint could not be written .*; make sure that the folder"
    with pytest.raises(PdtoolError, match=message):
        launch(replace(spec, epochs=2, resume=spec.out))
    kept = RunDir(spec.out).latest_checkpoint().path
    assert kept.name == "epoch-1"
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == old


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(PdtoolError, match=r"run cannot be written"):
        launch(harness.job(tmp_path, CONV3))


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no complete checkpoint"):
        launch(harness.job(tmp_path, CONV3, resume=tmp_path))


def test_a_failure_is_told_where_the_disk_is_full(tmp_path: Path) -> None:
    """The room for it is there from the start."""
    (RunDir(tmp_path).workers).mkdir()
    Status.begin(tmp_path, 0)
    path, failure = RunDir(tmp_path).workers / "0.failure", WorkerFailure(PdtoolError("no space", "make some"))
    assert read_failure(tmp_path, 0) is None
    size = path.stat().st_size
    write_failure(tmp_path, 0, failure)
    read = read_failure(tmp_path, 0)
    assert read is not None
    assert str(read.error) == str(failure.error)
    assert path.stat().st_size == size + 1, "a traceback, of which there is none, comes after it"


def test_a_target_that_no_metric_has_is_refused_before_the_first_epoch(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV2, target=Target.parse("foo=1"))
    with pytest.raises(UsageError, match="the model reports no metric 'foo'; it reports: "):
        launch(spec)
    assert not RunDir(spec.out).checkpoints()
    assert read_metrics(spec.out / "metrics.jsonl") == []


def test_a_correction_of_what_is_not_late_is_refused(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV2, schedule="gpipe", microbatches=2, correction="nesterov")
    with pytest.raises(UsageError, match="correction nesterov has no effect with schedule gpipe; leave it out"):
        launch(spec)


@pytest.mark.parametrize("correction", ["nesterov", "weight-prediction"])
def test_a_correction_that_predicts_weights_needs_stashed_ones(tmp_path: Path, correction: str) -> None:
    """Once, autograd found its saved weights changed."""
    spec = harness.job(tmp_path, CONV2, weights="none", correction=correction)
    with pytest.raises(UsageError, match=f"correction {correction} predicts weights.* use --weights stash"):
        launch(spec)
    launch(harness.job(tmp_path / "discount", CONV2, weights="none", correction="lr-discount", steps=3))


def test_a_bundle_of_another_plan_or_edited_by_hand_is_stale(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV3)
    other = harness.job(tmp_path / "other", harness.CONV2)
    with pytest.raises(StaleError, match="it has 2 stages, but the plan has 3"):
        launch(replace(spec, bundle=other.bundle, bundle_dir=other.bundle_dir))
    with (spec.bundle_dir / "stage_1.py").open("a") as file:
        file.write("# mine\n")
    with pytest.raises(StaleError, match=r"stage_1.py: has changed since codegen wrote it"):
        launch(spec)


def test_in_flight_numbers_that_deadlock_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        launch(harness.job(tmp_path, CONV3, in_flight=(1, 3, 1)))


@pytest.mark.parametrize(("height", "split"), [("7", "valid|train"), ("6 + (n == 10)", "valid")])
def test_inputs_of_another_shape_than_the_stages_take(tmp_path: Path, height: str, split: str) -> None:
    """Those of the validation set are found before an epoch is trained, too."""
    toy = replace(CONV3, model=CONV3.model.replace("n, 2, 6, 6", f"n, 2, {height}, 6"))
    gives = rf"dataset\('({split})'\) gives inputs float32\[4, 2, 7, 6\], but the stages take float32\[4, 2, 6, 6\]"
    with pytest.raises(
        PdtoolError, match=f"the loading of the data.*{gives}; give all samples of both splits the same"
    ):
        launch(harness.job(tmp_path, toy))


def test_a_target_that_is_not_tensors(tmp_path: Path) -> None:
    toy = replace(CONV3, model=CONV3.model.replace("self.x[i], self.y[i]", "self.x[i], 'cat'"))
    with pytest.raises(PdtoolError, match=r"a target of the dataset holds list|str, which cannot be sent"):
        launch(harness.job(tmp_path, toy))


def test_a_stage_whose_parameters_are_not_the_models(tmp_path: Path) -> None:
    toy = replace(CONV3, model=CONV3.model.replace("nn.Linear(16, 4)", "nn.Linear(16, 5)"))
    with pytest.raises(PdtoolError, match=r"its fc.weight is float32\[4, 16\], but the model's is float32\[5, 16\]"):
        launch(harness.job(tmp_path, toy))


def test_a_validation_that_gives_no_number(tmp_path: Path) -> None:
    toy = replace(CONV3, model=CONV3.model.replace("(output.argmax(-1) == target).sum()", "float('inf')"))
    with pytest.raises(PdtoolError, match="the validation after epoch 1 gives accuracy inf"):
        launch(harness.job(tmp_path, toy))


def test_a_process_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker_main.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(worker_main, "check_agreement", lambda *_: None)
    with pytest.raises(UsageError, match="4 processes were started, but the plan needs 3"):
        launch(harness.job(tmp_path, CONV3))


def test_no_cuda_here(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is")
    with pytest.raises(UsageError, match="torch finds no CUDA device here"):
        launch(harness.job(tmp_path, CONV3, device="cuda"))


def test_the_target_must_be_a_metric_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"reports no metric 'bleu'; it reports: loss, accuracy"):
        launch(harness.job(tmp_path, CONV3, target=Target.parse("bleu=20.0")))


def test_a_target_may_name_any_metric(tmp_path: Path) -> None:
    toy = replace(CONV3, model=CONV3.model.replace('"accuracy":', '"top-1 (%)":'))
    report = launch(harness.job(tmp_path, toy, target=Target.parse("top-1 (%)>=0"), epochs=3))
    assert (report.target_reached, report.epochs) == (True, 1)


@pytest.mark.parametrize(
    "text", ["accuracy", "accuracy==0.9", "accuracy=>1", "=1", "<=1", "loss=low", "loss<nan", "loss<inf", ""]
)
def test_a_target_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="is not METRIC=NUMBER, where"):
        Target.parse(text)


def test_workers_are_shared_among_machines_in_order(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, harness.CONV2, (2, 2))
    halves = [local_assignments(replace(spec, machines=Machines(2, k, "h:1"))) for k in (0, 1)]
    assert [[(p.rank, p.stage) for p in half] for half in halves] == [[(0, 0), (1, 0)], [(2, 1), (3, 1)]]
    with pytest.raises(UsageError, match="4 workers cannot be divided evenly among 3 machines"):
        local_assignments(replace(spec, machines=Machines(3)))
    with pytest.raises(UsageError, match="need an endpoint to meet at"):
        local_assignments(replace(spec, machines=Machines(2)))


def test_a_chain_of_lost_peers_leads_to_the_one_that_said_nothing(tmp_path: Path) -> None:
    """Rank 2 lost rank 1, which lost rank 0; the launcher saw only rank 2 end."""
    spec: RunConfig = harness.job(tmp_path, CONV3)
    prepare_folder(spec.out, [0, 1, 2], keep_metrics=False)
    write_failure(spec.out, 2, WorkerFailure(PeerError("no activation", peer=1)))
    write_failure(spec.out, 1, WorkerFailure(PeerError("no gradient", peer=0)))
    assert "rank 0 (stage 0, replica 0) died" in str(diagnose(spec, assign_ranks(spec.plan), {2: 5}))
