"""Laws 2, 3, 5 and 8: what the workers train is what the definitions say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import harness
import pytest
import replay
import torch
from harness import CONV1, CONV2, CONV3, LSTM3, SKIP1, SKIP3, TIED3, UNUSED1, Outcome

from pdtool.frontend.modelfile import ModelFile
from pdtool.run.data import sample_order
from pdtool.run.spec import RunSpec

NOTE = """
def note(i, samples):
    import os
    if samples == SAMPLES:  # not the validation set
        with open(f"{}/seen-{{os.getpid()}}", "a") as file:
            file.write(f"{{i}} ")
"""
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def batches(spec: RunSpec) -> list[list[replay.Batch]]:
    """The minibatches of every epoch, as the replays take them."""
    data = ModelFile.load(spec.model, trusted=True).dataset("train")
    size = spec.plan.batch_size
    out = []
    for epoch in range(1, spec.epochs + 1):
        order = sample_order(spec.seed, epoch, len(data))
        out.append([(data.x[order[i : i + size]], data.y[order[i : i + size]]) for i in range(0, len(data), size)])
    return out


def weights(outcomes: list[Outcome], replica: int = 0) -> dict[str, torch.Tensor]:
    """The state of all stages together."""
    return {name: value for o in outcomes if o.replica == replica for name, value in o.state.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, msg=lambda text, n=name: f"{n}: {text}", **(tolerance or TOLERANCE)
        )


def without_statistics(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without batch norm's counts and running statistics, of which each replica has seen its share only."""
    return {n: v for n, v in state.items() if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))}


def stage_of(spec: RunSpec) -> dict[str, int]:
    return {name: s for s, stage in enumerate(spec.bundle.stages) for name in stage.parameters}


ASYNCHRONOUS = [
    pytest.param(CONV2, (1, 1), "sgd", id="conv-two-stages"),
    pytest.param(CONV3, (1, 1, 1), "sgd", id="conv-three-stages"),
    pytest.param(CONV3, (1, 1, 1), "adam", id="conv-three-stages-adam"),
    pytest.param(CONV2, (2, 1), "plain", id="conv-2-1"),
    pytest.param(CONV2, (1, 2), "sgd", id="conv-1-2"),
    pytest.param(CONV2, (2, 2), "sgd", id="conv-2-2"),
    pytest.param(CONV2, (3, 1), "adam", id="conv-3-1-uneven-rounds"),
    pytest.param(SKIP3, (1, 1, 1), "sgd", id="skip"),
    pytest.param(SKIP3, (2, 1, 2), "sgd", id="skip-2-1-2"),
    pytest.param(LSTM3, (1, 1, 1), "adam", id="lstm"),
]


@pytest.mark.parametrize(("toy", "replicas", "optimizer"), ASYNCHRONOUS)
def test_1f1b_equals_its_replay_and_keeps_no_more_than_the_plan_says(
    tmp_path: Path, toy: harness.Toy, replicas: tuple[int, ...], optimizer: str
) -> None:
    """Law 3, and law 5. 26 samples in minibatches of 4: 7 minibatches, which 2 or 3 replicas do not divide, the
    last one short."""
    spec = harness.job(tmp_path, toy, replicas, optimizer=optimizer, epochs=2)
    outcomes = harness.run(spec)
    shape = spec.plan.shape()
    file = ModelFile.load(spec.model, trusted=True)
    stage = stage_of(spec)
    model = file.build(spec.seed)
    expected = replay.asynchronous(
        model, stage.__getitem__, batches(spec), file.loss, file.optimizer, replicas, shape.in_flight, replicas
    )
    for replica in range(max(replicas)):
        found = weights(outcomes, replica)
        assert_same(found, {n: v for n, v in expected.items() if n in found})
    if max(replicas) == 1:  # running statistics too: every minibatch went through the same module, in order
        assert_same(weights(outcomes), dict(model.named_buffers()))
    for outcome in outcomes:
        local, most = len(range(outcome.replica, 7, replicas[outcome.stage])), shape.in_flight[outcome.stage]
        assert outcome.peak_stashed == min(most, local)
        assert outcome.peak_versions == replay.peak_versions(local, most) <= most


SYNCHRONOUS = [
    pytest.param(CONV3, (1, 1, 1), "1f1b-flush", 3, "sgd", id="flush"),
    pytest.param(CONV3, (1, 1, 1), "gpipe", 3, "adam", id="gpipe"),
    pytest.param(CONV2, (2, 1), "1f1b-flush", 4, "adam", id="flush-2-1"),
    pytest.param(SKIP3, (1, 2, 1), "gpipe", 2, "sgd", id="skip-gpipe-1-2-1"),
    pytest.param(LSTM3, (1, 1, 1), "1f1b-flush", 2, "sgd", id="lstm-flush"),
    pytest.param(TIED3, (1, 1, 1), "1f1b-flush", 3, "adam", id="tied-flush"),
    pytest.param(TIED3, (2, 1, 1), "gpipe", 2, "sgd", id="tied-gpipe-2-1-1"),
    pytest.param(CONV1, (1,), "1f1b", 1, "adam", id="one-worker"),
]


