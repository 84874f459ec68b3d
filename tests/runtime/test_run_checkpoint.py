"""Checkpoints: resuming makes no difference, whatever the plan; export is an ordinary state_dict."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV1, CONV2, CONV3, SKIP1, SKIP3, TIED1, TIED3, TIED4, assert_same, batches, weights
from reference import replay
from safetensors.torch import load_file, save_file

from pdtool.artifacts.metrics import following_metrics
from pdtool.artifacts.run_dir import Checkpoint, CheckpointManifest, RunDir
from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.frontend.model_file import ModelFile
from pdtool.options.target import Target
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.stage.optimizer_state import OptimizerState
from pdtool.runtime.worker import checkpoint

DROPOUT = replace(
    CONV3,
    stages=(
        CONV3.stages[0],
        (CONV3.stages[1][0].replace("return b", "return F.dropout(b, 0.5, self.training)"), ("a",), ("b",)),
        CONV3.stages[2],
    ),
    model=CONV3.model
    + """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
""",
)


# its last stage has nothing to step, but counts the updates
BARE2 = replace(
    CONV1,
    stages=((CONV1.stages[0][0], ("x",), ("z",)), (harness.stage(1, "", "z: return z * 1.0"), ("z",), ())),
    tensors=(*CONV1.tensors, harness.tensor("z", 0, [1], 4)),
)


# whose evaluation adds to a weight, as an opaque module's may that merges adapters
_MERGES = """    def train(self, mode=True):
        if mode != self.training:
            self.l0.weight.data += -0.25 if mode else 0.25
        return super().train(mode)
"""
_MLP2 = harness.perceptron(2)
_STAGE, *_NAMES = _MLP2.stages[0]
MERGING = replace(
    _MLP2,
    stages=((_STAGE.replace("    def forward", _MERGES + "    def forward"), *_NAMES), _MLP2.stages[1]),
    model=_MLP2.model + "def metrics(output, target): return {'mean': (output.sum(), output.numel())}\n",
)

# whose loss, updates, metrics and sampler keep values outside the model and the optimizer
_KEEPS = """
import heapq

class Temperature:
    def __init__(self):
        self.value = 1.0
    def cool(self):
        self.value *= 0.8

AVERAGE, TAU, CALLS, OF_LOSS = {}, 1.0, 0, {"mean": torch.zeros(()), "seen": []}
TEMPERATURE = Temperature()
STEPS, CENTER, LEAST = torch.zeros(()), {"x": torch.zeros(())}, []

def move(center, value):
    center["x"] = 0.9 * center["x"] + 0.1 * value

def after_update(named_parameters, update):
    global TAU
    TAU = 0.9**update
    TEMPERATURE.cool()
    STEPS.mul_(0.5).add_(0.1)
    with torch.no_grad():
        for name, p in named_parameters:
            AVERAGE[name] = 0.5 * AVERAGE.get(name, p) + 0.5 * p
            p.lerp_(AVERAGE[name], 0.1)

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(()))
        self.count, self.inner = 0, nn.BatchNorm1d(1, affine=False)
    def forward(self, output, target):
        global CALLS
        CALLS += 1
        value = torch.tanh(output).square().mean()
        OF_LOSS["mean"] = 0.9 * OF_LOSS["mean"] + 0.1 * value.detach()
        OF_LOSS["seen"].append(float(value))
        self.count += 1
        self.center.mul_(0.9).add_(0.1 * value.detach())
        self.inner(output.detach().reshape(-1, 1))
        move(CENTER, value.detach())
        heapq.heappush(LEAST, float(value))
        kept = TAU + 0.1 * CALLS + OF_LOSS["mean"] + self.center + self.inner.running_var.sum() + 0.1 * self.count
        kept = kept + STEPS + CENTER["x"] + sum(LEAST[:2])
        return value * (1 + torch.sin(kept + TEMPERATURE.value + FOCUS + sum(OF_LOSS["seen"][-2:])))

loss = Loss()
FOCUS, MEASURED, EPOCHS = 0.0, {"minibatches": 0}, []

def sampler(dataset, epoch):
    EPOCHS.append(epoch + len(EPOCHS))
    return torch.randperm(len(dataset), generator=torch.Generator().manual_seed(sum(EPOCHS)))

def metrics(output, target):
    global FOCUS
    MEASURED["minibatches"] += 1
    FOCUS = float(output.mean())
    return {"mean": (float(output.sum()) + MEASURED["minibatches"] + len(OF_LOSS["seen"]), output.numel())}

