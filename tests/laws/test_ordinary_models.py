"""Ordinary models go through codegen as they are: what it writes is proved equal to them, on two stages."""

from pathlib import Path

import pytest
import torch
from skeletons import plan_of, skeleton, texts_in

from pdtool.artifacts.artifact import ModelRef
from pdtool.frontend.model_file import ModelFile
from pdtool.generator.generate import generate

MODELS = Path(__file__).parents[1] / "models" / "expressions.py"
# Each with a line that its stage files must have: as a person would write it.
EXPRESSIONS = {
    "pow_": "torch.pow(10000, ",
    "remainder": "torch.remainder(7, ",
    "functional_norms": "F.batch_norm(x, self.mean, self.var, None, None, training=self.training, ",
    "infinities": 'float("-inf")',
    "not_finite": 'torch.tensor([1.0, float("inf"), float("nan"), 0.0,',
    "permuted": "self.order = nn.Parameter(torch.zeros(8, dtype=torch.int64), requires_grad=False)",
    "positions": "self.embed(self.position_ids)",
    "diagonal": ".mT",
    "spectrum": ".imag",
    "where_number": "torch.where(",
    "fill": ".bernoulli_(0.9)",
    "reparameterised": "normal_(0.0, 1.0)",
    "parameter_lists": 'getattr(self.scales, "1")',
    "returned_parameter": "return (linear, self.scale)",
    "unpooling": "max_unpool2d",
    "short_time_fourier": "stft",
    "causal_encoder": "attn_mask=x",
    "columns": "torch.select_scatter(zeros, ",
    "partial_sum": "self.calls.copy_(",
    "dashes": 'self.heads["left-eye"](x)',
    "compiled": "self.linear(x)",
    "data_parallel": "self.linear(x)",
    "constant_mask": "dim=0, index=3)",
}


class ExpressionModel(ModelFile):
    """A model of tests/models/expressions.py."""

    def example_inputs(self, batch_size):
        return (torch.randn(batch_size, *self.module.INPUTS.get(self.ref.function, (8,))),)


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name, tmp_path):
    model_file = ExpressionModel.load(ModelRef(source=str(MODELS), function=name), trusted=True)
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")
    assert bundle.proof == "values"
    text = "".join(texts_in(tmp_path / "b").values())
    assert EXPRESSIONS[name] in text, text
