"""What user code does to the parameters and buffers of its model is done to the stages, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from harness import CONV3
from torch import nn

from pdtool.errors import ModelError, PdtoolError
from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.worker.worker_model import ModelTensors, WorkerModel, load_stage_module

KEPT_IN_A_VARIABLE = """
NET, made = [], model
def model():
    NET[:] = [made()]
    return NET[0]
"""
LATE = {
    "after_update": "def after_update(named, update):\n    if update == 5:\n        {}\n",
    "loss": "CALLS, first_loss = [], loss\ndef loss(output, target):\n    CALLS.append(0)\n    if len(CALLS) == 5:\n"
    "        {}\n    return first_loss(output, target)\n",
}


@pytest.mark.parametrize(
    ("function", "statement", "name"),
    [
        ("after_update", "NET[0].bn.running_mean = torch.ones(4)", "bn.running_mean"),
        ("after_update", "NET[0].fc = nn.Linear(16, 4)", "fc"),
        ("loss", "NET[0].bn.register_buffer('running_mean', torch.ones(4))", "bn.running_mean"),  # of another worker
    ],
)
def test_a_tensor_that_is_replaced_late_is_refused(function: str, statement: str, name: str, tmp_path: Path) -> None:
    """Too late, or only in training, so that codegen does not see it; training went on with the first tensor."""
    toy = replace(CONV3, model=CONV3.model + KEPT_IN_A_VARIABLE + LATE[function].format(statement))
    with pytest.raises(PdtoolError, match=f"another .* is in the place of {name} in the model now, but its stage"):
        launch(harness.job(tmp_path, toy))


def test_the_mode_of_the_model_is_that_of_the_phase(tmp_path: Path) -> None:
    """In a validation, a loss that asks the model in a variable for its mode computed what it does in training.

    After the validation its mode is no matter, as in a plain loop.
    """
    functions = """
first_loss = loss
def loss(output, target):
    assert NET[0].fc.training == torch.is_grad_enabled()
    return first_loss(output, target)
def metrics(output, target):
    return {"seen": (1.0, 1)}
def summarize_metrics(totals):
    NET[0].train()
    return {"seen": totals["seen"][0]}
"""
    launch(harness.job(tmp_path, replace(CONV3, model=CONV3.model + KEPT_IN_A_VARIABLE + functions)))


def test_a_mode_that_is_changed_late_is_refused(tmp_path: Path) -> None:
    toy = replace(CONV3, model=CONV3.model + KEPT_IN_A_VARIABLE + LATE["loss"].format("NET[0].bn.eval()"))
    with pytest.raises(PdtoolError, match="bn was put into evaluation mode during training, but stages keep"):
        launch(harness.job(tmp_path, toy))


def test_the_model_has_the_tensors_that_a_stage_has_on_its_device(tmp_path: Path) -> None:
    """On a GPU the model kept buffers on the CPU, and what user code wrote into them was lost."""
    config = harness.job(tmp_path, CONV3)
    assert config.model
    file = ModelFile.load(config.model, trusted=True)
    built = WorkerModel.build(file, 0, config.bundle, [0, 1, 2], as_a_whole=True)
    stages = {s: load_stage_module(config.bundle, config.bundle_dir, s, built.model) for s in (0, 2)}
    tensors = ModelTensors(built, config.bundle, stages, torch.device("meta"))
    model, first, last = built.model, stages[0], stages[2]
    assert isinstance(model, nn.Module)
    assert model.bn.running_mean is first.bn.running_mean
    assert model.fc.weight is last.fc.weight
    assert model.bn.running_mean.is_meta
    assert not model.conv2.weight.is_meta, "no stage of this worker has it"
    tensors.check()
    with torch.no_grad():
        model.bn.running_var.mul_(2)
    tensors.check()
    unused = model.conv2.bias
    model.conv2.bias = nn.Parameter(unused.detach().clone())
    tensors.check()
    assert model.conv2.bias is unused, "which had the same values"
    for bias, said in (
        (nn.Parameter(unused.detach() + 1), r"another tensor is in the place of conv2.bias in .*; write"),
        (None, "conv2.bias is no longer in the model"),
    ):
        model.conv2.bias = bias
        with pytest.raises(ModelError, match=said):
            tensors.check()
