"""Channels of torch.distributed, gloo or NCCL: they wait for sends as late as possible.

Both are a rendezvous: a message starts only when its receiver has asked for it. On gloo, receives are posted early, and
a sender keeps its tensors until they have gone. On NCCL, a receive is a kernel that runs until the message is there,
and anything that synchronises the device would wait for it. So it is posted only when needed; on an asynchronous device
that costs no time. NCCL matches messages by their order on a group. gloo's have tags, and the parts of one message come
in order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdtool.runtime.groups import PeerErrorContext
from pdtool.runtime.messages.pinned import in_pinned_memory
from pdtool.runtime.messages.routes import Route

_TAGS = 2**31
_MAX_BLOCKS = 4  # blocks of a kernel that sends or receives; some 20 GB/s each, more than links between machines carry


def make_gloo_groups(routes: Sequence[Route], timeout_s: float) -> Mapping[int, Any]:
    """Return the gloo group of each of these routes, by its number; all workers call it together. Raises PeerError.

    There is one for each direction, because two ranks that send to each other on one group take turns.
    """
    timeout = timedelta(seconds=timeout_s)
    with PeerErrorContext("the process groups between stages could not be made"):
        directions = sorted({route.direction for route in routes})
        groups = {direction: dist.new_group(timeout=timeout, backend="gloo") for direction in directions}
    return {route.number: groups[route.direction] for route in routes}


def make_nccl_groups(routes: Sequence[Route], timeout_s: float, device: torch.device) -> Mapping[int, Any]:
    """Return the NCCL group of each of these routes, by its number; all workers call it together. Raises PeerError.

    NCCL's messages have no tags, so each route has a group of its own. Each group is used once here, because the first
    message makes both hosts wait for each other. All workers go through the routes in the same order.
    """
    timeout, groups = timedelta(seconds=timeout_s), {}
    for route in routes:
        with PeerErrorContext(f"ranks {route.sender} and {route.receiver} did not connect by NCCL"):
            ranks = sorted((route.sender, route.receiver))
            options = _nccl_options(timeout)
            group = dist.new_group(ranks, timeout=timeout, backend="nccl", pg_options=options, device_id=device)
            if dist.get_rank() in ranks:
                first = torch.zeros(1, device=device)
                if dist.get_rank() == route.sender:
                    dist.send(first, route.receiver, group)
                else:
                    dist.recv(first, route.sender, group)
                first.item()  # the host waits until it has arrived
        groups[route.number] = group
    return groups


def _nccl_options(timeout: timedelta) -> Any:
    """Limit a message that waits for its receiver to a few blocks, so that the stage's kernels get the device.

    None if the user sets this, or torch has no NCCL.
    """
    if not dist.is_nccl_available() or "NCCL_MAX_CTAS" in os.environ:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MAX_BLOCKS
    options._timeout = timeout  # else torch warns that it differs
    return options


class DistributedSender:
    """Sends on a process group.

    Args:
        depth: messages that may be under way.
        device: where the group's tensors are.
        waiting: context that times a wait for the receiver.
    """

    def __init__(
        self, route: Route, group: Any, depth: int, device: torch.device, waiting: AbstractContextManager[None]
    ) -> None:
        self._route, self._group, self._depth, self._device, self._waiting = route, group, depth, device, waiting
        self._under_way: deque[tuple[int, list[tuple[Any, Tensor]]]] = deque()

    def send(self, minibatch: int, parts: Sequence[Tensor]) -> int:
        """Start sending; wait only when `depth` messages are under way."""
        while len(self._under_way) >= self._depth:
            self._wait_for_oldest()
        sends, size_bytes = [], 0
        try:
            for part, dtype in zip(parts, self._route.dtypes, strict=True):
                is_uploaded = part.is_cpu and self._device.type == "cuda"  # as data are; the host need not wait
                part = in_pinned_memory(part) if is_uploaded else part
                sent = _as_bytes(part.to(self._device, dtype, non_blocking=is_uploaded))
                work = dist.isend(sent, self._route.receiver, group=self._group, tag=_tag(self._route, minibatch))
                sends.append((work, sent))
                size_bytes += sent.nbytes
        except RuntimeError as error:
            raise self._route.not_sent(minibatch, error) from error
        self._under_way.append((minibatch, sends))
        return size_bytes

    def flush(self) -> None:
        """Wait until everything has been received."""
        while self._under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        minibatch, sends = self._under_way.popleft()
        try:
            with self._waiting:
                for work, _ in sends:
                    work.wait()
        except RuntimeError as error:
            raise self._route.not_sent(minibatch, error) from error


class DistributedReceiver:
    """Receives on a gloo group.

    Args:
        device: where tensors are received.
        pinned: whether received tensors are then copied to a GPU.
    """

    def __init__(self, route: Route, group: Any, device: torch.device, *, pinned: bool = False) -> None:
        self._route, self._group, self._device, self._pinned = route, group, device, pinned
        self._posted: deque[list[tuple[Any, Tensor]]] = deque()

    def expect(self, minibatch: int, samples: int) -> None:
        """Post the receives."""
        posted = []
        try:
            for shape, dtype in self._route.parts(samples):
                buffer = torch.empty(shape, dtype=dtype, device=self._device, pin_memory=self._pinned)
                tag = _tag(self._route, minibatch)
                work = dist.irecv(_as_bytes(buffer), self._route.sender, group=self._group, tag=tag)
                posted.append((work, buffer))
        except RuntimeError as error:
            raise self._route.not_received(minibatch, error) from error
        self._posted.append(posted)

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Wait for the oldest receives."""
        posted = self._posted.popleft()
        try:
            for work, _ in posted:
                work.wait()
        except RuntimeError as error:
            raise self._route.not_received(minibatch, error) from error
        return [buffer for _, buffer in posted]


class NcclReceiver(DistributedReceiver):
    """Receives on an NCCL group, onto a device. The host does not wait, but kernels started later do."""

    def expect(self, minibatch: int, samples: int) -> None:
        """Do nothing: a posted receive would be a running kernel."""

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Post the receives of the message."""
        super().expect(minibatch, samples)
        return super().receive(minibatch, samples)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in its memory if it is contiguous. NCCL does not send each dtype."""
    return tensor.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _tag(route: Route, minibatch: int) -> int:
    return (minibatch * 4096 + route.number) % _TAGS