@pytest.mark.parametrize(("toy", "replicas", "schedule", "microbatches", "optimizer"), SYNCHRONOUS)
def test_a_synchronous_schedule_equals_the_unsplit_model(
    tmp_path: Path, toy: harness.Toy, replicas: tuple[int, ...], schedule: str, microbatches: int, optimizer: str
) -> None:
    """Law 2: gradients accumulated over the microbatches of a round, on the same samples."""
    in_flight = (microbatches,) * len(replicas) if schedule == "gpipe" else ()
    spec = harness.job(tmp_path, toy, replicas, schedule=schedule, microbatches=microbatches, optimizer=optimizer,
                       in_flight=in_flight, epochs=2)  # fmt: skip
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, microbatches)
    found = weights(outcomes)
    assert_same(found, expected if max(replicas) == 1 else without_statistics(expected))
    assert all(outcome.peak_versions == 1 for outcome in outcomes)


@pytest.mark.parametrize(("toy", "optimizer"), [(SKIP1, "sgd"), (UNUSED1, "decay")], ids=["skip", "unused"])
def test_data_parallelism_equals_one_process_with_the_same_global_minibatch(
    tmp_path: Path, toy: harness.Toy, optimizer: str
) -> None:
    """Law 2 for one stage on three workers: an update every three minibatches (7 of them: the last round is short)."""
    spec = harness.job(tmp_path, toy, (3,), optimizer=optimizer, epochs=2)
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, 3)
    for replica in range(3):
        assert_same(weights(outcomes, replica), without_statistics(expected))


def test_replicas_share_their_running_statistics(tmp_path: Path) -> None:
    """Buffers are averaged when an epoch ends, weighted by the minibatches each replica saw: here 0 and 2, and 1."""
    spec = harness.job(tmp_path, CONV1, (2,), steps=3)
    left, right = harness.run(spec)
    assert_same(left.state, right.state, rtol=0, atol=0)
    file = ModelFile.load(spec.model, trusted=True)
    first, second, third = batches(spec)[0][:3]
    models = [file.build(spec.seed), file.build(spec.seed)]
    models[0](first[0])
    models[1](second[0])
    trained = replay.synchronous(file.build(spec.seed), [[first, second]], file.loss, file.optimizer, 2)
    models[0].load_state_dict({n: v for n, v in trained.items() if not n.startswith("bn.")}, strict=False)
    models[0](third[0])
    for name in ("bn.running_mean", "bn.running_var"):
        torch.testing.assert_close(
            left.state[name], (2 * models[0].get_buffer(name) + models[1].get_buffer(name)) / 3, **TOLERANCE
        )


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1, 1), (1, 1, 2)])
def test_tied_weights_without_flush_equal_their_replay_and_each_other(
    tmp_path: Path, replicas: tuple[int, ...]
) -> None:
    """Law 3 for a parameter that the first and the last stage hold."""
    spec = harness.job(tmp_path, TIED3, replicas, optimizer="adam", epochs=2)
    outcomes = harness.run(spec)
    shape = spec.plan.shape(((0, 2),))
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    model.out.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    stage = stage_of(spec)
    expected = replay.asynchronous_tied(
        model, ("embed.weight", "out.weight"), stage.__getitem__, batches(spec), file.loss, file.optimizer, replicas,
        shape.in_flight, shape.update_every,
    )  # fmt: skip
    found = weights(outcomes)
    assert torch.equal(found["embed.weight"], found["out.weight"])
    assert_same(found, expected)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2)])
def test_the_plan_changes_no_samples_place_in_the_order(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    """Law 8: what minibatch i holds is a function of seed and epoch; a permutation, another one in each epoch."""
    source = CONV2.model.replace("return self.x[i]", "note(i, len(self.y)); return self.x[i]") + NOTE.format(tmp_path)
    toy = replace(CONV2, model=source)
    spec = harness.job(tmp_path, toy, replicas, epochs=2)
    harness.run(spec)
    seen = [[int(i) for i in path.read_text().split()] for path in sorted(tmp_path.glob("seen-*"))]
    order = [sample_order(spec.seed, epoch, 26) for epoch in (1, 2)]
    expected = [  # each worker of the first stage looks at sample 0 first, to describe the data
        [0, *(i for epoch in order for m in range(k, 7, replicas[0]) for i in epoch[4 * m : 4 * m + 4])]
        for k in range(replicas[0])
    ]
    assert sorted(seen) == sorted(expected)
    assert sorted(order[0]) == sorted(order[1]) == list(range(26))
    assert order[0] != order[1]


def test_the_same_seed_gives_the_same_result_bit_for_bit(tmp_path: Path) -> None:
    """Law 8: weights, buffers and every line of metrics.jsonl; another seed gives others."""
    runs = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        spec = harness.job(tmp_path / name, CONV2, (2, 1), epochs=2, seed=seed)
        runs.append((weights(harness.run(spec)), (spec.out / "metrics.jsonl").read_text()))
    assert runs[0][1] == runs[1][1] != runs[2][1]
    assert_same(runs[0][0], runs[1][0], rtol=0, atol=0)
    assert not torch.equal(runs[0][0]["conv1.weight"], runs[2][0]["conv1.weight"])