def summarize_metrics(totals, history=[]):
    history.append(totals["mean"][0])
    return {"means": sum(history)}
"""
KEEPING = replace(CONV2, model=CONV2.model + _KEEPS)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("toy", [DROPOUT, BARE2, MERGING, KEEPING], ids=["dropout", "bare", "merging", "keeping"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, toy: harness.Toy) -> None:
    """Bit for bit, with dropout, momentum and a learning-rate schedule; metrics.jsonl included, although the
    interrupted run had begun the epoch that is done again."""
    whole = harness.job(tmp_path / "a", toy, epochs=3)
    expected = weights(harness.run(whole))
    part = harness.job(tmp_path / "b", toy, epochs=2)
    harness.run(part)
    with (part.out / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "epoch": 3, "step": 15, "loss": 1.0}\n{"split": "tra')
    found = weights(harness.run(replace(part, epochs=3, resume=part.out)))
    assert_same(found, expected, rtol=0, atol=0)
    assert harness.logged(part.out) == harness.logged(whole.out)


@pytest.mark.parametrize("toy", [CONV1, TIED3], ids=["conv", "tied"])
def test_a_run_goes_on_under_another_plan(tmp_path: Path, toy: harness.Toy) -> None:
    """Parameters, buffers and Adam's state by name: an epoch under each of two flushing plans, as if unsplit.

    A stage of TIED4 has none of these.
    """
    plans = [(CONV3, (1, 1, 1)), (CONV2, (1, 1))] if toy is CONV1 else [(TIED4, (1, 1, 1, 1)), (TIED1, (1,))]
    settings = {"schedule": "1f1b-flush", "microbatches": 3, "optimizer": "adam"}
    out = tmp_path / "run"
    first = harness.job(tmp_path / "first", *plans[0], out=out, epochs=1, **settings)
    harness.run(first)
    second = harness.job(tmp_path / "second", *plans[1], out=out, epochs=2, resume=out, **settings)
    found = weights(harness.run(second))
    file = ModelFile.load(first.model, trusted=True)
    expected = replay.synchronous(
        file.build(first.seed), batches(replace(first, epochs=2)), file.loss, file.optimizer, 3
    )
    assert_same(found, expected)


def test_a_run_whose_copy_of_the_plan_is_damaged_is_resumed(tmp_path: Path) -> None:
    """The plan comes from its own file. Once, the copy "would be overwritten; name another file", in a run's folder."""
    spec = harness.job(tmp_path, CONV2, (1, 1), epochs=1)
    launch(spec)
    copy = RunDir(spec.out).plan_file
    expected = copy.read_text()
    copy.write_text("x: [")
    launch(replace(spec, epochs=2, resume=spec.out))
    assert copy.read_text() == expected


def test_a_target_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    """Before training, a minibatch is validated to see whether the model has the metric; loss() may count its calls."""
    counting = """
class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
    def forward(self, output, target):
        global CALLS
        self.calls, CALLS = self.calls + 1, CALLS + 1
        self.seen.add_(1)
        return output.square().mean() * (1 + (self.seen + self.calls / 2 + CALLS / 3).sin())
CALLS, loss = 0, Loss()
"""
    toy = replace(_MLP2, model=_MLP2.model + counting)
    found = [
        weights(harness.run(harness.job(tmp_path / name, toy, epochs=2, target=target)))
        for name, target in (("without", None), ("with", Target.parse("loss<=0")))
    ]
    assert_same(*found, rtol=0, atol=0)


@pytest.mark.parametrize("plans", [(CONV2, CONV1), (CONV1, CONV3)], ids=["joined", "divided"])
def test_what_user_code_keeps_goes_on_under_another_plan(tmp_path: Path, plans: tuple[harness.Toy, ...]) -> None:
    plans = tuple(replace(toy, model=toy.model + _KEEPS) for toy in plans)
    first, second, whole = (
        harness.job(tmp_path / name, toy, epochs=epochs, schedule="1f1b-flush", microbatches=3)
        for name, toy, epochs in zip("abc", (*plans, plans[0]), (1, 2, 2), strict=True)
    )
    harness.run(first)
    found = weights(harness.run(replace(second, resume=first.out, out=first.out)))
    assert_same(found, weights(harness.run(whole)))


