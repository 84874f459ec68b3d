"""Bad input on the road: a clear line on stderr, the right exit code, nothing lost, nobody left running."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import NET

from pdtool.artifacts.run_dir import RunState


def changed(old: str, new: str) -> str:
    """NET with one piece replaced."""
    assert old in NET
    return NET.replace(old, new)


BRANCH = """
    class Net(nn.Module):
        def forward(self, x): return x if x.sum() > 0 else -x
    return Net()"""


@pytest.mark.parametrize(
    ("text", "options", "code", "match"),
    [
        ("def net(): pass\n", [], 1, r"model.py has no function model\(\); it defines: net"),
        ("def model(:\n", [], 1, r"model.py:1: invalid syntax"),
        ("import nothing_at_all\n", [], 1, r"model.py:1: importing it raised ModuleNotFoundError"),
        (NET, ["--set", "depth=3"], 1, r"model\(\) does not take these settings .*it takes: width; or give another"),
        (NET, ["--set", "depth"], 2, r"setting 'depth' is not NAME=VALUE"),
        (NET, ["--batch-size", "49"], 1, r"the training set has 48 samples, fewer than one minibatch of 49"),
        (changed("torch.randn(48, 4,", "torch.randn(48, 5,"), [], 1, r"error: .*(shape|mat|size)"),
        (changed("    return nn.Sequential(OrderedDict(layers))", BRANCH), [], 1, r"model.py:11: torch.export cannot"),
    ],
    ids=["model", "syntax", "import", "settings", "setting", "batch", "shape", "trace"],
)
def test_models_that_profile_cannot_use(folder, text, options, code, match):
    folder.write("model.py", text)
    result = folder.pdtool("profile", "model.py", "--batch-size", "8", *options, code=code)
    assert re.search(match, result.stderr.splitlines()[-1]), result.stderr
    assert not (folder.path / "profiles").exists()


MISTAKES = """
class Unreadable(Exception):
    def __str__(self): raise RuntimeError

class Stop(BaseException): pass

class Net(nn.Linear):
    def forward(self, x):
        FORWARD
        return super().forward(x)

def model():
    MODEL
    return Net(4, 2)

def loss(output, target):
    LOSS
    return nn.functional.cross_entropy(output, target)

class Keyless(torch.optim.SGD):
    def step(self): raise KeyError("momentum")

