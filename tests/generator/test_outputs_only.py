"""What loss() and metrics() may see besides the output and the target: in the last stage, nothing."""

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
from torch.nn.functional import cross_entropy

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.tensor(2.0))
        self.penalty = 0.0

    def forward(self, x):
        h = self.a(x).relu()
        self.penalty = h.pow(2).mean()
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        z = self.b(h).tanh()
        return h, z, self.c(z)

NET = None
def model():
    global NET
    NET = Net()
    return NET

def dataset(split): return [(torch.randn(4), torch.tensor(i % 3)) for i in range(8)]
def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.1)
"""
PENALTY = """
def loss(output, target):
    h, z, y = output
    value = cross_entropy(y, target)
    if y.requires_grad:
        slope, = torch.autograd.grad(y.sum(), FROM, create_graph=True, allow_unused=UNUSED)
        value = value if slope is None else value + 0.1 * slope.pow(2).sum()
    return value
"""


def penalty(by: str, unused: bool) -> str:
    return PENALTY.replace("FROM", by).replace("UNUSED", str(unused))


def plain(loss: str = "", metrics: str = "output[2].mean()") -> str:
    return (
        f"def loss(output, target): return cross_entropy(output[2]{loss}, target)\n"
        f"def metrics(output, target): return {{'m': ({metrics}, 1)}}\n"
    )


FOCUS = """
SCALES = [torch.ones(())]
def loss(output, target): return cross_entropy(output[2], target) * SCALES[-1]
def metrics(output, target):
    SCALES.append(SCALES[-1] * (1 + (len(SCALES) >= CALLS)))
    return {}
"""
GRAPH, WEIGHTS = (
    "depends on how the model computed its outputs",
    "reads a weight, buffer or attribute of the model from a variable",
)
CASES = {
    "another output by one of an earlier stage": (penalty("h", True), rf"model.py:\d+: loss\(\) {GRAPH}"),
    "the same, and torch refuses": (penalty("h", False), rf"model.py:\d+: loss\(\) {GRAPH}"),
    "another output of the last stage": (penalty("z", True), None),
    "a buffer that forward changes": (plain(" * (1 + NET.mean.mean())"), rf"model.py:\d+: loss\(\) {WEIGHTS}"),
    "the same, with metrics() that raises": (plain(" * (1 + NET.mean.mean())", "1 / 0"), rf"loss\(\) {WEIGHTS}"),
    "weights without a gradient": (plain(" * NET.a.weight.detach().norm()"), rf"loss\(\) {WEIGHTS}"),
    "weights in metrics": (plain(metrics="sum(p.norm() for p in NET.parameters())"), rf"metrics\(\) {WEIGHTS}"),
    "an attribute that forward sets": (plain(" * (1 + NET.penalty)"), rf"loss\(\) {WEIGHTS}"),
    "a buffer that stays as it is": (plain(" / NET.scale"), None),
    "what metrics change after two calls": (FOCUS.replace("CALLS", "2"), None),
    "what metrics change after three calls": (FOCUS.replace("CALLS", "3"), None),
    "a method of the model": (plain(metrics="len([*NET.modules()])"), None),
    "random numbers": (plain(" + torch.rand(1)", "NET.scale"), None),
}


@pytest.mark.parametrize(
    ("code", "stages"), [(" * (1 + NET.penalty)", 1), (" * (1 + NETS[0].penalty)", 2), (" * (1 + Net.last.penalty)", 1)]
)
def test_a_loss_that_forward_leaves_on_the_model_is_refused(code: str, stages: int, tmp_path: Path) -> None:
    """Whatever refers to the model; even a single stage sets no attribute."""
    kept = "    global NETS\n    NET = Net()\n    NETS = [NET]\n    Net.last = NET\n"
    with pytest.raises(ModelError, match=rf"loss\(\) {WEIGHTS}"):
        _generate(MODEL.replace("    NET = Net()\n", kept) + plain(code), stages, tmp_path)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_loss_may_read_what_no_training_changes(stages: int, tmp_path: Path) -> None:
    """In one stage also weights: that model follows the training."""
    _generate(MODEL + plain(" / NET.scale" if stages > 1 else " * NET.a.weight.detach().norm()"), stages, tmp_path)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("case", CASES)
def test_what_only_a_plain_loop_has_is_refused(case: str, tmp_path: Path) -> None:
    """They gave other losses and metrics in stages than in a plain loop, without a word."""
    code, match = CASES[case]
    with pytest.raises(ModelError, match=match) if match else nullcontext():
        _generate(MODEL + code, 3, tmp_path)


def _generate(text: str, stages: int, folder: Path) -> None:
    (folder / "model.py").write_text(text)
    file = ModelFile.load(ModelRef(source=str(folder / "model.py")), trusted=True)
    profile = skeleton(file)
    generate(plan_of(profile, stages), profile, file, folder / "stages")
