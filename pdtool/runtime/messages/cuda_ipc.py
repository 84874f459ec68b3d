"""Channels between two workers of one machine through memory of a GPU (CUDA IPC; the protocol: slots.py).

The slots are memory of the receiver's GPU, mapped by the sender. The hosts announce a slot through their pipes as
soon as its copy is enqueued. The devices wait for each other by events:

      sender's device    wait for freed[3] ─▶ copy into slot 3 ─▶ record written[3]
      receiver's device                       wait for written[3] ─▶ kernels that read slot 3 ─▶ record freed[3]

A device waits only for events that were recorded before its host was told, never for another host's future work.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from pdtool.errors import printable
from pdtool.runtime.groups import all_gather
from pdtool.runtime.messages.pinned import in_pinned_memory
from pdtool.runtime.messages.routes import Route
from pdtool.runtime.messages.shared_memory import SharedMemory
from pdtool.runtime.messages.slots import PartView, SlotLayout, SlotPipes, SlotReceiver, SlotSender

SPARE_SLOTS = 2  # slots that the receiver may not keep: one is written while another is on its way back
_FIRST_BYTES = 8  # of the first message
# Arguments that torch would take from the other process. This one sets them itself: no worker chooses a class here.
_CLASSES = {"tensor_cls": Tensor, "storage_cls": torch.storage.TypedStorage, "dtype": torch.uint8}
_DATA = (bool, int, tuple, bytes, type(None))


class DeviceMemory(NamedTuple):
    """Memory of a GPU that the two workers of a route share, and the pipes between them.

    Both workers may be on one GPU. No kernel waits, and nothing needs a communicator.

    Attributes:
        memory: slots x slot_bytes bytes, as a tensor of this worker's device.
        pipes: their timeout limits the wait for a message or a free slot.
        written: for each slot, an event that the sender records.
        freed: for each slot, an event that the receiver records.
    """

    memory: Tensor
    pipes: SlotPipes
    written: list[torch.cuda.Event]
    freed: list[torch.cuda.Event]


class CudaIpcSender(SlotSender):
    """Copies into memory of the receiver's GPU, on a stream of its own beside the kernels.

    Args:
        waiting: context that times a wait for a free slot.
    """

    _next_free = 0  # take the slot that was freed first, because the receiver's device is most likely done with it

    def __init__(
        self, route: Route, layout: SlotLayout, shared: DeviceMemory, waiting: AbstractContextManager[None]
    ) -> None:
        super().__init__(route, layout, shared.memory, shared.pipes, waiting)
        self._shared, self._device = shared, shared.memory.device
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._under_way: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def flush(self) -> None:
        """Wait until everything is in the receiver's memory."""
        if self._under_way:
            self._under_way[-1][0].synchronize()
        self._under_way.clear()

    def _copy(self, slot: int, views: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Enqueue the copies; keep the parts until they are read."""
        while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
            self._under_way.popleft()
        sources = [in_pinned_memory(part) for part in parts]
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        self._copies.wait_event(self._shared.freed[slot])
        with torch.cuda.stream(self._copies):
            for view, source in zip(views, sources, strict=True):
                view.copy_(source, non_blocking=True)
        self._shared.written[slot].record(self._copies)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record(self._copies)
        self._under_way.append((read, sources))


class CudaIpcReceiver(SlotReceiver):
    """Receives through memory of this worker's GPU; kernels started later see the tensors."""

    def __init__(self, route: Route, layout: SlotLayout, shared: DeviceMemory) -> None:
        super().__init__(route, layout, shared.pipes)
        self._shared, self._device = shared, shared.memory.device
        self._compute = torch.cuda.current_stream(self._device)  # also in autograd's threads

    def _tensors(self, slot: int, views: list[PartView]) -> list[Tensor]:
        self._compute.wait_event(self._shared.written[slot])
        return super()._tensors(slot, views)

    def _open_slot(self, slot: int) -> _Slot:
        return _Slot(self._shared.memory.data_ptr() + slot * self._layout.slot_bytes)

    def _tensor(self, opened: _Slot, view: PartView) -> Tensor:
        tensor = torch.as_tensor(_DeviceArray(opened, view), device=self._device)
        return tensor.view(view.dtype) if view.is_reinterpreted else tensor

    def _give_back(self, slot: int, collected: Any) -> None:
        """Free a slot once all kernels started so far are done."""
        self._shared.freed[slot].record(self._compute)
        super()._give_back(slot, collected)


class _Slot:
    """A received slot, at its address on the device."""

    def __init__(self, address: int) -> None:
        self.address = address


class _DeviceArray:
    """The bytes of a tensor, for torch.as_tensor; the tensor's memory keeps the slot alive."""

    def __init__(self, slot: _Slot, view: PartView) -> None:
        self._slot = slot
        self.__cuda_array_interface__ = {
            "shape": view.shape,
            "typestr": view.numpy_dtype.str,
            "data": (slot.address + view.start, False),  # False: it may be written to
            "version": 2,
        }


class _Offer(NamedTuple):
    """A receiver's export.

    Attributes:
        memory: torch's arguments for mapping a tensor of another process, by name; only plain data.
        freed: handles of its events.
    """

    memory: dict[str, bool | int | tuple[int, ...] | bytes | None]
    freed: list[bytes]


def share_device_memory(
    routes: Sequence[Route],
    shared: Mapping[int, SharedMemory],
    layouts: Mapping[int, SlotLayout],
    rank: int,
    world: Any,
    device: torch.device,
) -> tuple[set[int], dict[int, DeviceMemory]]:
    """Share memory of GPUs with the workers of this machine; all workers call it together. Raises PeerError.

    1. The receiver of each route allocates its slots, and exports them with its events.
    2. The sender maps them, exports its own events, and writes a first message.
    3. The receiver reads it: both ends of these routes share memory, and of no others.

    CUDA refuses in some containers, on some clouds, on parts of a GPU (MIG), and between GPUs that cannot reach each
    other.

    Args:
        routes: routes whose two workers share memory of the host.
        shared: that memory, by route number, for routes that begin or end at this worker.
        layouts: layout of the slots, by route number.
        world: process group of all workers.
        device: the GPU of this worker.

    Returns:
        The numbers of all routes that share memory of a GPU, and that of those that begin or end at this worker.
    """
    here = _RouteEnds(shared, layouts, device)
    received, sent = [r for r in routes if r.receiver == rank], [r for r in routes if r.sender == rank]

    def exchange(
        step: Callable[..., Any], kind: Any, own: Sequence[Route], before: Mapping[int, Any], what: str
    ) -> dict[int, Any]:
        """Do a step for this worker's routes that passed the step before; return the results for all routes."""
        results = {r.number: here.attempt(step, r, before[r.number]) for r in own if r.number in before}
        results = {number: result for number, result in results.items() if result is not None}
        return {n: each for worker in all_gather(results, dict[int, kind], world, what) for n, each in worker.items()}

    offers = exchange(here.offer, _Offer, received, dict.fromkeys(shared, ()), "the offers to share memory of GPUs")
    accepted = exchange(here.accept, list[bytes], sent, offers, "the events of those who share memory of GPUs")
    agreed = set(exchange(here.check, bool, received, accepted, "the memory of GPUs that is shared"))
    refusals = [each for each in all_gather(here.refusal, str, world, "the refusals to share memory of GPUs") if each]
    if refusals and rank == 0:
        sys.stderr.write(
            f"warning: CUDA does not let the workers share GPU memory ({printable(refusals[0])}), so messages go "
            "through NCCL or host memory\n"
        )
    return agreed, {number: memory for number, memory in here.memory.items() if number in agreed}


class _RouteEnds:
    """This worker's ends of the routes.

    Attributes:
        memory: the memory that it shares, by route number.
        refusal: CUDA's first error; "" for none.
    """

    def __init__(
        self, shared: Mapping[int, SharedMemory], layouts: Mapping[int, SlotLayout], device: torch.device
    ) -> None:
        self._shared, self._layouts, self._device = shared, layouts, device
        self.memory: dict[int, DeviceMemory] = {}
        self.refusal = ""

    def attempt(self, step: Callable[..., Any], route: Route, before: Any) -> Any:
        """Return the step's result; None if CUDA refuses, or if the other worker's torch does it differently."""
        try:
            with torch.cuda.device(self._device):
                return step(route, before)
        except torch.OutOfMemoryError:  # of the allocation; CUDA's own error may mean that it has no more handles
            raise
        except Exception as error:
            self.refusal = self.refusal or printable(str(error).partition("\n")[0])
            return None

    def offer(self, route: Route, _: object) -> _Offer:
        """Allocate the slots of a route that ends here, and export them."""
        layout = self._layouts[route.number]
        memory = torch.empty(layout.total_bytes, dtype=torch.uint8, device=self._device)
        memory[:_FIRST_BYTES].zero_()  # it may hold the first message of an earlier run
        freed = _new_events(layout.slots)
        self.memory[route.number] = DeviceMemory(memory, self._shared[route.number].pipes, [], freed)
        return _Offer(_exported(memory), _handles(freed))

    def accept(self, route: Route, offer: _Offer) -> list[bytes]:
        """Map the slots of a route that begins here, write a first message, and export the events."""
        memory, freed = _mapped(offer.memory, self._device), self._opened(offer.freed)
        written = _new_events(len(freed))
        freed[0].wait()  # until the receiver's device has cleared them
        memory[:_FIRST_BYTES].fill_(_first_byte(route))
        written[0].record()
        self.memory[route.number] = DeviceMemory(memory, self._shared[route.number].pipes, written, freed)
        return _handles(written)

    def check(self, route: Route, written: list[bytes]) -> bool:
        """Read the first message of a route that ends here."""
        here = self.memory[route.number] = self.memory[route.number]._replace(written=self._opened(written))
        here.written[0].wait()
        if not bool((here.memory[:_FIRST_BYTES] == _first_byte(route)).all()):
            raise RuntimeError("one worker could not read the other's message")
        return True

    def _opened(self, handles: Sequence[bytes]) -> list[torch.cuda.Event]:
        from_handle = torch.cuda.Event.from_ipc_handle
        return [from_handle(self._device, handle) for handle in handles]  # type: ignore[no-untyped-call]


def _new_events(count: int) -> list[torch.cuda.Event]:
    """Make events and record them, so that a wait before their first use ends at once."""
    events = [torch.cuda.Event(interprocess=True) for _ in range(count)]  # type: ignore[no-untyped-call]
    for event in events:
        event.record()
    return events


def _handles(events: Sequence[torch.cuda.Event]) -> list[bytes]:
    return [event.ipc_handle() for event in events]  # type: ignore[no-untyped-call]


def _exported(memory: Tensor) -> dict[str, Any]:
    """Export a tensor to another process: torch's arguments that are plain data, by name."""
    exported = reductions.reduce_tensor(memory)[1]  # type: ignore[no-untyped-call]
    arguments = inspect.signature(reductions.rebuild_cuda_tensor).bind(*exported).arguments
    data = {name: value for name, value in arguments.items() if name not in _CLASSES}
    if not all(isinstance(value, _DATA) for value in data.values()):
        raise TypeError("torch exports GPU memory as something other than plain data")
    return data


def _mapped(exported: Mapping[str, Any], device: torch.device) -> Tensor:
    """Map a tensor of another process as one of this worker's own device, which can reach it.

    torch would use the other process's device number, which may be a different device here.
    """
    names = inspect.signature(reductions.rebuild_cuda_tensor).parameters
    own = {name: kind for name, kind in _CLASSES.items() if name in names} | {"storage_device": device.index}
    tensor = reductions.rebuild_cuda_tensor(**{**exported, **own})  # type: ignore[no-untyped-call]
    assert isinstance(tensor, Tensor)
    return tensor


def _first_byte(route: Route) -> int:
    return route.number % 255 + 1
