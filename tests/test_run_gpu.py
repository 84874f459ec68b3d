"""The same laws on a GPU: two workers that share it (gloo through CPU memory), and NCCL where each has its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from harness import CONV2, CONV3, LSTM3, TIED3, batches, stage_of
from reference import replay

from pdtool.frontend.modelfile import ModelFile
from pdtool.run import checkpoint
from pdtool.run.data import Minibatches
from pdtool.run.measure.metrics_log import read_metrics
from pdtool.run.processes.launcher import launch
from pdtool.run.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("toy", "replicas"),
    [(CONV2, (1, 1)), (CONV3, (1, 1, 1)), (LSTM3, (1, 1, 1)), (CONV2, (2, 1))],
    ids=["conv-two-stages", "conv-three-stages", "lstm", "conv-2-1"],
)
def test_1f1b_equals_its_replay_on_the_cpu(tmp_path: Path, toy: harness.Toy, replicas: tuple[int, ...]) -> None:
    """Law 3, to the tolerance of other kernels. With as many devices as workers NCCL carries the tensors."""
    spec = harness.job(tmp_path, toy, replicas, optimizer="plain", device="cuda")
    launch(spec)
    checkpoint.export(spec.out, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    file = ModelFile.load(spec.model, trusted=True)
    shape = spec.plan.shape()
    expected = replay.asynchronous(
        file.build(spec.seed),
        stage_of(spec).__getitem__,
        batches(spec),
        file.loss,
        file.optimizer,
        replay.Pipeline(replicas, shape.in_flight, replicas),
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


def forbid_waiting() -> None:
    """After the first epoch, in which kernels are loaded and memory is pinned, no action may wait for the device."""
    train = Worker.train

    def watched(self: Worker, epoch: int, minibatches: Minibatches) -> None:
        torch.cuda.set_sync_debug_mode("error" if epoch > 1 else "default")
        try:
            train(self, epoch, minibatches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Worker.train = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("toy", [CONV3, TIED3, LSTM3], ids=["conv", "tied", "lstm"])
def test_no_action_of_any_stage_waits_for_the_device(tmp_path: Path, toy: harness.Toy) -> None:
    spec = harness.job(tmp_path, toy, optimizer="sgd", epochs=3, device="cuda")
    outcomes = harness.run(spec, forbid_waiting)
    assert [outcome.peak_versions for outcome in outcomes] == [3, 2, 1]
    losses = [line["loss"] for line in read_metrics(spec.out / "metrics.jsonl") if line["split"] == "train"]
    assert len(losses) == 3 * 7


def test_data_parallelism_with_nccl(tmp_path: Path) -> None:
    """One stage on all devices: with one device, a world of one."""
    replicas = torch.cuda.device_count()
    spec = harness.job(tmp_path, harness.CONV1, (replicas,), optimizer="plain", device="cuda")
    launch(spec)
    checkpoint.export(spec.out, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, replicas)
    for name in ("conv1.weight", "conv2.weight", "fc.weight"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-2, atol=1e-3)


def test_the_norm_of_all_stages_clips_as_in_a_plain_loop(tmp_path: Path) -> None:
    toy = replace(CONV3, model=CONV3.model + "\nMAX_GRAD_NORM = 0.3\n")
    spec = harness.job(tmp_path, toy, schedule="gpipe", microbatches=3, optimizer="plain", device="cuda")
    launch(spec)
    checkpoint.export(spec.out, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, 3, max_norm=0.3)
    for name in ("conv1.weight", "conv2.weight", "fc.weight"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-2, atol=1e-3)
