"""Corrections of delay: what the workers train equals a replay from the papers' formulas."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
import torch
from harness import CONV3, LSTM3, TIED3, Toy, assert_same, batches, stage_of, weights
from reference import delay_corrections

from pdtool.api.training import note_idle_correction
from pdtool.errors import UsageError
from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.corrections import DelayCompensation
from pdtool.schedule import SCHEDULES, ExecutionConfig, gradient_delays


@pytest.mark.rows_of_the_day(days=3)
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
    spec = harness.job(tmp_path, toy, optimizer=optimizer, epochs=2, correction=text)
    found = weights(harness.run(spec))
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    arguments = (stage_of(spec), batches(spec), file.loss, file.optimizer, asked.kind, asked.value)
    expected = delay_corrections.straight(model, *arguments)
    assert_same(found, expected)
    plain = harness.job(tmp_path / "plain", toy, optimizer=optimizer, epochs=2)
    uncorrected = weights(harness.run(plain))
    assert any(not torch.allclose(found[n], uncorrected[n], rtol=1e-4, atol=1e-5) for n in expected), "it did nothing"
    first = harness.job(tmp_path / "one", toy, optimizer=optimizer, epochs=1, correction=text)
    harness.run(first)
    resumed = harness.job(tmp_path / "two", toy, optimizer=optimizer, epochs=2, correction=text, resume=first.out)
    for name, value in weights(harness.run(resumed)).items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("text", ["nesterov", "weight-prediction"])
def test_copies_of_a_tied_parameter_stay_equal_under_a_correction(tmp_path: Path, text: str) -> None:
    spec = harness.job(tmp_path, TIED3, optimizer="adam", epochs=1, correction=text)
    found = weights(harness.run(spec))
    assert torch.equal(found["embed.weight"], found["out.weight"])


def test_the_delay_of_a_stage_is_that_of_its_schedule() -> None:
    """FACTS: p - 1 - r updates for PipeDream, 1 for 2BW, none with a flush; with vertical sync that of the first."""
    assert gradient_delays(SCHEDULES["1f1b"], ExecutionConfig.of_schedule("1f1b").shape((1,) * 4)) == [3, 2, 1, 0]
    assert gradient_delays(SCHEDULES["2bw"], ExecutionConfig.of_schedule("2bw").shape((1,) * 4)) == [1, 1, 1, 1]
    for name in ("1f1b-flush", "gpipe", "zb-h1"):
        assert gradient_delays(SCHEDULES[name], ExecutionConfig.of_schedule(name, 6).shape((1,) * 4)) == [0, 0, 0, 0]
    shape = ExecutionConfig(weights="vertical-sync").shape((1,) * 3)
    assert gradient_delays(SCHEDULES["1f1b"], shape) == [2, 2, 2]


@pytest.mark.parametrize("text", ["adam", "nesterov=1", "nesterov=x", "lr-discount=0", "weight-prediction=2", ""])
def test_what_is_no_correction_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"correction .* is unknown; pass lr-discount"):
        DelayCompensation.parse(text)


@pytest.mark.parametrize(
    ("replicas", "text", "said"),
    [
        ((1, 1), "lr-discount", "changes nothing: the gradients of this plan are at most 1 update late"),
        ((2,), "weight-prediction", "changes nothing: the gradients of this plan are not late"),
        ((1, 1), "weight-prediction", ""),
        ((1, 1, 1), "lr-discount=40", ""),
        ((1,), "nesterov", ""),
    ],
)
def test_a_correction_that_changes_nothing_is_noted(
    tmp_path: Path, replicas: tuple[int, ...], text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a flush it is refused; without one nothing was said."""
    toy = {1: harness.CONV1, 2: harness.CONV2, 3: CONV3}[len(replicas)]
    note_idle_correction(harness.job(tmp_path, toy, replicas, correction=text))
    stderr = capsys.readouterr().err
    assert said in stderr if said else not stderr
