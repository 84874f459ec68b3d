"""The training loss is read without waiting for the device: one round later on a GPU, and nothing is lost by that.

Here losses are read late on the CPU, where the code is the same but for the copy itself.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import harness
import pytest
import torch
from harness import CONV2, faulty

from pdtool.errors import PdtoolError
from pdtool.runtime.stage import losses as round_losses
from pdtool.runtime.stage.losses import LossReader, RoundLoss

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def read_late(stderr: Path | None = None) -> None:
    """Let a worker read losses late; what it says before it ends goes to a file."""
    round_losses.is_read_late = lambda device: True  # type: ignore[assignment]
    if stderr:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


def rounds(device: torch.device, losses: list[float]) -> list[RoundLoss | None]:
    """What is read at the end of each round of two minibatches, and of the epoch."""
    reader, read = LossReader(device), []
    for step, first in enumerate(range(0, len(losses), 2), 1):
        for i in (first, first + 1):
            reader.add(i, torch.tensor(losses[i], requires_grad=True))
        read.append(reader.end_round(step, {first: 1.0, first + 1: 0.5}, epoch=3))
    return [*read, reader.end_epoch()]


def test_a_round_is_read_at_its_end_or_one_later() -> None:
    expected = [RoundLoss(1, 2.0, 1.5), RoundLoss(2, 5.0, 1.5)]
    assert rounds(CPU, [1.0, 2.0, 3.0, 4.0]) == [*expected, None]
    assert rounds(CUDA, [1.0, 2.0, 3.0, 4.0]) == [None, *expected]


def test_a_replica_without_a_minibatch_in_a_round_still_takes_part() -> None:
    reader = LossReader(CPU)
    assert reader.end_round(1, {}, epoch=1) == RoundLoss(1, 0.0, 0.0)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("minibatch", [0, 3])
def test_a_loss_that_is_no_number_names_its_minibatch(device: torch.device, minibatch: int) -> None:
    losses = [1.0] * 4
    losses[minibatch] = float("nan")
    with pytest.raises(PdtoolError, match=f"the loss is nan in minibatch {minibatch} of epoch 3; try a lower"):
        rounds(device, losses)


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2)], ids=["1-1", "1-2"])
def test_the_log_holds_the_same_losses(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    logs = []
    for name, prepare in (("now", None), ("late", read_late)):
        (tmp_path / name).mkdir()
        spec = harness.job(tmp_path / name, CONV2, replicas, epochs=2)
        harness.run(spec, prepare)
        logs.append(harness.logged(spec.out))
    assert logs[0] == logs[1]
    assert [line.step for line in logs[0] if line.split == "train"] == sorted({line.step for line in logs[0]})


@pytest.mark.parametrize("call", [1, 6], ids=["in the first round", "in the last round"])
def test_a_run_ends_with_the_minibatch_named(tmp_path: Path, call: int) -> None:
    spec = harness.job(tmp_path, faulty(f"a = a * float('nan') if self.n == {call} else a"), timeout_s=10.0)
    with pytest.raises(AssertionError, match="exit codes"):
        harness.run(spec, partial(read_late, tmp_path / "stderr"))
    assert f"PdtoolError: the loss is nan in minibatch {call} of epoch 1" in (tmp_path / "stderr").read_text()
