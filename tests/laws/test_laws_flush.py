"""Law 2: a schedule with a flush, and data parallelism, train to the weights of the unsplit model; law 5 for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import (
    CONV1,
    CONV2,
    CONV3,
    CONV4,
    LSTM3,
    MLP6,
    SKIP1,
    SKIP3,
    SKIP4,
    TIED3,
    TIED4,
    TOLERANCE,
    UNUSED1,
    Toy,
    assert_same,
    batches,
    weights,
    without_statistics,
)
from reference import replay

from pdtool.frontend.model_file import ModelFile
from pdtool.schedule import SCHEDULES

TWO: dict[str, Any] = {"chunks": 2}
CHUNKED = [kind.name for kind in SCHEDULES.values() if kind.chunked]

CASES = [
    pytest.param(CONV3, (1, 1, 1), "1f1b-flush", 3, "sgd", {}, id="flush"),
    pytest.param(CONV3, (1, 1, 1), "gpipe", 3, "adam", {}, id="gpipe"),
    pytest.param(CONV2, (2, 1), "1f1b-flush", 4, "adam", {}, id="flush-2-1"),
    pytest.param(SKIP3, (1, 2, 1), "gpipe", 2, "sgd", {}, id="skip-gpipe-1-2-1"),
    pytest.param(LSTM3, (1, 1, 1), "1f1b-flush", 2, "sgd", {}, id="lstm-flush"),
    pytest.param(TIED3, (1, 1, 1), "1f1b-flush", 3, "adam", {}, id="tied-flush"),
    pytest.param(TIED3, (2, 1, 1), "gpipe", 2, "sgd", {}, id="tied-gpipe-2-1-1"),
    pytest.param(CONV1, (1,), "1f1b", 1, "adam", {}, id="one-worker"),
    # two or three stages on each of two workers
    *(
        pytest.param(toy, replicas, name, microbatches, optimizer, settings, id=case.format(name))
        for name in CHUNKED
        for toy, replicas, microbatches, optimizer, settings, case in [
            (CONV4, (1, 1), 4, "sgd", TWO | {"steps": 6}, "{}"),
            (MLP6, (1, 1), 4, "sgd", {"chunks": 3, "steps": 6}, "{}-3-chunks"),
            (CONV4, (2, 2), 4, "sgd", TWO, "{}-2-2"),
            (SKIP4, (1, 1), 2, "sgd", TWO, "skip-{}"),
            (TIED4, (1, 1), 4, "adam", TWO | {"steps": 6}, "tied-{}"),
        ]
    ),
    pytest.param(CONV3, (1, 1, 1), "zb-h1", 4, "sgd", {}, id="zb"),
    pytest.param(CONV2, (2, 2), "zb-h1", 4, "adam", {}, id="zb-2-2"),
    pytest.param(LSTM3, (1, 1, 1), "zb-h1", 3, "sgd", {}, id="lstm-zb"),
    pytest.param(SKIP3, (1, 1, 1), "zb-h1", 3, "adam", {}, id="skip-zb"),
    pytest.param(TIED3, (1, 1, 1), "zb-h1", 3, "sgd", {}, id="tied-zb"),
    # more in flight than there are stages
    pytest.param(CONV3, (1, 1, 1), "1f1b-flush", 6, "adam", {"in_flight": (6, 3, 1)}, id="deep-flush"),
    pytest.param(SKIP3, (1, 2, 1), "1f1b-flush", 5, "sgd", {"in_flight": (5, 2, 1)}, id="skip-deep-flush-1-2-1"),
    pytest.param(TIED3, (1, 1, 1), "zb-h1", 6, "sgd", {"in_flight": (5, 5, 5)}, id="tied-deep-zb"),
    pytest.param(CONV2, (2, 2), "zb-h1", 6, "adam", {"in_flight": (3, 3)}, id="deep-zb-2-2"),
    pytest.param(
        CONV4, (1, 1), "interleaved", 6, "sgd", TWO | {"steps": 6, "in_flight": (8, 6)}, id="deep-interleaved"
    ),
]


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize(("toy", "replicas", "schedule", "microbatches", "optimizer", "settings"), CASES)
def test_a_synchronous_schedule_equals_the_unsplit_model(
    tmp_path: Path,
    toy: Toy,
    replicas: tuple[int, ...],
    schedule: str,
    microbatches: int,
    optimizer: str,
    settings: dict[str, Any],
) -> None:
    """Gradients accumulated over the microbatches of a round, on the same samples. 7 minibatches of 4, the last one
    and the last round short; where that makes groups of another size than the paper's, 6."""
    spec = harness.job(
        tmp_path, toy, replicas, schedule=schedule, microbatches=microbatches, optimizer=optimizer, epochs=2, **settings
    )
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, microbatches)
    found = weights(outcomes)
    assert_same(found, expected if max(replicas) == 1 else without_statistics(expected))
    assert all(outcome.peak_versions == 1 for outcome in outcomes)
    for o in outcomes:
        mine = len(range(o.replica, microbatches, replicas[o.stage % len(replicas)]))
        if "in_flight" not in settings:
            assert o.peak_stashed == replay.peak_stashed(schedule, replicas, o.stage, mine, spec.plan.chunks)
        elif spec.plan.chunks == 1:
            assert o.peak_stashed == min(settings["in_flight"][o.stage], mine)


