"""The same laws on a GPU: two and three workers that share it, by CUDA IPC; with a GPU for each, they have one each.

The tests are those of the CPU (test_laws_*.py), with workers on the device and replays on the CPU, to the tolerance of
other kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import test_laws_flush
import test_laws_training
import torch
from harness import CONV2, CONV3, LSTM3, TIED3, Toy, assert_same, batches, weights
from reference import replay
from test_laws_precision import COMPILED, NEAR_FP32, trained

from pdtool.artifacts.metrics import UpdateLine, read_metrics
from pdtool.errors import WorkerDiedError
from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.loading.minibatches import Minibatches
from pdtool.runtime.messages import cuda_ipc
from pdtool.runtime.messages.pinned import DeviceUpload
from pdtool.runtime.worker import checkpoint
from pdtool.runtime.worker.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WITHOUT_FLUSH = [
    "conv-two-stages",
    "conv-three-stages",
    "conv-2-1",
    "conv-1-2",
    "skip",
    "lstm",
    "every-2",
    "every-3-2-1",
    "sync-conv",
    "sync-lstm",
    "sync-conv-2-1",
    "none-conv",
    "none-lstm",
    "2bw-conv",
    "2bw-lstm-every-4",
    "2bw-conv-2-1",
]
WITH_FLUSH = [
    "flush",
    "gpipe",
    "flush-2-1",
    "lstm-flush",
    "tied-flush",
    "interleaved",
    "skip-interleaved",
    "tied-interleaved",
    "zb",
    "lstm-zb",
]


@pytest.fixture(scope="module")
def shares_memory(tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether CUDA lets two workers here share memory of a GPU."""
    try:
        harness.run(harness.job(tmp_path_factory.mktemp("ipc"), CONV2, device="cuda"), require_cuda_ipc)
    except AssertionError:
        return False
    return True


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch: pytest.MonkeyPatch, shares_memory: bool) -> None:
    monkeypatch.setattr(harness, "DEVICE", "cuda")
    monkeypatch.setattr(harness, "PREPARE", require_cuda_ipc if shares_memory else None)


