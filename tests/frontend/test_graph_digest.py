"""The digest of the operator graph: what changes it, what does not, and that it is the same everywhere."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import samples
import torch

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.device import find_device
from pdtool.errors import StaleError
from pdtool.frontend.graph_digest import check_bundle, graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.tracing import trace
from pdtool.profiler.estimate import estimate

NET = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, width, seed):
        super().__init__()
        self.embedding = nn.Embedding(9, width)
        self.first = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.full((width,), float(seed)))
        self.decoder = nn.Linear(width, 9, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = torch.tanh(self.first(x)) * self.mask * 2
        y = F.dropout(y, 0.3 if self.training else 0.0)
        y = self.drop(y) + x * torch.tensor([0.5])
        return self.decoder(self.norm(y))

def model(width=4, seed=1):
    return Net(width, seed)

def example_inputs(batch_size):
    return torch.randint(0, 9, (batch_size, 5))

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
"""
PINNED = "a6f02ea31b8a8aa198fed2b50625cf6381df26be28932aa61df2a668b712449a"


def load(folder, *replacements, **settings):
    text = NET
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = folder / "model.py"
    path.write_text(text)
    return ModelFile.load(ModelRef(source=str(path), settings=settings), trusted=True)


def digest(file, *, batch_size=4, seed=0):
    return graph_sha256(trace(file.build(seed), file.example_inputs, batch_size, file.path))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return digest(load(tmp_path_factory.mktemp("original")))


DIFFERENT = {
    "kind": ("torch.tanh", "F.gelu"),
    "leaf": ("nn.LayerNorm(width)", "nn.RMSNorm(width)"),
    "constructor": ("nn.Dropout(0.1)", "nn.Dropout(0.2)"),
    "number": ("self.mask * 2", "self.mask * 3"),
    "tensor": ("torch.tensor([0.5])", "torch.tensor([0.25])"),
    "evaluation": ("0.3 if self.training else 0.0", "0.3"),
    "connection": ("+ x *", "+ y *"),
    "order": ("self.drop(y) + x * torch.tensor([0.5])", "x * torch.tensor([0.5]) + self.drop(y)"),
    "tie": ("        self.decoder.weight = self.embedding.weight\n", ""),
    "frozen": ("self.drop = ", "self.first.requires_grad_(False); self.drop = "),
    "buffer": ('"mask", torch.full((width,)', '"mask", torch.full((1,)'),
    "persistent": ("float(seed)))", "float(seed)), persistent=False)"),
    "dtype": ("float(seed)))", "float(seed)).double())"),
    "detached": ("self.first(x))", "self.first(x.detach()))"),
    "name": ("self.drop", "self.dropout"),
    "shape": ("(batch_size, 5)", "(batch_size, 6)"),
    "returned": ("return self.decoder(self.norm(y))", "return self.decoder(self.norm(y)), y"),
}


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("change", DIFFERENT)
def test_another_graph_has_another_digest(change, original, tmp_path):
    assert digest(load(tmp_path, DIFFERENT[change])) != original


def test_a_setting_counts_by_what_it_changes(original, tmp_path):
    assert digest(load(tmp_path, width=6)) != original
    assert digest(load(tmp_path, seed=2)) == original, "values of buffers are the model's own"
    assert digest(load(tmp_path, width=4)) == original


SAME = {
    "comment": ("def model", "# the model\ndef model"),
    "optimizer": ("lr=0.1", "lr=0.2"),
    "loss": ("F.cross_entropy(", "2 * F.cross_entropy("),
    "default": ("nn.LayerNorm(width)", "nn.LayerNorm(width, eps=1e-5)"),
    "unused": ("self.drop = ", "self.unused = nn.Linear(3, 3); self.drop = "),
    "hint": ("def loss", "HINTS = {'no_split': ['first']}\n\ndef loss"),
    "values": ("self.drop = ", "nn.init.ones_(self.first.weight); self.drop = "),
}


@pytest.mark.parametrize("change", SAME)
def test_what_is_no_part_of_the_graph_does_not_count(change, original, tmp_path):
    assert digest(load(tmp_path, SAME[change])) == original


def test_initial_weights_and_batch_size_do_not_count(original, tmp_path):
    file = load(tmp_path)
    assert {digest(file, batch_size=size, seed=size) for size in (1, 2, 5, 9, 32)} == {original}


@pytest.mark.rows_of_the_day(days=2)
def test_the_digest_is_the_same_in_every_process_and_version(original, tmp_path):
    load(tmp_path)
    code = (
        "from pathlib import Path\nfrom test_graph_digest import *\n"
        "print(digest(ModelFile.load(ModelRef(source='model.py'), trusted=True)))"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parents[1]), str(here.parent), str(here)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1"}  # that of this process is random
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == original
    assert original == PINNED, "a new way to compute the digest makes every artifact stale that was written before"


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_an_estimate_records_the_graph_of_the_model_as_it_is_written(precision, original, tmp_path):
    profile = estimate(load(tmp_path), batch_size=4, device=find_device("a100-80gb"), precision=precision)
    assert profile.graph_sha256 == original


HIDDEN = (("self.drop = ", "self.half = torch.tensor([0.5]); self.drop = "), ("torch.tensor([0.5])\n", "self.half\n"))


def test_a_constant_whose_value_a_fake_tensor_hides_leaves_the_graph_unrecorded(tmp_path):
    file = load(tmp_path, *HIDDEN)
    profile = estimate(file, batch_size=4, device=find_device("a100-80gb"))
    assert profile.graph_sha256 is None
    assert profile.digests == {file.ref.source: file.sha256}


def reseed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def draws():
    """A number from each generator that a user's code may draw from."""
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_the_check_of_a_bundle_refuses_another_graph_and_leaves_the_random_state(original, tmp_path):
    bundle = samples.bundle().with_graph(original)
    reseed()
    expected = draws()
    file = load(tmp_path, ("def example_inputs(batch_size):", "def example_inputs(batch_size):\n    torch.rand(3)"))
    model = file.build()
    reseed()
    check_bundle(file, model, bundle)
    assert draws() == expected

    file = load(tmp_path, DIFFERENT["kind"])
    with pytest.raises(
        StaleError, match=r"model.py: the model's operators have changed since the plan .* `pdtool check --fresh`"
    ):
        check_bundle(file, file.build(), bundle)


def test_the_check_of_a_bundle_keeps_no_training_set(original, tmp_path):
    """A worker of a later stage does it, which needs no sample afterwards."""
    data = "def dataset(split): return [(sample, 0) for sample in examples(64)]\ndef examples(batch_size):"
    file = load(tmp_path, ("def example_inputs(batch_size):", data))
    before = {**vars(file)}
    check_bundle(file, file.build(), samples.bundle().with_graph(original))
    assert vars(file) == before


def test_a_bundle_that_records_no_graph_is_not_checked(tmp_path):
    file = load(tmp_path)
    check_bundle(file, torch.nn.Linear(2, 2), samples.bundle())
