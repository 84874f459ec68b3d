"""Laws 3 and 5: what the workers train while minibatches are in flight is what the definitions say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV2, CONV3, LSTM3, SKIP1, SKIP3, TIED3, Outcome, Toy, assert_same, batches, stage_of, weights
from reference import replay

from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.config import RunConfig

# 26 samples: 7 minibatches of 4, or 13 of 2, which no update divides; the last one short
SMALL: dict[str, Any] = {"batch_size": 2}
SYNC: dict[str, Any] = {"weights": "vertical-sync"}
NONE: dict[str, Any] = {"weights": "none"}
BW2: dict[str, Any] = {"schedule": "2bw", **SMALL}

CASES = [  # the last column is k[s], minibatches in an update: in PipeDream as many as there are replicas
    pytest.param(CONV2, (1, 1), "sgd", {}, (1, 1), id="conv-two-stages"),
    pytest.param(CONV3, (1, 1, 1), "adam", {}, (1, 1, 1), id="conv-three-stages"),
    pytest.param(CONV2, (2, 1), "plain", {}, (2, 1), id="conv-2-1"),
    pytest.param(CONV2, (1, 2), "sgd", {}, (1, 2), id="conv-1-2"),
    pytest.param(CONV2, (2, 2), "sgd", {}, (2, 2), id="conv-2-2"),
    pytest.param(CONV2, (3, 1), "adam", {}, (3, 1), id="conv-3-1"),
    pytest.param(SKIP3, (1, 1, 1), "sgd", {}, (1, 1, 1), id="skip"),
    pytest.param(SKIP3, (2, 1, 2), "sgd", {}, (2, 1, 2), id="skip-2-1-2"),
    pytest.param(LSTM3, (1, 1, 1), "adam", {}, (1, 1, 1), id="lstm"),
    # gradients added up over more minibatches, also unevenly: of 3, one replica has 2 and the other 1, in turns
    pytest.param(CONV3, (1, 1, 1), "sgd", {"update_every": 2}, (2, 2, 2), id="every-2"),
    pytest.param(CONV2, (2, 1), "sgd", {"update_every": 2}, (2, 2), id="every-2-2-1"),
    pytest.param(CONV2, (2, 1), "adam", {"update_every": 3, **SMALL}, (3, 3), id="every-3-2-1"),
    pytest.param(CONV2, (2, 1), "sgd", {"update_every": 4, **SMALL}, (4, 4), id="every-4-2-1"),
    pytest.param(CONV2, (3, 1), "sgd", {"update_every": 3}, (3, 3), id="every-3-3-1"),
    pytest.param(CONV2, (3, 1), "sgd", {"update_every": 6, **SMALL}, (6, 6), id="every-6-3-1"),
    pytest.param(CONV3, (1, 1, 1), "adam", SYNC, (1, 1, 1), id="sync-conv"),
    pytest.param(LSTM3, (1, 1, 1), "adam", SYNC, (1, 1, 1), id="sync-lstm"),
    pytest.param(SKIP3, (1, 1, 1), "sgd", SYNC | {"update_every": 2, **SMALL}, (2, 2, 2), id="sync-skip-every-2"),
    pytest.param(CONV2, (2, 1), "plain", SYNC | SMALL, (2, 2), id="sync-conv-2-1"),
    pytest.param(CONV2, (1, 2), "sgd", SYNC | SMALL, (2, 2), id="sync-conv-1-2"),
    pytest.param(CONV2, (3, 1), "adam", SYNC | SMALL, (3, 3), id="sync-conv-3-1"),
    pytest.param(SKIP3, (2, 1, 2), "sgd", SYNC | SMALL, (2, 2, 2), id="sync-skip-2-1-2"),
    pytest.param(CONV3, (1, 1, 1), "sgd", NONE, (1, 1, 1), id="none-conv"),
    pytest.param(LSTM3, (1, 1, 1), "adam", NONE, (1, 1, 1), id="none-lstm"),
    pytest.param(SKIP3, (2, 1, 2), "sgd", NONE | SMALL, (2, 1, 2), id="none-skip-2-1-2"),
    pytest.param(CONV2, (3, 1), "adam", NONE | SMALL, (3, 1), id="none-conv-3-1"),
    pytest.param(CONV3, (1, 1, 1), "sgd", BW2, (3, 3, 3), id="2bw-conv"),
    pytest.param(LSTM3, (1, 1, 1), "adam", BW2 | {"update_every": 4}, (4, 4, 4), id="2bw-lstm-every-4"),
    pytest.param(CONV2, (2, 1), "sgd", BW2, (4, 4), id="2bw-conv-2-1"),
    pytest.param(CONV2, (1, 2), "sgd", BW2, (3, 3), id="2bw-conv-1-2"),
    pytest.param(SKIP3, (2, 1, 2), "sgd", BW2 | {"batch_size": 1}, (6, 6, 6), id="2bw-skip-2-1-2"),
]


def pipeline(spec: RunConfig, replicas: tuple[int, ...], every: tuple[int, ...]) -> replay.Pipeline:
    """As the replay takes it, with the paper's numbers in flight."""
    in_flight = [math.ceil(sum(replicas[s:]) / r) for s, r in enumerate(replicas)]
    return replay.Pipeline(replicas, in_flight, every, spec.plan.weights)