def named(cases: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The cases of these names; each must be one."""
    by_name = {case.id: case for case in cases}
    return [by_name[name] for name in names]


def require_cuda_ipc() -> None:
    """In a worker: fail unless all messages between workers go through memory of a GPU."""
    share = cuda_ipc.share_device_memory

    def checked(routes: Any, *args: Any) -> Any:
        agreed, memory = share(routes, *args)
        assert agreed == {route.number for route in routes if not route.is_local}, "CUDA IPC was refused"
        return agreed, memory

    cuda_ipc.share_device_memory = checked


def test_messages_go_through_memory_of_the_gpu(shares_memory: bool) -> None:
    """Where CUDA refuses that, as in some containers, this test fails and the others show the other ways."""
    assert shares_memory


def test_a_worker_that_is_killed_is_named_and_the_others_end(tmp_path: Path) -> None:
    killed = harness.faulty("os.kill(os.getpid(), signal.SIGKILL) if self.n == 3 else None")
    with pytest.raises(WorkerDiedError, match="rank 1"):
        launch(harness.job(tmp_path, killed, timeout_s=30.0))


@pytest.mark.parametrize(
    ("toy", "replicas", "optimizer", "settings", "every"), named(test_laws_training.CASES, WITHOUT_FLUSH)
)
def test_without_a_flush_training_equals_its_replay(
    tmp_path: Path, toy: Toy, replicas: Any, optimizer: str, settings: Any, every: Any
) -> None:
    """Laws 3 and 5."""
    law = test_laws_training.test_1f1b_equals_its_replay_and_keeps_no_more_than_the_plan_says
    law(tmp_path, toy, replicas, "plain" if optimizer == "adam" else optimizer, settings, every)


@pytest.mark.parametrize(
    ("replicas", "settings", "every"), [((1, 1, 1), {}, (1, 1, 1)), ((1, 1, 1), test_laws_training.BW2, (3, 3, 3))]
)
def test_tied_weights_without_a_flush(tmp_path: Path, replicas: Any, settings: Any, every: Any) -> None:
    test_laws_training.test_tied_weights_without_flush_equal_their_replay_and_each_other(
        tmp_path, replicas, settings, every
    )


@pytest.mark.parametrize(
    ("toy", "replicas", "schedule", "microbatches", "optimizer", "settings"), named(test_laws_flush.CASES, WITH_FLUSH)
)
def test_with_a_flush_training_equals_the_unsplit_model(
    tmp_path: Path, toy: Toy, replicas: Any, schedule: str, microbatches: int, optimizer: str, settings: Any
) -> None:
    """Laws 2 and 5."""
    law = test_laws_flush.test_a_synchronous_schedule_equals_the_unsplit_model
    law(tmp_path, toy, replicas, schedule, microbatches, "plain" if optimizer == "adam" else optimizer, settings)


def test_recomputing_changes_nothing(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV3, epochs=2)
    stages = tuple(stage.model_copy(update={"recompute": True}) for stage in spec.plan.stages)
    plan = spec.plan.model_copy(update={"stages": stages})
    again = replace(spec, plan=plan, out=tmp_path / "again")
    assert_same(weights(harness.run(again)), weights(harness.run(spec)))


def test_bf16_is_near_fp32(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, LSTM3, precision="bf16", epochs=2)
    found, exact = weights(harness.run(spec)), trained(spec, (1, 1, 1))
    for name, value in exact.items():
        torch.testing.assert_close(found[name], value, **NEAR_FP32)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_stages_equal_their_replay(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV3, compiled=True, epochs=2, timeout_s=300.0)
    assert_same(weights(harness.run(spec)), trained(spec, (1, 1, 1)), **COMPILED)


def test_a_run_resumes_with_fused_adam(tmp_path: Path) -> None:
    """Its counter of steps lives on the device. Law 8, with vertical sync: as if nothing had happened."""
    fused = CONV3.model.replace("OPTIMIZER", "torch.optim.Adam([p for _, p in named], lr=1e-3, fused=True)")
    toy = replace(CONV3, model=fused)
    whole = harness.job(tmp_path / "whole", toy, weights="vertical-sync", epochs=2)
    first = harness.job(tmp_path / "parts", toy, weights="vertical-sync", epochs=1)
    expected = weights(harness.run(whole))
    harness.run(first)
    second = replace(first, epochs=2, out=tmp_path / "second", resume=first.out)
    assert_same(weights(harness.run(second)), expected)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_minibatches_come_from_loader_workers(tmp_path: Path, loader_workers: int) -> None:
    spec = harness.job(tmp_path, CONV3, optimizer="plain", epochs=2, loader_workers=loader_workers)
    assert_same(weights(harness.run(spec)), trained(spec, (1, 1, 1)))


def test_an_upload_is_complete_before_what_is_started_after_it() -> None:
    """Copies of 64 MB, from pinned memory and from other, read at once."""
    upload = DeviceUpload(torch.device("cuda", torch.cuda.current_device()))
    for i in range(4):
        loaded = {"pinned": torch.full((1 << 24,), float(i)).pin_memory(), "pageable": torch.full((1 << 24,), i + 0.5)}
        upload.start(loaded)
        copies = upload.finish()
        assert {name: copy.mean().item() for name, copy in copies.items()} == {"pinned": float(i), "pageable": i + 0.5}


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
def test_no_action_of_any_stage_waits_for_the_device(tmp_path: Path, toy: Toy) -> None:
    spec = harness.job(tmp_path, toy, optimizer="sgd", epochs=3)
    outcomes = harness.run(spec, forbid_waiting)
    assert [outcome.peak_versions for outcome in outcomes] == [3, 2, 1]
    losses = [line.loss for line in read_metrics(spec.out / "metrics.jsonl") if isinstance(line, UpdateLine)]
    assert len(losses) == 3 * 7


def test_data_parallelism_with_nccl(tmp_path: Path) -> None:
    """One stage on all devices: with one device, a world of one."""
    replicas = torch.cuda.device_count()
    spec = harness.job(tmp_path, harness.CONV1, (replicas,), optimizer="plain")
    launch(spec)
    checkpoint.export(spec.out, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, replicas)
    names = ("conv1.weight", "conv2.weight", "fc.weight")
    assert_same(found, {name: expected[name] for name in names})


@pytest.mark.parametrize("toy", [CONV3, TIED3], ids=["conv", "tied"])
def test_the_norm_of_all_stages_clips_as_in_a_plain_loop(tmp_path: Path, toy: Toy) -> None:
    clipped = replace(toy, model=toy.model + "\nMAX_GRAD_NORM = 0.3\n")
    spec = harness.job(tmp_path, clipped, schedule="gpipe", microbatches=3, optimizer="plain")
    file = ModelFile.load(spec.model, trusted=True)
    expected = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, 3, max_norm=0.3)
    found = weights(harness.run(spec))
    assert_same(found, {name: value for name, value in expected.items() if name in found})
