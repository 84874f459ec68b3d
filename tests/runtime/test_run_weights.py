"""Weight versions: what a live graph has saved is never written, and nothing is copied without need."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pdtool.runtime.stage.pipeline_stage import PipelineStage
from pdtool.runtime.stage.weight_versions import WeightVersions
from pdtool.schedule import ExecutionConfig, tied_update_lag


def modules() -> list[tuple[str, nn.Module, torch.Tensor]]:
    """A module of each kind that keeps its weights in another way."""
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    return [
        ("conv", nn.Conv2d(2, 3, 3), torch.randn(2, 2, 5, 5)),
        ("linear", nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(2, 3)),
        ("lstm", nn.LSTM(3, 4, 2), torch.randn(5, 2, 3)),
        ("attention", nn.TransformerEncoderLayer(4, 2, 8, 0.0), torch.randn(5, 2, 4)),
        ("tied", tied, torch.randn(2, 3)),
    ]


@pytest.mark.parametrize("kind", [name for name, _, _ in modules()])
def test_a_backward_after_updates_sees_the_weights_of_its_forward(kind: str) -> None:
    """Two updates lie between forward and backward; the gradients equal those computed at once."""
    torch.manual_seed(0)
    [(module, x)] = [(m, x) for name, m, x in modules() if name == kind]

    def loss(output: object, _: object) -> torch.Tensor:
        return (output[0] if isinstance(output, tuple) else output).square().mean()  # type: ignore[union-attr]

    expected = torch.autograd.grad(loss(module(x), None), list(module.parameters()))
    stage = PipelineStage(module, loss)
    stage.forward(0, [x])
    for minibatch in (1, 2):
        stage.forward(minibatch, [x])
        stage.weights.prepare_update()
        with torch.no_grad():
            for parameter in stage.weights.parameters.values():
                parameter.add_(1.0)
    assert stage.weights.peak_versions == 3
    stage.backward(0, [None])
    for parameter, gradient in zip(stage.weights.parameters.values(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    newest = dict(module.named_parameters())  # and the module computes with the newest weights now
    for name, parameter in stage.weights.parameters.items():
        assert newest[name].data_ptr() == parameter.data_ptr()


class OwnIdentity(torch.autograd.Function):
    """Its node is Python's, which keeps no graph alive."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient


