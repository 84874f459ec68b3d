"""What a worker says of the user's data and optimizer."""

import pytest
import torch

from pdtool.artifacts.bundle import TensorSpec
from pdtool.artifacts.envelope import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend.modelfile import ModelFile
from pdtool.run.data import MinibatchLoader
from pdtool.run.stage import PipelineStage
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
    with pytest.raises(ModelError, match=r"^user.py:7: dataset\('train'\), sample 0, raised FileNotFoundError"):
        MinibatchLoader(load(tmp_path, "open('nowhere')"), "train", INPUTS).load([0], 1)


def test_a_length_that_cannot_be_told_names_its_line(tmp_path):
    file = load(tmp_path, more="class Broken(Data):\n    def __len__(self): return 1 // 0\nData = Broken\n")
    with pytest.raises(ModelError, match=r"^user.py:11: the length of dataset\('train'\) raised ZeroDivisionError"):
        MinibatchLoader(file, "train", INPUTS)


@pytest.mark.parametrize(
    ("item", "described"),
    [
        ("return torch.ones(2 + (i == 3)), 1", r"sample 1: float32\[2\], int; sample 3: float32\[3\], int"),
        ("return torch.ones(2), numpy.ones(1 + (i > 1))", r"sample 1: .* float64\[1\]; sample 2: .* float64\[2\]"),
    ],
)
def test_samples_that_do_not_go_together_are_named(tmp_path, item, described):
    loader = MinibatchLoader(load(tmp_path, item), "train", INPUTS)
    with pytest.raises(ModelError, match=r"^user.py: the samples of dataset\('train'\), .*" + described):
        loader.load([1, 2, 3], 1)


def test_samples_that_cannot_be_collated_are_described(tmp_path):
    with pytest.raises(ModelError, match=r"of dataset\('train'\), each float32\[2\], object, raised TypeError"):
        MinibatchLoader(load(tmp_path, "return torch.ones(2), object()"), "train", INPUTS).load([0, 1], 1)


def test_the_example_of_a_profile_says_the_same(tmp_path):
    with pytest.raises(ModelError, match=r"^user.py:7: dataset\('train'\), sample 1, raised ZeroDivisionError"):
        load(tmp_path, "return torch.ones(2), 1 // (1 - i)").example_batch(2)


def test_a_sample_that_is_not_a_pair_is_named(tmp_path):
    with pytest.raises(
        ModelError, match=r"^user.py: dataset\('train'\), sample 2, is not a pair .*; make it one, or define collate"
    ):
        MinibatchLoader(load(tmp_path, "return [1]"), "train", INPUTS).load([2], 1)


def test_samples_of_other_arguments_are_refused(tmp_path):
    file = load(tmp_path, "return {'x': torch.ones(2), 'y': 1}, 1")
    with pytest.raises(ModelError, match=r"gives the model other arguments \(x, y\) than it was traced with \(x\)"):
        MinibatchLoader(file, "train", INPUTS, ("x",)).load([0], 1)
    with pytest.raises(ModelError, match=r"\(x, y\) than it was traced with \(tensors by position\); let example_in"):
        MinibatchLoader(file, "train", INPUTS).load([0], 1)
    with pytest.raises(ModelError, match=r"\(x, y\) than it was traced with \(x, y=False\)"):
        MinibatchLoader(file, "train", INPUTS, ("x", "y=False")).load([0], 1)


COLLATE = """
def collate(samples):
    longest = LENGTH
    rows = [torch.nn.functional.pad(torch.tensor(s["words"]).float(), (0, longest - len(s["words"]))) for s in samples]
    return {"x": torch.stack(rows)}, TARGET
"""
WORDS = "return {'words': [1, 2, 3][: 1 + i], 'label': i}"  # sample i has min(i + 1, 3) words


def collated(tmp_path, length="2", target="None", item=WORDS):
    more = COLLATE.replace("LENGTH", length).replace("TARGET", target)
    return MinibatchLoader(load(tmp_path, item, more=more), "train", INPUTS, ("x",))


def test_the_users_collate_makes_a_minibatch_of_any_samples(tmp_path):
    loader = collated(tmp_path, target="{'label': torch.tensor([s['label'] for s in samples]), 'name': None}")
    split = loader.describe()
    assert split.samples == 4
    inputs, target = loader.load([1, 0], 1)
    assert [t.tolist() for t in inputs] == [[[1.0, 2.0], [1.0, 0.0]]]
    assert split.unflatten(target) == {"label": target[0], "name": None}
    assert target[0].tolist() == [1, 0]


