"""Stages whose layers only take their time, and note when they did.

A layer takes `forward_s` and `backward_s` by sleeping until they are over; what it does besides (it makes its output,
and the gradients, of real memory) is part of that. With 0 it does not sleep: then all that a run costs is pdtool's.
Each process appends to a file of its own: kind, begin and end on the clock, and the process's CPU seconds at the begin.
"""

from __future__ import annotations

import multiprocessing
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import HEAD, Toy, stage, tensor

RECORD = struct.Struct("dddd")
FORWARD, BACKWARD = 0.0, 1.0

LAYER = """
import os, struct, time

class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        begin, cpu = time.perf_counter(), time.process_time()
        ctx.layer, ctx.like_x, ctx.like_weight = layer, x, weight
        out = x.new_ones(len(x), layer.out)
        layer.end(0.0, begin, layer.forward_s, cpu)
        return out

    @staticmethod
    def backward(ctx, gradient):
        begin, cpu = time.perf_counter(), time.process_time()
        gradients = torch.ones_like(ctx.like_x), torch.ones_like(ctx.like_weight)
        ctx.layer.end(1.0, begin, ctx.layer.backward_s, cpu)
        return *gradients, None

class Layer(nn.Module):
    def __init__(self, number, weights, out, forward_s, backward_s):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weights))
        self.number, self.out, self.forward_s, self.backward_s, self.file = number, out, forward_s, backward_s, None
    def end(self, kind, begin, length, cpu):
        left = begin + length - time.perf_counter()
        if length and left > 0:
            time.sleep(left)
        if self.file is None:
            self.file = open(f"FOLDER/{self.number}-{os.getpid()}", "ab", buffering=0)
        self.file.write(struct.pack("dddd", kind, begin, time.perf_counter(), cpu))
    def forward(self, x):
        return Spend.apply(x, self.weight, self) if self.training else x.new_ones(len(x), self.out)
"""

MODEL = """
import torch
from torch.utils.data import TensorDataset

def dataset(split):
    n = SAMPLES if split == "train" else BATCH
    return TensorDataset(torch.zeros(n, INPUTS).requires_grad_(False), torch.zeros(n, dtype=torch.long))

def loss(output, target):
    return output.mean()

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=1e-6)
"""


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A chain of stages of one layer each.

    Attributes:
        forward_s, backward_s: of each stage.
        width: floats of a sample at each border.
        weights: parameters of each stage.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    width: int
    weights: int
    batch_size: int = 4
    minibatches: int = 100
    inputs: int = 4

    def toy(self, folder: Path) -> Toy:
        """The stages for tests/harness.py; they note into `folder`."""
        layer = LAYER.replace("FOLDER", str(folder))
        last = len(self.forward_s) - 1
        made = [
            f"self.l{s} = Layer({s}, {self.weights}, {4 if s == last else self.width}, {f!r}, {b!r})"
            for s, (f, b) in enumerate(zip(self.forward_s, self.backward_s, strict=True))
        ]
        body = (
            stage(
                9, "; ".join(made), "h0: " + "; ".join(f"h0 = self.l{s}(h0)" for s in range(last + 1)) + "; return h0"
            )
            .replace("Stage9", "Net")
            .replace(HEAD, "")
        )
        numbers = {"SAMPLES": self.batch_size * self.minibatches, "BATCH": self.batch_size, "INPUTS": self.inputs}
        data = MODEL
        for name, number in numbers.items():
            data = data.replace(name, str(number))
        return Toy(
            model=f"{HEAD}{layer}{data}\n{body}\ndef model():\n    return Net()\n",
            stages=tuple(
                (
                    HEAD + layer + stage(s, init, f"h{s}: return self.l{s}(h{s})").replace(HEAD, ""),
                    (f"h{s}",),
                    (f"h{s + 1}",) if s < last else (),
                )
                for s, init in enumerate(made)
            ),
            tensors=tuple(tensor(f"h{s}", s - 1, [s], self.width if s else self.inputs) for s in range(last + 1)),
            inputs=("h0",),
        )


@dataclass(frozen=True)
class Notes:
    """What one layer noted in one process, of the later half of its minibatches: the first warm up."""

    forward_s: list[float]
    backward_s: list[float]
    begins_s: list[float]
    cpu_s: list[float]

    @property
    def cpu_per_minibatch_s(self) -> float:
        """CPU seconds of the process from one forward to the next."""
        return (self.cpu_s[-1] - self.cpu_s[0]) / (len(self.cpu_s) - 1)

    @property
    def taken_s(self) -> float:
        """Mean forward and backward."""
        return fmean(self.forward_s) + fmean(self.backward_s)


def notes(folder: Path) -> dict[int, list[Notes]]:
    """Stage -> what each of its replicas noted."""
    found: dict[int, list[Notes]] = {}
    for path in sorted(folder.iterdir()):
        found.setdefault(int(path.name.split("-")[0]), []).append(read(path))
    return found


def read(path: Path) -> Notes:
    """One file."""
    records = list(RECORD.iter_unpack(path.read_bytes()))
    forwards, backwards = (list(_later(records, kind)) for kind in (FORWARD, BACKWARD))
    return Notes(
        [end - begin for _, begin, end, _ in forwards],
        [end - begin for _, begin, end, _ in backwards],
        [begin for _, begin, _, _ in forwards],
        [cpu for _, _, _, cpu in forwards],
    )


def _later(records: Sequence[tuple[float, ...]], kind: float) -> Iterator[tuple[float, ...]]:
    of_kind = [record for record in records if record[0] == kind]
    return iter(of_kind[len(of_kind) // 2 :])


@dataclass(frozen=True)
class Alone:
    """Seconds per minibatch on the clock, and of the CPU."""

    wall_s: float
    cpu_s: float


def alone(folder: Path, number: int, inputs: int, batch_size: int, minibatches: int) -> Alone:
    """Stage `number` by itself, without pdtool, in a process of its own: forward, a loss, backward, step.

    Args:
        folder: of the job; what the layer notes goes to `alone` in it.
        inputs: floats of a sample that the stage takes.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_loop, args=(folder, number, (batch_size, inputs), minibatches, sender))
    process.start()
    sender.close()
    found: Alone = receiver.recv()
    process.join()
    return found


def _loop(folder: Path, number: int, shape: tuple[int, int], minibatches: int, result: Any) -> None:
    torch.set_num_threads(1)
    (folder / "alone").mkdir(exist_ok=True)
    source = (folder / "bundle" / f"stage_{number}.py").read_text()
    space: dict[str, Any] = {}
    exec(source.replace(str(folder / "notes"), str(folder / "alone")), space)
    module = space[f"Stage{number}"]()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    warm_up = minibatches // 4
    for i in range(warm_up + minibatches):
        if i == warm_up:
            wall, cpu = time.perf_counter(), time.process_time()
        module(torch.zeros(*shape, requires_grad=True)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    result.send(Alone((time.perf_counter() - wall) / minibatches, (time.process_time() - cpu) / minibatches))
