"""Artifacts from strangers: each is loaded, or refused with its file and field, in 2 s and 500 MB; so do the commands.

`make fuzz` tries 10,000 of them and 300 through the commands, `make test` 500 and 30.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mutations import PROFILE, PROFILE_PATH, VALID, Forged

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.cli.commands.app import main
from pdtool.cli.terminal import show
from pdtool.cli.view import view
from pdtool.errors import ArtifactError, PdtoolError
from pdtool.planner.choice.comparison import compare
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.plan_check import check_plan
from pdtool.planner.choice.plan_figures import refresh
from pdtool.planner.placement import Placement
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob
from pdtool.reports.graph_drawing import dot, graph_drawing
from pdtool.schedule import RIVALS

INPUTS = int(os.environ.get("PDTOOL_FUZZ_INPUTS", "500"))
COMMANDS = int(os.environ.get("PDTOOL_FUZZ_COMMANDS", "30"))
PROCESSES = max(2, COMMANDS // 30)
MAX_LOAD_S, MAX_USE_S, MAX_MB = 2.0, 20.0, 500
KINDS = sorted(VALID)


def fuzz(inputs: int) -> Callable[[Any], Any]:
    """The same inputs each time in `make test`, others in `make fuzz`."""
    return settings(
        max_examples=max(1, inputs),
        database=None,
        derandomize=inputs < 1000 // len(KINDS),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def limited(seconds: float, what: str):
    """Fail where the body takes more than these seconds of the processor, or 500 MB."""
    began, before_kb = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    took_s = time.process_time() - began
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1000
    assert took_s < seconds, f"{what} took {took_s:.1f} s"
    assert grown_mb < MAX_MB, f"{what} took {grown_mb:.0f} MB"


def loaded(forged: Forged, path: Path) -> Any:
    """The artifact in the file, or None where it was refused as it should be."""
    path.write_bytes(forged.data)
    with limited(MAX_LOAD_S, "loading"):
        try:
            return type(forged.artifact).load(path)
        except ArtifactError as refusal:
            text, field = str(refusal), refusal.field
    assert text.startswith(f"{path}: {field}"), text
    assert len(text) < 2000, "a message that nobody reads"
    return None


def used(artifact: Any) -> None:
    """Do with an artifact what the commands do; only a PdtoolError may stop it."""
    with contextlib.suppress(PdtoolError):
        show(*view(artifact, None, 80), err=False)
    with contextlib.suppress(PdtoolError):
        match artifact.KIND:
            case "profile":
                for size in (2, 4):
                    with contextlib.suppress(PdtoolError):
                        make_plan(artifact, "net.json", make_cluster((size,), (1e9,)))
            case "cluster":
                make_plan(PROFILE, PROFILE_PATH, artifact.cluster())
            case "plan":
                _use_plan(artifact)


def _use_plan(plan: Plan) -> None:
    for step in (_draw, _check, _simulate):
        with contextlib.suppress(PdtoolError):
            step(plan)


def _draw(plan: Plan) -> None:
    dot(plan, PROFILE)
    graph_drawing(plan, PROFILE, 1120)


def _check(plan: Plan) -> None:
    list(check_plan(plan, PROFILE))


def _simulate(plan: Plan) -> None:
    plan.check_schedule()
    placement, cluster = Placement.of(refresh(plan, PROFILE), PROFILE), plan.cluster
    compare(PROFILE, plan, RIVALS, placement, simulate(SimulationJob.of(placement, PROFILE, cluster)))


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # it would hide what a large file shows
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_loaded_or_refused(kind, tmp_path, capsys):
    @fuzz(INPUTS // len(KINDS))
    @given(mutations.forged(kind))
    def attempt(forged: Forged) -> None:
        artifact = loaded(forged, tmp_path / "file")
        if artifact is not None:
            with limited(MAX_USE_S, "using it"):
                used(artifact)
        capsys.readouterr()

    attempt()


COMMANDS_OF = {
    "emulation": [["show", "FILE"], ["show", "FILE", "--json"], ["report", "FILE", "-o", "-"]],
    "profile": [
        ["show", "FILE"],
        ["show", "FILE", "--json"],
        ["partition", "FILE", "--topology", "2", "-o", "out.yaml"],
        ["partition", "FILE", "--topology", "2x2", "--schedule", "auto", "--memory", "1GB", "-o", "-"],
        ["check", "plan.yaml"],  # whose profile it is
    ],
    "plan": [
        ["show", "FILE"],
        ["show", "FILE", "--graph"],
        ["check", "FILE"],
        ["check", "FILE", "--json"],
        ["simulate", "FILE", "--svg", "-"],
        ["report", "FILE", "-o", "-"],
        ["simulate", "FILE", "--trace", "t.json", "--sweep", "bandwidth=1..10Gbit/s"],
        ["simulate", "FILE", "--minibatches", "20", "--json"],
        ["codegen", "FILE"],
        ["run", "FILE", "--dry-run"],
    ],
    "bundle": [["show", "FILE"], ["show", "."], ["show", "FILE", "--json"]],
    "report": [["show", "FILE"], ["show", "FILE", "--json"], ["report", ".", "-o", "-"]],
    "run": [["show", "FILE"], ["show", "."], ["show", "FILE", "--json"]],
    "cluster": [["show", "FILE"], ["partition", "net.json", "--cluster", "FILE", "-o", "out.yaml"]],
    "checkpoint": [["show", "FILE"], ["show", ".", "--json"]],
    "device": [["show", "FILE"], ["profile", "gone.py", "--device", "FILE"]],
}
FILES = {
    "profile": "net.json",
    "bundle": "bundle.yaml",
    "report": "report.json",
    "run": "run.json",
    "checkpoint": "checkpoint.json",
}


def written(kind: str, data: bytes) -> str:
    """Write the file, and what goes with it, into the current folder."""
    for forged in ("net.json", "plan.yaml"):  # which `save` would not replace
        Path(forged).unlink(missing_ok=True)
    PROFILE.save("net.json")
    VALID["plan"][0].save("plan.yaml")
    name = FILES.get(kind, "file.yaml")
    Path(name).write_bytes(data)
    return name


def arguments_of(kind: str, choice: int, name: str) -> list[str]:
    command = COMMANDS_OF[kind][choice % len(COMMANDS_OF[kind])]
    return [name if argument == "FILE" else argument for argument in command]


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_ends_as_designed(kind, folder):
    @fuzz(COMMANDS // len(KINDS))
    @given(mutations.forged(kind), st.integers(0, 99))
    def attempt(forged: Forged, choice: int) -> None:
        arguments = arguments_of(kind, choice, written(kind, forged.data))
        with limited(MAX_USE_S, " ".join(arguments)):
            result = CliRunner().invoke(main, arguments, prog_name="pdtool")
        error = result.exception
        if error and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        assert not error or isinstance(error, SystemExit), arguments
        assert 0 <= result.exit_code <= 6, (arguments, result.exit_code)
        assert result.exit_code == 0 or "rror: " in result.stderr, (arguments, result.stderr)

    attempt()


@pytest.mark.parametrize("number", range(PROCESSES))
def test_processes_end_as_designed(number, folder):
    """As users start them, what was forged coming through a pipe every other time."""
    kind = KINDS[number % len(KINDS)]
    data = VALID[kind][0].dump().encode()
    name = written(kind, data[: len(data) * (number % 7 + 1) // 9] + b"\x00[[[" * number)
    arguments = arguments_of(kind, number, "-" if number % 2 else name)
    command = [sys.executable, "-m", "pdtool", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(mutations.ROOT)}
    done = subprocess.run(
        command, input=Path(name).read_bytes(), env=environment, capture_output=True, timeout=120, check=False
    )
    assert 0 <= done.returncode <= 6, done.stderr
    assert b"Traceback" not in done.stderr


def test_what_was_not_changed_is_accepted(tmp_path):
    """The seeds themselves load, and are used without an error: the mutations start from what works."""
    for artifacts in VALID.values():
        for artifact in artifacts:
            artifact.save(tmp_path / artifact.KIND)
            assert type(artifact).load(tmp_path / artifact.KIND) == artifact
            used(artifact)
    assert Profile.load(mutations.ROOT / "profiles" / "mnist.json")