def assert_kept(spec: RunConfig, outcomes: list[Outcome], expected: replay.Pipeline) -> None:
    """Law 5, of every worker: as many versions and minibatches as the definitions need; the plan allows them."""
    minibatches = math.ceil(26 / spec.plan.batch_size)
    shape = spec.plan.shape(tuple(tied.stages for tied in spec.bundle.tied))
    for o in outcomes:
        assert o.peak_stashed == expected.peak_stashed(o.stage, o.replica, minibatches) <= shape.in_flight[o.stage]
        assert o.peak_versions == expected.peak_versions(o.stage, o.replica, minibatches) <= shape.versions(o.stage)
        if max(expected.replicas) == 1:
            assert o.peak_versions == shape.versions(o.stage)


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize(("toy", "replicas", "optimizer", "settings", "every"), CASES)
def test_1f1b_equals_its_replay_and_keeps_no_more_than_the_plan_says(
    tmp_path: Path,
    toy: Toy,
    replicas: tuple[int, ...],
    optimizer: str,
    settings: dict[str, Any],
    every: tuple[int, ...],
) -> None:
    spec = harness.job(tmp_path, toy, replicas, optimizer=optimizer, epochs=2, **settings)
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    model, definition = file.build(spec.seed), pipeline(spec, replicas, every)
    expected = replay.asynchronous(
        model, stage_of(spec).__getitem__, batches(spec), file.loss, file.optimizer, definition
    )
    for replica in range(max(replicas)):
        found = weights(outcomes, replica)
        assert_same(found, {n: v for n, v in expected.items() if n in found})
    if max(replicas) == 1:  # running statistics too: every minibatch went through the same module, in order
        assert_same(weights(outcomes), dict(model.named_buffers()))
    assert_kept(spec, outcomes, definition)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("replicas", "settings", "every"),
    [
        pytest.param((1, 1, 1), {}, (1, 1, 1), id="straight"),
        pytest.param((2, 1, 1), {}, (2, 1, 2), id="2-1-1"),
        pytest.param((1, 1, 2), {}, (2, 1, 2), id="1-1-2"),
        pytest.param((1, 1, 1), {"update_every": 2}, (2, 2, 2), id="every-2"),
        pytest.param((2, 1, 1), {"update_every": 3, **SMALL}, (3, 3, 3), id="every-3-2-1-1"),
        pytest.param((1, 1, 1), SYNC | SMALL, (1, 1, 1), id="sync"),
        pytest.param((1, 1, 2), SYNC | SMALL, (2, 2, 2), id="sync-1-1-2"),
        pytest.param((1, 1, 1), NONE, (1, 1, 1), id="none"),
        pytest.param((1, 1, 1), BW2, (3, 3, 3), id="2bw"),
        pytest.param((2, 1, 1), BW2, (4, 4, 4), id="2bw-2-1-1"),
    ],
)
def test_tied_weights_without_flush_equal_their_replay_and_each_other(
    tmp_path: Path, replicas: tuple[int, ...], settings: dict[str, Any], every: tuple[int, ...]
) -> None:
    """For a parameter that the first and the last stage hold."""
    spec = harness.job(tmp_path, TIED3, replicas, optimizer="adam", epochs=2, **settings)
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    model, definition = file.build(spec.seed), pipeline(spec, replicas, every)
    model.out.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    expected = replay.asynchronous(
        model,
        stage_of(spec).__getitem__,
        batches(spec),
        file.loss,
        file.optimizer,
        definition,
        ("embed.weight", "out.weight"),
    )
    found = weights(outcomes)
    assert torch.equal(found["embed.weight"], found["out.weight"])
    assert_same(found, expected)
    assert_kept(spec, outcomes, definition)


