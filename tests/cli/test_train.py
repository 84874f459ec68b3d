"""`pdtool train`, `init` and `makefile`: what is made, what is used again, and that what they write works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import NET

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Report
from pdtool.cli.commands.app import main
from pdtool.host import usable_cores

TRAIN = ("train", "model.py", "--topology", "2")
PLAN, PROFILE = Path("plans/model-2.yaml"), Path("profiles/model.json")


@pytest.fixture
def runs(monkeypatch):
    """What `run` is called with, in place of running."""
    calls = []
    monkeypatch.setattr(main.commands["run"], "callback", lambda **options: calls.append(options))
    return calls


def told(result):
    """What `train` says of each step: {"profile": "reusing"}."""
    steps = [line.split()[:2] for line in result.stderr.splitlines()]
    return {step[0][:-1]: step[1] for step in steps if step and step[0] in ("profile:", "partition:", "codegen:")}


FRESH = {"profile": "reusing", "partition": "reusing"}

# --- train ------------------------------------------------------------------------------------------------------------


def test_train_goes_the_whole_road_and_the_second_time_only_runs(folder, request):
    folder.write("model.py", NET)
    made = folder.pdtool(*TRAIN, "--batch-size", "8", "--straight", "--steps", "2", "--epochs", "1")
    assert Profile.load(PROFILE).threads == max(1, len(usable_cores()) // 2), "two workers will share the cores"
    assert told(made) == {"profile": "making", "partition": "making"}
    assert "proved: outputs, gradients and buffers equal the model's" in made.stderr
    assert Report.load("runs/model-2/report.json").epochs == 1
    files = {path: path.read_bytes() for path in (PROFILE, PLAN, Path("plans/model-2/bundle.yaml"))}
    request.getfixturevalue("runs")
    assert told(folder.pdtool(*TRAIN, "--steps", "2")) == {**FRESH, "codegen": "reusing"}
    assert {path: path.read_bytes() for path in files} == files


def test_what_the_four_commands_made_is_used_again_whatever_they_were_told(road, runs):
    road.pdtool("codegen")
    assert told(road.pdtool(*TRAIN, "--epochs", "3")) == {**FRESH, "codegen": "reusing"}
    assert runs[0]["plan"] == str(PLAN)
    assert runs[0]["epochs"] == 3
    assert Profile.load(PROFILE).batch_size == 8, "not the default of --batch-size"


@pytest.mark.parametrize(
    ("options", "stale"),
    [
        (["--bandwidth", "1GB/s", "--straight", "--batch-size", "8"], {}),
        (["--batch-size", "4"], {"profile": "making", "partition": "making"}),
        (["--set", "width=6"], {"profile": "making", "partition": "making"}),
        (["--precision", "bf16"], {"profile": "making", "partition": "making"}),
        (["--bandwidth", "2GB/s"], {"partition": "making"}),
        (["--strategy", "data-parallel"], {"partition": "making"}),
        (["--replicas", "2"], {"partition": "making"}),
        (["--memory", "1GB"], {"partition": "making"}),
        (["--schedule", "1f1b-flush"], {"partition": "making"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_an_option_makes_stale_what_was_made_with_another_value(road, runs, options, stale):
    assert told(road.pdtool(*TRAIN, *options)) == FRESH | stale
    assert told(road.pdtool(*TRAIN, *options)) == {**FRESH}, "now it is as asked for"


def test_another_operator_makes_a_new_profile_and_another_learning_rate_does_not(road, runs):
    road.write("model.py", NET.replace("lr=0.1", "lr=0.2"))
    assert told(road.pdtool(*TRAIN)) == FRESH
    road.write("model.py", NET.replace("nn.ReLU()", "nn.Tanh()"))
    result = road.pdtool(*TRAIN)
    assert told(result) == {"profile": "making", "partition": "making"}
    assert "operator relu is ReLU in the profile and Tanh in the model" in result.stderr
    assert Plan.load(PLAN).digests[str(PROFILE)] == Profile.load(PROFILE).content_sha256


def test_an_edited_plan_is_used_and_never_replaced(road, runs):
    edited = PLAN.read_text().replace("in_flight: 2", "in_flight: 1")
    road.write(str(PLAN), edited)
    result = road.pdtool(*TRAIN)
    assert told(result) == FRESH
    assert "edited by hand" in result.stderr
    stderr = road.pdtool(*TRAIN, "--bandwidth", "7GB/s", code=3).stderr
    assert "was edited by hand, and would be replaced" in stderr
    assert "another --bandwidth than 7GB/s" in stderr
    assert PLAN.read_text() == edited
    road.write(str(PLAN), edited.replace("in_flight", "in_fligth"))
    road.pdtool(*TRAIN, code=3)
    assert "in_fligth" in PLAN.read_text(), "a plan that cannot be read may have been edited"
    assert len(runs) == 1


def test_a_slip_is_found_before_anything_is_measured(folder, runs):
    folder.write("model.py", NET)
    assert "no cluster is given; give --topology 2" in folder.pdtool("train", "model.py", code=2).stderr
    for slip in (["--timeout", "0s"], ["--replicas", "x"], ["--epochs", "0"], ["--device", "abacus"]):
        folder.pdtool(*TRAIN, *slip, code=2)
    assert not PROFILE.exists()
    assert "there is no file other.py" in folder.pdtool("train", "other.py", "--topology", "2", code=2).stderr


def test_a_projects_defaults_hold_for_the_steps_of_train(folder, runs):
    folder.write("model.py", NET)
    defaults = (
        "[train]\ntopology = 2\n[profile]\nbatch-size = 4\n[partition]\nstraight = true\n[run]\nweights = 'none'\n"
    )
    folder.write("pdtool.toml", defaults + "epochs = 7\n")
    folder.pdtool("train", "model.py", "--batch-size", "6")
    assert Profile.load(PROFILE).batch_size == 6
    assert Plan.load(PLAN).strategy == "straight"
    assert (runs[0]["weights"], runs[0]["epochs"]) == ("none", 7)
    assert told(folder.pdtool("train", "model.py", "--batch-size", "6")) == FRESH


def test_a_model_outside_of_the_folder_is_named_to_run(folder, runs):
    path = folder.write("elsewhere/net.py", NET)
    project = folder.path / "project"
    project.mkdir()
    os.chdir(project)
    folder.pdtool("train", str(path), "--topology", "2")
    assert runs[0]["model"] == str(path)
    assert Path("plans/net-2.yaml").exists()


# --- init -------------------------------------------------------------------------------------------------------------


def test_init_writes_a_project_that_trains_as_it_is(folder):
    result = folder.pdtool("init")
    files = ("model.py", "pdtool.toml", "Makefile", ".github/workflows/pdtool.yml")
    assert [f"wrote {name}" for name in files] == result.stderr.splitlines()[:-1]
    report = folder.pdtool("train", "model.py", "--target", "accuracy>=0.9", "--json").stdout
    assert Report.parse(report).target_reached
    ours = Path("model.py").read_text()
    subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "model.py"], check=True)
    folder.write("model.py", "mine")
    assert "kept model.py, which was there (--force replaces it)" in folder.pdtool("init").stderr
    assert Path("model.py").read_text() == "mine"
    folder.pdtool("init", "--force")
    assert Path("model.py").read_text() == ours


def test_the_ci_job_of_init_may_read_and_no_more(folder):
    """A pull request runs a stranger's code in it."""
    folder.pdtool("init", "project")
    workflow = yaml.safe_load(Path("project/.github/workflows/pdtool.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())


def test_the_ci_job_of_init_calls_commands_that_exist(folder):
    folder.pdtool("init", "project")
    job = yaml.safe_load(Path("project/.github/workflows/pdtool.yml").read_text())["jobs"]["pipeline"]
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    commands = [line[line.index("pdtool ") :] for line in lines if "pdtool " in line and "pip" not in line]
    assert len(commands) == 2
    for line in commands:
        words = line.split("; fi")[0].replace("'", "").replace('"', "").split()
        main.commands[words[1]].make_context(words[1], words[2:])


# --- makefile ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(folder, monkeypatch):
    """Run make with the rules that `pdtool makefile` names; its `pdtool` says what it is called with, and writes -o."""
    [rules] = folder.pdtool("makefile").stdout.splitlines()
    writes = 'case $1 in profile|partition) for f; do :; done; mkdir -p "${f%/*}"; touch "$f";; esac'
    program = f'#!/bin/sh\n[ "$1" = makefile ] && echo {rules} && exit\necho pdtool "$@"\n{writes}\n'
    folder.write("bin/pdtool", program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder.path}/bin{os.pathsep}{os.environ['PATH']}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}

    def run(*arguments):
        command = ["make", "-s", *(["-f", rules] if "own.mk" not in arguments else []), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [" ".join(line.split()) for line in done.stdout.splitlines()]

    return run


def test_the_rules_make_a_plan_and_a_run_of_any_model(folder, make):
    folder.write("my-model.py", NET)
    commands = [
        "pdtool profile my-model.py --if-stale -o profiles/my-model.json",
        "pdtool partition profiles/my-model.json --topology 2x2 -o plans/my-model-2x2.yaml",
    ]
    assert make("plans/my-model-2x2.yaml") == commands
    assert make("plans/my-model-2x2.yaml") == []
    run = ["pdtool codegen plans/my-model-2x2.yaml", "pdtool run plans/my-model-2x2.yaml -o runs/my-model-2x2"]
    assert make("runs/my-model-2x2/report.json") == run
    os.utime("profiles/my-model.json", (0, 0))
    assert make("runs/my-model-2x2/report.json") == commands + run, "all that follows from what is stale"


def test_the_rules_are_included_by_a_makefile_of_the_users(folder, make):
    folder.write("models/net.py", NET)
    folder.write("own.mk", "PROFILE = --threads 1\nhello:\n\techo hello\n\ninclude $(shell pdtool makefile)\n")
    assert make("-f", "own.mk") == ["hello"], "the user's first target is still the default"
    profiling, _ = make("-f", "own.mk", "plans/net-2.yaml")
    assert profiling == "pdtool profile models/net.py --threads 1 --if-stale -o profiles/net.json"


def test_what_is_written_is_packaged(folder):
    """setup.cfg names the folder of all that init and makefile read."""
    [rules] = folder.pdtool("makefile").stdout.splitlines()
    setup = (Path(__file__).parents[2] / "setup.cfg").read_text()
    assert "cli/starter/*" in setup
    assert Path(rules).is_file()
    assert shutil.which("make")


def test_profile_if_stale_leaves_what_is_fresh(folder):
    """As the rules of make call it: another learning rate changes no profile, so that no plan becomes stale."""
    folder.write("model.py", NET)
    folder.pdtool("profile", "model.py", "--threads", "1", "--if-stale")
    written = PROFILE.stat().st_mtime_ns
    folder.write("model.py", NET.replace("lr=0.1", "lr=0.2"))
    assert "profile: reusing profiles/model.json" in folder.pdtool("profile", "model.py", "--if-stale").stderr
    assert PROFILE.stat().st_mtime_ns == written
    folder.pdtool("profile", "model.py", "--batch-size", "4", "--if-stale")
    assert PROFILE.stat().st_mtime_ns != written
