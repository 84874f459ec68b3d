"""`--resume` goes on with the run's own plan and options; what a command lacks is said before anything runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import time
from pathlib import Path

import pytest
from conftest import Folder

from pdtool import Plan, RunState
from pdtool.api.resuming import as_asked, note_options
from pdtool.artifacts.metrics import UpdateLine, read_metrics
from pdtool.artifacts.plan import FasterPlan
from pdtool.artifacts.run_dir import RunDir
from pdtool.cli.terminal import status, telling_what_takes_long
from pdtool.options.run_options import RunOptions
from pdtool.options.target import Target

OPTIONS = ("--seed", "3", "--steps", "5", "--schedule", "gpipe", "--microbatches", "2", "--set", "lr=0.01")


def losses(run: str) -> list[float]:
    return [line.loss for line in read_metrics(Path(run) / "metrics.jsonl") if isinstance(line, UpdateLine)]


@pytest.fixture
def trainable(road: Folder) -> Folder:
    """A folder with a plan of a model whose optimizer takes a setting."""
    text = Path("model.py").read_text()
    Path("model.py").write_text(
        re.sub(r"def optimizer\(named_parameters.*?\):", "def optimizer(named_parameters, lr=0.1):", text)
    )
    return road


@pytest.mark.usefixtures("stages")
def test_resume_alone_trains_what_the_run_was_asked_for(trainable: Folder) -> None:
    """Half a run, gone on with by nothing but its folder, has the losses of a whole one; so has one begun again."""
    plan = ("run", "plans/model-2.yaml", *OPTIONS)
    begun = trainable.pdtool(*plan, "-o", "runs/whole", "--epochs", "2", "--resume").stderr  # one command for both
    assert "runs/whole does not exist, so the run starts from the beginning" in begun
    trainable.pdtool(*plan, "-o", "runs/half", "--epochs", "2")
    state = RunState.load("runs/half/run.json")
    assert (state.epochs, state.epochs_done, state.plan_path) == (2, 2, "plans/model-2.yaml")
    shutil.rmtree("runs/half/checkpoints/epoch-2")
    said = trainable.pdtool("run", "-o", "runs/half", "--resume").stderr
    assert "taken from the earlier run: --epochs 2 --seed 3 --steps 5" in said.replace(
        "--steps 5 --seed 3", "--seed 3 --steps 5"
    )
    assert "continuing after epoch 1" in said
    assert losses("runs/half") == losses("runs/whole")
    shutil.rmtree("runs/half/checkpoints")
    assert (
        "has no checkpoint yet, so the run starts from the beginning"
        in trainable.pdtool("run", "--resume", "runs/half").stderr
    )
    assert losses("runs/half") == losses("runs/whole")


@pytest.mark.usefixtures("stages")
def test_a_run_whose_plan_is_gone_continues_with_its_own_copy(trainable: Folder) -> None:
    """It took the only other plan in plans/, of another schedule, without a word."""
    trainable.pdtool("run", "plans/model-2.yaml", *OPTIONS, "--epochs", "1", "-o", "runs/a")
    Path("plans/model-2.yaml").rename("plans/gone")
    trainable.pdtool(
        "partition", "profiles/model.json", "--topology", "2", "--schedule", "2bw", "-o", "plans/other.yaml"
    )
    said = trainable.pdtool("run", "-o", "runs/a", "--resume", "--epochs", "2").stderr
    assert "plans/model-2.yaml is missing, so runs/a continues with its own copy of the plan, runs/a/plan.yaml" in said
    assert Plan.load("runs/a/plan.yaml").schedule == "gpipe"
    Path("runs/a/plan.yaml").unlink()
    said = trainable.pdtool("run", "-o", "runs/a", "--resume", "--epochs", "3", code=2).stderr
    assert "runs/a/plan.yaml, the plan of runs/a, is missing; name another plan" in said


@pytest.mark.usefixtures("stages")
def test_a_run_is_not_resumed_with_the_plan_of_another_folder(trainable: Folder, tmp_path_factory, monkeypatch) -> None:
    """That plan, and the model that it names, may have the same names, and even parameters of the same shapes."""
    trainable.pdtool("run", "plans/model-2.yaml", *OPTIONS, "--epochs", "1", "-o", "runs/a b")
    began_in, other = Path.cwd(), tmp_path_factory.mktemp("other")
    shutil.copytree(began_in, other / "copy")
    monkeypatch.chdir(other / "copy")
    said = trainable.pdtool("run", "--resume", f"{began_in}/runs/a b", "--epochs", "2", code=2).stderr
    assert f"a b began in {began_in}, and this folder may have another plan" in said
    assert f"`cd {began_in} && pdtool run --resume 'runs/a b'`, or name a plan" in said
    trainable.pdtool("run", "--resume", "runs/a b", "--epochs", "2")  # the run has moved with its folder
    trainable.pdtool("run", "plans/model-2.yaml", "--resume", f"{began_in}/runs/a b", "--epochs", "3")


@pytest.mark.usefixtures("stages")
def test_what_is_typed_goes_before_what_the_run_was_asked_for(trainable: Folder) -> None:
    trainable.pdtool("run", "plans/model-2.yaml", *OPTIONS, "-o", "runs/a")
    said = trainable.pdtool(
        "run", "-o", "runs/a", "--resume", "--epochs", "2", "--seed", "0", "--schedule", "1f1b"
    ).stderr
    asked = RunState.load("runs/a/run.json").asked
    assert (asked["seed"], asked["schedule"], asked["steps"], asked["model_settings"]) == (0, "1f1b", 5, ("lr=0.01",))
    assert "microbatches" not in asked
    assert "continues with --seed 0" in said


@pytest.mark.parametrize(
    ("recorded", "given", "kept"),
    [
        ({"schedule": "1f1b-flush", "microbatches": 4}, {"wire_dtype": "bf16"}, ("1f1b-flush", 4, None, None, None)),
        ({"schedule": "1f1b-flush", "microbatches": 3}, {"microbatches": 4}, ("1f1b-flush", 4, None, None, None)),
        (
            {"weights": "vertical-sync", "correction": "nesterov"},
            {"update_every": 3},
            (None,) * 2 + ("vertical-sync", 3, "nesterov"),
        ),
        ({"weights": "none", "update_every": 2}, {"schedule": "2bw"}, ("2bw", None, None, 2, None)),
        ({"correction": "nesterov", "update_every": 2}, {"schedule": "gpipe"}, ("gpipe", None, None, None, None)),
        ({"schedule": "gpipe", "microbatches": 4}, {"schedule": "zb-h1"}, ("zb-h1", 4, None, None, None)),
        ({"schedule": "gpipe", "microbatches": 4}, {"schedule": "1f1b"}, ("1f1b", None, None, None, None)),
    ],
)
def test_an_option_of_the_plan_leaves_the_others_as_they_were(tmp_path: Path, recorded, given, kept) -> None:
    """Once, `--wire-dtype` made a run without a flush of one with a flush, and said nothing."""
    state = RunState(plan="net", config="1-1", schedule="1f1b", epochs=4, plan_path="p.yaml", asked=recorded)
    state.save(RunDir(tmp_path).state_file)
    asked = as_asked(None, RunOptions(resume=tmp_path, **given), given)
    assert (asked.schedule, asked.microbatches, asked.weights, asked.update_every, asked.correction) == kept
    asked = as_asked("other.yaml", RunOptions(resume=tmp_path, **given), given)
    assert asked.schedule == given.get("schedule"), "the schedule of another plan is its own"


def test_a_switch_is_taken_from_the_earlier_run_as_it_stood(tmp_path: Path, capsys) -> None:
    """Here over pdtool.toml. Once, the note said --compile."""
    state = RunState(plan="net", config="1-1", schedule="1f1b", epochs=4, plan_path="p.yaml", asked={"compiled": False})
    state.save(RunDir(tmp_path).state_file)
    before = RunOptions(resume=tmp_path, compiled=True)
    note_options(before, as_asked(None, before, {}))
    assert "taken from the earlier run: --epochs 4 --no-compile" in capsys.readouterr().err


@pytest.mark.usefixtures("stages")
def test_a_damaged_run_json_is_refused_and_told_where_a_plan_is_given(trainable: Folder) -> None:
    trainable.pdtool("run", "plans/model-2.yaml", *OPTIONS, "-o", "runs/a")
    Path("runs/a/run.json").write_text("[]")
    assert "runs/a/run.json" in trainable.pdtool("run", "-o", "runs/a", "--resume", "--epochs", "2", code=3).stderr
    said = trainable.pdtool("run", "plans/model-2.yaml", "-o", "runs/a", "--resume", "--epochs", "2").stderr
    assert "warning: runs/a/run.json: " in said
    assert "so the options of the earlier run are unknown and not used" in said
    Path("runs/a/run.json").unlink()
    said = trainable.pdtool("run", "plans/model-2.yaml", "-o", "runs/a", "--resume", "--epochs", "3").stderr
    assert "runs/a/run.json is missing, so the options of the earlier run are unknown and not used" in said


def test_options_that_run_json_cannot_hold_are_refused_by_name(trainable: Folder) -> None:
    trainable.pdtool("run", "plans/model-2.yaml", "--steps", "3", "-o", "runs/a")
    state = RunState.load("runs/a/run.json")
    state.model_copy(update={"asked": {"schedule": "dance", "unknown": 7}}).save("runs/a/run.json")
    said = trainable.pdtool("run", "-o", "runs/a", "--resume", "--epochs", "2", code=2).stderr
    assert "--schedule='dance'" in said


def test_an_older_run_is_read(trainable: Folder) -> None:
    """Its epochs_done were those before it began."""
    state = json.loads(RunState(plan="net", config="1-1", schedule="1f1b", epochs=4, resumed_after=2).dump())
    older = {key: value for key, value in state.items() if key not in ("plan_path", "resumed_after", "asked", "sha256")}
    upgraded = RunState.upgraded(older | {"epochs_done": 2}, 1)
    assert upgraded["resumed_after"] == 2


def test_hints_of_a_run_that_missed_its_target_can_be_pasted(trainable: Folder) -> None:
    said = trainable.pdtool("run", "plans/model-2.yaml", "-o", "runs/a b", "--target", "loss<=0.0", code=6).stderr
    command = re.search(r"train longer: `pdtool (.*?)`", said)
    assert command
    again = trainable.pdtool(*shlex.split(command[1]), code=6).stderr
    assert "continuing after epoch 1 of runs/a b, with 1 epoch" in again


@pytest.mark.parametrize("missing", ["loss", "optimizer", "dataset"])
@pytest.mark.parametrize("command", [("train", "model.py", "--topology", "2"), ("run", "plans/model-2.yaml")])
def test_what_training_lacks_is_said_before_anything_runs(road: Folder, missing: str, command: tuple[str, ...]) -> None:
    text = Path("model.py").read_text()
    Path("model.py").write_text(text.replace(f"def {missing}(", f"def other_{missing}("))
    said = road.pdtool(*command, code=1).stderr
    assert f"error: model.py has no function {missing}(); it defines: " in said
    assert "training on" not in said
    assert not Path("runs").exists()


def test_names_that_no_reader_sees_are_left_to_the_import(road: Folder) -> None:
    Path("base.py").write_text(Path("model.py").read_text())
    Path("model.py").write_text("from base import *\n")
    assert "training on" in road.pdtool("run", "plans/model-2.yaml", "--steps", "2").stderr


def test_a_script_is_told_of_init(folder: Folder) -> None:
    folder.write("train.py", "def main():\n    pass\n")
    said = folder.pdtool("train", "train.py", "--topology", "2", code=1).stderr
    assert (
        "train.py has no function model(); it defines: main; pdtool imports this file and calls its functions" in said
    )
    assert "`pdtool init example`" in said
    folder.pdtool("init", "example")


def test_a_start_that_fails_leaves_no_folder(road: Folder) -> None:
    """The other machine never comes."""
    road.pdtool("codegen")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    machines = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--timeout", "1")
    road.pdtool("run", "plans/model-2.yaml", "-o", "runs/a", *machines, code=5)
    assert not Path("runs/a").exists()


@pytest.mark.parametrize(
    ("target", "before", "is_doubted"),
    [("accuracy>=98", 0.1, True), ("accuracy>=0.98", 0.1, False), ("bleu>28", 3.0, False), ("loss<=2", 0.5, False)],
)
def test_a_share_above_one_is_doubted(target: str, before: float, is_doubted: bool) -> None:
    doubt = Target.parse(target).doubt({target.partition(">")[0].partition("<")[0]: before})
    assert bool(doubt) == is_doubted
    assert not is_doubted or "pass --target 'accuracy>=0.98'" in doubt


def test_a_faster_plan_that_was_passed_over_is_named(road: Folder) -> None:
    plan = Plan.load("plans/model-2.yaml")
    assert plan.why
    assert plan.predicted
    time_s = (plan.predicted.simulated_s or 0) * 0.98
    faster = FasterPlan(config="1-1-1", begins=("a", "b"), simulated_s=time_s)
    plan.model_copy(update={"why": plan.why.model_copy(update={"faster": faster})}).save("plans/model-2.yaml")
    shown = road.pdtool("show", "plans/model-2.yaml").stdout
    assert "passed over: 1-1-1, cut before a, b. Simulated, it takes " in shown
    assert ", 2.0% less, but has more stages" in shown


def test_what_takes_long_is_told_where_no_bar_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdtool.cli.terminal._TICK_S", 0.05)
    monkeypatch.setattr("pdtool.cli.terminal.Verbosity.notes", 0)
    with telling_what_takes_long(lambda: "codegen"):
        time.sleep(0.2)
        with status("generating") as step:
            step("proving stage 1")
            time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("codegen: still running, ")
    assert lines[0].endswith("s after the start")
    assert any(line.startswith("proving stage 1: still running, ") for line in lines)
