"""What models take and return besides tensors by position: codegen proves the stages, and the loss gets it all."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import assert_same, run, weights
from skeletons import plan_of, skeleton, texts_in

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.report import Report
from pdtool.errors import ModelError, TraceError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs, named_leaves, with_own_classes
from pdtool.frontend.tracing import trace
from pdtool.generator.composed import compose, copy_state, load_stages
from pdtool.generator.generate import generate
from pdtool.profiler.measure import measure, measure_loading_s
from pdtool.runtime.config import RunConfig
from pdtool.runtime.loading.minibatches import sample_order
from pdtool.runtime.worker.worker_model import load_stage_module

MODELS = Path(__file__).parents[1] / "models" / "model_io.py"
# Each with a line that its stage files must have: as a person would write it.
STRUCTURES = {
    "dictionary": 'return {"scores": second, "others": {"hidden": tanh, "count": 3}, "missing": None}',
    "named_tuple": 'Pair = namedtuple("Pair", ["scores", "hidden"])',
    "dataclass_output": "return Prediction(scores=second, hidden=tanh, samples=batch, weights=None)",
    "attributes": 'return [Named({"scores": second, "hidden": tanh}), (Pair(tanh, None),)]',
    "largest": "return torch.return_types.max((",
    "keywords": "F.cross_entropy(",
    "returned_scores": "class Named(dict):",
    "any_keywords": "def forward(self, words):",
    "positions": "def forward(self, x):",
    "nested": "pair_1_0",
    "dataclass_input": "def forward(self, batch_words):",
    "unused": "def forward(self, x):",
    "siamese": "x.split([batch, batch], dim=0)",
    "views": "x.split([batch, batch, batch], dim=0)",
    "halves": "[batch:2 * batch]",
    "lengths": "torch.arange(batch, ",
    "sections": "[batch, batch]",
    "table": 'self.inner.register_buffer("table", torch.zeros(12, 8), persistent=False)',
    "checkpointed": "self.first(x)",
    "trained": "self.net.first(",
}


class StructuredModel(ModelFile):
    """A model of tests/models/model_io.py."""

    def example_inputs(self, batch_size):
        return self.as_inputs(self.module.INPUTS.get(self.ref.function, self.module.vectors)(batch_size))


def load(name):
    return StructuredModel.load(ModelRef(source=str(MODELS), function=name), trusted=True)


def generated(name, folder):
    model_file = load(name)
    profile = skeleton(model_file)
    generate(plan_of(profile, 2), profile, model_file, folder)
    return model_file, Bundle.load(folder / "bundle.yaml"), texts_in(folder)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name, tmp_path):
    _, bundle, texts = generated(name, tmp_path / "b")
    assert bundle.proof == "values"
    assert STRUCTURES[name] in "".join(texts.values()), "".join(texts.values())


def composed(name, folder, samples=5):
    """(what the model returns, what its stages return)."""
    model_file, bundle, texts = generated(name, folder)
    model, stages = model_file.build(), load_stages(texts, bundle)
    copy_state(model, stages, bundle)
    inputs = model_file.example_inputs(samples)
    return inputs.call(model), compose(stages, bundle, inputs.tensors)


def test_what_a_loss_does_with_the_output(tmp_path):
    expected, found = composed("named_tuple", tmp_path / "a")
    scores, hidden = found
    assert torch.allclose(scores, expected.scores)
    assert torch.equal(found.hidden, hidden)
    expected, found = composed("dataclass_output", tmp_path / "b")
    assert (found.samples, found.weights) == (5, None)
    assert torch.allclose(found.scores, expected.scores)
    expected, found = composed("keywords", tmp_path / "c")
    assert torch.allclose(found.loss, expected["loss"])
    assert found["loss"] is found.loss is found[0]
    assert not hasattr(found, "scores")
    for name, folder in (("named_tuple", "a"), ("dataclass_output", "b"), ("keywords", "c")):
        expected, found = composed(name, tmp_path / folder)
        names = Bundle.load(tmp_path / folder / "bundle.yaml").output_classes
        assert type(with_own_classes((1, {"a": found}), names)[1]["a"]) is type(expected)
    expected, found = composed("largest", tmp_path / "d")
    assert torch.equal(found.indices, expected.indices)


def test_a_large_tensor_that_is_an_attribute_is_taken_from_the_model(tmp_path):
    model_file, bundle, _ = generated("table", tmp_path / "b")
    model = model_file.build(seed=3)
    holders = [s for s, stage in enumerate(bundle.stages) if "inner.table" in stage.buffers]
    assert holders
    for s in holders:
        stage = load_stage_module(bundle, tmp_path / "b", s, model)
        assert stage.inner.table is model.inner.table
        assert "inner.table" not in stage.state_dict()


def test_a_large_tensor_made_of_numbers_in_forward_is_refused():
    model_file = load("table_of_numbers")
    line = next(i for i, text in enumerate(MODELS.read_text().splitlines(), 1) if "torch.tensor([[" in text)
    message = rf"^model_io.py:{line}: forward uses a tensor of 72 elements that it makes from Python numbers, .*; make"
    with pytest.raises(TraceError, match=message):
        trace(model_file.build(), model_file.example_inputs, 4, model_file.path)


def test_a_model_of_transformers_called_with_a_dict_and_labels(tmp_path):
    (tmp_path / "model.py").write_text(LANGUAGE_MODEL)
    model_file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    assert model_file.build().config.use_cache is False
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")
    assert bundle.inputs == ("attention_mask", "input_ids", "labels")
    text = texts_in(tmp_path / "b")["stage_1.py"]
    assert "class CausalLMOutputWithCrossAttentions(dict):" in text
    left_out = next(line for line in text.splitlines() if line.endswith(" = None"))
    assert left_out.split(" = ")[1:] == ["hidden_states", "attentions", "cross_attentions", "None"]


def test_arguments_are_recorded(tmp_path):
    _, bundle, _ = generated("keywords", tmp_path / "a")
    assert bundle.arguments == ("labels", "mask", "scale=2.0", "words")
    assert bundle.inputs == ("labels", "mask", "words")
    _, bundle, _ = generated("positions", tmp_path / "b")
    assert bundle.arguments == ("0", "1=None", "2", "3=True")
    _, bundle, _ = generated("siamese", tmp_path / "c")
    assert bundle.arguments == (), "a plain model's bundle is what it was"


def test_a_dict_has_one_order():
    a, b = torch.ones(1), torch.zeros(1)
    one, other = ModelInputs.of({"b": b, "a": {"y": b, "x": a}}), ModelInputs.of({"a": {"x": a, "y": b}, "b": b})
    assert [name for name, _ in one.leaves] == [name for name, _ in other.leaves] == ["a.x", "a.y", "b"]


def test_an_output_that_is_no_container_is_refused():
    model_file = load("distribution")
    with pytest.raises(TraceError, match=r"the model returns output\.1, which is Normal; return tensors and numbers"):
        trace(model_file.build(), model_file.example_inputs, 4, model_file.path)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (lambda n: torch.randn(n, 8 + n % 2), r"have shapes \[4, 8\] and \[3, 9\].*pad to a fixed length"),
        (lambda n: {"x": torch.randn(n, 8), "mask": n % 2 == 0}, "different arguments"),
    ],
)
def test_example_inputs_that_change_with_the_size(example, message):
    with pytest.raises(TraceError, match=message):
        trace(load("dictionary").build(), example, 4, MODELS)


LANGUAGE_MODEL = """
import torch

