"""The folder that all trials use, commands in it, and what must hold after each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from click.testing import CliRunner

from pdtool.artifacts.run_dir import Checkpoint, RunDir
from pdtool.cli.commands.app import main
from pdtool.errors import PdtoolError
from pdtool.runtime.worker import checkpoint

ROOT = Path(__file__).parents[2]
PDTOOL = [sys.executable, "-m", "pdtool"]
TIMEOUT_S = 5.0  # that runs are given
LIMIT_S = 60.0  # for any of them to end, start-up included; what takes longer hangs
ORPHANS_WITHIN_S = 3.0  # for processes to be gone after their command
REFERENCE_EPOCHS = 40
WORKERS = 4
_PLAN = "plans/four.yaml"

MODEL = """
import time
from collections import OrderedDict
import torch
from torch import nn
from torch.utils.data import Dataset

def model():
    layers = dict(first=nn.Linear(4, 8), relu=nn.ReLU(), middle=nn.Linear(8, 8), last=nn.Linear(8, 2))
    return nn.Sequential(OrderedDict(layers))

class Slow(Dataset):
    def __init__(self):
        self.x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        time.sleep(0.002)
        return self.x[i], (self.x[i].sum() > 0).long()

def dataset(split):
    return Slow()

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.5)
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: exit code, negative for a signal; None: it had to be killed.
        orphans: command lines of its processes that were left.
    """

    code: int | None
    errors: str
    seconds: float
    orphans: list[str]


@dataclass
class Outcome:
    """What was wrong with one trial; nothing, if all lists are empty."""

    name: str
    seconds: float = 0.0
    hangs: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    wrong_causes: list[str] = field(default_factory=list)

    def add(self, ended: Ended, codes: Sequence[int], message: str = "") -> None:
        """Add how a command ended; it should have ended with one of `codes`, its errors matching `message`."""
        self.seconds = max(self.seconds, ended.seconds)
        self.orphans += ended.orphans
        if ended.code is None:
            self.hangs.append(f"{self.name}: it did not end within {LIMIT_S:g} s: {_last_words(ended.errors)}")
        elif ended.code not in codes or not re.search(message, ended.errors) or "Traceback" in ended.errors:
            expected = f"expected exit code {' or '.join(map(str, codes))} and {message!r}"
            self.wrong_causes.append(f"{self.name}: {expected}; exit code {ended.code}: {_last_words(ended.errors)}")


class Command:
    """A command whose processes can be told from all others by a variable in their environment."""

    def __init__(self, arguments: Sequence[str], folder: Path, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        self._start = time.monotonic()
        self.process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=variables | {"PDTOOL_CHAOS": self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ended(self) -> Ended:
        """Wait for its end, and for that of its processes."""
        code: int | None
        try:
            _, errors = self.process.communicate(timeout=LIMIT_S)
            code = self.process.returncode
        except subprocess.TimeoutExpired:
            for pid in [*self.processes(), self.process.pid]:
                kill(pid, signal.SIGKILL)
            _, errors = self.process.communicate()
            return Ended(None, errors, time.monotonic() - self._start, [])
        seconds, deadline = time.monotonic() - self._start, time.monotonic() + ORPHANS_WITHIN_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        orphans = self.processes()
        for pid in orphans:
            kill(pid, signal.SIGKILL)
        return Ended(code, errors, seconds, [f"{pid} {text[-200:]}" for pid, text in orphans.items()])

    def processes(self) -> dict[int, str]:
        """Its processes, and theirs: pid -> command line; zombies are not among them."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"PDTOOL_CHAOS={self.mark}".encode() in (path / "environ").read_bytes():
                    text = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found[int(path.name)] = text
        return found


class Bench:
    """A folder with a model, its plan on four workers, and a run that nothing disturbed."""

    def __init__(self, folder: Path, epochs: int = REFERENCE_EPOCHS) -> None:
        self.folder = folder
        (folder / "model.py").write_text(MODEL)
        self.pdtool("profile", "model.py", "--batch-size", "4")
        self.pdtool("partition", "--topology", "4", "--bandwidth", "1Gbit/s", "--straight", "-o", _PLAN)
        self.pdtool("codegen", _PLAN)
        self.pdtool(*self.run("runs/reference", epochs))
        checkpoints = RunDir(folder / "runs/reference").checkpoints()
        self.states = {epoch: checkpoint.read(saved.path, lambda key: True) for epoch, saved in checkpoints.items()}

    def run(self, out: str, epochs: int, *more: str) -> list[str]:
        """The arguments of a run."""
        return ["run", _PLAN, "-o", out, "--epochs", str(epochs), "--timeout", f"{TIMEOUT_S:g}s", *more]

    def pdtool(self, *arguments: str) -> None:
        """Run a command that must succeed, in this process."""
        with chdir(self.folder):
            ended = CliRunner().invoke(main, arguments, prog_name="pdtool")
        if ended.exit_code != 0:
            sys.exit(f"pdtool {' '.join(arguments)}: exit code {ended.exit_code}\n{ended.output}")

    def start(self, *arguments: str, prefix: Sequence[str] = (), folder: Path | None = None, **env: str) -> Command:
        """Start a command; `prefix` goes before it, as `ip netns exec NAME`."""
        return Command([*prefix, *PDTOOL, *arguments], folder or self.folder, **env)

    def losses(self, out: str, name: str, before: Mapping[int, Checkpoint] | None = None) -> list[str]:
        """What a run has lost: a checkpoint that was complete before, that cannot be read, or that is not the one which
        an undisturbed run wrote."""
        complete = RunDir(self.folder / out).checkpoints()
        losses = [f"{name}: epoch {epoch} is gone" for epoch in (before or {}).keys() - complete.keys()]
        for epoch, saved in complete.items():
            try:
                state = checkpoint.read(saved.path, lambda key: True)
            except PdtoolError as error:
                losses.append(f"{name}: {error}")
                continue
            expected = self.states.get(epoch)
            if expected and not _is_equal(state, expected):
                losses.append(f"{name}: epoch {epoch} is not that of the undisturbed run")
        return losses


def _last_words(errors: str) -> str:
    """What a command said was wrong, or else the end of what it said."""
    told = [line for line in errors.splitlines() if line.startswith("error")]
    return " ".join(told)[:800] or errors[-800:]


def _is_equal(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
