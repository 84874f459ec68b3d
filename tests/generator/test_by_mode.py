"""What differs between training and evaluation stands under `if self.training:` in the stage file as well."""

import copy
from pathlib import Path

import pytest
import torch
from skeletons import plan_of, skeleton, texts_in
from torch import nn

from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ArtifactError
from pdtool.frontend import tracing
from pdtool.frontend.exporting import exported
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.operators import ByMode
from pdtool.frontend.tracing import trace, trace_file
from pdtool.generator.generate import generate

MODELS = Path(__file__).parents[1] / "models" / "by_mode.py"
LINES = {
    "vae": "if self.training:\n            mul = logvar * 0.5\n",
    "stochastic_depth": "if self.training:\n            ",
    "auxiliary_head": "return ",
    "counting_norm": 'if self.training:\n            self.get_submodule("1").num_batches_tracked.add_(1)\n',
    "codebook": "1: Codebook of by_mode\n",
    "running_mean": "if self.training:\n            ",
    "evaluation_only": "else:\n            training = self.second(x)\n",
    "modes_apart": "if self.training:\n            ",
    "moving_target": "self.target_weight.lerp_(detach, ",
    "spectral_norm": "",
    "old_spectral_norm": "",
    "other_shape": ", training) if self.training else (last, training_1)",
}
# torch.cdist computes in another way from 26 samples on, and Balanced branches on values.
OPAQUE = {"codebook": {"1"}, "other_shape": {"balanced"}}


class ModelByMode(ModelFile):
    """A model of tests/models/by_mode.py."""

    def example_inputs(self, batch_size):
        return (torch.randn(batch_size, *self.module.INPUTS.get(self.ref.function, (8,))),)


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", LINES)
def test_stages_equal_the_model_in_both_modes(name, count, tmp_path):
    model_file = ModelByMode.load(ModelRef(source=str(MODELS), function=name), trusted=True)
    traced = trace_file(model_file, model_file.build(), 4)
    assert set(traced.opaque) == OPAQUE.get(name, set())
    profile = skeleton(model_file)
    stages = min(count, len(profile.graph.contracted(profile.together)) - 1)
    bundle = generate(plan_of(profile, stages), profile, model_file, tmp_path / "b")
    assert bundle.proof == "values"
    text = "".join(texts_in(tmp_path / "b").values())
    assert LINES[name] in text, text


class Asking(nn.Module):
    """A model that may ask for its mode."""

    def __init__(self, asked):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU())
        self.asked = asked

    def forward(self, x):
        return self.layers(x) * (2 if self.asked(self) else 3)


class OwnTrain(Asking):
    def train(self, mode=True):
        self.factor = 2 if mode else 3
        return super().train(mode)

    def forward(self, x):
        return self.layers(x) * self.factor


class OwnProperty(Asking):
    @property
    def training(self):
        return self.__dict__["training"]

    @training.setter
    def training(self, value):
        self.__dict__["training"] = value


def hooked():
    model = Asking(lambda model: True)
    model.layers.register_forward_hook(lambda module, inputs, output: output * (2 if module.training else 3))
    return model


class Stepwise(nn.Dropout):
    def forward(self, x):
        return x * 2 if self.training else x * 3


def with_stepwise():
    model = Asking(lambda model: True)
    model.layers[3] = Stepwise()
    return model


def with_hook_on_dropout():
    model = Asking(lambda model: True)
    model.layers[2].register_forward_hook(lambda module, inputs, output: None)  # torch's own code, but no leaf module
    return model


class Inline(Asking):
    """Here the code of the leaf module runs, and not its call."""

    def forward(self, x):
        return nn.Dropout.forward(self.layers[2], x) * 2


class ByDict(Asking):
    def forward(self, x):
        return self.layers(x) * (2 if self.__dict__["training"] else 3)


class ReactingToMode(Asking):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if isinstance(value, bool):
            self.factor = 2 if value else 3

    def forward(self, x):
        return self.layers(x) * self.factor


MODELS_THAT_ASK = {
    "its own": lambda: Asking(lambda model: model.training),
    "by name": lambda: Asking(lambda model: getattr(model, "training", True)),
    "of a leaf module": lambda: Asking(lambda model: model.layers[2].training),
    "of a copy": lambda: Asking(lambda model: copy.deepcopy(model.layers[2]).training),
    "in a hook": hooked,
    "in a subclass of a leaf module": with_stepwise,
    "in train()": lambda: OwnTrain(None),
    "in a module of torch": with_hook_on_dropout,
    "in a leaf module that is no operator": lambda: Inline(None),
    "where the mode is set": lambda: ReactingToMode(None),
    "in __dict__": lambda: ByDict(None),
    "by a property": lambda: OwnProperty(lambda model: model.training),
}


@pytest.mark.parametrize("way", MODELS_THAT_ASK)
def test_a_model_that_asks_for_its_mode_in_any_way_is_traced_in_both(way):
    traced = trace(MODELS_THAT_ASK[way](), lambda size: (torch.randn(size, 8),), 4, Path("model.py"))
    given = [arg for op in traced.operators for arg in op.kwargs.values() if isinstance(arg, ByMode)]
    assert given in ([ByMode(2, 3)], [ByMode(True, False)]), given


def test_a_model_that_does_not_ask_for_its_mode_is_exported_once(monkeypatch):
    """Once for both modes; what its dropout and batch norm do in each is in their own module."""
    exports = []
    monkeypatch.setattr(tracing, "exported", lambda *args, **kwargs: exports.append(1) or exported(*args, **kwargs))
    model = Asking(lambda model: True)
    trace(model, lambda size: (torch.randn(size, 8),), 4, Path("model.py"))
    assert len(exports) == 1
    assert not hasattr(nn.Module, "training")
    assert model.training


def test_a_stage_that_sends_nothing_is_refused(tmp_path):
    model_file = ModelByMode.load(ModelRef(source=str(MODELS), function="counting_norm"), trusted=True)
    profile = skeleton(model_file)
    plan = plan_of(profile, 3)
    nodes = [["input", "0"], ["1.training"], ["1.batch_norm", "2", "3", "4"]]
    stages = tuple(s.model_copy(update={"nodes": tuple(n)}) for s, n in zip(plan.stages, nodes, strict=True))
    with pytest.raises(
        ArtifactError, match=r"by_mode\.py:8\d: no later stage uses an output of stage 1 .*partition again"
    ):
        generate(plan.model_copy(update={"stages": stages}), profile, model_file, tmp_path / "b")
    assert not (tmp_path / "b").exists()
