"""With how many threads a worker computes: OMP_NUM_THREADS, else those of the profile, else its part of the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import samples

from pdtool.api import training
from pdtool.api.inputs import Inputs
from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.device import Device
from pdtool.artifacts.profile import Profile
from pdtool.errors import UsageError
from pdtool.host import usable_cores
from pdtool.options.run_options import RunOptions
from pdtool.runtime.launch import launcher
from pdtool.runtime.launch.worker_main import choose_threads


@pytest.mark.parametrize(
    ("environment", "profiled", "local_workers", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 2, 4, 3),
        ({"OMP_NUM_THREADS": "3,2"}, None, 1, 3),
        ({}, 2, 8, 2),
        ({}, 1, 1, 1),  # a pretend machine with one worker of many: it does not take all cores
        ({}, 32, 1, 8),  # measured on a larger machine
        ({}, None, 2, 4),
        ({}, None, 16, 1),
        ({"OMP_NUM_THREADS": "0"}, None, 2, 4),
        ({"OMP_NUM_THREADS": "many"}, 2, 2, 2),
    ],
)
def test_the_threads_of_a_worker_on_eight_cores(
    environment: dict[str, str], profiled: int | None, local_workers: int, threads: int
) -> None:
    assert choose_threads(environment, profiled, 8, local_workers) == threads


def measured(name: str, kind: str = "measured") -> Profile:
    return samples.profile().model_copy(update={"device": Device(name=name, kind=kind)})  # type: ignore[arg-type]


def test_a_profile_knows_its_threads() -> None:
    """If it was measured on a CPU."""
    assert measured("AMD EPYC, 1 thread").threads == 1
    assert measured("AMD EPYC, 16 threads").threads == 16
    assert measured("NVIDIA H100 80GB HBM3").threads is None
    assert measured("Intel Xeon, 4 threads, at 2 GHz").threads is None
    assert measured("AMD EPYC, 2 threads", "estimated").threads is None


def test_run_takes_the_threads_of_the_profile(tmp_path: Path) -> None:
    profile = measured("AMD EPYC, 2 threads")
    inputs = Inputs("plan.yaml", samples.plan(), profile, ModelRef(source="model.py"), trusted=False)
    assert training._config(inputs, samples.bundle(), RunOptions(), tmp_path / "run").threads == 2


@pytest.mark.parametrize(
    ("threads", "cores", "asked", "says"),
    [
        (4, 8, None, "3 workers with 4 threads each, as in the profile, share the 8 cores"),
        (2, 8, None, ""),
        (1, 2, None, ""),
        (4, 8, "4", ""),
        (None, 8, None, ""),
    ],
)
def test_workers_that_crowd_each_other_are_noted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    threads: int | None,
    cores: int,
    asked: str | None,
    says: str,
) -> None:
    """As when the profile was measured with all cores of this machine."""
    monkeypatch.setattr("pdtool.api.training.usable_cores", lambda: range(cores))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    config = replace(harness.job(tmp_path, harness.CONV3), threads=threads)
    training._note_crowding(config)
    told = " ".join(capsys.readouterr().err.split())
    assert says in told
    assert bool(says) == bool(told)


def test_threads_that_are_asked_for_are_taken_before_all_others(tmp_path: Path) -> None:
    """Those of `run --threads` before OMP_NUM_THREADS, which is 1 here; no more than there are cores."""
    told, cores = tmp_path / "threads", len(usable_cores())
    statement = f"open({str(told)!r}, 'w').write(str(torch.get_num_threads()))"
    config = replace(harness.job(tmp_path, harness.faulty(statement), steps=1), threads=cores, threads_given=True)
    launcher.launch(config)
    assert told.read_text() == str(cores)
    with pytest.raises(
        UsageError, match=rf"--threads is {cores + 1}, but this machine has {cores} cores?; pass {cores} or fewer"
    ):
        launcher.launch(replace(config, threads=cores + 1))


@pytest.mark.parametrize(("asked", "threads"), [(None, min(2, len(usable_cores()))), ("1", 1)])
def test_a_worker_computes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, threads: int
) -> None:
    """Three workers on this machine, of a profile with two threads."""
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    else:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    told = tmp_path / "threads"
    statement = f"open({str(told)!r}, 'w').write(str(torch.get_num_threads()))"
    config = harness.job(tmp_path, harness.faulty(statement), steps=1)
    launcher.launch(replace(config, threads=2))
    assert told.read_text() == str(threads)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")
@pytest.mark.parametrize("asked", [True, False])
def test_what_torchrun_sets_by_itself_is_not_what_the_user_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """torchrun sets OMP_NUM_THREADS=1 when it is not set."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    code = "import sys; sys.stdout.write('started'); sys.stdout.flush(); sys.stdin.read()"
    torchrun = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment | ({"OMP_NUM_THREADS": "1"} if asked else {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert torchrun.stdout
    torchrun.stdout.read(7)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(launcher.os, "getppid", lambda: torchrun.pid)
    launcher._forget_threads_of_torchrun()
    assert ("OMP_NUM_THREADS" in os.environ) == asked
    torchrun.communicate()
