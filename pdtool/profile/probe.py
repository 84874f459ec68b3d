"""Measure the network between the workers: what each level's links carry, an all-reduce, and a small message.

One process per worker. At a level of n members, worker p of member i sends to worker p of member i + 1 and receives
from worker p of member i - 1, all at once: every member's link is full in both directions, shared as in training.

    3x2:  0 1 | 2 3 | 4 5     level 0:  0 -> 2 -> 4 -> 0,  1 -> 3 -> 5 -> 1     level 1:  0 <-> 1,  2 <-> 3,  4 <-> 5
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from pdtool.artifacts.cluster_file import ClusterFile, LevelMeasured, LevelSpec, NetworkMeasured
from pdtool.errors import UsageError
from pdtool.profile.meeting import Meeting

_ROUNDS = 5  # of which the median counts
_FIRST_BYTES, _MESSAGE_BYTES = 2**20, 2**24
_PINGS = 100
OnStep = Callable[[str], None]
Transfer = Callable[[Tensor, Tensor], None]  # (to send, to receive into), of one shape


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure.

    Attributes:
        sizes: of the levels, the outermost first.
        device: `auto` is cuda (over NCCL) when every worker has a CUDA device of its own, else cpu (over gloo).
        timeout_s: how long one worker waits for another.
        round_s: seconds that a round lasts at least: long against its start, which workers reach a millisecond apart.
    """

    name: str
    sizes: tuple[int, ...]
    device: str = "auto"
    timeout_s: float = 60.0
    round_s: float = 0.2

    def __post_init__(self) -> None:
        if 1 in self.sizes:
            topology = "x".join(map(str, self.sizes))
            raise UsageError(
                f"topology {topology}: there is nothing to measure in a level of 1", "leave out levels of 1 member"
            )

    @property
    def workers(self) -> int:
        """In all."""
        return math.prod(self.sizes)

    def place(self, depth: int, rank: int) -> Place:
        """Where a worker stands in a level."""
        return Place(depth, self.sizes[depth], math.prod(self.sizes[depth + 1 :]), rank)


