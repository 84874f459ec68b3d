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
from typing import Any

import pytest

import pdtool
from pdtool.artifacts.report import Report
from pdtool.errors import NoPlanError
from pdtool.units import parse_bytes

ROOT = Path(__file__).parents[2]
GROUPS, LIMIT = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"  # control groups of version 1
WAYS: dict[str, dict[str, Any]] = {
    "pipeline": {"replicas": "1-1", "schedule": "1f1b"},
    "flush": {"replicas": "1-1", "schedule": "1f1b-flush", "microbatches": 4},
    "copies": {"replicas": "2"},
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


def run(folder: Path, plan: str, group: Path) -> subprocess.CompletedProcess[str]:
    """`pdtool run`, all of its processes in the control group."""
    command = [sys.executable, "-m", "pdtool", "run", plan, "--epochs", "1", "-o", "run"]
    in_group = ["sh", "-c", f'echo $$ > {group}/tasks && exec "$@"', "sh", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(in_group, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.rows_of_the_day(days=8)
@pytest.mark.skipif(not is_usable(), reason="needs to make control groups of version 1 that limit memory")
@pytest.mark.parametrize("seed", range(8))
def test_a_run_is_not_killed_with_the_least_memory_that_a_plan_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    text, batch = random_model(rng)
    Path("net.py").write_text(text)
    way = WAYS[rng.choice(list(WAYS))]
    profile = pdtool.profile("net.py", batch_size=batch, threads=1, device="cpu")
    planned: dict[str, Any] = {"topology": "2", "bandwidth": "16Gbit/s", **way}
    with pytest.raises(NoPlanError) as refused:
        pdtool.partition(profile, memory="1MB", **planned)
    found = re.search(r"at least --memory ([\d.]+\w*B)", str(refused.value))
    assert found, refused.value
    plan = pdtool.partition(profile, memory=found[1], output="plan.yaml", **planned)
    pdtool.codegen("plan.yaml")
    with control_group(2 * parse_bytes(found[1])) as group:
        done = run(tmp_path, "plan.yaml", group)
    assert not done.returncode, f"{text}\n{plan.config} {plan.schedule} in {found[1]} a worker\n{done.stderr}"
    assert Report.load(Path("run", "report.json")).minibatches == UPDATES
