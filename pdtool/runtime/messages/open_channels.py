"""Open a channel for each route: within a worker, through memory of a GPU or of the host, by NCCL or by gloo."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pdtool.artifacts.plan import Plan
from pdtool.errors import UsageError
from pdtool.runtime.config import RunConfig
from pdtool.runtime.groups import ProcessGroups, all_gather
from pdtool.runtime.messages import cuda_ipc, distributed
from pdtool.runtime.messages.pinned import PinnedReceiver, PinnedSender
from pdtool.runtime.messages.routes import LocalChannel, Receiver, Route, Sender
from pdtool.runtime.messages.shared_memory import SharedMemory, SharedMemoryReceiver, SharedMemorySender, share_memory
from pdtool.runtime.messages.slots import SlotLayout
from pdtool.runtime.meter import WorkerMeter

_HOST = torch.device("cpu")


@dataclass
class Channels:
    """This worker's ends of channels, each with its route, in the order of the routes.

    Attributes:
        device_bytes: memory of this worker's GPU for incoming messages.
    """

    senders: list[tuple[Route, Sender]] = field(default_factory=list)
    receivers: list[tuple[Route, Receiver]] = field(default_factory=list)
    device_bytes: int = 0

    def sent_bytes(self) -> int:
        """Return the bytes of memory for sent messages that the receivers share."""
        return sum(sender.shared_bytes for _, sender in self.senders if isinstance(sender, SharedMemorySender))


def open_channels(
    routes: Sequence[Route], groups: ProcessGroups, config: RunConfig, in_flight: Sequence[int], meter: WorkerMeter
) -> Channels:
    """Open this worker's ends of all channels; all workers call it together.

    Args:
        in_flight: minibatches that the schedule has in flight at once, over all replicas of each stage (with chunks, of
            each chunk).
        meter: measures how long senders wait.

    Raises:
        UsageError: memory must be shared but cannot be.
        PeerError: a worker does not come.
    """
    rank, size, device = dist.get_rank(), config.plan.batch_size, groups.device
    devices = all_gather(device.type, str, groups.world, "the kind of each worker's device")
    by_device = set(devices) == {"cuda"} and config.transport == "auto"
    layout = _device_layout if by_device else _host_layout
    layouts = {route.number: layout(route, size, in_flight) for route in routes}
    agreed: set[int] = set()
    memory: dict[int, SharedMemory] = {}
    if config.transport != "gloo":
        agreed, memory = share_memory(routes, rank, groups.world, layouts, config.timeout_s)
    by_ipc: set[int] = set()
    device_memory: dict[int, cuda_ipc.DeviceMemory] = {}
    if by_device:
        within = [route for route in routes if route.number in agreed]
        by_ipc, device_memory = cuda_ipc.share_device_memory(within, memory, layouts, rank, groups.world, device)
    uses_nccl = groups.uses_nccl and config.transport == "auto"
    by_nccl = [r for r in routes if uses_nccl and r.number not in by_ipc and can_use_nccl(r, config.plan)]
    by_gloo = [r for r in routes if not r.is_local and r.number not in agreed and r not in by_nccl]
    if by_gloo and config.transport == "shared":
        remedy = "leave out --transport: workers on one Linux machine share memory, others use the network"
        raise UsageError(f"rank {by_gloo[0].sender} and rank {by_gloo[0].receiver} cannot share memory", remedy)
    gloo_groups = distributed.make_gloo_groups(by_gloo, config.timeout_s)
    nccl_groups = distributed.make_nccl_groups(by_nccl, config.timeout_s, device)
    is_pinned = device.type == "cuda"  # where messages go through memory of the host

    def sender(route: Route) -> Sender:
        layout, number = layouts[route.number], route.number
        if number in device_memory:
            return cuda_ipc.CudaIpcSender(route, layout, device_memory[number], meter.waiting)
        if number in nccl_groups:
            return distributed.DistributedSender(route, nccl_groups[number], layout.depth, device, meter.waiting)
        waiting = nullcontext() if is_pinned else meter.waiting  # a thread's wait holds nobody up
        if number in memory:
            to_host: Sender = SharedMemorySender(route, layout, memory[number], waiting)
        else:
            to_host = distributed.DistributedSender(route, gloo_groups[number], layout.depth, _HOST, waiting)
        return PinnedSender(route, to_host, device) if is_pinned else to_host

    def receiver(route: Route) -> Receiver:
        number = route.number
        if number in device_memory:
            return cuda_ipc.CudaIpcReceiver(route, layouts[number], device_memory[number])
        if number in nccl_groups:
            return distributed.NcclReceiver(route, nccl_groups[number], device)
        if number in memory:
            from_host: Receiver = SharedMemoryReceiver(route, layouts[number], memory[number])
        else:
            from_host = distributed.DistributedReceiver(route, gloo_groups[number], _HOST, pinned=is_pinned)
        return PinnedReceiver(from_host, device) if is_pinned else from_host

    received = [route.number for route in routes if route.receiver == rank and route.number in by_ipc]
    channels = Channels(device_bytes=sum(layouts[number].total_bytes for number in received))
    for route in routes:
        if route.is_local and route.sender == rank:
            local = LocalChannel()
            channels.senders.append((route, local))
            channels.receivers.append((route, local))
        elif route.sender == rank:
            channels.senders.append((route, sender(route)))
        elif route.receiver == rank:
            channels.receivers.append((route, receiver(route)))
    return channels


def _host_layout(route: Route, batch_size: int, in_flight: Sequence[int]) -> SlotLayout:
    depth = route.depth(max(in_flight))
    return SlotLayout.of(route, batch_size, depth, spare=depth)


def _device_layout(route: Route, batch_size: int, in_flight: Sequence[int]) -> SlotLayout:
    """GPU memory is scarce: use a slot per minibatch in flight from the stage nearer the input, and few spares."""
    nearer = min(route.source, route.destination) % len(in_flight)
    return SlotLayout.of(route, batch_size, route.depth(in_flight[nearer]), cuda_ipc.SPARE_SLOTS)


def can_use_nccl(route: Route, plan: Plan) -> bool:
    """Whether NCCL can carry the messages of a route without ever making workers wait in a circle.

    With NCCL, a sent message is a kernel that runs until it is received, and anything that synchronises the device
    waits for it (docs/waiting.md). Neighbours that send to each other at every minibatch can never wait in a circle.
    Stages further apart, several stages on a worker, and replicas without a flush can. The tests prove both
    (tests/runtime/test_nccl_rules.py).
    """
    is_replicated = any(stage.replicas > 1 for stage in plan.stages)
    if route.is_local or plan.chunks > 1 or (is_replicated and not plan.kind.flushes):
        return False
    return abs(route.source - route.destination) == 1
