"""Copies of a parameter begin alike, wherever model() draws its weights from; splits of the data do not overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from conftest import Folder
from harness import CONV1, CONV2, TIED3, weights

from pdtool.artifacts.artifact import ModelRef
from pdtool.frontend.model_file import ModelFile

UNSEEDED = """
_seeded = model

def model():
    import numpy
    made = _seeded()
    values = numpy.random.default_rng()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.tensor(values.normal(0, 0.1, tuple(parameter.shape))).to(parameter))
    return made
"""


FREEZING = """
_trained = model

def model():
    made = _trained()
    made.embed.weight.requires_grad_(False)
    return made
"""
_X, _E, _H = TIED3.tensors
FROZEN3 = replace(  # nothing sums gradients of the shared parameter, so the bundle lists none as tied
    TIED3, model=TIED3.model + FREEZING, tensors=(_X, _E.model_copy(update={"gradient": False}), _H), tied=()
)


@pytest.mark.parametrize(
    ("toy", "replicas"), [(CONV2, (2, 1)), (TIED3, (2, 1, 1)), (FROZEN3, (1, 1, 1))], ids=["replicas", "tied", "frozen"]
)
def test_weights_that_no_seed_fixes_begin_alike(tmp_path: Path, toy: harness.Toy, replicas: tuple[int, ...]) -> None:
    """After training, too: the replicas of the first stage have equal parameters, and so have tied copies."""
    outcomes = harness.run(harness.job(tmp_path, replace(toy, model=toy.model + UNSEEDED), replicas, epochs=1))
    first = [harness.without_statistics(outcome.state) for outcome in outcomes if outcome.stage == 0]
    assert len(first) == replicas[0]
    assert all(torch.equal(first[0][name], first[-1][name]) for name in first[0])
    for tied in TIED3.tied if toy is FROZEN3 else toy.tied:
        states = [weights([outcome for outcome in outcomes if outcome.stage == s]) for s in tied.stages]
        copies = [state[name] for state, name in zip(states, tied.names, strict=True)]
        assert all(torch.equal(copies[0], other) for other in copies[1:])


MASKED = """
class Masked(nn.Conv2d):
    def forward(self, x):
        self.weight.data.mul_(self.weight.detach() > 0)
        return super().forward(x)

_unmasked = model

def model():
    made = _unmasked()
    made.conv1 = Masked(2, 4, 3, padding=1, bias=False)
    return made
"""


def test_a_warning_names_what_began_otherwise(tmp_path: Path) -> None:
    """Once, and not for weights that the seeds fix, though a forward of the check may change them."""
    for name, added, warnings in (("unseeded", UNSEEDED, 1), ("seeded", "", 0), ("masked", MASKED, 0)):
        spec = harness.job(tmp_path / name, replace(CONV1, model=CONV1.model + added), (2,))
        harness.run(replace(spec, check_stage_files=bool))  # what makes one worker trace the model
        errors = harness.errors(spec)
        assert errors.count("warning: model() gave conv1.weight") == warnings, errors


SPLITS = """
import random
import numpy
import torch
from torch.utils.data import TensorDataset, random_split

def model():
    return torch.nn.Linear(1, 2)

def dataset(split):
    order = list(range(50))
    random.shuffle(order)
    numpy.random.shuffle(order)
    samples = TensorDataset(torch.tensor(order).float()[:, None], torch.zeros(50).long())
    train, valid = random_split(samples, [40, 10])
    return train if split == "train" else valid
"""


def test_random_splits_are_disjoint(folder: Folder) -> None:
    """Whatever was drawn before, and whatever the seed of the run."""
    folder.write("splits.py", SPLITS)
    file = ModelFile.load(ModelRef(source="splits.py"))
    splits = []
    for name in ("train", "valid", "train"):
        file.build(len(splits))
        torch.rand(3)
        splits.append({float(inputs) for inputs, _ in file.dataset(name)})
    assert splits[0] == splits[2]
    assert splits[0].isdisjoint(splits[1])
    assert splits[0] | splits[1] == set(map(float, range(50)))
