"""A worker's actions, and the messages of its stages."""

from __future__ import annotations

import gc
import logging
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from harness import CONV2
from torch import nn

from pdtool.artifacts.bundle import Bundle, StageModule, TensorSpec
from pdtool.artifacts.run_dir import CheckpointManifest
from pdtool.errors import PdtoolError
from pdtool.frontend.model_io import Structure
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.loading.minibatches import DataPass, DatasetSplit, Minibatches
from pdtool.runtime.messages.open_channels import Channels
from pdtool.runtime.messages.routes import LocalChannel, list_edges, list_routes
from pdtool.runtime.messages.stage_io import StageIO
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.stage.pipeline_stage import Autocast, PipelineStage
from pdtool.runtime.worker.run_report import Progress
from pdtool.runtime.worker.start_worker import warn_of_length
from pdtool.runtime.worker.worker import Place, Worker
from pdtool.schedule import SCHEDULES, ActionKind, ExecutionConfig

CPU = torch.device("cpu")


def worker_of(stages: Any = MappingProxyType({1: None}), *, kind: Any = SCHEDULES["1f1b"], shape: Any = None) -> Worker:
    """A worker of four epochs of three minibatches, which has stage 1 and cannot train."""
    plan = SimpleNamespace(kind=kind, batch_size=2)
    config: Any = SimpleNamespace(
        plan=plan, target=None, epochs=4, compiled=False, shape=shape or SimpleNamespace(replicas=())
    )
    assignment: Any = SimpleNamespace(stage=1, replica=0)
    unused: Any = None
    place = Place(assignment=assignment, device=CPU, local_workers=1, groups=unused, meter=WorkerMeter(CPU))
    data: Any = SimpleNamespace(epoch_samples=6, order_of_epoch=lambda epoch, trained: range(6))
    return Worker(config, place, data, stages, Progress(), {})


class CountedStage:
    """A stage that computes nothing, and tells which of its backwards end a round."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.done: list[str] = []
        self.look, self.own, self.reads = look, range(0), iter(())
        self.stage = SimpleNamespace(stashed={})

    def begin_phase(self, data: DataPass, own: range, reads: Iterator[int] | None) -> None:
        self.own, self.reads = own, reads or iter(())
        self.look()

    def forward(self, minibatch: int) -> None:
        next(self.reads, None)
        self.look()

    def backward(self, minibatch: int, kind: ActionKind, *, ends_round: bool) -> None:
        self.done += [f"{kind}{minibatch}"] * ends_round

    def update(self, epoch: int) -> None:
        pass

    def end_phase(self) -> None:
        pass


def data_of(minibatches: Minibatches) -> Any:
    """What a worker asks of its data."""
    of_split = DatasetSplit(len(minibatches.order), Structure.of(()))
    return SimpleNamespace(data_pass=lambda split, epoch, _: DataPass(split, of_split, minibatches, 0, epoch))


@pytest.mark.parametrize(("name", "ends"), [("zb-h1", ["W1", "W3", "W4"]), ("1f1b-flush", ["B1", "B3", "B4"])])
def test_a_round_ends_with_the_backward_before_an_update(name: str, ends: list[str]) -> None:
    """Sums over replicas begin in it; of a split backward in its second part."""
    stage, minibatches = CountedStage(), Minibatches(range(10), 2)
    worker = worker_of({1: stage}, kind=SCHEDULES[name], shape=ExecutionConfig.of_schedule(name, 2).shape((1, 1)))
    worker._data = data_of(minibatches)
    worker.train(1, minibatches)
    assert stage.done == ends


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("weights", ["stash", "vertical-sync", "2bw"])
def test_nothing_in_a_worker_grows_with_the_minibatches_of_an_epoch(
    name: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither before its first action nor in the steady state; an epoch of 10^12 minibatches begins at once."""
    kind = SCHEDULES[name]
    if weights not in kind.policy_names and (not kind.flushes or weights != "stash"):
        pytest.skip("not a policy of this schedule")
    execution = ExecutionConfig(
        schedule=name, weights=weights if weights in kind.policy_names else "flush", microbatches=4
    )
    shape = execution.shape((2, 2) if kind.equal_replicas else (2, 3))
    monkeypatch.setattr("pdtool.runtime.meter.MAX_UNREAD", 1)  # else they are up to 1,000
    peaks = []
    for count, looks in ((400, 400), (10**12, 100), (10**12, 1500)):
        seen = iter(range(looks))

        def look(seen: Iterator[int] = seen) -> None:
            if next(seen, None) is None:
                raise StopAsyncIteration

        stage, minibatches = CountedStage(look), Minibatches(range(2 * count), 2)
        worker = worker_of({1: stage}, kind=kind, shape=shape)
        worker._place.meter._timings._draw = lambda *_: None  # type: ignore[method-assign]  # the trace has its own end
        worker._data = data_of(minibatches)
        gc.collect()
        tracemalloc.start()
        with suppress(StopAsyncIteration):
            worker.train(1, minibatches)
        stage.done.clear()
        worker._place.meter.synchronize()
        peaks.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert max(peaks) < min(peaks) + 20_000


