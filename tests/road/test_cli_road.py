"""A small model goes the whole road through the commands; what changed on the way is noticed."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from conftest import NET

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Report
from pdtool.artifacts.run_dir import RunState
from pdtool.errors import UsageError

PLAN = "plans/model-2.yaml"


def test_profile_to_export(road):
    profile = Profile.load("profiles/model.json")
    assert profile.digests.keys() == {"model.py", "operator graph"}
    assert Plan.load(PLAN).digests.keys() == {"model.py", "operator graph", "profiles/model.json"}

    result = road.pdtool("codegen")
    assert "wrote plans/model-2/ (stage_0.py, stage_1.py, bundle.yaml)" in result.stderr
    assert "checked: outputs, gradients and buffers equal the model's" in result.stderr

    result = road.pdtool("run", "--epochs", "3", "--json", "--target", "accuracy=0.1")
    report = Report.parse(result.stdout)
    assert report.epochs == 1, "the target was reached after the first epoch"
    assert report.target_reached
    assert report == Report.load("runs/model-2/report.json")
    assert re.search(r"epoch 1/3: training loss \d\.\d{4}, validation loss \d\.\d{4}, accuracy", result.stderr)
    assert "predicted  measured" in result.stderr

    line = json.loads((road.path / "runs/model-2/metrics.jsonl").read_text().splitlines()[-1])
    assert {"split", "epoch", "step", "loss", "metrics"} <= line.keys()
    assert line["metrics"].keys() == {"accuracy"}
    assert "model-2: 1-1" in road.pdtool("show", "runs/model-2").stdout

    road.pdtool("export", "runs/model-2", "-o", "model.pt")
    names = {f"{layer}.{kind}" for layer in ("first", "middle", "last") for kind in ("weight", "bias")}
    assert torch.load("model.pt").keys() == names

    result = road.pdtool("run", "--epochs", "2", "--resume", "runs/model-2", "--target", "accuracy=1.5", code=6)
    assert "error: target accuracy=1.5 was not reached in 2 epochs" in result.stderr
    assert "epoch 2/2: " in result.stderr
    assert "epoch 1/" not in result.stderr
    assert result.stderr.count("continuing after epoch 1 of runs/model-2, with 1 epoch to train\n") == 1
    assert not (road.path / "runs/model-2.2").exists(), "a resumed run goes on in its own folder"
    shutil.rmtree(road.path / "runs/model-2/checkpoints/epoch-2")
    told = road.pdtool("run", "--resume", "runs/model-2", code=6).stderr
    assert "taken from the earlier run: --epochs 2 --target accuracy=1.5" in told
    assert "continuing after epoch 1 of runs/model-2, with 1 epoch to train" in told, "what it was asked for"
    errors = road.pdtool("run", "--resume", "runs/model-2", code=2).stderr
    assert "has already trained its 2 epochs; pass a larger --epochs" in errors


@pytest.mark.usefixtures("stages")
def test_another_seed_and_other_steps_on_resuming_are_told(road):
    """And reports count the minibatches of the epochs that they measure: the others' may have had another size."""
    road.pdtool("run", "--steps", "2", "--seed", "3", "-o", "runs/x")
    resumed = ["run", "--steps", "2", "--resume", "-o", "runs/x"]
    assert "continues with --seed" not in road.pdtool(*resumed, "--seed", "3", "--epochs", "2").stderr
    result = road.pdtool(*resumed, "--epochs", "3", "--steps", "3", "--seed", "0")
    assert "was trained with --seed 3 and continues with --seed 0" in result.stderr
    assert "resumed after epoch 2, 1 epoch of 3 minibatches of 8" in result.stderr
    state = RunState.load("runs/x/run.json")
    assert (state.updates, state.updates_before, state.total_updates) == (3, 4, 7)
    said = "resumed after epoch 2: only the epochs since then are measured"
    assert said in " ".join(result.stderr.split())
    assert said in road.pdtool("show", "runs/x").stdout
    assert "epoch 3, seed 0: validation loss" in road.pdtool("show", "runs/x/checkpoints/epoch-3").stdout
    assert "stage-1.safetensors" in road.pdtool("show", "runs/x/checkpoints/epoch-3").stdout
    road.pdtool("report", "runs/x")
    assert "2 earlier, 1 × 3" in (road.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("stages")
def test_other_samples_per_update_on_resuming_are_told_and_the_remedy_gives_the_old_ones(road):
    road.pdtool("run", "--steps", "6", "-o", "runs/x")
    assert (
        "an update now averages" not in road.pdtool("run", "--steps", "6", "--resume", "runs/x", "--epochs", "2").stderr
    )
    road.pdtool("partition", "profiles/model.json", "--topology", "2", "--strategy", "data-parallel", "-o", "dp.yaml")
    resumed = ["run", "dp.yaml", "--steps", "6", "--resume", "runs/x", "-o", "runs/y", "--epochs", "3"]
    told = road.pdtool(*resumed).stderr
    assert "warning: an update now averages 16 samples instead of 8, with the same learning rate. " in told
    assert "To average 8 as before, partition with --samples-per-update 8" in told
    road.pdtool("run", "plans/model-2.yaml", "--steps", "6", "--update-every", "2", "-o", "runs/z")
    resumed = ["run", "plans/model-2.yaml", "--steps", "6", "--resume", "runs/z", "--epochs", "2"]
    assert "averages 8 samples instead of 16" in (
        told := road.pdtool(*resumed, "--update-every", "1", "-o", "runs/w").stderr
    )
    assert "To average 16 as before, pass --update-every 2" in told
    told = road.pdtool(*resumed, "--update-every", "2").stderr
    assert "an update now averages" not in told


def test_a_run_that_computes_otherwise_than_was_profiled_is_told(road):
    warning = "warning: the plan is for {} but the run computes in {}, so the predictions do not apply: profile with"
    run = ["run", "--steps", "1"]
    assert "predictions do not apply" not in road.pdtool(*run).stderr
    assert warning.format("fp32", "bf16") in road.pdtool(*run, "--precision", "bf16").stderr
    assert "measured for" in (told := road.pdtool("profile", "model.py", "--precision", "bf16").stderr)
    assert "in bf16" in told
    assert Profile.load("profiles/model.json").precision == "bf16"
    road.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s")
    assert "predictions do not apply" not in road.pdtool(*run, "--precision", "bf16").stderr
    assert warning.format("bf16", "fp32") in road.pdtool(*run).stderr
    road.pdtool("profile", "model.py", "--device", "a100-80gb", "--precision", "bf16")
    road.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s")
    told = road.pdtool(*run, "--precision", "bf16").stderr
    assert "needs more memory" in told
    assert "A100" in told
    assert "the run computes on cpu, so the predictions do not apply: profile with --device cpu" in told


def test_without_a_device_profile_measures_where_run_trains(road, monkeypatch):
    def measure(file, *, device, **options):
        raise UsageError(f"would be measured on {device}")

    monkeypatch.setattr("pdtool.profiler.measure.measure", measure)
    same = ["--if-stale", "--batch-size", "8"]
    assert "reusing" in road.pdtool("profile", "model.py", *same, "--device", "auto").stderr
    assert '"nodes"' in road.pdtool("profile", "model.py", *same, "--device", "auto", "--json").stdout
    assert "on cpu" in road.pdtool("profile", "model.py", code=2).stderr
    monkeypatch.setattr("pdtool.frontend.compute_mode.default_device", lambda: "cuda")
    for arguments in ([], ["--device", "auto"], ["--device", "auto", *same]):
        assert "on cuda" in road.pdtool("profile", "model.py", *arguments, code=2).stderr


@pytest.mark.usefixtures("stages")
def test_a_plan_for_cpus_that_is_run_on_gpus_is_told(road, monkeypatch):
    monkeypatch.setattr("pdtool.frontend.compute_mode.default_device", lambda: "cuda")
    told = road.pdtool("run", "--steps", "1").stderr  # the workers see that there is none
    assert "the run computes on cuda, so the predictions do not apply: profile with --device cuda" in told


def test_a_plan_for_gpus_leaves_room_for_what_no_tensor_gets(road):
    partition = ["partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s", "--memory"]
    road.pdtool(*partition, "2GB")
    memory_bytes = Plan.load(PLAN).cluster.memory_bytes
    assert memory_bytes == Profile.load("profiles/model.json").tensor_bytes(2 * 10**9, 2)
    road.pdtool("profile", "model.py", "--device", "v100")
    result = road.pdtool(*partition, "2GB")
    assert Plan.load(PLAN).cluster.memory_bytes == Profile.load("profiles/model.json").tensor_bytes(2 * 10**9, 2)
    assert "of each worker's 2 GB, 1.13 GB is set aside for CUDA's context" in result.stderr
    result = road.pdtool(*partition, "1GB", code=2)
    assert "1 GB of memory is not enough: 1.07 GB is set aside for CUDA's context" in result.stderr


def test_profile_on_stdout(folder):
    folder.write("model.py", NET)
    result = folder.pdtool("profile", "model.py", "--batch-size", "4", "--set", "width=6", "-o", "-")
    profile = Profile.parse(result.stdout)
    assert profile.batch_size == 4
    assert profile.model.settings == {"width": 6}
    assert not (folder.path / "profiles").exists()


def test_a_model_outside_of_the_folder_is_told_when_it_is_profiled(folder, tmp_path_factory):
    """codegen and run would refuse it, unless it is named to them."""
    path = tmp_path_factory.mktemp("elsewhere") / "model.py"
    path.write_text(NET)
    errors = folder.pdtool("profile", str(path), "--batch-size", "4", "-o", "net.json").stderr
    assert f"is outside this folder: pass it to codegen and run too, with --model {path}" in errors
    folder.pdtool("partition", "net.json", "--topology", "2", "-o", "net.yaml")
    for command in (("codegen", "net.yaml"), ("run", "net.yaml", "--dry-run")):
        assert "outside the current folder; check that file" in folder.pdtool(*command, code=2).stderr
        folder.pdtool(*command, "--model", str(path))
    folder.write("model.py", NET)
    assert "outside" not in folder.pdtool("profile", "model.py", "--batch-size", "4", "-o", "net.json").stderr


def test_run_generates_a_missing_or_stale_bundle(road):
    assert "is missing or does not belong to this plan" in road.pdtool("run", "--steps", "2").stderr
    assert "is missing" not in road.pdtool("run", "--steps", "2").stderr
    assert (road.path / "runs/model-2.2/report.json").is_file(), "a second run has a folder of its own"


COLLECTING = """
SCORES = []
def metrics(output, target):
    SCORES.extend(target.tolist())
    return {"mean": (output.mean(), 1)}
def summarize_metrics(totals):
    return {"median": sorted(SCORES)[len(SCORES) // 2]}
"""
NORMALIZING = """
def after_update(named_parameters, update):
    total = sum(p.norm() for _, p in named_parameters)
    for _, p in named_parameters:
        p.div_(total)
"""


@pytest.mark.parametrize(
    ("strategy", "code", "says"),
    [
        ("data-parallel", COLLECTING, "summarize_metrics() reads SCORES, which metrics() changes"),
        ("straight", NORMALIZING, "after_update() depends on parameters of several stages"),
    ],
)
def test_functions_that_are_edited_after_codegen_are_checked_again(strategy, code, says, road):
    road.pdtool("partition", "--topology", "2", "--strategy", strategy, "-o", "plan.yaml")
    road.pdtool("codegen", "plan.yaml")
    model = road.path / "model.py"
    model.write_text(model.read_text() + code)
    assert says in road.pdtool("run", "plan.yaml", "--steps", "2", "-o", "runs/edited", code=1).stderr


def test_an_edited_stage_file_is_run_with_trust_only_and_never_overwritten_unasked(road):
    """Neither as it is, nor with a digest and a seal to match, as a stranger would write them."""
    road.pdtool("codegen")
    folder = road.path / "plans/model-2"
    stage, edited = folder / "stage_1.py", "import pathlib\npathlib.Path('executed').touch()\n"
    stage.write_text(stage.read_text() + edited)
    errors = road.pdtool("run", "--steps", "2", code=3).stderr
    assert "stage_1.py: has changed since codegen wrote it; use --trust to train it as it is, or" in errors
    text = stage.read_text()
    told = road.pdtool("codegen").stderr
    assert "plans/model-2/stage_1.py was edited since codegen wrote it. Your edited file is now plans/model" in told
    assert (folder / "stage_1.py~").read_text() == text
    stage.write_text(text + "# again\n")
    assert "Your edited file is now plans/model-2/stage_1.py~2" in road.pdtool("codegen").stderr
    assert [(folder / f"stage_1.py~{n}").read_text() for n in ("", 2)] == [text, text + "# again\n"]
    stage.write_text(text)
    Bundle.load(folder / "bundle.yaml").trusting(folder).save(folder / "bundle.yaml")
    errors = road.pdtool("run", "--steps", "2", code=3).stderr
    assert (
        "stage_1.py: differs from what codegen writes here for this plan and model; run `pdtool codegen` again"
        in errors
    )
    assert not (road.path / "executed").exists()
    assert stage.read_text().endswith(edited)
    road.pdtool("run", "--steps", "2", "--trust")
    assert (road.path / "executed").exists()
    stage.unlink()
    assert "stage_1.py: is missing; run `pdtool codegen` again" in road.pdtool("run", "--trust", code=3).stderr


@pytest.mark.usefixtures("stages")
def test_a_trusted_file_that_does_not_fit_is_named(road):
    stage = road.path / "plans/model-2/stage_0.py"
    text = stage.read_text()
    stage.write_text("syntax error here(")
    errors = road.pdtool("run", "--trust", "--steps", "2", code=3).stderr
    assert "plans/model-2/stage_0.py: cannot be used (SyntaxError: " in errors
    stage.write_text(text.replace("    return ", "    return None, "))
    errors = road.pdtool("run", "--trust", "--steps", "2", code=1).stderr
    assert "stage_0.py returns 2 tensors, but bundle.yaml says 1; fix it" in errors
    stage.write_text(text.replace("    return ", "    return None  # "))
    errors = road.pdtool("run", "--trust", "--steps", "2", code=1).stderr
    assert (
        "stage_0.py returns an output 'middle' that is NoneType, but bundle.yaml says a tensor of shape [8, " in errors
    )


@pytest.mark.parametrize("where", ["import sys; sys.exit(0)", "def model(width=8):\n    import sys; sys.exit(0)"])
def test_a_command_whose_model_calls_sys_exit_has_not_done_its_work(road, where):
    """Exit code 0 would let a CI job pass that checked nothing."""
    path = road.path / "model.py"
    path.write_text(f"{path.read_text()}\n{where}\n")
    for command in (["profile", "model.py", "-o", "x.json"], ["codegen"], ["check", "--fresh", PLAN]):
        errors = road.pdtool(*command, code=1).stderr
        assert "error: model.py:" in errors
        assert "sys.exit(0) was called; raise an error in the model file instead" in errors


def test_an_empty_output_is_refused(road):
    """Such as -o "$OUT" where OUT is not set."""
    for command in (["run", "--steps", "2"], ["codegen"], ["profile", "model.py"]):
        assert "-o is empty; name a file or folder" in road.pdtool(*command, "-o", "", code=2).stderr
    assert "a run writes a folder" in road.pdtool("run", "-o", "-", code=2).stderr


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 101, "\ud800"])
@pytest.mark.usefixtures("stages")
def test_a_metric_that_cannot_be_printed_is_refused_at_once(road, name):
    path = road.path / "model.py"
    path.write_text(path.read_text().replace('{"accuracy":', f"{{{name!r}:"))
    errors = road.pdtool("run", "--steps", "2", code=1).stderr
    assert "metrics() names " in errors
    assert "which cannot be printed in a table; use 1 to 100 printable characters" in errors