@pytest.mark.parametrize("name", CHUNKED)
def test_groups_of_minibatches_may_be_larger_than_the_paper_of_interleaved_has_them(tmp_path: Path, name: str) -> None:
    """Rounds of 5 and 2 minibatches on two workers: groups of 3 and 2, and of 2."""
    spec = harness.job(tmp_path, CONV4, schedule=name, chunks=2, microbatches=5, optimizer="adam", epochs=2)
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, 5)
    assert_same(weights(outcomes), expected)
    assert all(o.peak_stashed <= spec.plan.stages[o.stage].in_flight for o in outcomes)


@pytest.mark.parametrize(("toy", "optimizer"), [(SKIP1, "sgd"), (UNUSED1, "decay")], ids=["skip", "unused"])
def test_data_parallelism_equals_one_process_with_the_same_global_minibatch(
    tmp_path: Path, toy: Toy, optimizer: str
) -> None:
    """One stage on three workers: an update every three minibatches (7 of them: the last round is short)."""
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
    first, second, third = batches(spec)[0]
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


CONSTANTS = {
    "mask": "torch.full((4, 4), float('-inf')).triu(1)",
    "tenth": "torch.full((7,), 0.1)",
    "turned": "torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).t()",
    "spread": "torch.full((1,), 0.3).expand(3)",
    "waves": "torch.polar(torch.ones(2), torch.tensor([0.1, 0.7]))",
    "empty": "torch.empty(0, 2)",
    "counts": "torch.ones(2, dtype=torch.int16)",
    "coarse": "torch.full((2,), 0.7, dtype=torch.bfloat16)",
}


@pytest.mark.parametrize("steps", [1, 3], ids=["one-replica-idle", "both-busy"])
def test_constant_buffers_stay_as_they_are(tmp_path: Path, steps: int) -> None:
    """To the last bit, in a resumed run too; also where a replica had no minibatch, and lacks a buffer that forward
    makes."""
    buffers = "; ".join(f"self.register_buffer('{name}', {value})" for name, value in CONSTANTS.items())
    init = f"self.fc = nn.Linear(72, 4); {buffers}"
    made = "hasattr(self, 'made') or self.register_buffer('made', torch.ones(2))"
    forward = f"x: {made}; return self.fc(x.flatten(1)) @ self.mask.softmax(1)"
    stages = ((harness.stage(0, init, forward), ("x",), ()),)
    toy = replace(CONV1, model=harness.IMAGES + harness.model(init, forward), stages=stages)
    spec = harness.job(tmp_path, toy, (2,), steps=steps, epochs=3)
    harness.run(replace(spec, epochs=2))
    outcomes = harness.run(replace(spec, resume=spec.out))
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    constants = {name: model.get_buffer(name).clone() for name in CONSTANTS}
    expected = replay.synchronous(model, batches(spec), file.loss, file.optimizer, 2)
    for outcome in outcomes:
        assert_same(outcome.state, {name: expected[name] for name in ("fc.weight", "fc.bias")})
        assert_same(outcome.state, constants, rtol=0, atol=0)


@pytest.mark.parametrize("bucket_bytes", [1, 2**20], ids=["many-buckets", "one"])
def test_a_layer_that_a_reentrant_checkpoint_uses_again_sums_all_its_gradients(
    tmp_path: Path, bucket_bytes: int
) -> None:
    """The backward of such a checkpoint is one of its own, after which the gradient of a parameter seems complete."""
    init = "self.before = nn.Linear(72, 8); self.layer = nn.Linear(8, 8); self.fc = nn.Linear(8, 4)"
    again = "h = checkpoint(lambda h: torch.tanh(self.layer(h)), h, use_reentrant=True)"
    forward = (
        "x: from torch.utils.checkpoint import checkpoint; h = self.before(x.flatten(1)); "
        f"{again}; {again}; {again}; h = self.layer(h); return self.fc(h)"
    )
    stages = ((harness.stage(0, init, forward), ("x",), ()),)
    toy = replace(CONV1, model=harness.IMAGES + harness.model(init, forward), stages=stages)
    spec = harness.job(tmp_path, toy, (2,), optimizer="decay", epochs=2, bucket_bytes=bucket_bytes)
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, 2)
    for outcome in outcomes:
        assert_same(outcome.state, expected)
