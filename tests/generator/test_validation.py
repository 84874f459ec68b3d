"""What a validation computes is tried before training: an error there would end the run after its first epoch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from skeletons import plan_of, skeleton

from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.generator.generate import generate

MODEL = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def model(): return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def dataset(split):
    x = torch.randn(8, 4)
    return [(row, row.sum().view(1)) for row in x]

SEEN = []
def loss(output, target): return mse_loss(output, target)
def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.1)
"""
PENALTY = """
def loss(output, target):
    error = mse_loss(output, target)
    if CONDITION:
        slope, = torch.autograd.grad(error, output, create_graph=True)
        error = error + slope.pow(2).sum()
    return error
"""
FIELDS = """
def dataset(split):
    fields = {"y": torch.ones(1)} if split == "train" else {"y": torch.ones(1), "name": torch.ones(1)}
    return [(torch.randn(4), fields)] * 8
def loss(output, target): return mse_loss(output, target["y"])
def metrics(output, target): return {"named": (target["NAME"].sum(), 1)}
"""
WIDTH = "torch.randn(4 + (split == 'valid'))"
CASES = {
    "gradients": (
        PENALTY.replace("CONDITION", "True"),
        r"loss\(\) raised RuntimeError: .*grad.*only if torch.is_grad_",
    ),
    "gradients in training only": (PENALTY.replace("CONDITION", "torch.is_grad_enabled()"), None),
    "a slip": ("def metrics(output, target): return {'a': (output.meen(), 1)}", r"metrics\(\) raised AttributeError: "),
    "no number": ("def metrics(output, target): return {'a': (output, 1)}", r"metrics\(\) returned \{'a'"),
    "a target of the validation set": (FIELDS.replace("NAME", "name"), None),
    "a field that none has": (FIELDS.replace("NAME", "nome"), r"metrics\(\) raised KeyError: 'nome'"),
    "a name like grad": (
        "def metrics(output, target): return {}['upgrade']",
        r"metrics\(\) raised KeyError: 'upgrade'$",
    ),
    "a forward that fails, which run tells": (FIELDS.replace("NAME", "name").replace("torch.randn(4)", WIDTH), None),
    "an end of the process": ("def metrics(output, target): import os; os._exit(1)", None),
    "a device": ("def metrics(output, target): return {'a': (output.cuda().sum(), 1)}", None),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_a_validation_is_found_before_training(case: str, tmp_path: Path) -> None:
    code, match = CASES[case]
    (tmp_path / "model.py").write_text(MODEL + code)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    profile = skeleton(file)
    with pytest.raises(ModelError, match=rf"model.py:\d+: {match}") if match else nullcontext():
        generate(plan_of(profile, 2), profile, file, tmp_path / "stages")


def test_what_metrics_collects_is_left_alone(tmp_path: Path) -> None:
    text = MODEL + "def metrics(output, target):\n    SEEN.append(1)\n    return {'a': (output.sum(), 1)}\n"
    (tmp_path / "model.py").write_text(text)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    profile = skeleton(file)
    generate(plan_of(profile, 1), profile, file, tmp_path / "stages")
    assert not file.module.SEEN