def test_an_optimizer_of_another_class_begins_with_an_empty_state(tmp_path: Path) -> None:
    """Once, RMSprop was given Adam's state: KeyError: 'square_avg'."""
    settings = {"schedule": "1f1b-flush", "microbatches": 3, "out": tmp_path / "run"}
    other = "\ndef optimizer(named):\n    return torch.optim.RMSprop([p for _, p in named], lr=0.01)\n"
    first = harness.job(tmp_path / "first", SKIP3, (1, 1, 1), epochs=1, optimizer="adam", **settings)
    trained = weights(harness.run(first))
    toy = replace(SKIP3, model=SKIP3.model + other)
    second = harness.job(tmp_path / "second", toy, (1, 1, 1), epochs=2, resume=first.out, **settings)
    found = weights(harness.run(second))
    file = ModelFile.load(second.model, trusted=True)
    model = file.build()
    model.load_state_dict(trained)
    later = batches(second)[len(batches(first)) :]
    assert_same(found, replay.synchronous(model, later, file.loss, file.optimizer, 3))


def test_a_run_goes_on_from_a_checkpoint_in_the_first_format(tmp_path: Path) -> None:
    """Until fa430e5 an entry held one value of an optimizer's state, and manifests did not give numbers of samples."""
    spec = harness.job(tmp_path, CONV2, (1, 1), epochs=1, optimizer="adam")
    harness.run(spec)
    saved = RunDir(spec.out).latest_checkpoint()
    expected = weights(harness.run(replace(spec, epochs=2, resume=spec.out, out=tmp_path / "now")))
    files = {}
    for name in saved.manifest().files:
        path, tensors = saved.path / name, {}
        for key, value in load_file(path).items():
            is_record = key.startswith("optimizer.") and ".state." not in key
            tensors[key.replace(".state.", ".")] = value
            if is_record:
                _, ((_, updates), *_) = json.loads(bytes(tensors.pop(key).numpy()))
                tensors[f"{key}.updates"] = torch.tensor(updates)
        save_file(tensors, path)
        files[name] = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    kept = saved.manifest().model_dump(exclude={"samples"}) | {"files": files}
    CheckpointManifest(**kept).save(saved.path / "checkpoint.json")
    found = weights(harness.run(replace(spec, epochs=2, resume=spec.out, out=tmp_path / "then")))
    assert_same(found, expected, rtol=0, atol=0)


