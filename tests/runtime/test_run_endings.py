"""Whatever ends a launcher, nothing that it or the user's data set has started is left; signals are respected."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import popen_forkserver, util
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import faulty

from pdtool.artifacts.run_dir import RunDir, RunState
from pdtool.errors import PdtoolError
from pdtool.machines import Machines
from pdtool.runtime import worker_end as shared_memory_files
from pdtool.runtime.config import RunConfig
from pdtool.runtime.launch import launcher
from pdtool.runtime.launch.process_group import Reaper, StopSignal, stop_message
from pdtool.runtime.status import read_status

SCRIPT = """
import pickle, sys
from pathlib import Path
from pdtool.runtime.launch.launcher import launch

def tell(line):
    print(line, file=sys.stderr, flush=True)

if __name__ == "__main__":
    try:
        launch(pickle.loads(Path(sys.argv[1]).read_bytes()), lambda line: print(line, flush=True), tell)
    except KeyboardInterrupt:
        sys.exit(130)
"""

FORKING = """
import os, subprocess, time
_dataset = dataset
def dataset(split):
    subprocess.Popen(["sleep", "1000"])
    if os.fork() == 0:
        time.sleep(1000)
    return _dataset(split)
"""

SLOW = replace(faulty("time.sleep(0.02)"), model=harness.CONV3.model + FORKING)
SOON_S = 25


class Launcher:
    """A launcher of SLOW in a session of its own, in the middle of training."""

    def __init__(self, folder: Path, spec: RunConfig, *command: str) -> None:
        self.spec, self.left = spec, [""]
        self.temporary_folder = Path(tempfile.mkdtemp())  # in which the path of a socket may have 100 characters
        (folder / "spec").write_bytes(pickle.dumps(spec))
        (folder / "script.py").write_text(SCRIPT)
        self.errors = folder / "errors"
        path = os.pathsep.join([os.getcwd(), *sys.path])
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, sys.executable, str(folder / "script.py"), str(folder / "spec")],
                env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(self.temporary_folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.await_progress()

    def await_progress(self) -> None:
        """Wait for the next line of metrics but one: the next may have been waiting here."""
        assert self.process.stdout
        for _ in range(2):
            assert "step" in self.process.stdout.readline(), self.errors.read_text()

    def workers(self) -> list[int]:
        return [read_status(self.spec.out, rank).pid for rank in range(3)]

    def states(self) -> dict[int, str]:
        """pid -> state of every process of the session that is not a zombie."""
        states = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if state != "Z" and int(session) == self.process.pid:
                states[int(path.parent.name)] = state
        return states

    def tells_how_to_go_on(self, name: str) -> None:
        """State what a signal of this name has let it say."""
        epoch = max(RunDir(self.spec.out).checkpoints(), default=0)
        how = f"; continue from the last checkpoint (epoch {epoch}) with `pdtool run -o {self.spec.out} --resume`"
        assert f"stopped by {name}{how if epoch else ' before the first checkpoint'}" in self.errors.read_text()

    def end(self) -> int:
        """Return the exit code; nothing of the session may be left."""
        self.process.communicate(timeout=SOON_S)
        wait_until(lambda: not self.states())
        self.left = [path.name for path in self.temporary_folder.glob("pymp-*")]
        shutil.rmtree(self.temporary_folder)
        return self.process.returncode


def test_a_signal_says_how_to_go_on_and_after_the_last_epoch_what_there_is(tmp_path: Path) -> None:
    out = RunDir(tmp_path / "my run")
    for epoch in (1, 2):
        out.checkpoint(epoch).path.mkdir(parents=True)
        out.checkpoint(epoch).manifest_file.touch()
    RunState(plan="p", config="1-1", schedule="1f1b", epochs=2).save(out.state_file)
    (out.checkpoint(2).manifest_file).rename(out.path / "other")
    machines = Machines(2, 1, "node0:29500")
    command = f"pdtool run -o '{out.path}' --resume --nnodes 2 --node-rank 1 --rdzv-endpoint node0:29500"
    assert stop_message(signal.SIGINT, out.path, machines).endswith(f"(epoch 1) with `{command}`")
    (out.path / "other").rename(out.checkpoint(2).manifest_file)
    message = stop_message(signal.SIGINT, out.path)
    assert message == f"stopped by Ctrl-C after all epochs; `pdtool export '{out.path}'` writes the weights"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_worker_and_what_the_data_set_forked_end_with_the_launcher(
    tmp_path: Path, number: signal.Signals
) -> None:
    launcher = Launcher(tmp_path, harness.job(tmp_path, SLOW, epochs=1000))
    assert len(launcher.states()) >= 3 + 2
    os.kill(launcher.workers()[1], signal.SIGSTOP)
    launcher.process.send_signal(number)
    assert launcher.end() == (130 if number == signal.SIGINT else -number)
    assert launcher.left == []
    if number == signal.SIGINT:
        launcher.tells_how_to_go_on("Ctrl-C")


@pytest.mark.rows_of_the_day(days=2)
def test_a_worker_is_killed_while_another_is_stopped(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, harness.job(tmp_path, SLOW, epochs=1000))
    for rank, number in ((1, signal.SIGSTOP), (0, signal.SIGKILL)):
        os.kill(launcher.workers()[rank], number)
    assert launcher.end() == 1
    assert "rank 0 (stage 0, replica 0) was killed by SIGKILL" in launcher.errors.read_text()


@pytest.mark.rows_of_the_day(days=2)
def test_what_the_data_set_forked_ends_with_a_run_that_is_done(tmp_path: Path) -> None:
    assert Launcher(tmp_path, harness.job(tmp_path, SLOW, epochs=1)).end() == 0


@pytest.mark.rows_of_the_day(days=2)
def test_nohup_is_respected_and_ctrl_z_suspends_the_workers(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, harness.job(tmp_path, SLOW, epochs=1000), "nohup")
    os.killpg(launcher.process.pid, signal.SIGHUP)
    launcher.await_progress()
    launcher.process.send_signal(signal.SIGTSTP)
    suspended = [launcher.process.pid, *launcher.workers()]
    wait_until(lambda: all(launcher.states()[pid] == "T" for pid in suspended))
    launcher.process.send_signal(signal.SIGCONT)
    launcher.await_progress()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == -signal.SIGTERM
    assert launcher.left == []
    launcher.tells_how_to_go_on("SIGTERM")


def test_counters_of_shared_tensors_end_with_their_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_files, "_FOLDER", tmp_path)
    for name in ("torch_12_345_0", "torch_12_345_1", "torch_123_45_0", "torch_1_2_3"):
        (tmp_path / name).touch()
    shared_memory_files.remove_counters(12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torch_123_45_0", "torch_1_2_3"]


@pytest.mark.rows_of_the_day(days=2)
def test_a_launch_that_is_killed_with_all_its_processes_leaves_no_semaphore(tmp_path: Path) -> None:
    """The resource tracker of multiprocessing, which unlinks named ones, is killed, too."""
    launcher = Launcher(tmp_path, harness.job(tmp_path, SLOW, epochs=1000))
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (launcher.process.pid, *launcher.workers())]
    os.killpg(launcher.process.pid, signal.SIGKILL)
    assert launcher.end() == -signal.SIGKILL
    assert not [path for text in maps for path in re.findall(r"/dev/shm/sem\S+", text) if Path(path).exists()]


def test_ctrl_c_before_the_machines_have_met_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "gather_machines", interrupted)
    spec = harness.job(tmp_path, harness.CONV2)
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(spec)
    state = RunDir(spec.out).state()
    assert state
    assert (state.end, state.reason) == ("stopped", "Ctrl-C")


@pytest.mark.parametrize("handler", [lambda *_: None, lambda *_: sys.exit(1)])
def test_a_signal_that_the_calling_program_handles_is_recorded_as_that(
    handler: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise StopSignal(signal.SIGTERM)

    monkeypatch.setattr(launcher, "wait_for_workers", stopped)
    spec = harness.job(tmp_path, harness.CONV2)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            launcher.launch(spec)
    finally:
        signal.signal(signal.SIGTERM, before)
    state = RunDir(spec.out).state()
    assert state
    assert (state.end, state.reason) == ("stopped", "SIGTERM")


def test_an_alarm_of_the_calling_program_is_not_said_to_be_of_the_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TimeoutError is an OSError: `the workers could not be started (too long); name another place`."""

    def rung(*_: object) -> None:
        raise TimeoutError("too long")

    monkeypatch.setattr(launcher, "wait_for_workers", rung)
    spec = harness.job(tmp_path, harness.CONV2)
    with pytest.raises(TimeoutError, match=r"^too long$"):
        launcher.launch(spec)


