"""d. Overhead: what pdtool itself takes for an action, with stages that do nothing and tensors of a few bytes.

An action is a forward, a backward or an update. `own` is the CPU time of a worker from one forward to the next, less
that of the same layer, loss and optimizer in a plain loop, over three: waiting costs none, and neither does being
displaced by other workers. `on the clock` is the whole pipeline's time per minibatch, over three: with more workers
than cores it grows with their sum.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import torch

from pdtool.run.launch import launch
from runtime_bench.rows import Row, medians
from runtime_bench.toys import Emulated, notes

ACTIONS = 3
MOST_US = 100.0


def rows(folder: Path, repeats: int, quick: bool) -> Iterator[Row]:
    """By number of stages."""
    for stages in (2,) if quick else (2, 4, 8):
        found = [measure(stages, 60 if quick else 500, folder / f"{stages}-{i}") for i in range(repeats)]
        detail = medians(found)
        own, clock = ([each[name] for each in found] for name in ("own", "clock"))
        yield Row(part="d", case=f"straight {stages}", figure="us of CPU per action, own (mean of workers)", values=own,
                  most=MOST_US, detail={n: v for n, v in detail.items() if n not in ("own", "clock")})  # fmt: skip
        yield Row(part="d", case=f"straight {stages}", figure="us on the clock per minibatch / 3", values=clock)


def measure(stages: int, minibatches: int, folder: Path) -> dict[str, float]:
    """One run, and one plain loop right after it; microseconds per action."""
    idle = [0.0] * stages
    emulated = Emulated(forward_s=idle, backward_s=idle, width=4, weights=4, batch_size=1, minibatches=minibatches)
    noted = folder / "notes"
    noted.mkdir(parents=True)
    spec = harness.job(folder, emulated.toy(noted), batch_size=1, epochs=2, device="cpu")
    report = launch(spec)
    per_minibatch = {s: each[0].cpu_per_minibatch_s for s, each in notes(noted).items()}
    plain = plain_loop(folder, minibatches)
    us = {s: (value - plain) / ACTIONS * 1e6 for s, value in per_minibatch.items()}
    busy = fmean(of.busy_s + of.rest_s for of in report.stages)
    return {
        "own": fmean(us.values()), "clock": report.measured.bottleneck_s / ACTIONS * 1e6, "first": us[0],
        "last": us[stages - 1], "most": max(us.values()), "busy_on_the_clock": (busy - plain) / ACTIONS * 1e6,
        "plain_loop": plain / ACTIONS * 1e6,
    }  # fmt: skip


def plain_loop(folder: Path, minibatches: int) -> float:
    """CPU seconds per minibatch of stage 0 alone in a loop without pdtool, in a process of its own."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(target=_loop, args=(folder, minibatches, sender))
    process.start()
    sender.close()
    seconds: float = receiver.recv()
    process.join()
    return seconds


def _loop(folder: Path, minibatches: int, result: Any) -> None:
    sys.path.insert(0, os.fspath(folder))
    torch.set_num_threads(1)
    space: dict[str, Any] = {}
    (folder / "plain").mkdir()
    source = (folder / "bundle" / "stage_0.py").read_text().replace(str(folder / "notes"), str(folder / "plain"))
    exec(source, space)
    module = space["Stage0"]()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    for i in range(2 * minibatches):
        if i == minibatches:
            start = time.process_time()
        module(torch.zeros(1, 4, requires_grad=True)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    result.send((time.process_time() - start) / minibatches)
