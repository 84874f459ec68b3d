"""`pdtool train`, `init` and `makefile`: what is made, what is used again, and that what they write works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import click
import pytest
import torch
import yaml
from click.testing import CliRunner
from conftest import NET
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import Command
from safetensors.torch import load_file

from pdtool.artifacts.metrics import read_metrics
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Report
from pdtool.artifacts.run_dir import RunDir, RunState
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
OF_ROAD = (*TRAIN, "--batch-size", "8", "--threads", "1", "--straight", "--bandwidth", "1GB/s")

# --- train ------------------------------------------------------------------------------------------------------------


def test_train_goes_the_whole_road_and_the_second_time_only_runs(folder, request):
    folder.write("model.py", NET)
    options = ("--batch-size", "8", "--straight")
    made = folder.pdtool(*TRAIN, *options, "--steps", "2", "--epochs", "1")
    assert Profile.load(PROFILE).threads == max(1, len(usable_cores()) // 2), "two workers will share the cores"
    assert told(made) == {"profile": "making", "partition": "making"}
    assert "checked: outputs, gradients and buffers equal the model's" in made.stderr
    assert Report.load("runs/model-2/report.json").epochs == 1
    files = {path: path.read_bytes() for path in (PROFILE, PLAN, Path("plans/model-2/bundle.yaml"))}
    request.getfixturevalue("runs")
    assert told(folder.pdtool(*TRAIN, *options, "--steps", "2")) == {**FRESH, "codegen": "reusing"}
    assert {path: path.read_bytes() for path in files} == files


def test_what_the_four_commands_made_is_used_again_by_the_same_options(road, runs):
    road.pdtool("codegen")
    assert told(road.pdtool(*OF_ROAD, "--epochs", "3")) == {**FRESH, "codegen": "reusing"}
    assert runs[0]["plan"] == str(PLAN)
    assert runs[0]["epochs"] == 3
    for flag in ("-q", "-v"):  # which no command has among its parameters
        assert told(road.pdtool(*OF_ROAD, flag)).get("profile") == (None if flag == "-q" else "reusing")


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-size", "4"], "keeping profiles/model.json: it was made with --batch-size 8, not 4"),
        (["--set", "width=6"], "it is for model.py:model, not for model.py:model --set width=6"),
        (["--precision", "bf16"], "it was made with --precision left out, not bf16"),
        (["--bandwidth", "2GB/s"], "keeping plans/model-2.yaml: it was made with --bandwidth 8 Gbit/s, not 16 Gbit/s"),
        (["--latency", "1ms"], "it was made with --latency 0, not 1 ms"),
        (["--memory", "9GB"], " GB, not 9 GB"),  # not what is left of it for tensors
        (["--no-recompute"], "it was made with --recompute, not --no-recompute"),
        (["--schedule", "1f1b-flush"], "it was made with --schedule 1f1b, not 1f1b-flush"),
        (["--simplest", "0%"], "it was made with --simplest 0.03, not 0.0"),
        (["--schedule", "1f1b", "--samples-per-update", "16"], "with --samples-per-update left out, not 16"),
        (["--wire-dtype", "bf16"], "it was made with --wire-dtype fp32, not bf16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_was_made_with_other_options_is_kept_and_not_used(road, runs, options, words):
    before = {path: path.read_bytes() for path in (PROFILE, PLAN)}
    made = road.pdtool(*OF_ROAD, *options)
    assert words in made.stderr
    assert told(road.pdtool(*OF_ROAD, *options)) == FRESH, "there is one with these options now"
    assert runs[0]["plan"] == runs[1]["plan"] != str(PLAN)
    assert {path: path.read_bytes() for path in before} == before
    road.pdtool(*OF_ROAD)
    assert runs[2]["plan"] == str(PLAN)


OPTIONS = (
    ("--batch-size", "4"),
    ("--batch-size", "64"),
    ("--set", "width=6"),
    ("--set", "width=6.0"),
    ("--set", "lr=0.5"),
    ("--precision", "bf16"),
    ("--straight",),
    ("--strategy", "data-parallel"),
    ("--replicas", "2"),
    ("--schedule", "1f1b-flush"),
    ("--microbatches", "2", "--schedule", "gpipe"),
    ("--samples-per-update", "128"),
    ("--bandwidth", "1MB/s"),
    ("--latency", "1ms"),
    ("--memory", "1GB"),
    ("--wire-dtype", "bf16"),
    ("--simplest", "0%"),
)


IN_A_FRESH_FOLDER = {}  # (options, files) -> what they train there
MODEL = NET.replace("named_parameters)", "named_parameters, lr=0.1)", 1)
NESTED = MODEL.replace("middle=nn.Linear(width, width)", "middle=nn.Sequential(nn.Linear(width, width), nn.ReLU())")
DEVICE = """format: pdtool/device/1
devices:
  slow:
    {name: slow, peak_flops_per_s: {fp32: 1.0e+9}, bandwidth_bytes_per_s: 1.0e+9, memory_bytes: 16_000_000_000,
     launch_s: 1.0e-6, source: made up}
