"""The zoo: paper sizes exact, contracts kept, digits learned."""

import pytest
import torch

from pdtool.artifacts.envelope import ModelRef
from pdtool.frontend.modelfile import ModelFile

SMALL = ["digits", "mini:vgg", "mini:alexnet", "mini:resnet", "lstm_lm", "transformer", "gpt2", "hf_resnet"]


def load(name):
    module, _, function = name.partition(":")
    return ModelFile.load(ModelRef(source=f"pdtool.zoo.{module}", function=function or "model"))


@pytest.mark.parametrize(("name", "count"), [("vgg16", 138_357_544), ("alexnet", 61_100_840), ("resnet50", 25_557_032)])
def test_paper_size_has_the_papers_parameters(name, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in load(name).build().parameters()) == count


@pytest.mark.parametrize("name", SMALL)
def test_a_minibatch_gives_a_loss_and_gradients_everywhere(name):
    if name in ("gpt2", "hf_resnet"):
        pytest.importorskip("transformers")
    file = load(name)
    model = file.build()
    inputs, target = file.example_batch(6)
    assert file.example_inputs(6)[0].shape == inputs.shape
    output = model(inputs)
    assert output.shape[0] == 6
    loss = file.loss(output, target)
    loss.backward()
    assert torch.isfinite(loss)
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert all(0 <= total <= count for total, count in file.metrics(output, target).values())
    assert len(file.dataset("valid")) > 0


@pytest.mark.parametrize("name", ["digits", "lstm_lm"])
def test_the_seed_fixes_the_model(name):
    file = load(name)
    first, again, other = file.build(1).state_dict(), file.build(1).state_dict(), file.build(2).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_the_language_model_is_tied():
    model = load("lstm_lm").build()
    assert model.decoder.weight is model.embedding.weight


def test_digits_are_learned_by_one_process():
    file = load("digits")
    model = file.build(0)
    optimizer = file.optimizer(model.named_parameters())
    train, (images, digits) = file.dataset("train"), file.dataset("valid").tensors
    for _ in range(12):
        order = torch.randperm(len(train))
        for i in range(0, len(order), 32):
            x, y = train[order[i : i + 32]]
            optimizer.zero_grad()
            file.loss(model.train()(x), y).backward()
            optimizer.step()
        right, count = file.metrics(model.eval()(images), digits)["accuracy"]
        if right / count >= 0.98:
            return
    pytest.fail(f"{right / count:.3f} after 12 epochs")