@pytest.mark.parametrize("ends_in_python", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_outputs_are_freed_once_they_are_sent(*, ends_in_python: bool, is_split: bool) -> None:
    """A linear layer does not save its output, so nothing needs that between forward and backward."""
    torch.manual_seed(0)
    linear, x = nn.Linear(3, 5), torch.randn(2, 3, requires_grad=True)
    gradient = torch.randn(2, 5)
    expected = torch.autograd.grad(linear(x), [x, *linear.parameters()], gradient)
    module = linear
    if ends_in_python:
        module = nn.Linear(3, 5)
        module.load_state_dict(linear.state_dict())
        module.register_forward_hook(lambda _, __, output: OwnIdentity.apply(output))
    stage = PipelineStage(module, None)
    outputs = stage.forward(0, [x])
    memory = StorageWeakRef(outputs[0].untyped_storage())
    del outputs
    gc.collect()
    assert memory.expired()
    if is_split:
        gradients = stage.backward_input(0, [gradient])
        stage.backward_weight(0)
    else:
        gradients = stage.backward(0, [gradient])
    found = [*gradients, *(p.grad for p in stage.weights.parameters.values())]
    torch.testing.assert_close(tuple(found), expected, rtol=0, atol=0)


def test_the_loss_may_be_a_received_tensor() -> None:
    """An earlier stage has computed it."""
    received = torch.tensor(3.0, requires_grad=True)
    stage = PipelineStage(nn.Identity(), lambda output, _: output)
    assert stage.forward(0, [received])[0] == 3.0
    assert stage.backward(0, [None]) == [torch.tensor(1.0)]


def flattened(lstm: nn.LSTM) -> nn.LSTM:
    """The module with its weights one after another in a single storage, the last one first, as on a GPU."""
    weights = list(lstm.parameters())[::-1]
    flat = torch.cat([weight.detach().reshape(-1) for weight in weights])
    parts = torch.split(flat, [weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part.view_as(weight)
    return lstm


def places(lstm: nn.LSTM) -> tuple[set[int], list[int]]:
    """The storages of the weights that the module computes with, and where each begins in its storage."""
    weights = lstm._flat_weights
    return {w.untyped_storage().data_ptr() for w in weights}, [w.storage_offset() for w in weights]


def test_each_version_of_recurrent_weights_is_one_piece_of_memory() -> None:
    """So cuDNN need not put them together at each call."""
    lstm = flattened(nn.LSTM(3, 4, 2))
    weights = WeightVersions(nn.Sequential(lstm, nn.Linear(4, 2)))
    _, offsets = places(lstm)
    assert sorted(offsets)[1] > 0
    storages = set()
    for _ in range(4):
        weights.acquire()
        [storage], offsets_now = places(lstm)
        assert offsets_now == offsets
        storages.add(storage)
        values = [weight.clone() for weight in lstm._flat_weights]
        weights.prepare_update()
        weights.bind_newest()
        assert all(map(torch.equal, lstm._flat_weights, values)), "a version begins as a copy of the one before"
    assert len(storages) == 4


def test_with_nothing_in_flight_a_step_is_done_in_place() -> None:
    """No copy at the last stage of a pipeline, nor ever with a flush; one kept buffer serves the steady state."""
    stage = PipelineStage(nn.Linear(2, 2), lambda output, _: output.sum())
    weight = stage.weights.parameters["weight"]
    memory = [weight.data_ptr()]
    for minibatch in range(6):
        stage.forward(minibatch, [torch.ones(1, 2)])
        if minibatch < 3:
            stage.backward(minibatch, [None])
        elif minibatch > 3:
            stage.backward(minibatch - 1, [None])
        stage.weights.prepare_update()
        memory.append(weight.data_ptr())
    assert memory[:4] == memory[:1] * 4
    assert memory[4:] == [memory[4], memory[0], memory[4]]
    assert memory[4] != memory[0]
    assert stage.weights.peak_versions == 2


def test_gradients_are_added_by_samples_and_tied_parameters_once() -> None:
    tied = next(module for name, module, _ in modules() if name == "tied")
    assert list(WeightVersions(tied).parameters) == ["0.weight", "0.bias", "1.bias"]
    stage = PipelineStage(nn.Linear(1, 1, bias=False), lambda output, _: output.mean())
    for minibatch, (value, weight) in enumerate(((2.0, 1.0), (8.0, 0.25))):
        stage.forward(minibatch, [torch.full((1, 1), value)])
        stage.backward(minibatch, [None], weight)
    assert stage.weights.parameters["weight"].grad.item() == 4.0  # type: ignore[union-attr]


def test_gradients_are_told_of_while_the_backward_goes_on() -> None:
    """Each parameter once, the last layer first, its gradient collected: what starts the all-reduce of a bucket."""
    stage = PipelineStage(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lambda output, _: output.sum())
    names = {id(p): name for name, p in stage.weights.parameters.items()}
    told: list[tuple[str, int]] = []

    def final(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        told.append((names[id(parameter)], sum(p.grad is not None for p in stage.weights.parameters.values())))

    stage.forward(0, [torch.ones(1, 2)])
    stage.backward(0, [None], 0.5, final)
    assert [count for _, count in told] == [1, 2, 3, 4]
    assert sorted(name for name, _ in told[:2]) == ["1.bias", "1.weight"]
    assert stage.weights.parameters["1.bias"].grad.tolist() == [0.5, 0.5]  # type: ignore[union-attr]


def test_frozen_parameters_stay_frozen() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    stage = PipelineStage(module, lambda output, _: output.sum())
    stage.forward(0, [torch.ones(1, 2)])
    stage.backward(0, [None])
    assert stage.weights.parameters["bias"].grad is None
    assert stage.weights.parameters["weight"].grad is not None


@pytest.mark.parametrize(
    ("replicas", "together", "stage", "lag"),
    [((1, 1, 1), (0, 2), 0, 0), ((1, 1, 1), (0, 2), 2, 2), ((2, 1, 1), (0, 2), 2, 2), ((2, 1, 2), (0, 2), 2, 2)],
)
def test_a_later_holder_of_a_tied_parameter_lags(
    replicas: tuple[int, ...], together: tuple[int, ...], stage: int, lag: int
) -> None:
    """By the rounds in which the first holder cannot have finished: never more, or copies would drift for nothing."""
    every = tuple(2 if s in together and max(replicas) > 1 else r for s, r in enumerate(replicas))
    shape = replace(ExecutionConfig.of_schedule("1f1b").shape(replicas), update_every=every)
    assert tied_update_lag(shape, together, stage) == lag