...
"""
EDITS = (
    ("model.py", NESTED),
    ("model.py", NESTED + 'HINTS = {"pin": {"relu": 1}}'),
    ("model.py", NESTED + 'HINTS = {"no_split": ["middle"]}'),
    ("model.py", NESTED + 'HINTS = {"pin": {"reul": 1}}'),
    ("model.py", "import os; os.chdir('..')\n" + NESTED),
    ("slow.yaml", DEVICE.replace("1.0e-6", "1.0e-3")),
    ("slow.yaml", DEVICE.replace("fp32", "fp16")),
)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.sampled_from(OPTIONS), max_size=2).map(sorted), min_size=2, max_size=5))
def test_what_train_does_follows_from_its_options_alone(folder, tmp_path_factory, monkeypatch, commands):
    """Law: after any other commands in its folder, a command trains what it trains in a fresh one, or fails alike."""
    steps = [
        (("--device", "v100", *words), (("model.py", MODEL),)) for words in (sum(options, ()) for options in commands)
    ]
    trains_as_in_a_fresh_folder(steps, tmp_path_factory, monkeypatch)


def test_what_train_does_follows_from_its_files_as_they_are(folder, tmp_path_factory, monkeypatch):
    """Law: after commands and edits, a command trains what it trains in a fresh folder with the same files."""
    files, steps = {"slow.yaml": DEVICE}, []
    for name, text in EDITS:
        files[name] = text
        steps.append((("--device", "slow.yaml", "--strategy", "pipeline"), tuple(files.items())))
    trains_as_in_a_fresh_folder(steps, tmp_path_factory, monkeypatch)


def trains_as_in_a_fresh_folder(steps, tmp_path_factory, monkeypatch):
    """Compare `train` with options and files, one after the other in a folder and each in its own.

    The profile is estimated, so that it is the same each time.
    """

    def trained(options, files):
        plans = []
        monkeypatch.setattr(main.commands["run"], "callback", lambda plan, **_: plans.append(Plan.load(plan)))
        for name, text in files:
            Path(name).write_text(text)
        result = CliRunner().invoke(main, [*TRAIN, *options])
        assert isinstance(result.exception, SystemExit | None), result.exception
        return result.exit_code, [without_path(plan) for plan in plans]

    def in_a_folder(sequence):
        with chdir(tmp_path_factory.mktemp("project")):
            return [trained(*step) for step in sequence]

    for step, result in zip(steps, in_a_folder(steps), strict=True):
        if step not in IN_A_FRESH_FOLDER:
            [IN_A_FRESH_FOLDER[step]] = in_a_folder([step])
        assert result == IN_A_FRESH_FOLDER[step]


def without_path(plan):
    """A plan without the path of its profile, which its digests hold, too."""
    assert plan.predicted
    predicted = plan.predicted.model_copy(update={"plan_sha256": ""})
    return plan.model_copy(update={"profile": "", "digests": {}, "predicted": predicted})


@pytest.mark.parametrize(
    ("defaults", "typed", "planned"),
    [
        ("[partition]\nstraight = true", ["--strategy", "auto"], {"strategy": "auto"}),
        ("[partition]\nstraight = true", ["--strategy", "data-parallel"], {"strategy": "data-parallel"}),
        ("[partition]\nstraight = true", ["--replicas", "2"], {"config": "2"}),
        ("[partition]\nstraight = true", ["--no-straight"], {"strategy": "auto"}),
        ("[run]\nschedule = 'gpipe'\nmicrobatches = 2", ["--schedule", "1f1b"], {"run": None}),
        ("[run]\nwire-dtype = 'bf16'", ["--wire-dtype", "fp32"], {"run": None}),
        ("[run]\nset = {lr = 0.5}", ["--set", "lr=0.01"], {"run": None}),
        ("[run]\nupdate-every = 2", ["--samples-per-update", "64", "--schedule", "1f1b"], {"update_every": 2}),
        ("[run]\nupdate-every = 9", ["--samples-per-update", "64"], {"microbatches": 2}),
        ("[run]\nweights = 'none'\nupdate-every = 9", ["--schedule", "gpipe"], {"weights": "flush"}),
    ],
)
def test_the_command_line_of_train_goes_before_all_tables_of_the_file(folder, runs, defaults, typed, planned):
    folder.write("model.py", NET.replace("named_parameters)", "named_parameters, lr=0.1)", 1))
    folder.write("pdtool.toml", defaults)
    folder.pdtool(*TRAIN, *typed)
    plan = Plan.load(runs[0]["plan"])
    expected = {name: value for name, value in planned.items() if name != "run"}
    assert {name: getattr(plan, name) for name in expected} == expected
    of_plan = ("schedule", "microbatches", "update_every", "weights", "wire_dtype", "model_settings")
    assert not any(runs[0][name] for name in of_plan), "the plan has it"


def test_a_run_after_others_has_the_losses_of_a_fresh_one(folder, tmp_path_factory):
    one_cut = 'HINTS = {"pin": {"relu": 0, "middle": 1}}'  # another cut, which times may decide, has other losses
    losses = {}
    for name in ("after others", "fresh"):
        with chdir(tmp_path_factory.mktemp("project")):
            Path("model.py").write_text(NET + one_cut)
            if name == "after others":
                folder.pdtool(*TRAIN, "--straight", "--batch-size", "16", "--steps", "1", "--set", "width=6")
            folder.pdtool(*TRAIN, "--straight", "--batch-size", "8", "--steps", "2", "-o", "runs/last")
            losses[name] = [line.loss for line in read_metrics(RunDir(Path("runs/last")).metrics_file)]
    assert losses["after others"] == losses["fresh"]


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.slow
def test_a_sweep_side_by_side_trains_what_it_trains_in_a_row(folder, tmp_path_factory):
    """Law: commands that are started at once in one folder each train what was asked of them.

    Three: where there are two cores, two are at work at once, and the third among their files.
    """

    def asked(width: int) -> list[str]:
        alone = ["train", "model.py", "--topology", "1", "--memory", "2GB", "--device", "cpu"]
        return [*alone, "--steps", "2", "--epochs", "1", "--set", f"width={width}", "-o", f"runs/{width}"]

    folder.write("model.py", NET)
    widths = range(3, 6)
    commands = [Command(folder.path, asked(width)) for width in widths]
    for width, command in zip(widths, commands, strict=True):
        code, output = command.end()
        assert code == 0, output
        assert Plan.load(f"runs/{width}/plan.yaml").model.settings == {"width": width}
    with chdir(tmp_path_factory.mktemp("in a row")):
        Path("model.py").write_text(NET)
        for width in widths:
            folder.pdtool(*asked(width))
            trained, expected = (load_file(path / weights_of(width)) for path in (folder.path, Path()))
            assert all(torch.equal(trained[name], tensor) for name, tensor in expected.items())
            assert trained.keys() == expected.keys()


def weights_of(width: int) -> Path:
    """The file of a run's only stage, in its checkpoint."""
    return RunDir(Path(f"runs/{width}")).checkpoint(1).stage_file(0)


