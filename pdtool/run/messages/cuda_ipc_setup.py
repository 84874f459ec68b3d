"""How two workers of one machine come to share memory of a GPU: the receiver offers it, the sender maps it.

1. The receiver of each route allocates its slots, and exports them with its events.
2. The sender maps them, exports its own events, and writes a first message.
3. The receiver reads it: both ends of those routes, and of no others, share memory.

CUDA refuses in some containers, on some clouds, on parts of a GPU (MIG), and between GPUs that cannot reach each other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from pdtool.run.messages.cuda_ipc import DeviceMemory
from pdtool.run.messages.routes import Route
from pdtool.run.messages.shared_memory import SharedMemory
from pdtool.run.messages.slots import SlotLayout
from pdtool.run.processes.collectives import all_gather

_FIRST_BYTES = 8  # of the first message


class _Offer(NamedTuple):
    """What a receiver exports.

    Attributes:
        memory: arguments with which torch maps a tensor of another process.
        freed: handles of its events.
    """

    memory: tuple[Any, ...]
    freed: list[bytes]


def share_device_memory(
    routes: Sequence[Route],
    shared: Mapping[int, SharedMemory],
    layouts: Mapping[int, SlotLayout],
    rank: int,
    world: Any,
    device: torch.device,
) -> tuple[set[int], dict[int, DeviceMemory]]:
    """Share memory of GPUs with the workers of this machine; all workers call it together.

    Args:
        routes: those whose two workers share memory of the host.
        shared: that memory, by route number, of the routes that begin or end at this worker.
        layouts: of the slots, by route number.
        world: process group of all workers.
        device: the GPU of this worker.

    Returns:
        The numbers of all routes that share memory of a GPU, and that of those that begin or end at this worker.

    Raises:
        PeerError: a worker does not come.
    """
    here = _RouteEnds(shared, layouts, device)
    received, sent = [r for r in routes if r.receiver == rank], [r for r in routes if r.sender == rank]

    def exchange(
        step: Callable[..., Any], own: Sequence[Route], before: Mapping[int, Any], what: str
    ) -> dict[int, Any]:
        """Do a step for one's own routes that came through the step before; return its results for all routes."""
        results = {r.number: here.attempt(step, r, before[r.number]) for r in own if r.number in before}
        results = {number: result for number, result in results.items() if result is not None}
        return {n: each for worker in all_gather(results, world, what) for n, each in worker.items()}

    offers = exchange(here.offer, received, dict.fromkeys(shared, ()), "the offers to share memory of GPUs")
    accepted = exchange(here.accept, sent, offers, "the events of those who share memory of GPUs")
    agreed = set(exchange(here.check, received, accepted, "the memory of GPUs that is shared"))
    refusals = [each for each in all_gather(here.refusal, world, "the refusals to share memory of GPUs") if each]
    if refusals and rank == 0:
        sys.stderr.write(
            f"warning: CUDA does not let workers share memory of their GPUs ({refusals[0]}): they send each other "
            "messages by NCCL, or through memory of the host\n"
        )
    return agreed, {number: memory for number, memory in here.memory.items() if number in agreed}


class _RouteEnds:
    """This worker's ends of the routes.

    Attributes:
        memory: what it shares, by route number.
        refusal: what CUDA said first; "" when it said nothing.
    """

    def __init__(
        self, shared: Mapping[int, SharedMemory], layouts: Mapping[int, SlotLayout], device: torch.device
    ) -> None:
        self._shared, self._layouts, self._device = shared, layouts, device
        self.memory: dict[int, DeviceMemory] = {}
        self.refusal = ""

    def attempt(self, step: Callable[..., Any], route: Route, before: Any) -> Any:
        """Return the step's result; None if CUDA refuses it, or another torch shares memory in another way."""
        try:
            with torch.cuda.device(self._device):
                return step(route, before)
        except torch.OutOfMemoryError:  # of the allocation; CUDA's own error may mean that it has no more handles
            raise
        except Exception as error:
            self.refusal = self.refusal or str(error).partition("\n")[0]
            return None

    def offer(self, route: Route, _: object) -> _Offer:
        """Allocate the slots of a route that ends here, and export them."""
        layout = self._layouts[route.number]
        memory = torch.empty(layout.total_bytes, dtype=torch.uint8, device=self._device)
        freed = _new_events(layout.slots)
        self.memory[route.number] = DeviceMemory(memory, self._shared[route.number].connection, [], freed)
        return _Offer(reductions.reduce_tensor(memory)[1], _handles(freed))  # type: ignore[no-untyped-call]

    def accept(self, route: Route, offer: _Offer) -> list[bytes]:
        """Map the slots of a route that begins here, write a first message, and export the events."""
        memory, freed = _mapped(offer.memory, self._device), self._opened(offer.freed)
        written = _new_events(len(freed))
        memory[:_FIRST_BYTES].fill_(_first_byte(route))
        written[0].record()
        self.memory[route.number] = DeviceMemory(memory, self._shared[route.number].connection, written, freed)
        return _handles(written)

    def check(self, route: Route, written: list[bytes]) -> bool:
        """Read the first message of a route that ends here."""
        here = self.memory[route.number] = self.memory[route.number]._replace(written=self._opened(written))
        here.written[0].wait()
        if not bool((here.memory[:_FIRST_BYTES] == _first_byte(route)).all()):
            raise RuntimeError("one worker did not read what the other one wrote")
        return True

    def _opened(self, handles: Sequence[bytes]) -> list[torch.cuda.Event]:
        from_handle = torch.cuda.Event.from_ipc_handle
        return [from_handle(self._device, handle) for handle in handles]  # type: ignore[no-untyped-call]


def _new_events(count: int) -> list[torch.cuda.Event]:
    """Make events that have been recorded, so that who waits for one before its first use does not wait."""
    events = [torch.cuda.Event(interprocess=True) for _ in range(count)]  # type: ignore[no-untyped-call]
    for event in events:
        event.record()
    return events


def _handles(events: Sequence[torch.cuda.Event]) -> list[bytes]:
    return [event.ipc_handle() for event in events]  # type: ignore[no-untyped-call]


def _mapped(exported: tuple[Any, ...], device: torch.device) -> Tensor:
    """Map a tensor of another process as one of this worker's own device, which reaches it from there.

    torch would give it the number that its device has in the other process, and use that device here, too.
    """
    arguments = inspect.signature(reductions.rebuild_cuda_tensor).bind(*exported)
    arguments.arguments["storage_device"] = device.index
    tensor = reductions.rebuild_cuda_tensor(*arguments.args)  # type: ignore[no-untyped-call]
    assert isinstance(tensor, Tensor)
    return tensor


def _first_byte(route: Route) -> int:
    return route.number % 255 + 1