@dataclass(frozen=True)
class Place:
    """A worker's place in a level: `below` workers in each of `size` members."""

    depth: int
    size: int
    below: int
    rank: int

    @property
    def peers(self) -> list[int]:
        """Its counterparts in all members, its own rank among them."""
        first = self.rank - self.rank // self.below % self.size * self.below
        return [first + k * self.below for k in range(self.size)]

    def neighbour(self, step: int) -> int:
        """Its counterpart `step` members further, in a ring."""
        return self.peers[(self.rank // self.below + step) % self.size]


def probe_here(request: Request, store: Any, rank: int, local: int, *, alone: bool, on_step: OnStep) -> ClusterFile:
    """Be worker `rank`, in this process.

    Args:
        store: where all workers meet.
        local: number of this worker on its machine.
        alone: all workers are on this machine.
        on_step: told by worker 0 what is measured next.

    Raises:
        WorkerDiedError: a wait was not answered; it says which, and by whom.
        UsageError: a worker lacks the device.
    """
    if alone and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing leaves this machine
    meeting = Meeting(store, rank, request.workers, request.timeout_s)
    memory_bytes = _agreed_memory(request, meeting, local)
    device = torch.device("cuda", local) if memory_bytes else torch.device("cpu")
    if memory_bytes:
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a wait ends when its time is over, with an error
        torch.cuda.set_device(device)
    levels = _Prober(request, meeting, device, on_step if rank == 0 else lambda step: None).levels()
    meeting.leave()
    dist.destroy_process_group()
    return ClusterFile(
        name=request.name,
        levels=tuple(spec for spec, _ in levels),
        memory_bytes=memory_bytes,
        measured=NetworkMeasured(
            workers=request.workers,
            backend="nccl" if memory_bytes else "gloo",
            torch=torch.__version__,
            levels=tuple(measured for _, measured in levels),
        ),
    )


def _agreed_memory(request: Request, meeting: Meeting, local: int) -> int | None:
    """Bytes of the smallest CUDA device; None when the CPU is used. All workers come to the same answer."""
    own = torch.cuda.is_available() and dist.is_nccl_available() and local < torch.cuda.device_count()
    memory = meeting.everyone(torch.cuda.get_device_properties(local).total_memory if own else 0)
    if request.device == "cuda" and 0 in memory:
        raise UsageError(
            f"worker {memory.index(0)} has no CUDA device of its own", "use --device cpu, or fewer workers"
        )
    return None if request.device == "cpu" else min(memory) or None


class _Prober:
    """One worker of the measurement."""

    def __init__(self, request: Request, meeting: Meeting, device: torch.device, on_step: OnStep) -> None:
        self.request, self.meeting, self.device, self.on_step = request, meeting, device, on_step
        self.timeout = timedelta(seconds=request.timeout_s)
        self.cuda = device.type == "cuda"

    def levels(self) -> list[tuple[LevelSpec, LevelMeasured]]:
        """Measure all of them."""
        everyone = range(self.request.workers)
        with self.meeting.waiting_for(everyone, "set GLOO_SOCKET_IFNAME to the network card that they share"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.cuda else "gloo",
                store=PrefixStore("groups", self.meeting.store),
                rank=self.meeting.rank,
                world_size=self.request.workers,
                timeout=self.timeout,
            )
            groups = [self._group(depth) for depth in range(len(self.request.sizes))]
        return [self._level(depth, group) for depth, group in enumerate(groups)]

    def _group(self, depth: int) -> Any:
        """The group of this worker's counterparts at a level; every worker makes all of them, in the same order."""
        own = None
        for rank in range(self.request.workers):
            peers = self.request.place(depth, rank).peers
            if rank == peers[0]:
                group = dist.new_group(peers, timeout=self.timeout, backend="nccl" if self.cuda else "gloo")
                own = group if self.meeting.rank in peers else own
        return own

    def _level(self, depth: int, group: Any) -> tuple[LevelSpec, LevelMeasured]:
        place = self.request.place(depth, self.meeting.rank)
        pair = (0, place.below)
        other = pair[1 - pair.index(place.rank)] if place.rank in pair else None
        self._begin(depth, "all links both ways at once")
        link = place.below * self._rate(partial(self._exchange, place.neighbour(1), place.neighbour(-1)))
        self._begin(depth, f"workers {pair[0]} and {pair[1]} alone")
        alone = self._rate(partial(self._exchange, other, other))
        self._begin(depth, f"latency between workers {pair[0]} and {pair[1]}")
        latency = self._latency(other)
        self._begin(depth, "all-reduce")
        share = 2 * (place.size - 1) / place.size  # of the bytes, that each member of a ring sends
        ring = place.below * share * self._rate(partial(self._all_reduce, group, place))
        return (
            LevelSpec(size=place.size, bandwidth_bytes_per_s=_rounded(link), latency_s=_rounded(latency)),
            LevelMeasured(pair_bytes_per_s=_rounded(alone), allreduce_bytes_per_s=_rounded(ring)),
        )

    def _begin(self, depth: int, what: str) -> None:
        self.meeting.step = f"level {depth} of {'x'.join(map(str, self.request.sizes))}, {what}"
        self.on_step(self.meeting.step)

    def _rate(self, transfer: Transfer) -> float:
        """Bytes per second at the slowest worker. Rounds grow until they last long enough; then several count."""
        total = _FIRST_BYTES
        self._round(transfer, total)  # to warm up
        while (seconds := self._round(transfer, total)) < self.request.round_s:
            growth = 1.2 * self.request.round_s / seconds
            total = int(total * min(16.0, growth)) // 4 * 4
        return total / statistics.median(self._round(transfer, total) for _ in range(_ROUNDS))

    def _round(self, transfer: Transfer, total: int) -> float:
        """Seconds of the slowest worker for `total` bytes, in messages of a common size."""
        size = min(total, _MESSAGE_BYTES) // 4
        out, into = (torch.zeros(size, device=self.device) for _ in range(2))
        whole, rest = divmod(total // 4, size)
        self._together()
        start = time.perf_counter()
        for count in [size] * whole + [rest] * (rest > 0):
            transfer(out[:count], into[:count])
        return float(max(self.meeting.everyone(time.perf_counter() - start)))

    def _together(self) -> None:
        """Start at the same time."""
        self.meeting.everyone()
        with self.meeting.waiting_for(range(self.request.workers)):
            dist.all_reduce(torch.zeros(1))

    def _exchange(self, to: int | None, source: int | None, out: Tensor, into: Tensor) -> None:
        """Both ways at once: gloo needs the receive posted first, NCCL the two in one batch."""
        if to is None or source is None:
            return  # this worker only waits for those who do
        with self.meeting.waiting_for((source, to)):
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, source), dist.P2POp(dist.isend, out, to)]):
                self._finish(work)

    def _all_reduce(self, group: Any, place: Place, out: Tensor, into: Tensor) -> None:
        with self.meeting.waiting_for(place.peers):
            self._finish(dist.all_reduce(out, group=group, async_op=True))

    def _latency(self, other: int | None) -> float:
        """Seconds of a small message one way: half the median of many there and back; None only waits."""
        self._together()
        times = [0.0]
        if other is not None:
            there = (dist.isend, dist.irecv) if self.meeting.rank < other else (dist.irecv, dist.isend)
            letter = torch.zeros(1, device=self.device)
            with self.meeting.waiting_for([other]):
                times = [self._ping(there, letter, other) for _ in range(_PINGS)]
        return float(max(self.meeting.everyone(statistics.median(times) / 2)))

    def _ping(self, there_and_back: tuple[Any, Any], letter: Tensor, other: int) -> float:
        start = time.perf_counter()
        for way in there_and_back:
            self._finish(way(letter, other))
        return time.perf_counter() - start

    def _finish(self, work: Any) -> None:
        work.wait(self.timeout)
        if self.cuda:
            torch.cuda.synchronize(self.device)


def _rounded(value: float) -> float:
    """To the digits that a measurement has, and that a person reads."""
    return float(f"{value:.4g}")