def test_another_operator_makes_a_new_profile_and_another_learning_rate_does_not(road, runs):
    road.write("model.py", NET.replace("lr=0.1", "lr=0.2"))
    assert told(road.pdtool(*OF_ROAD)) == FRESH
    road.write("model.py", NET.replace("nn.ReLU()", "nn.Tanh()"))
    result = road.pdtool(*OF_ROAD)
    assert told(result) == {"profile": "making", "partition": "making"}
    assert "operator relu is ReLU in the profile and Tanh in the model" in result.stderr
    assert Plan.load(PLAN).digests[str(PROFILE)] == Profile.load(PROFILE).content_sha256


def test_an_edited_plan_is_used_and_never_replaced(road, runs):
    edited = PLAN.read_text().replace("in_flight: 2", "in_flight: 1")
    road.write(str(PLAN), edited)
    result = road.pdtool(*OF_ROAD)
    assert told(result) == FRESH
    assert "edited by hand" in result.stderr
    road.pdtool(*OF_ROAD, "--bandwidth", "7GB/s")
    assert runs[1]["plan"] != str(PLAN), "it was made with other options"
    road.write("model.py", NET.replace("nn.ReLU()", "nn.Tanh()"))
    stderr = road.pdtool(*OF_ROAD, code=3).stderr
    assert "was edited by hand and would be replaced" in stderr
    assert PLAN.read_text() == edited
    road.write(str(PLAN), edited.replace("in_flight", "in_fligth"))
    road.pdtool(*OF_ROAD, code=3)
    assert "in_fligth" in PLAN.read_text(), "a plan that cannot be read may have been edited"
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [("name:", "# mine\nname:"), ("settings: {lr: 0.2}", "settings: {lr: 0.3}"), ("in_flight: 2", "in_flight: 1")],
    ids=["comment", "setting of the model", "stages"],
)
def test_no_command_replaces_a_plan_that_someone_changed(folder, runs, old, new):
    """Law: each says that it was edited, uses it for the same options, and otherwise leaves it as it is."""
    folder.write("model.py", MODEL)
    profiling = ("--device", "v100", "--set", "lr=0.2")
    planning = ("--straight", "--topology", "2", "--memory", "none")
    folder.pdtool("train", "model.py", *profiling, *planning)
    assert old in PLAN.read_text()
    edited = folder.write(str(PLAN), PLAN.read_text().replace(old, new, 1)).read_text()
    reusing = [("train", "model.py", *profiling, *planning), ("partition", *planning, "--if-stale")]
    for command in reusing:
        assert "schedule 1f1b, edited by hand)" in folder.pdtool(*command).stderr
    assert "edited by hand and would be overwritten" in folder.pdtool("partition", *planning, code=2).stderr
    remedy = "partition to another file with -o and repeat your edits there, or remove this one"
    assert remedy in folder.pdtool("partition", *planning, "--latency", "1ms", "--if-stale", code=3).stderr
    if "settings" not in old:  # only the profile that the plan was made from tells an edit of its settings
        folder.write("model.py", MODEL.replace("nn.ReLU()", "nn.Tanh()"))
        for command in reusing:
            assert remedy in folder.pdtool(*command, code=3).stderr
    assert PLAN.read_text() == edited


