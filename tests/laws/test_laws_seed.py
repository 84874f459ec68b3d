"""Law 8: the same seed gives the same result, and the plan changes no sample's place in the order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV2, CONV4, Toy, assert_same, weights

from pdtool.runtime.loading.minibatches import sample_order

NOTE = """
def note(i, samples):
    import os
    if samples == SAMPLES:  # not the validation set
        with open(f"{}/seen-{{os.getpid()}}", "a") as file:
            file.write(f"{{i}} ")
"""
SYNC = {"weights": "vertical-sync"}
CHUNKS = {"schedule": "interleaved", "chunks": 2, "microbatches": 3}


@pytest.mark.parametrize(
    ("toy", "replicas", "settings"),
    [(CONV2, (1, 1), {}), (CONV2, (2, 1), SYNC), (CONV2, (1, 2), {}), (CONV4, (1, 1), CHUNKS)],
    ids=["straight", "sync-2-1", "1-2", "interleaved"],
)
def test_the_plan_changes_no_samples_place_in_the_order(
    tmp_path: Path, toy: Toy, replicas: tuple[int, ...], settings: dict[str, Any]
) -> None:
    """What minibatch i holds is a function of seed and epoch; a permutation, another one in each epoch."""
    source = toy.model.replace("return self.x[i]", "note(i, len(self.y)); return self.x[i]") + NOTE.format(tmp_path)
    spec = harness.job(tmp_path, replace(toy, model=source), replicas, epochs=2, **settings)
    harness.run(spec)
    seen = [[int(i) for i in path.read_text().split()] for path in sorted(tmp_path.glob("seen-*"))]
    order = [list(sample_order(spec.seed, epoch, 26)) for epoch in (1, 2)]
    expected = [  # each worker of the first stage looks at sample 0 first, to describe the data
        [0, *(i for epoch in order for m in range(k, 7, replicas[0]) for i in epoch[4 * m : 4 * m + 4])]
        for k in range(replicas[0])
    ]
    assert sorted(seen) == sorted(expected)
    assert sorted(order[0]) == sorted(order[1]) == list(range(26))
    assert order[0] != order[1]


@pytest.mark.parametrize("settings", [{}, SYNC], ids=["stash", "sync"])
def test_the_same_seed_gives_the_same_result_bit_for_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Weights, buffers and every line of metrics.jsonl; another seed gives others."""
    runs = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        spec = harness.job(tmp_path / name, CONV2, (2, 1), epochs=2, seed=seed, **settings)
        runs.append((weights(harness.run(spec)), harness.logged(spec.out)))
    assert runs[0][1] == runs[1][1] != runs[2][1]
    assert_same(runs[0][0], runs[1][0], rtol=0, atol=0)
    assert not torch.equal(runs[0][0]["conv1.weight"], runs[2][0]["conv1.weight"])


def test_with_vertical_sync_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Bit for bit: an epoch begins with one version everywhere, whether it is the run's first or not."""
    expected = weights(harness.run(harness.job(tmp_path / "a", CONV2, (2, 1), epochs=2, **SYNC)))
    part = harness.job(tmp_path / "b", CONV2, (2, 1), epochs=1, **SYNC)
    harness.run(part)
    found = weights(harness.run(replace(part, epochs=2, resume=part.out)))
    assert_same(found, expected, rtol=0, atol=0)
