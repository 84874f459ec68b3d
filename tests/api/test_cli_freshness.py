"""What makes a plan stale: another operator graph, wherever the change stands, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import NET

from pdtool.api.inputs import Inputs
from pdtool.api.training import _bundle
from pdtool.artifacts.artifact import OPERATOR_GRAPH
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.generator import generate, user_functions

PLAN = "plans/model-2.yaml"
LAYERS = "from torch import nn\n\ndef activation():\n    return nn.ReLU()\n"
TANH = "from torch import nn\n\ndef activation():\n    return nn.Tanh()  # not as it was\n"
IMPORTING = "import layers as own\n" + NET.replace("nn.ReLU()", "own.activation()")


@pytest.fixture
def importing(folder, monkeypatch):
    """A folder with a planned and generated model.py that imports layers.py, read anew by each command."""

    def pdtool(*arguments, **options):
        monkeypatch.delitem(sys.modules, "layers", raising=False)
        return original(*arguments, **options)

    original = folder.pdtool
    monkeypatch.setattr(folder, "pdtool", pdtool)
    folder.write("model.py", IMPORTING)
    folder.write("layers.py", LAYERS)
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s")
    folder.pdtool("codegen")
    return folder


def marks(result):
    """Claim -> mark of each line that `check --fresh` printed."""
    return {line[2:].split(":")[0]: line[0] for line in result.stdout.splitlines() if line[0] in "✓✗–"}


def test_an_operator_changed_in_an_imported_module_stops_every_command(importing):
    importing.pdtool("run", "--steps", "2")
    importing.write("layers.py", TANH)
    stderr = importing.pdtool("run", "--steps", "2", code=3).stderr
    assert "model.py: the model's operators have changed since the plan and its stage files were made" in stderr
    assert "`pdtool check --fresh` shows where they differ" in stderr
    difference = "model.py: operator relu is ReLU in the profile and Tanh in the model"
    stderr = importing.pdtool("codegen", code=3).stderr
    assert f"error: {difference}. model.py itself is unchanged, so a module that it imports" in stderr
    assert "profile and partition it again" in stderr
    result = importing.pdtool("check", "--fresh", code=3)
    assert marks(result) == {"profile": "✗", "plan": "✓", "bundle": "✗", "stage files": "✓"}
    assert difference in result.stdout
    importing.write("layers.py", LAYERS)
    importing.pdtool("check", "--fresh")
    importing.pdtool("run", "--steps", "2")


def test_what_a_plan_was_made_from_and_is_not_there(importing):
    """Exit code 3, not 2: the plan names the model and the profile, and the command line is right."""
    (importing.path / "model.py").rename(importing.path / "moved.py")
    for command in (["run", "--steps", "2"], ["codegen"], ["check", "--fresh"]):
        assert "its model file model.py is not there" in importing.pdtool(*command, code=3).stderr
    importing.pdtool("codegen", "--model", "moved.py")
    next((importing.path / "profiles").glob("*.json")).unlink()
    assert "is not there (searched from" in importing.pdtool("run", "--steps", "2", code=3).stderr


def test_a_worker_of_torchrun_refuses_an_operator_that_changed(importing, monkeypatch):
    importing.write("layers.py", TANH)
    one_stage = importing.pdtool("partition", "--topology", "1", "-o", "plans/one.yaml")
    assert "wrote plans/one.yaml" in one_stage.stderr
    importing.write("layers.py", LAYERS)
    importing.pdtool("codegen", "plans/one.yaml")
    importing.write("layers.py", TANH)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29617"}.items():
        monkeypatch.setenv(name, value)
    stderr = importing.pdtool("run", "plans/one.yaml", "-o", "runs/one", code=3).stderr
    assert "the model's operators have changed since the plan" in stderr


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def model", "# a comment\ndef model"),
        ("lr=0.1", "lr=0.05"),
        ("cross_entropy(", "1.0 * nn.functional.cross_entropy("),
    ],
    ids=["comment", "learning rate", "loss"],
)
def test_what_leaves_the_graph_alone_leaves_plan_and_edits_and_bundle_valid(road, old, new):
    plan = Plan.load(PLAN)
    nodes = (("input", "target", "first"), ("relu", "middle", "last", "loss"))
    stages = (stage.model_copy(update={"nodes": part}) for stage, part in zip(plan.stages, nodes, strict=True))
    plan.model_copy(update={"stages": tuple(stages)}).save(PLAN)
    road.pdtool("codegen")
    before = Path("plans/model-2/bundle.yaml").read_bytes()

    changed = NET.replace(f"nn.functional.{old}", new) if old.endswith("(") else NET.replace(old, new)
    assert changed != NET
    road.write("model.py", changed)
    stderr = road.pdtool("run", "--steps", "2").stderr
    assert "model.py has changed since it was profiled. The plan stays valid if the operators are the same" in stderr
    assert "It keeps the HINTS and the costs of loss and optimizer that were profiled" in stderr
    assert "generating it" not in stderr
    assert Path("plans/model-2/bundle.yaml").read_bytes() == before
    result = road.pdtool("check", "--fresh")
    assert marks(result) == {"profile": "✓", "source": "–", "plan": "✓", "bundle": "✓", "stage files": "✓"}
    assert "the costs of its loss and optimizer may have changed" in result.stdout
    assert "model.py has changed" in road.pdtool("codegen").stderr


def test_functions_are_checked_once_for_each_edit_of_the_file(road, monkeypatch):
    """Each run checked them again, though codegen had checked the same file."""
    checked = []
    assert generate.check_user_functions is user_functions.check_user_functions  # which codegen goes on to call
    monkeypatch.setattr(user_functions, "check_user_functions", lambda file, *_: checked.append(file.path.read_text()))
    road.pdtool("codegen")
    for rate in ("0.05", "0.01"):
        road.write("model.py", NET.replace("lr=0.1", f"lr={rate}"))
        _bundle(Inputs.load(PLAN, None), trust=False)
        assert f"lr={rate}" in checked.pop()
        road.pdtool("codegen")
        _bundle(Inputs.load(PLAN, None), trust=False)
        assert not checked


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("relu=nn.ReLU()", "relu=nn.GELU()", "operator relu is ReLU in the profile and GELU in the model"),
        ("relu=nn.ReLU(), ", "", "the model has operator middle where the profile has relu"),
        ("last=nn.Linear(width, 2)", "last=nn.Linear(width, 2), act=nn.Tanh()", "operator act is in the model but not"),
        (
            "def model(width=8)",
            "def model(width=6)",
            "the parameters of operator first have 160 B in the profile and 120 B",
        ),
        ("relu=nn.ReLU()", "relu=nn.Dropout(0.1)", "operator relu is ReLU in the profile and Dropout in the model"),
    ],
)
def test_codegen_says_which_operator_changed(road, old, new, difference):
    assert old in NET
    road.write("model.py", NET.replace(old, new))
    assert f"error: model.py: {difference}" in road.pdtool("codegen", code=3).stderr


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("file", "text", "change", "words"),
    [
        ("model.py", f"{NET}# nothing", "unknown", ""),
        ("model.py", f'{NET}HINTS = {{"pin": {{"first": 1}}}}', "HINTS", "HINTS of model.py have changed"),
        ("m.json", None, "profile", "m.json has changed since profiles/model.json was made with it"),
    ],
)
def test_check_fresh_and_if_stale_agree_on_the_profile_and_the_plan_stays_valid(road, file, text, change, words):
    profiling = ("profile", "model.py", "--batch-size", "8", "--device", "v100", "--calibrate", "m.json", "--if-stale")
    Path("profiles/model.json").rename("m.json")
    road.pdtool(*profiling)
    road.pdtool("partition", "--topology", "2", "--straight", "-o", "plans/mine.yaml")
    road.write("moving.py", f"import os\nos.chdir('plans')\n{NET}")  # as a script does that reads files beside it
    road.pdtool("profile", "moving.py", *profiling[2:-1], "-o", "profiles/moving.json")
    assert "profile: reusing" in road.pdtool(*profiling).stderr
    road.write(file, text or Profile.load("m.json").model_copy(update={"name": "other"}).dump())
    result = road.pdtool("check", "--fresh", "plans/mine.yaml", code=3 if words else 0)
    assert words in result.stdout
    assert marks(result).get(change) == ("✗" if words else None)
    assert "operators" in road.pdtool("codegen", "plans/mine.yaml").stderr or file != "model.py"
    assert ("profile: reusing" in road.pdtool(*profiling).stderr) == (not words)
    Path("m.json").unlink()
    result = road.pdtool("check", "--fresh", "plans/mine.yaml", code=3 if words else 0)
    assert "m.json, with which profiles/model.json was made, is not there" in result.stdout
    assert "profile: reusing" in road.pdtool(*profiling).stderr


def test_a_constant_that_changed_is_seen_though_the_profile_does_not_know_it(folder):
    text = NET.replace("relu=nn.ReLU()", "relu=nn.LeakyReLU(0.1)")
    folder.write("model.py", text)
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight")
    folder.write("model.py", text.replace("LeakyReLU(0.1)", "LeakyReLU(0.2)"))
    assert "an argument of an operator, a constant, a shape or a tie" in folder.pdtool("codegen", code=3).stderr


def test_a_setting_edited_in_the_plan_counts_as_what_it_makes_of_the_model(folder):
    folder.write("model.py", NET.replace("width=8", "width=8, act='ReLU'").replace("nn.ReLU()", "getattr(nn, act)()"))
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight")
    folder.pdtool("codegen")
    text = Path(PLAN).read_text()
    assert "settings: {}" in text
    folder.write(PLAN, text.replace("settings: {}", "settings: {act: ReLU}"))
    folder.pdtool("run", "--steps", "2")
    folder.write(PLAN, text.replace("settings: {}", "settings: {act: Tanh}"))
    assert "operators have changed since the plan" in folder.pdtool("run", "--steps", "2", code=3).stderr


def without_graph(artifact):
    """As a version wrote it that recorded no operator graph."""
    kept = {name: value for name, value in artifact.digests.items() if name != OPERATOR_GRAPH}
    return artifact.model_copy(update={"digests": kept})


def test_artifacts_without_a_graph_go_by_the_bytes_of_the_file(road):
    profile = without_graph(Profile.load("profiles/model.json"))
    profile.save("profiles/model.json")
    plan = without_graph(Plan.load(PLAN))
    plan = plan.model_copy(update={"digests": {**plan.digests, "profiles/model.json": profile.content_sha256}})
    plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"plan_sha256": plan.plan_sha256})}).save(
        PLAN
    )
    road.pdtool("codegen")
    assert Bundle.load("plans/model-2/bundle.yaml").graph_sha256, "what is made now records it"
    without_graph(Bundle.load("plans/model-2/bundle.yaml")).save("plans/model-2/bundle.yaml")
    assert "generating it" not in road.pdtool("run", "--steps", "2").stderr
    assert (
        "profiles/model.json records no operator graph, and model.py is unchanged"
        in road.pdtool("check", "--fresh").stdout
    )
    road.write("model.py", NET + "\n# changed\n")
    for command in ("codegen", "run"):
        assert "model.py has changed since it was profiled; profile" in road.pdtool(command, code=3).stderr
    result = road.pdtool("check", "--fresh", code=3)
    assert marks(result)["profile"] == "✗"


def test_each_kind_of_staleness_has_its_line(road):
    fresh = {"profile": "✓", "plan": "✓", "bundle": "–"}
    assert marks(road.pdtool("check", "--fresh")) == fresh
    road.pdtool("codegen")
    fresh |= {"bundle": "✓", "stage files": "✓"}
    assert marks(road.pdtool("check", "--fresh")) == fresh
    stage = Path("plans/model-2/stage_0.py")
    stage.write_text(stage.read_text() + "# edited\n")
    result = road.pdtool("check", "--fresh", code=3)
    assert marks(result) == fresh | {"stage files": "✗"}
    assert "error: plans/model-2.yaml: stage files: plans/model-2/stage_0.py: has changed" in result.stderr
    road.pdtool("codegen")
    road.write(PLAN, Path(PLAN).read_text().replace("in_flight: 2", "in_flight: 1"))
    assert marks(road.pdtool("check", "--fresh", code=3)) == fresh | {"bundle": "✗"}
    road.pdtool("profile", "model.py", "--batch-size", "4")
    result = road.pdtool("check", "--fresh", "--json", code=3)
    findings = {finding["claim"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["plan"]["holds"] is False
    assert findings["plan"]["remedy"] == "run `pdtool partition` again"
    assert "(and 1 more)" in result.stderr
    road.write("plans/model-2/bundle.yaml", "cut off")
    assert "bundle.yaml" in road.pdtool("check", "--fresh", code=3).stdout


def test_a_plan_of_no_model_has_none_to_be_compared_with(road):
    for kind, path in ((Profile, "profiles/model.json"), (Plan, PLAN)):
        artifact = kind.load(path)
        artifact.model_copy(update={"model": None, "digests": {}}).save(path)
    assert "– profile: profiles/model.json comes without a model" in road.pdtool("check", "--fresh").stdout
