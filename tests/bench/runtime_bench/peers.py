"""b. Other ways to train the same model on the same samples: seconds per minibatch, one thread in each process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle
from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.worker.worker_model import load_stage_module

WARM_UP = 3
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way.

    Attributes:
        way: `one` process, `two` at once that know nothing of each other, `ddp` over two, `GPipe` or `1F1B` of
            torch.distributed.pipelining over two, with the stages that pdtool generated.
        batch_size: samples in a minibatch, over all processes (of `two`, in each).
        microbatches: of a pipeline.
    """

    way: str
    model: ModelRef
    bundle: Bundle
    bundle_dir: Path
    batch_size: int
    steps: int
    microbatches: int = 1

    def samples_per_s(self, folder: Path) -> float:
        """Of all processes together, from the slowest."""
        world = 1 if self.way == "one" else 2
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        folder.mkdir(parents=True)
        members = [context.Process(target=_member, args=(self, rank, world, folder, sender)) for rank in range(world)]
        for member in members:
            member.start()
        sender.close()
        found: list[float] = []
        try:
            found = [receiver.recv() for _ in members]
        except EOFError:
            raise SystemExit(f"{self.way} of {self.model.source} failed") from None
        finally:
            for member in members:
                member.join()
        if self.way == "two":
            return sum(self.batch_size / seconds for seconds in found)
        return self.batch_size / max(found)


def _member(peer: Peer, rank: int, world: int, folder: Path, result: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    file = ModelFile.load(peer.model, trusted=True)
    data = file.dataset("train")
    x, y = default_collate([data[i] for i in range(peer.batch_size)])
    step = (_pipeline if peer.way in SCHEDULES else _whole)(peer, file, x, y, rank, world)
    for i in range(WARM_UP + peer.steps):
        if i == WARM_UP:
            dist.barrier()
            start = time.perf_counter()
        step()
    length = time.perf_counter() - start
    dist.barrier()
    result.send(length / peer.steps)
    dist.destroy_process_group()


def _whole(peer: Peer, file: ModelFile, x: Any, y: Any, rank: int, world: int) -> Callable[[], None]:
    """A process that holds all of the model."""
    model = file.build(0)
    optimizer = file.optimizer(list(model.named_parameters()))
    if peer.way == "ddp":
        model = DistributedDataParallel(model)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]

    def step() -> None:
        file.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class _Dense(torch.autograd.Function):
    """The same tensor, contiguous, and its gradient, too: gloo sends no other, and LSTMs give and take others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _Sendable(nn.Module):
    """A stage whose borders torch.distributed.pipelining can send."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: torch.Tensor) -> Any:
        output = self.stage(*map(_dense, inputs))
        return tuple(map(_dense, output)) if isinstance(output, tuple) else _dense(output)


def _dense(x: torch.Tensor) -> Any:
    return _Dense.apply(x) if x.is_floating_point() else x


def _pipeline(peer: Peer, file: ModelFile, x: Any, y: Any, rank: int, world: int) -> Callable[[], None]:
    """A process that holds one stage."""
    module = load_stage_module(peer.bundle, peer.bundle_dir, rank, file.build(0))
    optimizer = file.optimizer(list(module.named_parameters()))
    stage = PipelineStage(_Sendable(module), rank, world, CPU)
    schedule = SCHEDULES[peer.way](stage, peer.microbatches, loss_fn=file.loss)

    def step() -> None:
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=y, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
