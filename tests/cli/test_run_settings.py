"""`run --set`: settings reach the functions of model.py that take them, and the plan holds or is said not to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import NET

from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile

# Each function writes what it was given beside the model.
TUNED = (
    NET.replace("lr=0.1)", "lr=lr)").replace("(named_parameters)", "(named_parameters, lr=0.1)")
    + """
def scheduler(optimizer, total_updates, decay=1.0):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: decay**update)
"""
)
EVERY = (
    NET.replace("def model(width=8):", "def model(width=8, gain=1.0):")
    + """
SEEN = {}

def example_inputs(batch_size, a=0):
    SEEN["example_inputs"] = a
    return torch.zeros(batch_size, 4)

def dataset(split, a=0):
    SEEN["dataset"] = a
    return [(torch.zeros(4), 0)] * 8

def collate(samples, a=0):
    SEEN["collate"] = a
    return torch.stack([x for x, _ in samples]), torch.zeros(len(samples), dtype=torch.long)

def sampler(dataset, epoch, a=0):
    SEEN["sampler"] = a
    return range(8)

def loss(output, target, a=0):
    SEEN["loss"] = a
    return output.sum()

def optimizer(named_parameters, *, a=0):
    SEEN["optimizer"] = a
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

def scheduler(optimizer, total, a=0):
    SEEN["scheduler"] = a
    return torch.optim.lr_scheduler.ConstantLR(optimizer)

def metrics(output, a=0, width=0):
    SEEN["metrics"] = (a, width)
    return {}

def summarize_metrics(totals, a=0):
    SEEN["summarize_metrics"] = a
    return {}

def after_update(named_parameters, update, a=0):
    SEEN["after_update"] = a
"""
)


def test_settings_reach_every_function_but_never_what_pdtool_passes(folder):
    """The second argument of metrics() is the target, whatever its name; model() gets what only it takes."""
    folder.write("every.py", EVERY)
    file = ModelFile.load(ModelRef(source="every.py", settings={"a": 3, "width": 4}))
    model = file.build()
    file.example_inputs(2)
    data = file.dataset("train")
    samples = file.sampler(data, 1)
    inputs, target = file.collate(file.read(data, samples, "x"), samples, "x")
    output = model(inputs)
    file.loss(output, target)
    optimizer = file.optimizer(model.named_parameters())
    file.scheduler(optimizer, 5)
    file.metrics(output, "target")
    file.summarize_metrics({})
    file.after_update(model.named_parameters(), 1)
    seen = file.module.SEEN
    assert seen.pop("metrics") == ("target", 4)
    assert set(seen) == {*file.setting_names} - {"model", "metrics"}
    assert set(seen.values()) == {3}
    assert model.first.out_features == 4


def test_a_setting_that_nothing_takes_is_refused_when_the_model_is_built(folder):
    folder.write("every.py", EVERY)
    with pytest.raises(ModelError, match=r"model\(\) does not take these settings .*it takes: width, gain"):
        ModelFile.load(ModelRef(source="every.py", settings={"depth": 3})).build()


@pytest.fixture
def tuned(folder):
    """model.py with a learning rate as a setting, profiled and planned for one worker."""
    folder.write("model.py", TUNED)
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s")
    return folder


def last_loss(folder, out, *settings):
    folder.pdtool("run", "-o", out, "--epochs", "2", *settings)
    lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "valid"][-1]


def test_a_learning_rate_is_set_without_a_new_plan(tuned):
    """A learning rate of 0 learns nothing: the validation loss stays what it was after the first epoch."""
    plan = Path("plans/model-2.yaml").read_bytes()
    learned = last_loss(tuned, "runs/a")
    bundle = Path("plans/model-2/bundle.yaml").read_bytes()
    assert last_loss(tuned, "runs/b", "--set", "lr=0.0") > learned
    difference = tuned.pdtool("diff", "runs/a", "runs/b").stdout
    assert re.search(r"^settings lr +– +0$", difference, re.MULTILINE)
    assert last_loss(tuned, "runs/c", "--set", "lr=0.1", "--set", "decay=1.0") == learned
    assert Path("plans/model-2.yaml").read_bytes() == plan
    assert Path("plans/model-2/bundle.yaml").read_bytes() == bundle


def test_settings_that_do_not_go_with_the_plan_are_refused(tuned):
    stderr = tuned.pdtool("run", "--set", "width=16", code=2).stderr
    assert "--set width=16 changes the model's operators" in stderr
    assert "profile it with --set width=16 and partition it again" in stderr
    assert "did you mean decay?" in tuned.pdtool("run", "--set", "decai=0.9", code=2).stderr
    stderr = tuned.pdtool("run", "--set", "momentum=0.9", code=2).stderr
    assert "no function of model.py has a parameter momentum; give one a parameter, as in optimizer(..., mo" in stderr
    assert "you can set model(width), optimizer(lr)" in stderr
    assert "write --set layers=12" in tuned.pdtool("run", "--set", "lr", code=2).stderr
    assert not Path("runs").exists()
    dry = tuned.pdtool("run", "--set", "lr=1", "--set", "width=8", "--dry-run")
    assert "settings of this run: lr=1, width=8" in dry.stderr