def test_a_minibatch_may_have_no_target(tmp_path):
    loader = collated(tmp_path)
    split = loader.describe()
    assert loader.load([0, 1], 1)[1] == split.leaves == []
    assert split.unflatten([]) is None


def test_lengths_that_differ_between_minibatches_are_refused(tmp_path):
    loader = collated(tmp_path, length="max(len(s['words']) for s in samples)")
    assert loader.load([0, 1], 1)[0][0].shape == (2, 2)
    message = r"gives inputs float32\[2, 3\]; the stages take float32\[2, 2\]; let collate\(\) pad to a fixed length"
    with pytest.raises(ModelError, match=message):
        loader.load([1, 2], 1)


def test_targets_that_differ_between_minibatches_are_refused(tmp_path):
    loader = collated(tmp_path, target="torch.ones(len(samples), max(len(s['words']) for s in samples))")
    loader.describe()
    message = (
        r"targets float32\[2, 2\], where the first sample alone makes them float32\[2, 1\]; .* pad to a fixed length"
    )
    with pytest.raises(ModelError, match=message):
        loader.load([0, 1], 1)
    with pytest.raises(ModelError, match="let targets have one row for each sample"):
        collated(tmp_path, target="torch.tensor(len(samples))").describe()


def test_faults_of_collate_name_their_line(tmp_path):
    with pytest.raises(
        ModelError, match=r"^user.py:13: collate\(\) of 2 samples of dataset\('train'\) raised KeyError"
    ):
        collated(tmp_path, item="return {}").load([0, 1], 1)
    with pytest.raises(ModelError, match=r"^user.py:7: dataset\('train'\), sample 3, raised ZeroDivisionError"):
        collated(tmp_path, item="return 1 // (3 - i)").load([3, 1], 1)
    file = load(tmp_path, "return 1", more="def collate(samples): return torch.ones(len(samples))\n")
    with pytest.raises(ModelError, match=r"^user.py: collate\(\) returned Tensor, not a pair \(inputs, target\)"):
        file.example_batch(2)


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


def test_a_schedule_that_fails_names_its_line(tmp_path):
    more = "def scheduler(o): return torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 - step))\n"
    with pytest.raises(ModelError, match=r"^user.py:10: the learning-rate schedule LambdaLR raised ZeroDivisionError"):
        NamedOptimizer(load(tmp_path, more=more), parameter()).step()


def test_an_optimizer_whose_step_fails_names_its_line(tmp_path):
    more = """
class Broken(torch.optim.SGD):
    def step(self):
        raise KeyError("momentum")
def optimizer(named): return Broken([p for n, p in named], lr=0.1)
"""
    with pytest.raises(ModelError, match=r"^user.py:13: step 0 of Broken raised KeyError: 'momentum'"):
        NamedOptimizer(load(tmp_path, more=more), parameter()).step()


def test_a_metric_of_several_elements_is_refused(tmp_path):
    file = load(tmp_path, more="def metrics(output, target): return {'a': (output, 1)}\n")
    with pytest.raises(ModelError, match=r"metrics\(\) returned .*; return {name: \(sum, count\)}"):
        file.metrics(torch.ones(2), None)


def detached_loss(output, target):
    return output.detach().mean()


def test_a_loss_without_a_gradient_is_refused_at_the_first_minibatch():
    stage = PipelineStage(torch.nn.Linear(2, 2), detached_loss)
    stage.weights.begin_phase({0: 0})
    with pytest.raises(ModelError, match=r"loss\(\) returned a tensor without a gradient, .*; compute it from"):
        stage.forward(0, [torch.ones(1, 2)])


def test_with_recomputation_it_is_refused_in_the_backward():
    stage = PipelineStage(torch.nn.Linear(2, 2), detached_loss, recompute=True)
    stage.weights.begin_phase({0: 0})
    stage.forward(0, [torch.ones(1, 2)])
    with pytest.raises(ModelError, match=r"loss\(\) returned a tensor without a gradient"):
        stage.backward(0, [None])


def test_a_loss_of_a_model_that_is_frozen_needs_no_gradient():
    stage = PipelineStage(torch.nn.Linear(2, 2).requires_grad_(False), lambda output, target: output.mean())
    stage.weights.begin_phase({0: 0})
    stage.forward(0, [torch.ones(1, 2)])