def model():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=6, vocab_size=20))

def example_inputs(n):
    mask = torch.tensor([1, 1, 1, 1, 1, 0]).repeat(n, 1)
    return {"input_ids": torch.randint(1, 20, (n, 6)), "attention_mask": mask, "labels": torch.randint(20, (n, 6))}
"""
BY_NAME = """
import torch
import torch.nn.functional as F
from torch import nn

class Output(dict):
    __getattr__ = dict.__getitem__

    def total(self):
        return 2 * self.loss

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, words, mask=None, labels=None):
        hidden = torch.tanh(self.first(self.embed(words))) * mask[:, :, None]
        scores = self.second(hidden.sum(1))
        return Output(loss=F.cross_entropy(scores, labels), scores=scores)

def model():
    return Net()

def dataset(split):
    return [{"words": list(range(1 + i % 5)), "label": i % 2} for i in range(24)]

def collate(samples):
    words, mask = torch.zeros(len(samples), 5, dtype=torch.int64), torch.zeros(len(samples), 5)
    for row, sample in enumerate(samples):
        words[row, : len(sample["words"])] = torch.tensor(sample["words"])
        mask[row, : len(sample["words"])] = 1
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"words": words, "mask": mask, "labels": labels}, labels

def loss(output, target):
    return output.total() if isinstance(output, Output) else output.loss

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)