def autoencoder(decoder: str, decode: str, row: str, read: str) -> Toy:
    """Three stages, the second of which decodes with the transposed weight of its encoder, and reads a row of it."""
    layers = ("self.a = nn.Linear(6, 7)", "self.b = nn.Linear(7, 3)", "self.c = nn.Linear(7, 4)")
    forward = f"h = torch.tanh(self.b(h) + {read}); k = {decode}"
    in_stage = f"{layers[1]}; {decoder}; {row}".replace("self.b.weight.detach()[1, :3]", "torch.zeros(3)")
    own = harness.model(
        "; ".join((layers[0], layers[1], decoder.replace("torch.zeros(7, 3)", "self.b.weight.t()"), row, layers[2])),
        f"x: h = torch.tanh(self.a(x)); {forward}; return self.c(k)",
    )
    return Toy(
        model=SKIP1.model[: SKIP1.model.index("class Net")] + own,
        stages=(
            (harness.stage(0, layers[0], "x: return torch.tanh(self.a(x))"), ("x",), ("h",)),
            (harness.stage(1, in_stage, f"h: {forward}; return k"), ("h",), ("k",)),
            (harness.stage(2, layers[2], "k: return self.c(k)"), ("k",), ()),
        ),
        tensors=(harness.tensor("x", -1, [0], 6), harness.tensor("h", 0, [1], 7), harness.tensor("k", 1, [2], 7)),
    )


OVER_ONE_MEMORY = autoencoder(
    "self.d = nn.Parameter(torch.zeros(7, 3))",
    "h @ self.d.t()",
    'self.register_buffer("row", self.b.weight.detach()[1, :3])',
    "self.row",
)
USED_TWICE = autoencoder("", "h @ self.b.weight", "", "self.b.weight.detach()[1, :3]")


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize(
    ("replicas", "settings"),
    [
        pytest.param((1, 1, 1), {}, id="straight"),
        pytest.param((1, 2, 1), {}, id="1-2-1"),
        pytest.param((1, 1, 1), SYNC | SMALL, id="sync"),
        pytest.param((1, 1, 1), NONE, id="none"),
        pytest.param((1, 1, 1), BW2, id="2bw"),
        pytest.param((1, 1, 1), {"schedule": "1f1b-flush", "microbatches": 4}, id="flush"),
        pytest.param((1, 1, 1), {"correction": "weight-prediction"}, id="prediction"),
    ],
)
def test_parameters_and_buffers_over_one_memory_are_one_in_each_version(
    tmp_path: Path, replicas: tuple[int, ...], settings: dict[str, Any]
) -> None:
    """Two parameters over one memory take two steps in it, which with SGD are those of one that is used twice."""
    found, expected = (
        weights(harness.run(harness.job(tmp_path / name, toy, replicas, optimizer="sgd", epochs=2, **settings)))
        for name, toy in (("views", OVER_ONE_MEMORY), ("used-twice", USED_TWICE))
    )
    assert_same(found, expected | {"d": expected["b.weight"].t(), "row": expected["b.weight"][1, :3]})
