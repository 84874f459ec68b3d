"""A stand-in for NCCL on real worker processes without a GPU: gloo carries the messages, under the rules of NCCL.

`install` replaces in this process what pdtool calls of torch.distributed for NCCL groups. What a rule of
docs/waiting.md says of a host or a device is enforced, and what would then hang fails after a while:

1. The first operation of a group, and the first message between two members, make their hosts wait for each other.
2. Operations of a group run one after the other, in a thread of their own.
3. So many run at once; others wait until one has ended.
4. Each forward, backward and step synchronises: it waits until all operations that were issued before have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

TIMEOUT_S = 20.0  # what goes on takes milliseconds, but the machine may be busy


class StandInError(RuntimeError):
    """What would hang with NCCL."""


@dataclass
class StandInGroup:
    """A process group that obeys the rules; `gloo` carries its messages."""

    name: str
    gloo: Any
    device: Device
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    is_used: bool = False

    def issue(self, what: str, operation: Callable[[], Any], first: str) -> Work:
        """Let an operation run after those issued before it.

        Args:
            first: names the members that wait for each other where this is the first between them.
        """
        if not self.is_used:  # rule 1
            self.is_used = True
            self.device.meet(self.name, dist.get_world_size(self.gloo))
        if first:
            self.device.meet(f"{self.name}: {first}", 2)
        work = Work(f"{what} on {self.name}", self.thread.submit(self.device.run, operation), self.device.timeout_s)
        self.device.issued.append(work)
        return work


@dataclass
class Work:
    """An operation that was issued."""

    what: str
    future: Future[Any]
    timeout_s: float

    def wait(self, timeout: Any = None) -> None:
        """Let the computation wait; on a GPU the stream would."""
        try:
            self.future.result(self.timeout_s)
        except FutureTimeoutError as error:
            raise StandInError(f"{self.what} does not end") from error


class Device:
    """What the operations of this process share."""

    def __init__(self, max_running: int, timeout_s: float) -> None:
        self._slots, self.timeout_s = threading.Semaphore(max_running), timeout_s
        self._met: set[str] = set()
        self.issued: list[Work] = []

    def run(self, operation: Callable[[], Any]) -> Any:
        """Run an operation when one more may run (rule 3).

        Raises:
            FutureTimeoutError: it does not end.
        """
        with self._slots:
            try:
                return operation()
            except RuntimeError as error:  # Gloo's own timeout may come before that of who waits
                if "Timed out" in str(error):
                    raise FutureTimeoutError from error
                raise

    def synchronize(self) -> None:
        """Wait until everything that was issued has ended (rule 4)."""
        deadline_s = time.monotonic() + self.timeout_s
        for work in self.issued:
            try:
                work.future.result(max(0.0, deadline_s - time.monotonic()))
            except FutureTimeoutError as error:
                raise StandInError(f"the device does not come to an end: {work.what}") from error
        self.issued.clear()

    def meet(self, place: str, members: int) -> None:
        """Wait until all members are there, the first time."""
        if place in self._met:
            return
        self._met.add(place)
        store = dist.distributed_c10d._get_default_store()
        deadline_s = time.monotonic() + self.timeout_s
        arrived = store.add(f"stand-in {place}", 1)
        while arrived < members:
            if time.monotonic() > deadline_s:
                raise StandInError(f"{arrived} of {members} came to the first operation of {place}")
            time.sleep(0.001)
            arrived = store.add(f"stand-in {place}", 0)


def install(max_running: int = 8, timeout_s: float = TIMEOUT_S) -> None:
    """Let this process, a worker, find NCCL and a device of its own."""
    from pdtool.runtime import groups as process_groups
    from pdtool.runtime.stage.pipeline_stage import PipelineStage
    from pdtool.runtime.stage.stage_replica import StageReplica

    device = Device(max_running, timeout_s)
    real = {name: getattr(dist, name) for name in ("new_group", "all_reduce", "broadcast", "isend", "irecv")}
    count = iter(range(1_000_000))

    def new_group(ranks: Any = None, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend != "nccl":
            return real["new_group"](ranks, *args, backend=backend, **kwargs)
        is_eager = kwargs.pop("device_id", None) is not None
        timeout = {"timeout": timedelta(seconds=timeout_s)}
        gloo = real["new_group"](ranks, *args, backend="gloo", **kwargs | timeout)
        group = StandInGroup(f"group {next(count)} of ranks {ranks}", gloo, device)
        if is_eager and dist.get_rank() in ranks:
            device.meet(group.name, len(ranks))
            group.is_used = True
        return group

    def collective(name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            if not isinstance(group, StandInGroup):
                return real[name](tensor, *args, group=group, async_op=async_op, **kwargs)
            work = group.issue(name, lambda: real[name](tensor, *args, group=group.gloo, **kwargs), "")
            return work if async_op else work.wait()

        return call

    def message(name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, other: int, group: Any = None, tag: int = 0) -> Any:
            if not isinstance(group, StandInGroup):
                return real[name](tensor, other, group, tag)
            ends = (dist.get_rank(), other) if name == "isend" else (other, dist.get_rank())
            first = f"messages from {ends[0]} to {ends[1]}"
            return group.issue(f"{name} {other}", lambda: real[name](tensor, other, group.gloo).wait(), first)

        return call

    isend, irecv = message("isend"), message("irecv")
    dist.new_group, dist.isend, dist.irecv = new_group, isend, irecv
    dist.all_reduce, dist.broadcast = collective("all_reduce"), collective("broadcast")
    dist.send = lambda *args, **kwargs: isend(*args, **kwargs).wait()
    dist.recv = lambda *args, **kwargs: irecv(*args, **kwargs).wait()
    process_groups._nccl_device = lambda _: f"device of rank {dist.get_rank()}"
    for owner, names in (
        (PipelineStage, "forward evaluate backward backward_input backward_weight"),
        (StageReplica, "step"),
    ):
        for name in names.split():
            setattr(owner, name, _synchronizing(getattr(owner, name), device))


def _synchronizing(function: Callable[..., Any], device: Device) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        device.synchronize()
        return function(*args, **kwargs)

    return call


def install_with_all_routes() -> None:
    """As `install`, with every route on NCCL: skip connections then make workers wait in a circle."""
    from pdtool.runtime.messages import open_channels

    install(timeout_s=5.0)
    open_channels.can_use_nccl = lambda route, plan: not route.is_local


def install_with_receives_ahead() -> None:
    """As `install`, with receives posted before they are needed, as on gloo."""
    from pdtool.runtime.messages import distributed

    install(timeout_s=5.0)
    distributed.NcclReceiver = distributed.DistributedReceiver