def test_a_profile_is_the_same_by_another_path(road):
    planning = ("--straight", "--topology", "2", "--bandwidth", "1GB/s", "--if-stale")
    for path in (f"./{PROFILE}", str(PROFILE.absolute()), "profiles/../profiles/model.json"):
        assert "partition: reusing" in road.pdtool("partition", path, *planning).stderr


def test_settings_that_python_finds_equal_are_others_for_a_model(folder, request):
    """1, 1.0 and True; both `train` and `run --set` took one for the other."""
    folder.write("model.py", NET.replace("width=8", "width=8, kind=1").replace("ReLU()", "LeakyReLU(len(repr(kind)))"))
    folder.pdtool("profile", "model.py", "--device", "v100", "--set", "kind=1")
    folder.pdtool("partition", "--topology", "2")
    refused = folder.pdtool("run", "--set", "kind=1.0", "--dry-run", code=2).stderr
    assert "--set kind=1.0 changes the model's operators" in refused
    runs = request.getfixturevalue("runs")
    for kind in ("1", "1.0", "True"):
        folder.pdtool(*TRAIN, "--device", "v100", "--set", f"kind={kind}")
        assert repr(Plan.load(runs[-1]["plan"]).model.settings["kind"]) == kind


def test_what_is_typed_to_train_goes_before_what_a_resumed_run_was_asked_for(folder, monkeypatch):
    """Law: the options of a plan train the same with and without --resume, even if the run had others."""

    def train_plan(inputs, plan, asked):
        chosen.append((plan.schedule, plan.microbatches, plan.update_every, plan.wire_dtype, inputs.model.settings))
        paths.append(inputs.path)
        raise click.exceptions.Exit

    folder.write("model.py", MODEL)
    alike = (*TRAIN, "--straight", "--batch-size", "8", "--threads", "1", "--device", "cpu", "--memory", "none")
    alike += ("--set", "lr=0.2")
    begun = folder.pdtool(*alike, "--steps", "1", "-o", "runs/a", "--resume").stderr
    assert "runs/a does not exist, so the run starts from the beginning" in begun
    state = RunDir(Path("runs/a")).state_file
    run = RunState.load(state)
    monkeypatch.setattr("pdtool.api.training.train_plan", train_plan)
    flushing, updating = {"schedule": "1f1b-flush", "microbatches": 3}, {"schedule": "1f1b", "update_every": 3}
    for typed, earlier in (
        (("--schedule", "1f1b"), flushing),
        (("--wire-dtype", "fp32"), flushing),
        (("--samples-per-update", "16"), updating),
        (("--samples-per-update", "16", "--schedule", "1f1b"), updating),
        (("--schedule", "gpipe", "--microbatches", "2"), updating),
    ):
        chosen, paths = [], []
        folder.pdtool(*alike, *typed, "-o", "runs/b")
        others = {**run.asked, **earlier, "wire_dtype": "bf16", "model_settings": ("lr=0.9",)}
        run.model_copy(update={"asked": others, "plan_path": paths[0]}).save(state)
        folder.pdtool(*alike, *typed, "--resume", "runs/a", "--epochs", "2")
        assert chosen[0] == chosen[1]