def test_all_epochs_after_the_first_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one warms up."""
    for name in ("train", "validate", "_save", "_report"):
        monkeypatch.setattr(Worker, name, lambda *_, **__: {"loss": 1.0})
    worker = worker_of({})
    worker.run()
    times = worker._place.meter.epochs
    assert (times.minibatches, times.samples) == (9, 18)
    done = worker.progress
    assert (done.minibatches, done.samples, done.validation_losses) == ([3] * 4, [6] * 4, [1.0] * 4)


def warnings_of_length(
    capsys: pytest.CaptureFixture[str], *, takes_total: bool = True, scheduler_step: str = "update", **before: Any
) -> str:
    """What a worker says that goes on after the first epoch, as a run of 4 epochs of 20 minibatches."""
    file = SimpleNamespace(scheduler_takes_total=takes_total, training=SimpleNamespace(scheduler_step=scheduler_step))
    config: Any = SimpleNamespace(epochs=4)
    data: Any = SimpleNamespace(file=file, epoch_minibatches=20)
    warn_of_length(config, data, CheckpointManifest(epoch=1, seed=0, metrics={}, files={}, **before))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "takes_total", "is_told"), [(2, True, True), (4, True, False), (0, True, False), (2, False, False)]
)
def test_a_schedule_that_is_resumed_as_one_of_another_length_is_told(
    before: int, takes_total: bool, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where it takes no length; 0: an older checkpoint does not know how long its run was to be."""
    said = warnings_of_length(capsys, takes_total=takes_total, epochs=before)
    assert ("made for 2 epochs. From epoch 2 on, it continues as a schedule of 4 epochs" in said) == is_told
    assert ("To keep the old schedule, use --epochs 2\n" in said) == is_told
    assert "minibatches" not in said