def test_tensors_of_a_resealed_bundle_are_compared_too(road):
    road.pdtool("codegen")
    path = road.path / "plans/model-2/bundle.yaml"
    bundle = Bundle.load(path)
    tensors = [tensor.model_copy(update={"gradient": False}) for tensor in bundle.tensors]
    bundle.model_copy(update={"tensors": tuple(tensors)}).save(path)
    errors = road.pdtool("run", "--steps", "2", code=3).stderr
    assert "bundle.yaml: differs from what codegen writes here for this plan and model" in errors


@pytest.mark.usefixtures("stages")
def test_another_schedule_for_the_same_stages(road):
    result = road.pdtool("run", "--schedule", "1f1b-flush", "--microbatches", "2", "--steps", "4", "--json")
    assert "an update averages 16 samples (in the plan 8): the learning rate may need to change" in result.stderr
    report = Report.parse(result.stdout)
    assert report.schedule == "1f1b-flush"
    assert [stage.peak_versions for stage in report.stages] == [1, 1]
    assert "has no microbatches" in road.pdtool("run", "--microbatches", "2", code=2).stderr


def test_a_dry_run_says_who_does_what_where_and_does_nothing(road, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = road.pdtool("run", "--dry-run", "--nnodes", "2")
    assert "machine 0" in result.stdout
    assert "machine 1" in result.stdout
    assert "1, replica 0" in result.stdout
    assert not (road.path / "runs").exists()
    assert not (road.path / "plans/model-2").exists()
    no_machine = road.pdtool("run", "--dry-run", "--nnodes", "2", "--node-rank", "2", code=2).stderr
    assert "--node-rank 2 is not one of 0 to 1" in no_machine
    assert "cannot be divided evenly among 3" in road.pdtool("run", "--dry-run", "--nnodes", "3", code=2).stderr
    message = "--json cannot be combined with --dry-run, which prints a table; leave one out"
    assert message in road.pdtool("run", "--dry-run", "--json", code=2).stderr


def test_a_changed_profile_is_stale_by_name(road):
    road.pdtool("profile", "model.py", "--batch-size", "4")
    stderr = road.pdtool("codegen", code=3).stderr
    assert "profiles/model.json has changed since the plan was made; run `pdtool partition` again" in stderr


def test_a_model_that_moved_is_named_and_must_be_the_same(road):
    road.write("elsewhere/net.py", NET)
    (road.path / "model.py").unlink()
    assert "its model file model.py is not there" in road.pdtool("codegen", code=3).stderr
    road.pdtool("codegen", "--model", "elsewhere/net.py")
    road.write("elsewhere/net.py", NET.replace("nn.ReLU()", "nn.Tanh()"))
    stderr = road.pdtool("codegen", "--model", "elsewhere/net.py", code=3).stderr
    assert "elsewhere/net.py: operator relu is ReLU in the profile and Tanh in the model" in stderr


def test_a_dry_run_refuses_the_target_that_a_run_would_refuse(road):
    assert "target 'acc<' is not METRIC=NUMBER" in road.pdtool("run", "--dry-run", "--target", "acc<", code=2).stderr
    road.pdtool("run", "--dry-run", "--target", "accuracy >= 0.9")


def edited(folder, *stages, code=0):
    """codegen after the nodes of the two stages were replaced by hand."""
    plan = Plan.load(PLAN)
    changed = (stage.model_copy(update={"nodes": nodes}) for stage, nodes in zip(plan.stages, stages, strict=True))
    folder.write(PLAN, plan.model_copy(update={"stages": tuple(changed)}).dump())
    return folder.pdtool("codegen", code=code)


def test_an_edited_plan_is_checked_predicted_again_and_runs(road):
    twice = edited(road, ("input", "target", "first", "relu"), ("relu", "middle", "last", "loss"), code=3)
    assert "'relu' is in stage 0 and in stage 1" in twice.stderr
    missing = edited(road, ("input", "target", "first"), ("middle", "last", "loss"), code=3)
    assert "'relu' is in no stage" in missing.stderr
    backwards = edited(road, ("input", "target", "relu"), ("first", "middle", "last", "loss"), code=3)
    assert "'relu' in stage 0 takes 'first' from the later stage 1" in backwards.stderr
    for first in (("input", "target", "first"), ("input", "target", "first", "relu", "middle")):
        rest = [name for name in ("first", "relu", "middle", "last", "loss") if name not in first]
        assert "edited by hand" in edited(road, first, tuple(rest)).stderr
        parameters = Bundle.load("plans/model-2/bundle.yaml").stages[0].parameters
        assert {name.split(".")[0] for name in parameters} == {"first", "middle"} & set(first)
    report = Report.parse(road.pdtool("run", "--steps", "2", "--json").stdout)
    assert not Plan.load(PLAN).model_copy(update={"predicted": report.predicted}).edited


def test_resume_needs_a_folder(road):
    assert "--resume does not say which run" in road.pdtool("run", "--resume", code=2).stderr
    assert "runs/x is not there; name the folder" in road.pdtool("run", "--resume", "-o", "runs/x", code=2).stderr
    assert "runs/x is not there; name the folder" in road.pdtool("export", "runs/x", code=2).stderr


def test_workers_started_one_by_one_need_a_bundle_and_a_folder(road, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "run `pdtool codegen` before torchrun" in road.pdtool("run", "-o", "runs/x", code=3).stderr
    road.pdtool("codegen")
    assert (
        "all workers must share the folder of the run, but none is named; name it with -o"
        in road.pdtool("run", code=2).stderr
    )


@pytest.mark.parametrize("options", [["--timeout", "5x"], ["--target", "accuracy"], ["--nnodes", "2", "-o", "x"]])
@pytest.mark.usefixtures("stages")
def test_impossible_options_of_run_exit_with_2(road, options):
    assert road.pdtool("run", *options, code=2).stderr.count("error: ") == 1


IDLE = NET.replace(
    "    return nn.Sequential(OrderedDict(layers))\n",
    """    net = nn.Sequential(OrderedDict(layers))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
            self.also = net.middle
            self.idle = nn.Linear(3, 3)
        def forward(self, x):
            return self.net(x)
    return Net()
""",
)


def test_an_export_holds_what_no_operator_uses_and_every_name_of_what_one_does(folder):
    folder.write("model.py", IDLE)
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s")
    folder.pdtool("run")
    folder.pdtool("export", "runs/model-2", "-o", "model.pt")
    scope: dict = {}
    exec(IDLE, scope)
    torch.manual_seed(0)
    before = scope["model"]()
    state = torch.load("model.pt")
    before.load_state_dict(state, strict=True)
    torch.manual_seed(0)
    before = scope["model"]().state_dict()
    assert torch.equal(state["idle.weight"], before["idle.weight"])
    assert torch.equal(state["also.weight"], state["net.middle.weight"])
    assert not torch.equal(state["also.weight"], before["also.weight"])


@pytest.mark.usefixtures("stages")
def test_a_folder_that_holds_a_run_is_left_alone(road):
    road.pdtool("run", "-o", "runs/a", "--epochs", "2")
    before = (road.path / "runs/a/metrics.jsonl").read_text()
    assert "already contains a run" in road.pdtool("run", "-o", "runs/a", code=2).stderr
    assert (
        "has already trained its 2 epochs" in road.pdtool("run", "--resume", "runs/a", "--epochs", "2", code=2).stderr
    )
    assert (road.path / "runs/a/metrics.jsonl").read_text() == before


FROZEN = NET.replace(
    "    return nn.Sequential(OrderedDict(layers))\n",
    """    net = nn.Sequential(OrderedDict(layers))
    net.first.requires_grad_(False)
    return net
""",
).replace(
    "torch.optim.SGD([p for _, p in named_parameters], lr=0.1)",
    """torch.optim.SGD([
        {"params": [p for n, p in named_parameters if p.requires_grad and "bias" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named_parameters if p.requires_grad and "bias" in n]},
    ], lr=0.1)""",
)


def test_a_stage_of_frozen_layers_and_groups_picked_by_name(folder):
    folder.write("model.py", FROZEN)
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s")
    plan = Plan.load(PLAN)
    stages = [
        s.model_copy(update={"nodes": n}) for s, n in zip(plan.stages, (("input", "first", "target"), ()), strict=True)
    ]
    rest = [node.name for node in Profile.load("profiles/model.json").nodes if node.name not in stages[0].nodes]
    stages[1] = stages[1].model_copy(update={"nodes": tuple(rest)})
    plan.model_copy(update={"stages": tuple(stages)}).save(PLAN)
    folder.pdtool("run")
    folder.pdtool("export", "runs/model-2", "-o", "model.pt")
    scope: dict = {}
    exec(FROZEN, scope)
    torch.manual_seed(0)
    before, after = scope["model"]().state_dict(), torch.load("model.pt")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"middle.weight", "middle.bias", "last.weight", "last.bias"}


def test_a_module_that_goes_to_another_folder_changes_no_path(folder):
    folder.write("model.py", f"{NET}\nimport os, tempfile\nos.chdir(tempfile.gettempdir())\n")
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s")
    folder.pdtool("run", "-o", "runs/first")
    assert (folder.path / "plans" / "model-2" / "stage_1.py").is_file()
    assert (folder.path / "runs" / "first" / "report.json").is_file()
