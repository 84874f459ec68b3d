"""State that a model keeps on its modules between minibatches: a pipeline would get it wrong, so codegen refuses it."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from conftest import Folder
from torch import Tensor, nn

from pdtool.generator.verify import attributes, kept_attributes

HEAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.kept, self.steps, self.cache = None, 0, {}

    def forward(self, x):
"""
TAIL = """
def model():
    return Net()

def dataset(split):
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
"""
REFUSED = {
    "hidden state, reset when the size changes": (
        """
        h = torch.tanh(self.first(x))
        if self.kept is not None and self.kept.shape == h.shape:
            h = h + self.kept
        self.kept = h.detach()
        return self.last(h)
""",
        "kept",
        16,
    ),
    "counter that a branch reads": (
        """
        self.steps += 1
        return self.last(torch.tanh(self.first(x))) * (2 if self.steps > 100 else 1)
""",
        "steps",
        13,
    ),
    "cache": (
        """
        if not self.training:
            self.cache["x"] = self.cache.get("x", 0) + 1
        return self.last(torch.tanh(self.first(x)))
""",
        "cache",
        None,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_forward_reads_again_is_refused(folder: Folder, name: str) -> None:
    """With its attribute and line; nothing is written."""
    forward, attribute, line = REFUSED[name]
    folder.write("model.py", HEAD + forward.removeprefix("\n") + TAIL)
    folder.pdtool("profile", "model.py", "--batch-size", "4")
    folder.pdtool("partition", "--topology", "2", "--straight")
    errors = folder.pdtool("codegen", code=1).stderr
    where = f"model.py:{line}: " if line else ""
    assert f"{where}forward changes self.{attribute} of the model and reads it again" in errors
    assert not (folder.path / "plans/model-2").exists()


def test_state_that_forward_only_writes_is_no_matter(folder: Folder) -> None:
    """A count of calls that nobody reads, and the activations of the last call."""
    forward = (
        "        self.steps += 1\n        self.kept = h = torch.tanh(self.first(x))\n        return self.last(h)\n"
    )
    folder.write("model.py", HEAD + forward + TAIL)
    folder.pdtool("profile", "model.py", "--batch-size", "4")
    folder.pdtool("partition", "--topology", "2", "--straight")
    folder.pdtool("codegen")


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.count, self.values, self.queue, self.plain = 0, [torch.zeros(2)], deque([1]), {"a": float("nan")}
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(x) + self.count + self.values[0] + self.queue[0] + self.plain["a"]


@pytest.mark.parametrize("statement", ["count += 1", "values[0].add_(1)", "queue.append(2)", "values.append(None)"])
def test_every_kind_of_change_is_seen(statement: str) -> None:
    model = Keeps()
    before = attributes(model)
    model(torch.ones(1, 2))
    model.eval()
    assert list(kept_attributes(model, before)) == []
    exec(f"model.{statement}")
    (kept,) = kept_attributes(model, before)
    assert kept.name == statement.split()[0].partition(".")[0].partition("[")[0]
