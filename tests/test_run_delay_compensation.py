"""Corrections of delay: what the workers train equals a replay from the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV3, LSTM3, TIED3, Toy, assert_same, batches, stage_of, weights
from torch import Tensor, nn
from torch.func import functional_call

from pdtool.errors import UsageError
from pdtool.frontend.modelfile import ModelFile
from pdtool.run.weights.delay_compensation import DelayCompensation
from pdtool.schedule import PipelineShape, default_shape, gradient_delays


def replay(
    model: nn.Module,
    stage: dict[str, int],
    epochs: Sequence[Sequence[tuple[Tensor, Any]]],
    loss: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    kind: str,
    value: float | None,
) -> dict[str, Tensor]:
    """A straight pipeline of p stages, one update a minibatch: at stage s minibatch t sees version t - tau, with
    tau = p - 1 - s, of what that stage lets forwards see."""
    named = dict(model.named_parameters())
    p = 1 + max(stage.values())
    tau = {n: p - 1 - stage[n] for n in named}
    optimizers = [make_optimizer([(n, named[n]) for n in named if stage[n] == s]) for s in range(p)]
    d = {n: torch.zeros_like(w) for n, w in named.items()}
    updates = 0

    def seen(n: str) -> Tensor:
        ahead = {"weight-prediction": tau[n], "nesterov": value if value is not None else 0.9}.get(kind, 0)
        return (named[n].detach() + ahead * d[n]).clone()

    for minibatches in epochs:
        history = [{n: seen(n) for n in named}]
        for t, (x, y) in enumerate(minibatches):
            used = {n: history[max(0, t - tau[n])][n].clone().requires_grad_() for n in named}
            gradients = torch.autograd.grad(loss(functional_call(model, used, (x,)), y), list(used.values()))
            before = {n: w.detach().clone() for n, w in named.items()}
            for n, gradient in zip(used, gradients, strict=True):
                named[n].grad = gradient
            for s, optimizer in enumerate(optimizers):
                power = 1.0 if value is None else max(0.0, 1 - updates / value)
                factor = max(1, p - 1 - s) ** power if kind == "lr-discount" else 1.0
                for group in optimizer.param_groups:
                    group["lr"] /= factor
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] *= factor
            updates += 1
            for n, w in named.items():
                step = w.detach() - before[n]
                gain = 0.9 if value is None else value
                d[n] = gain * d[n] + (1 - gain) * step if kind == "nesterov" else step
                if kind == "nesterov":
                    w.data.copy_(before[n] + d[n])
            history.append({n: seen(n) for n in named})
    return {n: w.detach() for n, w in named.items()}


@pytest.mark.parametrize(
    ("toy", "optimizer", "text"),
    [
        pytest.param(CONV3, "sgd", "weight-prediction", id="prediction-momentum"),
        pytest.param(LSTM3, "adam", "weight-prediction", id="prediction-adam-lstm"),
        pytest.param(CONV3, "plain", "nesterov=0.8", id="nesterov-plain"),
        pytest.param(CONV3, "adam", "nesterov", id="nesterov-adam"),
        pytest.param(CONV3, "sgd", "lr-discount", id="discount"),
        pytest.param(LSTM3, "adam", "lr-discount=10", id="discount-annealed-adam-lstm"),
    ],
)
def test_a_corrected_run_equals_its_replay_and_goes_on_from_a_checkpoint(
    tmp_path: Path, toy: Toy, optimizer: str, text: str
) -> None:
    """Three stages, two epochs of 7 minibatches; then the second epoch again, resumed from the first."""
    asked = DelayCompensation.parse(text)
    spec = harness.job(tmp_path, toy, optimizer=optimizer, epochs=2, delay_compensation=asked)
    found = weights(harness.run(spec))
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    expected = replay(model, stage_of(spec), batches(spec), file.loss, file.optimizer, asked.kind, asked.value)
    assert_same(found, expected)
    plain = harness.job(tmp_path / "plain", toy, optimizer=optimizer, epochs=2)
    uncorrected = weights(harness.run(plain))
    assert any(not torch.allclose(found[n], uncorrected[n], rtol=1e-4, atol=1e-5) for n in expected), "it did nothing"
    first = harness.job(tmp_path / "one", toy, optimizer=optimizer, epochs=1, delay_compensation=asked)
    harness.run(first)
    resumed = harness.job(
        tmp_path / "two", toy, optimizer=optimizer, epochs=2, delay_compensation=asked, resume=first.out
    )
    for name, value in weights(harness.run(resumed)).items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("text", ["nesterov", "weight-prediction"])
def test_copies_of_a_tied_parameter_stay_equal_under_a_correction(tmp_path: Path, text: str) -> None:
    spec = harness.job(tmp_path, TIED3, optimizer="adam", epochs=1, delay_compensation=DelayCompensation.parse(text))
    found = weights(harness.run(spec))
    assert torch.equal(found["embed.weight"], found["out.weight"])


def test_the_delay_of_a_stage_is_that_of_its_schedule() -> None:
    """FACTS: p - 1 - r updates for PipeDream, 1 for 2BW, none with a flush; with vertical sync that of the first."""
    assert gradient_delays("1f1b", default_shape("1f1b", (1,) * 4)) == [3, 2, 1, 0]
    assert gradient_delays("2bw", default_shape("2bw", (1,) * 4)) == [1, 1, 1, 1]
    for name in ("1f1b-flush", "gpipe", "zb-h1"):
        assert gradient_delays(name, default_shape(name, (1,) * 4, 6)) == [0, 0, 0, 0]
    shape = PipelineShape(replicas=(1,) * 3, in_flight=(3, 2, 1), update_every=(1,) * 3, weights="vertical-sync")
    assert gradient_delays("1f1b", shape) == [2, 2, 2]


@pytest.mark.parametrize("text", ["adam", "nesterov=1", "nesterov=x", "lr-discount=0", "weight-prediction=2", ""])
def test_what_is_no_correction_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"correction .* is unknown; give lr-discount"):
        DelayCompensation.parse(text)