def metrics(output, target):
    return {"accuracy": ((output.scores.argmax(1) == target).sum(), len(target))}
"""


def plain_loop(model_file, order, batch_size):
    """The weights after one epoch of a loop that knows nothing of pipelines."""
    model, data = model_file.build(), model_file.dataset("train")
    optimizer = model_file.optimizer(model.named_parameters())
    for start in range(0, len(order), batch_size):
        inputs, target = model_file.module.collate([data[i] for i in order[start : start + batch_size]])
        optimizer.zero_grad()
        model_file.loss(model(**inputs), target).backward()
        optimizer.step()
    return model.state_dict()


def test_a_model_called_by_name_trains_as_in_a_plain_loop(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(BY_NAME)
    monkeypatch.setattr("pdtool.profiler.measure._BUDGET_S", 0.1)
    model_file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    profile = measure(model_file, batch_size=4)
    assert profile.by_name["loss"].inputs == ("cross_entropy_loss", "second", "target")
    assert {"labels", "mask", "words"} <= set(profile.by_name)
    exact = {"schedule": "1f1b-flush", "weights": "flush", "microbatches": 2}
    plan = plan_of(profile, 2).model_copy(update=exact)
    bundle = generate(plan, profile, model_file, tmp_path / "bundle")
    spec = RunConfig(
        plan=plan,
        bundle=bundle,
        bundle_dir=tmp_path / "bundle",
        model=model_file.ref,
        trusted=True,
        out=tmp_path / "run",
        epochs=1,
        timeout_s=60.0,
    )
    outcomes = run(spec)
    expected = plain_loop(model_file, list(sample_order(spec.seed, 1, 24)), 8)  # two minibatches for each update
    assert_same(weights(outcomes), expected)
    assert 0 <= Report.load(tmp_path / "run" / "report.json").metrics["accuracy"] <= 1


def test_leaves_are_named():
    output = {"a": [1, None], "b": Point(2, 3)}
    assert [name for name, _ in named_leaves(output, "output")] == [
        "output.a.0",
        "output.a.1",
        "output.b.x",
        "output.b.y",
    ]


@dataclass
class Point:
    x: int
    y: int


PADDED_TO_THE_LONGEST = """
import torch
from torch import nn

def dataset(split):
    return [(torch.ones(LENGTHS[i % len(LENGTHS)], 4), 0) for i in range(32)]

def collate(samples):
    inputs, targets = zip(*samples)
    return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.tensor(targets)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.last(self.first(x).tanh().sum(1) / x.shape[1])

def model():
    return Net()
"""


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([2, 5, 6, 3], "a minibatch of 2 samples has inputs of shape [2, 5, 4], not [2, 6, 4] as in the trace"),
        ([6, 5, 2, 3], ""),  # a run tells
    ],
)
def test_minibatches_that_are_padded_to_their_longest_sample_are_refused(lengths, said, tmp_path):
    """codegen said that a module may keep state between calls."""
    (tmp_path / "padded.py").write_text(f"{PADDED_TO_THE_LONGEST}\nLENGTHS = {lengths}\n")
    file = ModelFile.load(ModelRef(source=str(tmp_path / "padded.py")), trusted=True)
    profile = skeleton(file)
    with pytest.raises(ModelError, match=re.escape(said)) if said else nullcontext():
        generate(plan_of(profile, 2), profile, file, tmp_path / "bundle")
    with pytest.raises(ModelError, match=r"two minibatches of 3 samples have tensors of shape \[3, .* pad to a fixed"):
        measure_loading_s(file, 3)