@pytest.mark.parametrize("place", [(Reaper, "_received_pid"), (popen_forkserver.Popen, "_launch")])
def test_a_reaper_whose_start_is_interrupted_ends_and_leaves_the_folder(
    place: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the start of its process and what `start` notes of it, nobody knows which one to kill."""
    started: list[int] = []
    untouched = getattr(*place)

    def interrupted(*arguments: Any) -> None:
        found = untouched(*arguments)
        started.append(found or arguments[0].pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(*place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Reaper()
    [pid] = started
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert Path(util.get_temp_dir()).is_dir()


def test_a_workers_semaphores_are_not_said_to_leak() -> None:
    """tqdm makes one when torch.export runs; a worker ends without Python's own tidying."""
    code = (
        "import multiprocessing\nfrom pdtool.runtime.worker_end import end_despite_threads\n"
        "lock = multiprocessing.get_context('forkserver').Lock()\nend_despite_threads(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr


@pytest.mark.parametrize("end", ["", "if update == 2: raise ValueError", "import gc; gc.freeze()"])
def test_a_file_that_nobody_closes_is_written_at_the_end(tmp_path: Path, end: str) -> None:
    """As at the end of any program; after an error, too, and where the collector skips it."""
    log = tmp_path / "log.csv"
    code = f"LOG = open({str(log)!r}, 'a')\ndef after_update(named, update):\n    LOG.write('1')\n    {end}\n"
    toy = replace(harness.SKIP1, model=harness.SKIP1.model + code)
    with pytest.raises(PdtoolError) if "raise" in end else nullcontext():
        launcher.launch(harness.job(tmp_path, toy, steps=2))
    assert log.read_text() == "11"
