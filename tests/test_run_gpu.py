"""The same laws on a GPU: two workers that share it (gloo through CPU memory), and NCCL where each has its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from harness import CONV2, CONV3, LSTM3, batches, stage_of
from reference import replay

from pdtool.frontend.modelfile import ModelFile
from pdtool.run import checkpoint
from pdtool.run.loading.device_upload import DeviceUpload
from pdtool.run.processes.launcher import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("toy", "replicas", "loader_workers"),
    [(CONV2, (1, 1), 0), (CONV3, (1, 1, 1), 2), (LSTM3, (1, 1, 1), 0), (CONV2, (2, 1), 1)],
    ids=["conv-two-stages", "conv-three-stages", "lstm", "conv-2-1"],
)
def test_1f1b_equals_its_replay_on_the_cpu(
    tmp_path: Path, toy: harness.Toy, replicas: tuple[int, ...], loader_workers: int
) -> None:
    """Law 3, to the tolerance of other kernels. With as many devices as workers NCCL carries the tensors."""
    spec = harness.job(tmp_path, toy, replicas, optimizer="plain", device="cuda", loader_workers=loader_workers)
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


def test_an_upload_is_complete_before_what_is_started_after_it() -> None:
    """Copies of 64 MB, from pinned memory and from other, read at once."""
    upload = DeviceUpload(torch.device("cuda", torch.cuda.current_device()))
    for i in range(4):
        loaded = {"pinned": torch.full((1 << 24,), float(i)).pin_memory(), "pageable": torch.full((1 << 24,), i + 0.5)}
        upload.start(loaded)
        copies = upload.finish()
        assert {name: copy.mean().item() for name, copy in copies.items()} == {"pinned": float(i), "pageable": i + 0.5}