def test_a_slip_is_found_before_anything_is_measured(folder, runs):
    folder.write("model.py", NET)
    assert "no cluster is given; pass --topology 4x4" in folder.pdtool("train", "model.py", code=2).stderr
    for slip in ("--timeout 0s", "--replicas x", "--epochs 0", "--device abacus", "--bandwidth 10", "--latency 1s,1s"):
        folder.pdtool(*TRAIN, *slip.split(), code=2)
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
    files = ("model.py", "pdtool.toml", "Makefile", ".gitignore", ".github/workflows/pdtool.yml")
    assert [f"wrote {name}" for name in files] == result.stderr.splitlines()[:-1]
    report = folder.pdtool("train", "model.py", "--target", "accuracy>=0.9", "--json").stdout
    assert Report.parse(report).target_reached
    ours = Path("model.py").read_text()
    subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "model.py"], check=True)
    folder.write("model.py", "mine")
    assert "kept the existing model.py (--force replaces it)" in folder.pdtool("init").stderr
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
    writes = """
    step=$1
    case $1 in
      profile) for f; do :; done; mkdir -p profiles; grep -q harmless *.py || touch "$f";;
      partition) for f; do :; done; mkdir -p plans; [ -e from-git ] || touch "$f";;
      codegen) mkdir -p "${2%.yaml}"; touch "${2%.yaml}/bundle.yaml";;
      run) while [ $# -gt 1 ]; do [ "$1" = -o ] && mkdir -p "$2" && touch "$2/report.json"; shift; done;;
    esac
    [ "$step" != "$MISSES" ] || exit 6"""
    program = f'#!/bin/sh\n[ "$1" = makefile ] && echo {rules} && exit\necho pdtool "$@"\n{writes}\n'
    folder.write("bin/pdtool", program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder.path}/bin{os.pathsep}{os.environ['PATH']}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}

    def run(*arguments, misses=""):
        command = ["make", "-s", *(["-f", rules] if "own.mk" not in arguments else []), *arguments]
        environment["MISSES"] = misses
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (not misses), done.stderr
        return [" ".join(line.split()) for line in done.stdout.splitlines()]

    return run


