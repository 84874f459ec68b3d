"""What differs between training and evaluation stands under `if self.training:` in the stage file as well."""

from pathlib import Path

import pytest
import torch
from skeletons import plan_of, skeleton, texts_in

from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ArtifactError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.tracing import trace_file
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


@pytest.mark.rows_of_the_day(days=3)
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
