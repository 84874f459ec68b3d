"""A plan keeps its word about memory: with just the memory that it asks for, a run is not killed."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.report import Report
from pdtool.units import parse_bytes

ROOT = Path(__file__).parents[2]
GROUPS, LIMIT = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"  # control groups of version 1
WAYS = {
    "pipeline": ("--replicas", "1-1", "--schedule", "1f1b"),
    "flush": ("--replicas", "1-1", "--schedule", "1f1b-flush", "--microbatches", "4"),
    "copies": ("--replicas", "2"),
}
UPDATES = 20
MODEL = """
import torch
from torch import nn

class Last(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]

def model():
    return nn.Sequential({layers}, nn.Flatten(), nn.Linear({features}, 10))

class Samples(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn({shape}, generator=g), i % 10

def dataset(split):
    return Samples({samples} if split == "train" else {batch})

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.{optimizer}([p for _, p in named_parameters])
"""


def random_model(rng: random.Random) -> tuple[str, int]:
    """A model file with tensors of some hundred MB, and the samples of a minibatch."""
    kind = rng.choice(["linear", "convolution", "attention", "recurrent"])
    depth, batch = rng.randint(3, 6), rng.choice([16, 32, 48])
    if kind == "linear":
        width = rng.randint(1200, 2000)
        block = f"nn.Linear({width}, {width}), nn.GELU()"
        shape: tuple[int, ...] = (width,)
    elif kind == "convolution":
        width = rng.choice([48, 64, 96])
        block = f"nn.Conv2d({width}, {width}, 3, padding=1), nn.BatchNorm2d({width}), nn.ReLU()"
        shape = (width, 24, 24)
    elif kind == "attention":
        width = 64 * rng.randint(6, 12)
        block, shape = f"nn.TransformerEncoderLayer({width}, 4, {2 * width}, batch_first=True)", (24, width)
    else:
        width = rng.randint(500, 900)
        block, shape = f"Last({width}, {width}, batch_first=True)", (16, width)
    optimizer = rng.choice(["Adam", "AdamW", "SGD"])
    text = MODEL.format(
        layers=", ".join([block] * depth),
        features=math.prod(shape),
        samples=batch * UPDATES,
        batch=batch,
        shape=", ".join(map(str, shape)),
        optimizer=optimizer,
    )
    return text, batch


@contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """A new control group of processes that have so much memory together."""
    group = GROUPS / f"pdtool-{os.getpid()}"
    group.mkdir()
    try:
        (group / LIMIT).write_text(str(limit_bytes))
        yield group
    finally:
        for _ in range(50):  # until the kernel has forgotten its last process
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def is_usable() -> bool:
    """Whether control groups that limit memory can be made here."""
    try:
        with control_group(10**9) as group:
            return (group / "tasks").exists()
    except OSError:
        return False


def pdtool(folder: Path, *arguments: str, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One command, all of its processes in the control group."""
    enter = f"echo $$ > {group}/tasks && " if group else ""
    command = ["sh", "-c", f'{enter}exec "$@"', "sh", sys.executable, "-m", "pdtool", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.rows_of_the_day(days=8)
@pytest.mark.skipif(not is_usable(), reason="needs to make control groups of version 1 that limit memory")
@pytest.mark.parametrize("seed", range(8))
def test_a_run_is_not_killed_with_the_least_memory_that_a_plan_asks_for(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text, batch = random_model(rng)
    (tmp_path / "net.py").write_text(text)
    way = rng.choice(list(WAYS))
    partition = ("partition", "--topology", "2", "--bandwidth", "16Gbit/s", *WAYS[way], "--memory")
    done = pdtool(tmp_path, "profile", "net.py", "--batch-size", str(batch), "--threads", "1")
    assert not done.returncode, done.stderr
    refused = pdtool(tmp_path, *partition, "1MB")
    found = re.search(r"at least --memory ([\d.]+\w*B)", refused.stderr)
    assert found, refused.stderr
    for command in ((*partition, found[1]), ("codegen",)):
        done = pdtool(tmp_path, *command)
        assert not done.returncode, done.stderr
    plan = Plan.load(tmp_path / "plans" / "net-2.yaml")
    with control_group(2 * parse_bytes(found[1])) as group:
        done = pdtool(tmp_path, "run", "plans/net-2.yaml", "--epochs", "1", "-o", "run", group=group)
    assert not done.returncode, f"{text}\n{plan.config} {plan.schedule} in {found[1]} a worker\n{done.stderr}"
    report = Report.load(tmp_path / "run" / "report.json")
    assert report.minibatches == UPDATES