"""


@pytest.mark.parametrize(
    ("part", "statement", "match"),
    [
        ("FORWARD", "assert len(x) == 3", r"the model fails on inputs of shape \(8, 4\): AssertionError; fix"),
        ("FORWARD", "raise Unreadable", "the model fails on .*: Unreadable: its text cannot be read; fix"),
        ("FORWARD", "raise Stop('now')", "Stop: now was raised, which is not an Exception"),
        ("FORWARD", "raise GeneratorExit", "GeneratorExit was raised, which is not an Exception"),
        ("MODEL", "return model()", r"model\(\) raised RecursionError"),
        ("MODEL", "print('\\ud800')", r"model\(\) raised UnicodeEncodeError"),
        ("MODEL", "raise Stop", "Stop was raised, which is not an Exception"),
        ("MODEL", "Net.train = lambda *_: 1 / 0", r"<lambda>\(\) raised ZeroDivisionError"),
        ("LOSS", "raise Unreadable", r"loss\(\) raised Unreadable: its text cannot be read"),
        ("", "def optimizer(named): return Keyless([p for _, p in named])", "a step of Keyless raised KeyError"),
    ],
)
def test_a_mistake_of_any_kind_names_its_line(folder, part, statement, match):
    """Also an exception that is no Exception, or cannot be printed; never a traceback."""
    text = NET + (MISTAKES.replace(part, statement) if part else MISTAKES + statement)
    for other in ("FORWARD", "MODEL", "LOSS"):
        text = text.replace(other, "pass")
    folder.write("model.py", text)
    fault = statement if part else 'raise KeyError("momentum")'
    line = next(number for number, written in enumerate(text.splitlines(), 1) if fault in written)
    stderr = folder.pdtool("profile", "model.py", "--batch-size", "8", code=1).stderr
    assert re.search(rf"^error: model.py:{line}: {match}", stderr, re.MULTILINE), stderr


@pytest.mark.parametrize(
    ("helper", "match"),
    [
        ("x = 1\ndef f(:\n", "helper.py:2: invalid syntax"),
        ("if x:\ny = 2\n", "helper.py:2: expected an indented block"),
        ("x = 1\nassert x == 2\n", "helper.py:2: importing it raised AssertionError"),
    ],
)
def test_a_mistake_in_a_file_that_the_model_imports_names_that_file(folder, helper, match):
    folder.write("model.py", "import helper\n" + NET)
    folder.write("helper.py", helper)
    assert match in folder.pdtool("profile", "model.py", code=1).stderr


def test_a_model_that_is_not_there(folder):
    assert "there is no file gone.py" in folder.pdtool("profile", "gone.py", code=2).stderr
    folder.write("net.json", "{}")
    errors = folder.pdtool("profile", "net.json", code=2).stderr
    assert "'net.json' is not a Python file; name the Python file with model(); a profile is for `pdtool part" in errors
    assert "'a b' in 'gone.py:a b' is not the name" in folder.pdtool("profile", "gone.py:a b", code=2).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_here_is_refused(road):
    said = road.pdtool("profile", "model.py", "--device", "cuda", code=2).stderr
    assert "--device cuda: torch finds no CUDA device here; measure with --device cpu, or estimate" in said
    said = road.pdtool("run", "--device", "cuda", code=2).stderr
    assert "device cuda: torch finds no CUDA device here; leave out --device" in said
    assert not Path("runs").exists()


def test_a_full_disk_keeps_the_old_profile(road, monkeypatch):
    before = Path("profiles/model.json").read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    stderr = road.pdtool("profile", "model.py", "--batch-size", "4", code=1).stderr
    assert "profiles/model.json could not be written (No space left on device)" in stderr
    assert Path("profiles/model.json").read_bytes() == before
    assert os.listdir("profiles") == ["model.json"]


def test_a_full_disk_keeps_the_old_bundle(road, monkeypatch):
    road.pdtool("codegen")
    before = {path.name: path.read_bytes() for path in Path("plans/model-2").glob("*.*")}

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in road.pdtool("codegen", code=1).stderr
    assert {path.name: path.read_bytes() for path in Path("plans/model-2").glob("*.*")} == before
    assert sorted(os.listdir("plans")) == ["model-2", "model-2.yaml"]


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("profiles/model.json", ("partition", "--topology", "2")),
        ("profiles/model.json", ("codegen",)),
        ("plans/model-2.yaml", ("codegen",)),
        ("plans/model-2.yaml", ("run",)),
        ("plans/model-2.yaml", ("show",)),
    ],
)
def test_truncated_artifacts_stop_every_command(road, file, command):
    text = Path(file).read_text()
    road.write(file, text[: len(text) // 2])
    arguments = (*command, file) if command == ("show",) else command
    assert f"error: {file}" in road.pdtool(*arguments, code=3).stderr


def test_an_altered_profile_is_refused(road):
    text = Path("profiles/model.json").read_text()
    road.write("profiles/model.json", text.replace('"batch_size": 8', '"batch_size": 9'))
    assert "was altered or damaged" in road.pdtool("partition", "--topology", "2", code=3).stderr


def test_what_only_training_needs_is_missed_by_name(folder):
    folder.write("model.py", NET.replace("def optimizer", "def optimiser"))
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight")
    stderr = folder.pdtool("run", "--steps", "2", code=1).stderr
    assert "model.py has no function optimizer(); it defines: model, dataset, loss, optimiser, metrics" in stderr


def test_a_loss_that_is_no_number_ends_the_run_by_name(folder):
    folder.write("model.py", changed("cross_entropy(output, target)", "cross_entropy(output / 0, target)"))
    folder.pdtool("profile", "model.py", "--batch-size", "8")
    folder.pdtool("partition", "--topology", "2", "--straight")
    stderr = folder.pdtool("run", "--steps", "2", code=1).stderr
    assert "the loss is nan in minibatch 0 of epoch 1; try a lower learning rate" in stderr


def test_a_worker_that_dies_is_named_and_its_checkpoints_stay(road):
    kill = "import os, signal\n    if os.path.exists('die'):\n        os.kill(os.getpid(), signal.SIGKILL)\n    "
    road.write("model.py", changed("return nn.functional", f"{kill}return nn.functional"))
    road.pdtool("profile", "model.py", "--batch-size", "8")
    road.pdtool("partition", "--topology", "2", "--straight")
    road.pdtool("run", "-o", "runs/a", "--steps", "3")
    road.write("die", "")
    stderr = road.pdtool("run", "-o", "runs/a", "--steps", "3", "--epochs", "2", "--resume", code=5).stderr
    assert re.search(r"rank 1 \(stage 1, replica 0\) (was killed|died).*; it was last at 1F0 of epoch 2", stderr)
    (road.path / "die").unlink()
    assert "epoch 2/2:" in road.pdtool("run", "-o", "runs/a", "--steps", "3", "--epochs", "2", "--resume").stderr


def alive(session: int) -> list[str]:
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(path.parent.name)
    return found


@pytest.mark.usefixtures("stages")
def test_ctrl_c_ends_the_run_with_130_and_leaves_no_worker(road):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-m", "pdtool", "run", "-o", "runs/a", "--epochs", "100000"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = Path("runs/a/metrics.jsonl")
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert RunState.load("runs/a/run.json").reason == "Ctrl-C"
    deadline = time.monotonic() + 5
    while left := alive(process.pid):
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.05)


CLIPPING = """
class Clipping(torch.optim.SGD):
    def step(self):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()

def optimizer(named_parameters):
    return Clipping([p for _, p in named_parameters], lr=0.1)
"""


def test_an_optimizer_that_looks_at_all_stages_is_refused_by_codegen_and_by_a_run_after_it(road):
    """The operators stay the same, so that no new plan is asked for."""
    road.pdtool("codegen")
    road.write("model.py", NET + CLIPPING)
    for command in ("run", "codegen"):
        error = road.pdtool(command, code=1).stderr
        assert ": a step of Clipping depends on parameters of several stages: with the same grad" in error
    assert "pdtool partition --strategy data-parallel" in error
    assert not list(road.path.glob("runs/*"))
    road.pdtool("partition", "--topology", "2", "--strategy", "data-parallel", "-o", "plans/replicas.yaml")
    road.pdtool("codegen", "plans/replicas.yaml")


FREE = """
import schedulefree

class Whole(schedulefree.AdamWScheduleFree):
    def step(self):
        self.state["n"] = 1
        super().step()

def optimizer(named_parameters):
    return Whole([p for _, p in named_parameters], lr=0.1)
"""


def test_an_optimizer_that_has_modes_is_profiled_in_that_of_training(folder):
    """And one that keeps a number for no parameter."""
    folder.write("model.py", NET + FREE)
    folder.pdtool("profile", "model.py", "--batch-size", "8")