def test_export_is_the_models_own_state_dict(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Names that share a tensor both stand in it, and the model loads it strictly; `-` is stdout."""
    spec = harness.job(tmp_path, TIED3, epochs=1)
    trained = weights(harness.run(spec))
    assert checkpoint.export(spec.out, tmp_path / "model.pt") == spec.out / "checkpoints" / "epoch-1"
    model = ModelFile.load(spec.model, trusted=True).build(1)
    assert model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)).missing_keys == []
    assert_same(dict(model.state_dict()), trained, rtol=0, atol=0)
    checkpoint.export(spec.out, Path("-"))
    assert_same(torch.load(io.BytesIO(capfdbinary.readouterr().out)), torch.load(tmp_path / "model.pt"))


_COMPLEX = (
    "self.fc = nn.Linear(72, 4); self.turn = nn.Parameter(torch.eye(4, dtype=torch.complex128) * (1 + 2j)); "
    "self.register_buffer('waves', torch.polar(torch.ones(4), torch.arange(4.0)).conj())"
)
_COMPLEX_FORWARD = (
    "x: h = torch.view_as_real(self.fc(x.flatten(1)) * self.waves @ self.turn.to(torch.complex64)).flatten(1)"
)
COMPLEX = replace(
    CONV2,
    model=harness.IMAGES
    + harness.model(f"{_COMPLEX}; self.out = nn.Linear(8, 4)", f"{_COMPLEX_FORWARD}; return self.out(h)"),
    stages=(
        (harness.stage(0, _COMPLEX, f"{_COMPLEX_FORWARD}; return h"), ("x",), ("h",)),
        (harness.stage(1, "self.out = nn.Linear(8, 4)", "h: return self.out(h)"), ("h",), ()),
    ),
    tensors=(harness.tensor("x", -1, [0], 2, 6, 6), harness.tensor("h", 0, [1], 8)),
)


def test_checkpoints_hold_complex_numbers_of_any_precision(tmp_path: Path) -> None:
    """And the state of their optimizer; an export gives them back, conjugated ones too."""
    settings = {"schedule": "1f1b-flush", "microbatches": 2, "optimizer": "adam"}
    part = harness.job(tmp_path, COMPLEX, (2, 1), epochs=1, **settings)
    harness.run(part)
    whole = replace(part, epochs=2, resume=part.out)
    file = ModelFile.load(whole.model, trusted=True)
    model = file.build(whole.seed)
    waves = model.waves.clone()
    expected = replay.synchronous(model, batches(whole), file.loss, file.optimizer, 2)
    assert_same(weights(harness.run(whole)), expected)
    checkpoint.export(whole.out, tmp_path / "model.pt")
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same(exported, expected)
    assert torch.equal(exported["waves"], waves)
    assert exported["turn"].dtype == torch.complex128


def test_tied_names_share_a_tensor_in_an_export(tmp_path: Path) -> None:
    """Stored once, as torch.save stores the model's own; names whose values differ, and older checkpoints, do not."""
    spec = harness.job(tmp_path, TIED3, epochs=1, steps=2)
    harness.run(spec)

    def storages() -> tuple[int, int]:
        checkpoint.export(spec.out, tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt", weights_only=True)
        return state["embed.weight"].data_ptr(), state["out.weight"].data_ptr()

    assert len(set(storages())) == 1
    manifest = RunDir(spec.out).latest_checkpoint().manifest()
    assert manifest.tied == {"out.weight": "embed.weight"}
    for tied in ({}, {"out.weight": "gone"}, {"out.weight": "out.bias"}):
        manifest.model_copy(update={"tied": tied}).save(RunDir(spec.out).latest_checkpoint().path / "checkpoint.json")
        assert len(set(storages())) == 2


def test_an_export_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    (tmp_path / "file").write_text("")
    with pytest.raises(PdtoolError, match=r"model.pt could not be written"):
        checkpoint.export(spec.out, tmp_path / "file" / "model.pt")


def test_an_export_goes_through_a_link_and_into_a_pipe(tmp_path: Path) -> None:
    """Neither is replaced by a file."""
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    (tmp_path / "link").symlink_to(tmp_path / "model.pt")
    checkpoint.export(spec.out, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        checkpoint.export(spec.out, tmp_path / "pipe")
        piped = reader.communicate(timeout=20)[0]
    assert (tmp_path / "pipe").is_fifo()
    assert_same(*(torch.load(f, weights_only=True) for f in (io.BytesIO(piped), tmp_path / "model.pt")), rtol=0, atol=0)


def test_an_export_that_nobody_reads_ends_as_any_output_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `pdtool export RUN -o - | head -1` torch said that the disk was full."""
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, suppress(BrokenPipeError), open(writer, "w") as stdout:
        patched.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError):
            checkpoint.export(spec.out, Path("-"))


def test_only_a_complete_checkpoint_is_found(tmp_path: Path) -> None:
    """Epoch 10 comes after 9; what is being written, or has lost its last file, is not there."""
    for name in ("epoch-9", "epoch-10", ".epoch-11.partial", "epoch-12"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if name != "epoch-12":
            (tmp_path / "checkpoints" / name / "checkpoint.json").write_text("{}")
    assert RunDir(tmp_path).latest_checkpoint().path == tmp_path / "checkpoints" / "epoch-10"
    assert RunDir(tmp_path / "checkpoints" / "epoch-9").latest_checkpoint().path.name == "epoch-9"
    with pytest.raises(UsageError, match="contains no complete checkpoint"):
        RunDir(tmp_path / "checkpoints" / "epoch-12").latest_checkpoint()


def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nope is not there; name the folder of a run$"):
        RunDir(tmp_path / "nope").latest_checkpoint()
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints" / "epoch-1").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "epoch-1" / "checkpoint.json").write_text("{}")
    with pytest.raises(UsageError, match=rf"nope is not there; name the folder of a run: {tmp_path / 'a'}$"):
        RunDir(tmp_path / "nope").latest_checkpoint()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV1, epochs=1)
    launch(spec)
    with pytest.raises(
        UsageError, match=r"a.weight has shape .* in the model, but the checkpoint .*epoch-1 has no such tensor; resume"
    ):
        launch(harness.job(tmp_path / "other", SKIP1, epochs=2, resume=spec.out))
    wider = replace(
        CONV1,
        model=CONV1.model.replace("Linear(16, 4)", "Linear(16, 5)"),
        stages=((CONV1.stages[0][0].replace("Linear(16, 4)", "Linear(16, 5)"), ("x",), ()),),
    )
    with pytest.raises(
        UsageError,
        match=r"fc.weight has shape \[5, 16\] in the model, but the checkpoint .*epoch-1 has shape \[4, 16\]",
    ):
        launch(harness.job(tmp_path / "wider", wider, epochs=2, resume=spec.out))


def test_a_checkpoint_holds_data_and_nothing_that_runs(tmp_path: Path) -> None:
    """Safetensors, one file for each stage, and a manifest with the digest of each; no file is a pickle."""
    spec = harness.job(tmp_path, TIED3, (1, 1, 1), epochs=1, seed=7)
    harness.run(spec)
    folder = RunDir(spec.out).latest_checkpoint().path
    files = {f"stage-{s}.safetensors" for s in range(3)}
    assert {path.name for path in folder.iterdir()} == {"checkpoint.json", *files}
    manifest = Checkpoint(folder).manifest()
    assert (manifest.epoch, manifest.seed, manifest.files.keys()) == (1, 7, files)
    for name, stored in manifest.files.items():
        content = (folder / name).read_bytes()
        assert (stored.bytes, stored.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert content[:1] != pickle.PROTO
        assert not zipfile.is_zipfile(folder / name)


@dataclass(frozen=True)
class Hostile:
    """Unpickling it makes a file."""

    made: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("use", ["export", "resume"])
@pytest.mark.parametrize("name", ["checkpoint.json", "stage-0.safetensors", ".metadata", "epoch.json"])
def test_a_hostile_file_in_a_run_is_not_executed(tmp_path: Path, name: str, use: str) -> None:
    """Law: a file from a stranger is data. What pdtool reads is refused with exit code 3, what it does not read is
    left alone."""
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    made = tmp_path / "made"
    path = (spec.out if name == "metrics.jsonl" else RunDir(spec.out).latest_checkpoint().path) / name
    is_read = path.exists() and not (name == "metrics.jsonl" and use == "export")
    path.write_bytes(pickle.dumps(Hostile(made)))
    expectation = pytest.raises(PdtoolError, match=name) if is_read else nullcontext()
    with expectation as raised:
        if use == "export":
            checkpoint.export(spec.out, tmp_path / "model.pt")
        else:
            launch(replace(spec, epochs=2, resume=spec.out))
    assert raised is None or raised.value.exit_code == 3
    assert not made.exists()


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[-1] ^= 1
    elif how == "flipped header":
        content[9] ^= 1
    elif how == "cut":
        del content[-5:]
    elif how == "longer":
        content += b"0"
    path.unlink()
    if how != "missing":
        path.write_bytes(content)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("how", ["flipped", "flipped header", "cut", "longer", "missing", "of another epoch"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(tmp_path: Path, how: str) -> None:
    spec = harness.job(tmp_path, CONV1, epochs=2)
    harness.run(spec)
    first, last = (spec.out / "checkpoints" / f"epoch-{epoch}" for epoch in (1, 2))
    name = "stage-0.safetensors"
    if how == "of another epoch":
        (last / name).write_bytes((first / name).read_bytes())
    else:
        damage(last / name, how)
    what = "is missing" if how == "missing" else "is damaged .*"
    remedy = f"continue in a new folder from the checkpoint before it: `pdtool run --resume {first}`"
    message = rf"epoch-2/stage-0.safetensors: {what}; {remedy}"
    with pytest.raises(ArtifactError, match=message):
        checkpoint.export(spec.out, tmp_path / "model.pt")
    with pytest.raises(PdtoolError, match=message) as raised:
        launch(replace(spec, epochs=3, resume=spec.out))
    assert raised.value.exit_code == ArtifactError.exit_code
    launch(replace(spec, epochs=2, resume=first, out=tmp_path / "again"))
    assert RunDir(tmp_path / "again").latest_checkpoint().path.name == "epoch-2"
    shutil.rmtree(first)
    with pytest.raises(ArtifactError, match="this run has no earlier checkpoint"):
        checkpoint.export(spec.out, tmp_path / "model.pt")


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "null", '{"format": "pdtool/checkpoint/1"}', "\xff"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: str) -> None:
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    (RunDir(spec.out).latest_checkpoint().path / "checkpoint.json").write_text(content, encoding="latin-1")
    with pytest.raises(ArtifactError, match=r"epoch-1/checkpoint.json: is damaged"):
        checkpoint.export(spec.out, tmp_path / "model.pt")
    with pytest.raises(ArtifactError, match=r"epoch-1/checkpoint.json: is damaged"):
        launch(replace(spec, epochs=2, resume=spec.out))


def test_a_folder_of_another_epoch_is_refused(tmp_path: Path) -> None:
    """Renamed, it would be taken for the last one, and hide what is trained after it."""
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    folder = RunDir(spec.out).latest_checkpoint().path
    folder.rename(folder.with_name("epoch-9"))
    message = (
        r"epoch-9/checkpoint.json: is of epoch 1, but its folder is of another epoch; rename the folder to epoch-1"
    )
    with pytest.raises(ArtifactError, match=message):
        checkpoint.export(spec.out, tmp_path / "model.pt")
    with pytest.raises(ArtifactError, match=message):
        launch(replace(spec, epochs=12, resume=spec.out))


def test_metrics_that_are_no_file_are_refused(tmp_path: Path) -> None:
    """A FIFO would be waited for."""
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    (spec.out / "metrics.jsonl").unlink()
    os.mkfifo(spec.out / "metrics.jsonl")
    with pytest.raises(PdtoolError, match=r"metrics.jsonl: is not a regular file; remove it"):
        launch(replace(spec, epochs=2, resume=spec.out), on_metrics=print)


def test_a_file_of_a_checkpoint_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A FIFO has 0 bytes, as a manifest can say; export waited for it."""
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    folder = RunDir(spec.out).latest_checkpoint().path
    manifest = Checkpoint(folder).manifest()
    [(name, stored)] = manifest.files.items()
    manifest.model_copy(update={"files": {name: stored.model_copy(update={"bytes": 0})}}).save(
        folder / "checkpoint.json"
    )
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(
        ArtifactError, match=rf"{name}: is damaged \(it is not a regular file\); this run has no earlier checkpoint"
    ):
        checkpoint.export(spec.out, tmp_path / "model.pt")


def test_values_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    """A view, a transposed tensor, a tensor under two names, one without elements, a scalar."""
    base = torch.arange(12.0)
    state = {
        "a": base[:4],
        "b": base,
        "c": base,
        "d": base.view(3, 4).t(),
        "e": torch.empty(0, 2),
        "f": torch.tensor(3),
    }
    path = tmp_path / "stage-0.safetensors"
    checkpoint._write(path, state)
    assert_same(load_file(path), state, rtol=0, atol=0)
    assert os.listdir(tmp_path) == ["stage-0.safetensors"]


def test_the_numbers_of_an_optimizers_state_return_to_the_device_that_they_were_on() -> None:
    """One on the GPU came back on the CPU, where the next step failed."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))  # stands for a GPU
    numbers = {"norm": torch.empty((), device="meta"), "mean": torch.tensor(2.0), "step": torch.tensor(3.0)}
    file: Any = None
    saved, loaded = (OptimizerState(file, torch.optim.SGD([parameter], lr=0.1), steps_by_user=False) for _ in range(2))
    saved._optimizer.state[parameter] = numbers
    record = saved.records([parameter], ())[parameter]
    on_the_cpu = {name: torch.zeros(()) for name in numbers}
    loaded.load({parameter: record | {"state": on_the_cpu}})
    found = {name: number.device for name, number in loaded._optimizer.state[parameter].items()}
    assert found == {name: number.device for name, number in numbers.items()}
    loaded.load({parameter: {"state": on_the_cpu, "optimizer": {}}})  # an older checkpoint, or one of a CPU
    assert all(number.is_cpu for number in loaded._optimizer.state[parameter].values())


def test_a_checkpoint_can_be_read_by_whom_the_umask_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors lets only the owner read, and says of such a file that it is missing."""
    spec = harness.job(tmp_path, CONV1, epochs=1)
    harness.run(spec)
    folder = RunDir(spec.out).latest_checkpoint().path
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert len({*modes.values()}) == 1, modes
    real, file = Path.open, folder / "stage-0.safetensors"

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path == file:
            raise PermissionError(13, "Permission denied")
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    remedy = f"ask its owner to run `chmod a+r {file}`"
    with pytest.raises(ArtifactError, match=rf"cannot be read \(Permission denied\); {re.escape(remedy)}"):
        checkpoint.read(folder, lambda key: True)


def test_a_limit_on_threads_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    found = pytest.raises(PdtoolError, match=r"followed \(can't start new thread\); raise the limit .*`ulimit -u 4096`")
    with found, following_metrics(tmp_path / "metrics.jsonl", print, after=0):
        pass