def test_the_rules_make_a_plan_and_a_run_of_any_model(folder, make):
    folder.write("my-model.py", NET)
    commands = [
        "pdtool profile my-model.py --if-stale -o profiles/my-model.json",
        "pdtool partition profiles/my-model.json --topology 2x2 --if-stale -o plans/my-model-2x2.yaml",
    ]
    assert make("plans/my-model-2x2.yaml") == commands
    assert make("plans/my-model-2x2.yaml") == []
    run = ["pdtool codegen plans/my-model-2x2.yaml", "pdtool run plans/my-model-2x2.yaml -o runs/my-model-2x2"]
    assert make("runs/my-model-2x2/report.json") == run
    assert make("runs/my-model-2x2/report.json") == []
    os.utime("my-model.py", (time.time() + 1,) * 2)
    assert make("runs/my-model-2x2/report.json") == commands + run, "all that follows from what is stale"


def test_the_rules_make_again_what_was_made_with_other_options(folder, make):
    folder.write("net.py", NET)
    target = "runs/net-2/report.json"
    profiling, partitioning, codegen, run = make(target)
    assert make(target, "RUN=--epochs 3") == [f"{run} --epochs 3"]
    assert make(target, "RUN=--epochs 3") == []
    assert make(target, "RUN=--epochs 3", "PARTITION=--latency '1ms,2 s'") == [
        partitioning.replace(" --if-stale", " --latency 1ms,2 s --if-stale"),
        codegen,
        f"{run} --epochs 3",
    ]
    assert make(target, "PROFILE=--threads 1")[0] == profiling.replace(" --if-stale", " --threads 1 --if-stale")
    assert len(list(Path("runs").glob("net-2.*"))) >= 1, "the runs of before"


def test_the_rules_look_at_the_files_that_options_name(folder, make):
    """An edited device file changed nothing, and no option was left for a cluster file."""
    for name in ("net.py", "mine.yaml", "cluster.yaml"):
        folder.write(name, NET)
    target, options = "plans/net-2.yaml", ("PROFILE=--device mine.yaml", "PARTITION=--cluster cluster.yaml")
    profiling = "pdtool profile net.py --device mine.yaml --if-stale -o profiles/net.json"
    partitioning = f"pdtool partition profiles/net.json --cluster cluster.yaml --if-stale -o {target}"
    assert make(target, *options) == [profiling, partitioning]
    assert make(target, *options) == []
    os.utime("cluster.yaml", (time.time() + 1,) * 2)
    assert make(target, *options) == [partitioning]
    os.utime("mine.yaml", (time.time() + 1,) * 2)
    assert make(target, *options)[0] == profiling


@pytest.mark.parametrize(
    ("file", "partition", "run"),
    [
        ("pdtool.toml", "[partition]\nstraight = true\n", "[run]\nepochs = {}\n"),
        ("pdtool.toml", "[ partition ] # mine\nstraight = true\n", "[ run ]\nepochs = {}\n"),
        ("pdtool.toml", "partition.straight = true\n", "run = {{epochs = {}}}\n"),
        ("pyproject.toml", "[tool.pdtool.partition]\nstraight = true\n", "[tool.pdtool.run]\nepochs = {}\n"),
        ("pyproject.toml", "tool.pdtool.partition.straight = true\n", "tool.pdtool.run.epochs = {}\n"),
    ],
)
def test_the_rules_make_again_what_was_made_with_other_defaults(folder, make, file, partition, run):
    """They looked at the options in the Makefile only, and then at [partition] in pdtool.toml only."""
    folder.write("net.py", NET)
    folder.write(file, partition + run.format(2))
    target = "runs/net-2/report.json"
    _, partitioning, codegen, running = make(target)
    assert make(target) == []
    folder.write(file, partition + run.format(3))
    assert make(target) == [running]
    folder.write(file, run.format(3))
    assert make(target) == [partitioning, codegen, running]
    assert make(target) == []