def test_epochs_that_go_on_with_another_number_of_minibatches_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Once more for a schedule that is stepped by updates; an older checkpoint does not say how many there were."""
    told = "warning: an epoch had 45 minibatches before and now has 20. If you did not intend this, "
    said = warnings_of_length(capsys, epochs=4, minibatches=(45,))
    assert said.startswith(told)
    assert (
        "schedule was made for 4 epochs of 45 minibatches. From epoch 2 on, it continues as a schedule of 4 epochs"
        in said
    )
    assert "To keep the old schedule, use epochs of 45 minibatches\n" in said
    assert "differ\n" in warnings_of_length(capsys, epochs=1), "the old schedule has ended"
    for others in ({"takes_total": False}, {"scheduler_step": "epoch"}):
        said = warnings_of_length(capsys, epochs=4, minibatches=(45,), **others)
        assert said.startswith(told)
        assert "schedule" not in said
    for unchanged in ((20,), (0,), ()):
        assert warnings_of_length(capsys, epochs=4, minibatches=unchanged) == ""


def two_stages() -> list[StageIO]:
    """Both on one worker; the tensor `a`, [batch, 3], goes from the first to the second."""
    tensor = TensorSpec(name="a", producer=0, consumers=(1,), shape=("batch", 3), dtype="float32", gradient=True)
    ends: list[tuple[tuple[str, ...], tuple[str, ...]]] = [((), ("a",)), (("a",), ())]
    modules = tuple(
        StageModule(
            file=f"stage_{s}.py", class_name="S", sha256="0" * 64, inputs=inputs, outputs=outputs, parameters=()
        )
        for s, (inputs, outputs) in enumerate(ends)
    )
    bundle = Bundle(name="b", batch_size=2, proof="values", inputs=(), stages=modules, tensors=(tensor,))
    local = [(route, LocalChannel()) for route in list_routes(list_edges(bundle, []), [[0], [0]])]
    channels = Channels(senders=list(local), receivers=list(local))
    data = DataPass("train", DatasetSplit(8, Structure.of(())), Minibatches(range(8), 2), 0, 1)
    stages = [StageIO(bundle, s, channels, prefetch=2, device=CPU, meter=WorkerMeter(CPU)) for s in (0, 1)]
    for io in stages:
        io.begin_phase(data, None, range(4), range(4))
    return stages


def test_a_missing_gradient_is_sent_as_zeros() -> None:
    first, second = two_stages()
    first.send_outputs(0, [torch.ones(2, 3)])
    [a], _ = second.receive_inputs(0)
    assert a.requires_grad
    second.send_gradients(0, [None])
    [gradient] = first.receive_gradients(0)
    assert torch.equal(gradient, torch.zeros(2, 3))


def test_messages_come_in_the_order_in_which_they_are_expected() -> None:
    """A stage that asks for another one, or leaves one, breaks its list of actions."""
    first, second = two_stages()
    first.send_outputs(0, [torch.ones(2, 3)])
    with pytest.raises(AssertionError, match="minibatch 1 was asked for, but 0 was posted first"):
        second.receive_inputs(1)
    with pytest.raises(AssertionError, match=r"minibatches \[0, 1\] were posted and never received"):
        first.end_phase()


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([None], "an output 'a' that is NoneType, but bundle.yaml says a tensor of shape [2, 3] for 2 samples"),
        (
            [torch.ones(3, 2)],
            "an output 'a' of shape [3, 2], but bundle.yaml says a tensor of shape [2, 3] for 2 samples",
        ),
        ([torch.ones(2, 3)] * 2, "2 tensors, but bundle.yaml says 1"),
    ],
)
@pytest.mark.parametrize("autocast", [None, Autocast(CPU, [torch.float32])], ids=["float32", "bf16"])
def test_outputs_that_are_not_those_of_the_bundle_are_refused(
    outputs: list[Any], said: str, autocast: Autocast | None
) -> None:
    """A stage file edited by hand; [3, 2] has as many bytes as [2, 3], and would arrive as that."""
    first, _ = two_stages()
    returned = PipelineStage(Returns(tuple(outputs)), None, autocast=autocast).forward(0, [])
    with pytest.raises(PdtoolError, match=re.escape(f"stage_0.py returns {said}; fix it, or write it again")):
        first.send_outputs(0, returned)


class Returns(nn.Module):
    """Whatever is called for."""

    def __init__(self, outputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self) -> tuple[Any, ...]:
        return self.outputs


def test_other_loggers_go_on_while_a_run_lasts(tmp_path: Path) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("of.the.user")
    logger.addHandler(handler)
    lines: list[Any] = []

    def on_metrics(line: Any) -> None:
        lines.append(line)
        logger.warning("a line")

    try:
        launch(harness.job(tmp_path, harness.CONV2), on_metrics)
    finally:
        logger.removeHandler(handler)
    assert lines
    assert len(records) == len(lines)


def test_inputs_of_a_stage_require_gradients_in_training_only(tmp_path: Path) -> None:
    """In a plain validation no tensor does, and a loss may ask for that; the stage's file asks here."""
    first, (source, inputs, outputs) = CONV2.stages
    asking = source.replace(
        "        return", "        assert a.requires_grad == torch.is_grad_enabled()\n        return"
    )
    assert asking != source
    harness.run(harness.job(tmp_path, replace(CONV2, stages=(first, (asking, inputs, outputs)))))
