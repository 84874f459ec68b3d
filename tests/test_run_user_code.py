"""What a worker says of the user's data and optimizer."""

import pytest
import torch

from pdtool.artifacts.bundle import TensorSpec
from pdtool.artifacts.envelope import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend.modelfile import ModelFile
from pdtool.run.data import MinibatchLoader
from pdtool.run.weights.optimizer import NamedOptimizer

TEXT = """
import numpy, torch
def model(): pass
class Data:
    def __len__(self): return 4
    def __getitem__(self, i):
        ITEM
def dataset(split): return Data()
def optimizer(named): return torch.optim.SGD([p for n, p in named if PICK], lr=0.1)
"""
INPUTS = [TensorSpec(name="x", producer=-1, consumers=(0,), shape=("batch", 2), dtype="float32", gradient=False)]


def load(tmp_path, item="pass", pick="True", more=""):
    path = tmp_path / "user.py"
    path.write_text(TEXT.replace("ITEM", item).replace("PICK", pick) + more)
    return ModelFile.load(ModelRef(source=str(path)), trusted=True)


def test_a_sample_that_cannot_be_read_names_its_line(tmp_path):
    with pytest.raises(ModelError, match=r"user.py:7: user.py: dataset\('train'\) raised FileNotFoundError"):
        MinibatchLoader(load(tmp_path, "open('nowhere')"), "train", INPUTS).load([0], 1)


def test_inputs_by_name_are_refused(tmp_path):
    with pytest.raises(ModelError, match="input 0 of a minibatch is dict"):
        MinibatchLoader(load(tmp_path, "return {'a': 1}, 1"), "train", INPUTS).load([0], 1)


def test_the_seed_fixes_numpys_random_numbers_too(tmp_path):
    loader = MinibatchLoader(load(tmp_path, "return numpy.random.randn(2).astype('float32'), 1"), "train", INPUTS)
    first, again, other = (loader.load([0, 1], seed)[0][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def parameter(trainable=True):
    return {"w": torch.nn.Parameter(torch.ones(2), requires_grad=trainable)}


def test_a_stage_with_nothing_to_train_has_no_optimizer(tmp_path):
    assert NamedOptimizer(load(tmp_path), parameter(trainable=False)).optimizer is None
    assert NamedOptimizer(load(tmp_path, pick="'head' in n"), parameter()).optimizer is None
    assert NamedOptimizer(load(tmp_path), parameter()).optimizer is not None


def test_other_faults_of_the_optimizer_are_not_hidden(tmp_path):
    with pytest.raises(ModelError, match="division by zero"):
        NamedOptimizer(load(tmp_path, pick="1 / 0"), parameter())


def test_a_schedule_that_wants_a_metric_is_refused(tmp_path):
    plateau = "def scheduler(o): return torch.optim.lr_scheduler.ReduceLROnPlateau(o)\n"
    updater = NamedOptimizer(load(tmp_path, more=plateau), parameter())
    with pytest.raises(ModelError, match="ReduceLROnPlateau cannot be stepped"):
        updater.step()