def test_a_run_that_missed_its_target_is_made_again(folder, make):
    """It counted as done, so a second try in CI passed."""
    folder.write("net.py", NET)
    target = "runs/net-2/report.json"
    *_, run = make(target, misses="run")
    assert make(target, misses="run") == [run]
    assert make(target) == [run]
    assert make(target) == []


def test_a_harmless_change_of_a_model_trains_again_once_and_leaves_the_rest(folder, make):
    path = folder.write("net.py", NET)
    profiling, _, _, run = make("runs/net-2/report.json")
    path.write_text(f"{NET}# harmless")
    os.utime(path, (time.time() + 1,) * 2)
    assert make("runs/net-2/report.json") == [profiling, run]
    os.utime("runs/net-2/report.json", (time.time() + 2,) * 2)
    os.utime("profiles/.net.checked", (time.time() + 2,) * 2)
    assert make("runs/net-2/report.json") == []
    Path("profiles/net.json").unlink()
    assert make("plans/net-2.yaml")[0] == profiling.replace(" --if-stale", "")


def test_a_plan_from_git_is_kept_whatever_its_date(folder, make):
    """It was planned again in each fresh clone, and stopped make if someone had edited it."""
    folder.write("net.py", NET)
    profiling, partitioning, *_ = make("runs/net-2/report.json")
    folder.write("from-git", "")
    for path in (*Path("profiles").glob(".*"), *Path("plans").glob(".*")):
        path.unlink()
    os.utime("plans/net-2.yaml", (0, 0))
    folder.write("net.py", f"{NET}# harmless")
    assert make("plans/net-2.yaml") == [profiling, partitioning]
    assert make("plans/net-2/bundle.yaml") == []
    Path("plans/net-2.yaml").unlink()
    assert make("plans/net-2.yaml") == [partitioning.replace(" --if-stale", "")]


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


def test_if_stale_leaves_what_is_fresh(folder):
    """As the rules of make call it: another learning rate changes no profile, so that no plan becomes stale."""
    folder.write("model.py", NET)
    folder.pdtool("profile", "model.py", "--batch-size", "4")
    written = PROFILE.stat().st_mtime_ns
    folder.write("model.py", NET.replace("lr=0.1", "lr=0.2"))
    same = ("profile", "model.py", "--batch-size", "4", "--if-stale")
    assert "profile: reusing profiles/model.json" in folder.pdtool(*same).stderr
    assert PROFILE.stat().st_mtime_ns == written
    planning = ("partition", "--topology", "2", "--if-stale")
    assert "partition: making plans/model-2.yaml: it does not exist" in folder.pdtool(*planning).stderr
    plan = Path("plans/model-2.yaml")
    plan.write_text(plan.read_text().replace("in_flight: 1", "in_flight: 2"))
    assert "partition: reusing plans/model-2.yaml (2, schedule 1f1b, edited by hand)" in folder.pdtool(*planning).stderr
    refused = folder.pdtool(*planning, "--memory", "none", code=3).stderr
    assert "because it was made with --memory" in refused
    assert "--if-stale compares" in folder.pdtool("partition", "a.json", "b.json", *planning[1:], code=2).stderr
    made = folder.pdtool("profile", "model.py", "--if-stale").stderr
    assert "profile: making profiles/model.json: it was made with --batch-size 4, not 32" in made
    assert PROFILE.stat().st_mtime_ns != written


def test_a_process_without_memory_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise MemoryError

    monkeypatch.setattr("pdtool.cli.commands.app._check_folder", full)
    result = CliRunner().invoke(main, ["show", "plan.yaml"])
    assert (result.exit_code, "error: this process found no memory; raise its limit" in result.stderr) == (1, True)
