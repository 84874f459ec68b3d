"""Channels between two workers of one machine through memory of the host (the protocol: slots.py).

The sender makes the memory and two pipes, and passes them to the receiver over a Unix socket. The memory is a file
without a name, which disappears when both workers have ended, however they end.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdtool.runtime.groups import all_gather
from pdtool.runtime.messages.routes import Route
from pdtool.runtime.messages.slots import PartView, SlotLayout, SlotPipes, SlotReceiver, SlotSender, open_pipes

ROUTE_NUMBER = struct.Struct("=I")
_CREDENTIALS = struct.Struct("=3i")  # pid, uid, gid
HANDSHAKE_TIMEOUT_S = 10.0


class SharedMemory(NamedTuple):
    """Memory that the two workers of a route share, and the pipes between them.

    Attributes:
        memory: slots x slot_bytes bytes.
        pipes: their timeout limits the wait for a message or a free slot.
    """

    memory: mmap.mmap
    pipes: SlotPipes


class SharedMemorySender(SlotSender):
    """Sends through shared memory, which outlives this worker.

    Args:
        waiting: context that times a wait for a free slot.
    """

    def __init__(
        self, route: Route, layout: SlotLayout, shared: SharedMemory, waiting: AbstractContextManager[None]
    ) -> None:
        memory = torch.frombuffer(shared.memory, dtype=torch.uint8)
        super().__init__(route, layout, memory, shared.pipes, waiting)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the slots that were written, because the system provides no memory before."""
        written: dict[tuple[int, int], int] = {}
        for (slot, k, _), view in self._views.items():
            written[slot, k] = max(view.nbytes, written.get((slot, k), 0))
        return sum(written.values())


class SharedMemoryReceiver(SlotReceiver):
    """Receives through shared memory."""

    def __init__(self, route: Route, layout: SlotLayout, shared: SharedMemory) -> None:
        super().__init__(route, layout, shared.pipes)
        self._memory = shared.memory

    def _open_slot(self, slot: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._memory, np.uint8, self._layout.slot_bytes, slot * self._layout.slot_bytes)

    def _tensor(self, opened: np.ndarray[Any, Any], view: PartView) -> Tensor:
        tensor = torch.from_numpy(np.ndarray(view.shape, view.numpy_dtype, opened, view.start))
        return tensor.view(view.dtype) if view.is_reinterpreted else tensor


def share_memory(
    routes: Sequence[Route], rank: int, world: Any, layouts: Mapping[int, SlotLayout], timeout_s: float
) -> tuple[set[int], dict[int, SharedMemory]]:
    """Share memory with the workers of this machine; all workers call it together. Raises PeerError.

    1. All workers exchange their places, and the name of the socket that each listens on. It is an abstract name: it
       leaves no file and is visible in one network namespace only, so that containers do not share memory by mistake.
    2. The sender of each route within a machine connects, and sends the route's number with the descriptors.
    3. All workers exchange the routes that they accepted: both ends of these share memory, and of no others.

    Args:
        routes: routes whose messages may go through memory.
        world: process group of all workers.
        layouts: route number -> layout of its memory.
        timeout_s: timeout of the pipes.

    Returns:
        The numbers of all routes that share memory, and the memory of routes that begin or end at this worker.
    """
    machine = machine_id()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("")  # Linux chooses a free abstract name
        listener.listen(len(routes))
        listener.settimeout(HANDSHAKE_TIMEOUT_S)
        place = (machine, listener.getsockname())
        workers = all_gather(place, tuple[str, bytes], world, "the place of each worker")
        offered: dict[int, SharedMemory] = {}
        for route in routes:
            receiver_machine, receiver_address = workers[route.receiver]
            if route.sender == rank and not route.is_local and machine and machine == receiver_machine:
                memory = offer_memory(receiver_address, route.number, layouts[route.number])
                if memory:
                    offered[route.number] = memory
        all_offered = set().union(*all_gather(set(offered), set[int], world, "the offers to share memory"))
        received = [route.number for route in routes if route.receiver == rank and route.number in all_offered]
        accepted = accept_memory(listener, {number: layouts[number] for number in received})
    agreed = set().union(*all_gather(set(accepted), set[int], world, "the memory shared"))
    shared = {n: memory for n, memory in (offered | accepted).items() if n in agreed}
    for memory in shared.values():
        memory.pipes.timeout_s = timeout_s
    return agreed, shared


def machine_id() -> str:
    """Return a text that is equal for processes that can connect, on one kernel; "" if unknown."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return kernel + os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def offer_memory(address: bytes, number: int, layout: SlotLayout) -> SharedMemory | None:
    """Connect to the receiver of route `number` and pass new memory; None if it cannot be reached."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        try:
            connection.connect(address)
            own, other = open_pipes(layout.slots)
            with closing(other), open(os.memfd_create("pdtool"), "r+b") as file:
                file.truncate(layout.total_bytes)
                memory = mmap.mmap(file.fileno(), layout.total_bytes)
                socket.send_fds(connection, [ROUTE_NUMBER.pack(number)], [file.fileno(), *other.descriptors])
                return SharedMemory(memory, own)
        except OSError:
            return None


def accept_memory(listener: socket.socket, expected: Mapping[int, SlotLayout]) -> dict[int, SharedMemory]:
    """Accept the connections of the expected routes, and the memory that comes with them.

    Args:
        expected: route number -> layout of its memory.

    Returns:
        Route number -> memory; without routes that did not come in time.
    """
    accepted: dict[int, SharedMemory] = {}
    with suppress(TimeoutError):
        while len(accepted) < len(expected):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(HANDSHAKE_TIMEOUT_S)
                accepted |= receive_memory(connection, expected)
    return accepted


def receive_memory(connection: socket.socket, expected: Mapping[int, SlotLayout]) -> dict[int, SharedMemory]:
    """Receive memory, with its route's number; {} from a process that is not a worker of this run."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(peer)
    descriptors: list[int] = []
    try:
        message, descriptors, *_ = socket.recv_fds(connection, ROUTE_NUMBER.size, 3, socket.MSG_CMSG_CLOEXEC)
        if user != os.getuid() or len(message) != ROUTE_NUMBER.size or len(descriptors) != 3:
            return {}
        (number,) = ROUTE_NUMBER.unpack(message)
        if number not in expected:
            return {}
        memory_file, incoming, outgoing = descriptors
        memory = mmap.mmap(memory_file, expected[number].total_bytes)
        descriptors = [memory_file]  # the mapping stays; the pipes close the others
        return {number: SharedMemory(memory, SlotPipes(incoming, outgoing))}
    except (OSError, ValueError):
        return {}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
