"""The zoo: paper sizes exact, contracts kept, every model traceable, digits learned."""

import sys
from importlib.metadata import distribution

import pytest
import torch

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.device import find_device
from pdtool.artifacts.plan import PlanOptions
from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.planner.choice.make_plan import make_plan
from pdtool.profiler.estimate import estimate

PAPER = {
    "vgg16": 138_357_544,
    "alexnet": 61_100_840,
    "resnet50": 25_557_032,
    "gnmt": 193_765_952,  # the sum over the profile that PipeDream published
    "awd_lm": 55_989_200,
    "s2vt": 36_968_094,
}
IMAGES = ("vgg16", "alexnet", "resnet50")
SMALL = {
    "digits": {},
    **{name: {"size": "mini"} for name in PAPER},
    "lstm_lm": {"width": 32},
    "transformer": {"width": 32, "layers": 2},
    "gpt2": {"width": 32, "layers": 2},
    "llm": {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "vocabulary": 256},
    "hf_resnet": {},
}
TIED = {
    "awd_lm": ("embedding.weight", "decoder.weight"),
    "lstm_lm": ("embedding.weight", "decoder.weight"),
    "transformer": ("embedding.weight", "decoder.weight"),
    "gpt2": ("lm.transformer.wte.weight", "lm.lm_head.weight"),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Others may hold the cores: a second thread then only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(name, **settings):
    if name in ("gpt2", "hf_resnet"):
        pytest.importorskip("transformers")
    return ModelFile.load(ModelRef(source=f"pdtool.zoo.{name}", settings=settings))


def example_batch(file):
    """The model's arguments, and the target, of six samples."""
    inputs, target = file.example_batch(6)
    return file.as_inputs(inputs).args, target


@pytest.fixture(params=SMALL)
def file(request):
    return load(request.param, **SMALL[request.param])


@pytest.mark.parametrize("name", PAPER)
def test_paper_size_is_the_default_and_has_the_papers_parameters(name):
    with torch.device("meta"):
        assert sum(p.numel() for p in load(name).build().parameters()) == PAPER[name]


def test_the_language_model_has_the_parameters_of_llama_7b():
    with torch.device("meta"):
        assert sum(p.numel() for p in load("llm").build().parameters()) == 6_738_415_616


def test_gnmt_has_16_layers_and_awd_lm_its_authors_3():
    with torch.device("meta"):
        gnmt16 = load("gnmt", layers=16).build()
        awd3 = load("awd_lm").module.LanguageModel(10_000, embedding=400, width=1150, layers=3, dropout=1.0)
    assert sum(p.numel() for p in gnmt16.parameters()) == 277_717_568
    assert sum(p.numel() for p in awd3.parameters()) == 24_221_600  # "24M" in Merity et al., table 1


@pytest.mark.parametrize("name", PAPER)
def test_an_unknown_size_is_refused(name):
    with pytest.raises(ModelError, match="size 'huge' is neither paper nor mini"):
        load(name, size="huge").build()


@pytest.mark.rows_of_the_day(days=3)
def test_example_inputs_are_shaped_as_the_dataset(file):
    assert all(map(file.has, ("model", "example_inputs", "dataset", "loss", "optimizer", "metrics")))
    inputs = file.example_inputs(6).tensors
    data = file.as_inputs(file.example_batch(6)[0]).tensors
    assert [(x.shape, x.dtype) for x in inputs] == [(x.shape, x.dtype) for x in data]
    assert len(file.dataset("train")) > len(file.dataset("valid")) > 0


def test_a_step_changes_every_parameter(file):
    model = file.build()
    inputs, target = example_batch(file)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = file.optimizer(model.named_parameters())
    loss = file.loss(model(*inputs), target)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    optimizer.step()
    assert [name for name, p in model.named_parameters() if torch.equal(before[name], p)] == []


def test_loss_is_a_mean_and_metrics_are_sums(file):
    inputs, target = example_batch(file)
    with torch.no_grad():
        output = file.build().eval()(*inputs)
    assert len(output) == 6
    halves = [(output[:3], target[:3]), (output[3:], target[3:])]
    mean = sum(file.loss(*half) for half in halves) / 2
    torch.testing.assert_close(file.loss(output, target), mean)
    first, second = (file.metrics(*half) for half in halves)
    for name, (total, count) in file.metrics(output, target).items():
        assert total == pytest.approx(first[name][0] + second[name][0], rel=1e-5)
        assert count == first[name][1] + second[name][1] > 0


@pytest.mark.rows_of_the_day(days=3)
# torch.export says so of every nn.LSTM
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_it_exports_with_any_batch_size(file):
    model = file.build()
    batch = torch.export.Dim("batch", min=2)
    example = file.example_inputs(4).args
    exported = torch.export.export(
        model, example, strict=False, dynamic_shapes=tuple({0: batch} for _ in example)
    ).module()
    inputs = file.example_inputs(7).args
    torch.manual_seed(0)
    expected = model(*inputs)
    torch.manual_seed(0)
    torch.testing.assert_close(exported(*inputs), expected)


def test_the_seed_fixes_the_model_and_the_data(file):
    first, repeated, other = (file.build(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], repeated[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    (first, target), (second, repeated_target) = example_batch(file), example_batch(file)
    assert all(torch.equal(a, b) for a, b in zip([*first, target], [*second, repeated_target], strict=True))


@pytest.mark.parametrize("name", TIED)
def test_embedding_and_decoder_are_one_parameter(name):
    settings = {"tied": True} if name == "transformer" else {}
    model = load(name, **settings).build()
    embedding, decoder = (model.get_parameter(path) for path in TIED[name])
    assert embedding is decoder


def test_the_transformer_is_untied_by_default():
    model = load("transformer").build()
    assert model.decoder.weight is not model.embedding.weight


@pytest.mark.parametrize("name", ["awd_lm", "lstm_lm", "transformer", "llm"])
def test_a_word_does_not_see_what_follows(name):
    file = load(name, **SMALL[name])
    model = file.build().eval()
    (words,) = file.example_inputs(2).tensors
    changed = words.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    torch.testing.assert_close(model(words)[:, :10], model(changed)[:, :10])
    assert not torch.allclose(model(words)[:, 10:], model(changed)[:, 10:])


@pytest.mark.parametrize("name", ["gnmt", "s2vt"])
def test_a_word_of_a_sentence_does_not_see_what_follows_but_sees_what_is_told(name):
    file = load(name, size="mini")
    model = file.build().eval()
    told, words = file.example_inputs(2).tensors
    changed = words.clone()
    changed[:, 4:] = changed[:, 4:] % 20 + 1
    torch.testing.assert_close(model(told, words)[:, :4], model(told, changed)[:, :4])
    assert not torch.allclose(model(told, words)[:, 4:], model(told, changed)[:, 4:])
    assert not torch.allclose(model(told, words), model(told.flip(0), words))


def test_gnmt_gives_no_attention_to_padding():
    file = load("gnmt", size="mini")
    attention = file.build().decoder.attention
    queries, keys = torch.rand(2, 3, 64), torch.rand(2, 5, 64)
    is_padding = torch.tensor([[False, False, True, True, True], [False] * 5])
    found = attention(queries, keys, is_padding)
    torch.testing.assert_close(found[:1], attention(queries[:1], keys[:1, :2], is_padding[:1, :2]))
    assert not torch.allclose(found[1], attention(queries, keys[:, :2], is_padding[:, :2])[1])


def test_awd_lm_drops_the_same_units_at_all_positions_and_weights_between_hidden_states():
    zoo = load("awd_lm").module
    torch.manual_seed(0)
    dropped = zoo.SameDropout(0.5)(torch.ones(2, 3, 64)) == 0
    assert torch.equal(dropped[:, 0], dropped[:, 2])
    assert not torch.equal(dropped[0], dropped[1])
    lstm = zoo.DroppedLSTM(4, 64, 0.5)
    x = torch.rand(2, 3, 4)
    plain, _ = lstm.lstm(x)
    torch.testing.assert_close(lstm.eval()(x), plain)
    trained = lstm.train()(x)
    torch.testing.assert_close(trained[:, 0], plain[:, 0])  # the first state is zero: nothing to be dropped
    assert not torch.allclose(trained[:, 1], plain[:, 1])


@pytest.mark.parametrize("name", ["digits", "hf_resnet", "vgg16", "lstm_lm", "gnmt", "s2vt"])
def test_no_sample_is_in_both_splits(name):
    file = load(name)
    train, valid = ({tuple(sample.flatten().tolist()) for sample in raw(file, split)} for split in ("train", "valid"))
    assert not train & valid


def raw(file, split):
    """What the samples are made of: images, or the words that are translated."""
    data = file.dataset(split)
    if isinstance(data, list):
        return [english for (english, _), _ in data]
    return data.images if hasattr(data, "images") else data.tensors[0]


def test_sentences_and_clips_are_what_they_say():
    (english, german), target = load("gnmt", size="mini").dataset("train")[0]
    assert english.shape == (7,)
    assert torch.equal(german[1:], target[:-1].where(target[1:] != 0, german[1:]))
    clip = load("s2vt", size="mini")
    data, words = clip.dataset("valid"), clip.module.WORDS
    image = data.images[0]
    frames = data.frames(image, "left", "down").view(8, 16, 16)
    assert torch.equal(frames[0, 4:12, 4:12], image)
    assert torch.equal(frames[4, 4:12, :8], image)
    assert torch.equal(frames[7, 7:15, :8], image)
    assert " ".join(words[i] for i in data.caption("two", "left", "down")) == "<begin> a two moves left then down <end>"
    assert " ".join(words[i] for i in data.caption("two", "up", "up")) == "<begin> a two keeps moving up <end> <pad>"
    # the same clip at the size of the paper, eight times as large
    large = load("s2vt").dataset("valid")
    assert large.frames(image, "left", "down").shape == (60, 4096)


@pytest.mark.parametrize(
    ("name", "package"), [("vgg16", "mlxtend.data"), ("gnmt", "num2words"), ("s2vt", "sklearn.datasets")]
)
def test_a_missing_package_is_named_with_the_extra(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"pdtool.zoo.{name}", raising=False)
    with pytest.raises(ModelError, match=rf"{name}.py:\d+: .*{package}.*; run pip install '.\[zoo\]'"):
        load(name).dataset("train")


def test_a_missing_text_is_named_with_the_extra(monkeypatch):
    file = load("awd_lm")
    monkeypatch.setattr(file.module, "distribution", lambda _: distribution("no-such-bible"))
    with pytest.raises(ModelError, match=r"awd_lm.py:\d+: .*no-such-bible; run pip install '.\[zoo\]'"):
        file.dataset("train")


def epochs_to(file, accuracy, epochs):
    """Train in one process until the validation accuracy is reached; fails when `epochs` are over."""
    model = file.build(0)
    optimizer = file.optimizer(model.named_parameters())
    (train, labels), (valid, valid_labels) = (
        torch.utils.data.default_collate(list(file.dataset(split))) for split in ("train", "valid")
    )
    for epoch in range(1, epochs + 1):
        for chosen in torch.randperm(len(train)).split(32):
            optimizer.zero_grad()
            file.loss(model.train()(train[chosen]), labels[chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            right, count = file.metrics(model.eval()(valid), valid_labels)["accuracy"]
        if right / count >= accuracy:
            return epoch
    pytest.fail(f"{right / count:.3f} after {epochs} epochs")


def test_digits_are_learned_by_one_process():
    epochs_to(load("digits"), 0.98, 12)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("name", [*IMAGES, "hf_resnet"])
def test_small_image_models_learn(name):
    """At five seeds all had passed 0.85 by then; chance is 0.1."""
    epochs_to(load(name, **SMALL[name]), 0.6, 5)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("name", "device", "minibatch", "cluster"),
    [
        ("alexnet", "v100", 256, make_cluster([4, 4], [1.25e9, 12e9], memory_bytes=16 * 10**9)),
        ("s2vt", "titanx", 80, make_cluster([4], [5e9], memory_bytes=12 * 10**9)),
    ],
)
def test_paper_sizes_are_estimated_and_planned_for_the_papers_clusters(name, device, minibatch, cluster):
    """The two that take the least time; those of LSTMs take half a minute each."""
    profile = estimate(load(name), batch_size=minibatch, device=find_device(device))
    assert profile.parameter_bytes(set(profile.by_name)) == 4 * PAPER[name]
    plan = make_plan(profile, "profile.json", cluster, PlanOptions())
    assert sum(stage.replicas for stage in plan.stages) == plan.workers <= cluster.workers
    assert max(plan.predicted.memory_bytes) < cluster.memory_bytes
