"""What opaque modules return in a run must have the sizes that the trace has found: stages have them as constants."""

from __future__ import annotations

from pathlib import Path

import pytest
import samples
from skeletons import plan_of, skeleton

from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.generator.generate import generate
from pdtool.runtime.worker.worker_model import load_stage_module

TRIMMED = """
import torch
from torch import nn

class Trim(nn.Module):
    def forward(self, tokens, lengths):
        return tokens[:, : int(lengths.max())], tokens[tokens > 0]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trim, self.first, self.last = Trim(), nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, tokens, lengths):
        tokens, some = self.trim(tokens, lengths)
        return self.last(self.first(tokens).sum(1) / tokens.size(1) + some.float().mean())

def model():
    return Net()

def example_inputs(batch_size):
    tokens = torch.arange(1, 9).repeat(batch_size, 1)
    tokens[:, 0] = torch.arange(batch_size) % 3
    return tokens, torch.full((batch_size,), 6)
"""


def test_sizes_that_depend_on_the_samples_are_refused(tmp_path: Path) -> None:
    """A stage divides by 6; the number of chosen tokens is none of one that it knows, and stays free."""
    (tmp_path / "trimmed.py").write_text(TRIMMED)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "trimmed.py")), trusted=True)
    profile = skeleton(file)
    bundle = generate(plan_of(profile, 2), profile, file, tmp_path / "b")
    model = file.build()
    stage = load_stage_module(bundle, tmp_path / "b", 0, model)
    for size in (1, 2, 5):
        stage(*file.example_inputs(size).tensors)
    tokens, lengths = file.example_inputs(5).tensors
    lengths[2] = 8
    with pytest.raises(
        ModelError,
        match=r"^trim returns \[5, 8\], .* in the trace it returned \[batch, 6\], .*constants in the .*; let it",
    ):
        stage(tokens, lengths)


@pytest.mark.parametrize(
    ("dims", "shapes", "fits"),
    [
        ([["batch", 8]], [(3, 8)], True),
        ([["batch", 8]], [(3, 7)], False),
        ([["batch", "batch+5"]], [(3, 8)], True),
        ([["batch", "batch+5"]], [(4, 8)], False),
        ([["7*batch-1", 8]], [(3, 8)], True),  # nobody knows how many samples these are
        ([["batch", None]], [(3, 99)], True),
        ([["batch", 8]], [(3, 8, 8)], True),  # of another mode, perhaps
        ([["batch", 8]], [(3, 8), (3, 8)], False),  # the second is None in the trace
        ([["batch", 8], ["batch", 8]], [(3, 8)], False),
        ([["batch", 8], ["batch+1"]], [(3, 8), (9,)], True),  # as many as were chosen, which is free
        ([[8], ["batch"]], [(7,), (4,)], False),
    ],
)
def test_the_shapes_of_a_call(dims: list, shapes: list, fits: bool) -> None:
    bundle = samples.bundle().model_copy(update={"opaque_outputs": {"net": (tuple(map(tuple, dims)),)}})
    assert bundle.fits_opaque("net", shapes) == fits
    assert bundle.fits_opaque("other", shapes)
