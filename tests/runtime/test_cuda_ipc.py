"""Messages through memory of a GPU, on a simulated device that works in any order that CUDA allows.

That CUDA shares memory and events between processes is for `make gpu-check` to show (test_run_gpu.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from reference.simulated_device import Event, SimulatedDevice, Stream
from test_nccl_rules import job, jobs
from torch import Tensor
from torch.multiprocessing import reductions

from pdtool.artifacts.bundle import TensorSpec
from pdtool.artifacts.text_formats import read_message, write_message
from pdtool.runtime.messages import cuda_ipc
from pdtool.runtime.messages import cuda_ipc as cuda_ipc_setup
from pdtool.runtime.messages.cuda_ipc import (
    SPARE_SLOTS,
    CudaIpcReceiver,
    CudaIpcSender,
    DeviceMemory,
    share_device_memory,
)
from pdtool.runtime.messages.open_channels import _device_layout
from pdtool.runtime.messages.routes import Edge, Route, list_routes
from pdtool.runtime.messages.slots import SlotLayout, open_pipes
from pdtool.runtime.status import PeerError
from pdtool.schedule import SCHEDULES, Action, ActionKind

BATCH, DEPTH, MESSAGES = 4, 3, 40


class UnrecordedEvent(Event):
    """An event that nobody records, so that nobody waits for it."""

    def record(self, stream: Stream) -> None:
        """Do nothing."""


@dataclass
class Pair:
    """Both ends of a route on a simulated device, and the streams on which their workers compute."""

    device: SimulatedDevice
    sender: CudaIpcSender
    receiver: CudaIpcReceiver
    sending: Stream
    receiving: Stream

    def send(self, minibatch: int, values: list[Tensor]) -> None:
        """Compute the values on the sender's stream, and send what is computed."""
        self.device.compute = self.sending
        computed = [torch.full_like(value, 99) for value in values]
        for value, tensor in zip(values, computed, strict=True):
            self.sending.enqueue(partial(tensor.copy_, value))
        self.sender.send(minibatch, computed)

    def receive(self, minibatch: int) -> list[Tensor]:
        self.device.compute = self.receiving
        return self.receiver.receive(minibatch, BATCH)


def edge(name: str, dtype: str) -> Edge:
    tensor = TensorSpec(name=name, producer=0, consumers=(1,), shape=("batch", 3), dtype=dtype, gradient=False)
    return Edge(name, 0, 1, tensor)


@contextmanager
def pair(
    seed: int, monkeypatch: pytest.MonkeyPatch, written: Callable[[], Event] = Event, freed: Callable[[], Event] = Event
) -> Iterator[Pair]:
    """Two workers on one device, which works in the order that the seed says; two tensors a message."""
    device = SimulatedDevice(seed)
    device.install(monkeypatch)
    monkeypatch.setattr(cuda_ipc, "in_pinned_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch, "as_tensor", _tensor_in_host_memory)
    route = list_routes([edge("a", "float32"), edge("b", "bfloat16")], [[0], [1]])[0]
    layout = SlotLayout.of(route, BATCH, DEPTH, SPARE_SLOTS)
    memory = torch.full((layout.total_bytes,), 255, dtype=torch.uint8)
    events: Any = ([made() for _ in range(layout.slots)] for made in (written, freed))
    all_written, all_freed = events
    sending, receiving = Stream(device), Stream(device)
    first, second = open_pipes(layout.slots)
    first.timeout_s = second.timeout_s = 5.0
    with closing(first), closing(second):
        sender = CudaIpcSender(route, layout, DeviceMemory(memory, first, all_written, all_freed), nullcontext())
        device.compute = receiving
        receiver = CudaIpcReceiver(route, layout, DeviceMemory(memory, second, all_written, all_freed))
        yield Pair(device, sender, receiver, sending, receiving)


def _tensor_in_host_memory(array: Any, device: object) -> Tensor:
    """What torch makes of an array of a device, here on the host: a tensor that refers to it."""
    array.__array_interface__ = array.__cuda_array_interface__ | {"version": 3}
    return torch.from_numpy(np.asarray(array))


class Kernel:
    """Reads a tensor's memory when the device comes to it; it does not keep the tensor."""

    def __init__(self, tensor: Tensor, expected: Tensor) -> None:
        bits = tensor.view(torch.int16).numpy()
        self.expected, self.found = expected, torch.empty(0)
        self.__array_interface__ = bits.__array_interface__ | {"descr": [("", bits.dtype.str)]}

    def __call__(self) -> None:
        self.found = torch.from_numpy(np.array(self, copy=True)).view(self.expected.dtype)


def kernels(pair: Pair, seed: int) -> list[Kernel]:
    """Send messages and read each several times, while the device works now and then; return who read them."""
    random = Random(seed)
    sent = [[torch.randn(BATCH, 4), torch.randn(BATCH, 4).bfloat16()] for _ in range(MESSAGES)]
    sent = [[a[:, :3].contiguous(), b[:, :3].contiguous()] for a, b in sent]
    started: list[Kernel] = []
    kept: deque[tuple[int, list[Tensor]]] = deque()
    received = 0
    for i, values in enumerate(sent):
        pair.send(i, values)
        under_way = i + 1 - received
        for _ in range(under_way if len(kept) + under_way == DEPTH else random.randint(0, under_way)):
            kept.append((received, pair.receive(received)))
            received += 1
        new = [kernel for number, tensors in kept for kernel in map(Kernel, tensors, sent[number])]
        for kernel in new:
            pair.receiving.enqueue(kernel)
        started += new
        while kept and (len(kept) == DEPTH or random.random() < 0.6):
            kept.popleft()
        pair.device.run(random.randrange(8))
    pair.sender.flush()
    pair.device.run()
    return started


@pytest.mark.parametrize("seed", range(20))
def test_kernels_read_what_was_sent_in_whatever_order_the_device_works(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(seed, monkeypatch) as ends:
        started = kernels(ends, seed)
    assert len(started) > MESSAGES
    assert all(torch.equal(kernel.found, kernel.expected) for kernel in started)


@pytest.mark.parametrize("ignored", ["written", "freed"])
def test_a_device_that_ignores_an_event_reads_something_else(ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = 0
    for seed in range(20):
        with pair(seed, monkeypatch, **{ignored: UnrecordedEvent}) as ends:
            wrong += sum(not torch.equal(kernel.found, kernel.expected) for kernel in kernels(ends, seed))
    assert wrong


def test_what_is_sent_stays_until_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(0, monkeypatch) as ends:
        ends.send(0, [torch.ones(BATCH, 3), torch.ones(BATCH, 3).bfloat16()])
        assert len(ends.sender._under_way) == 1
        ends.device.run()
        ends.send(1, [torch.ones(BATCH, 3), torch.ones(BATCH, 3).bfloat16()])
        assert len(ends.sender._under_way) == 1, "the first one was read"


def test_a_receiver_that_keeps_all_it_may_copies_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(0, monkeypatch) as ends:
        kept = []
        for i in range(3 * DEPTH):
            ends.send(i, [torch.full((BATCH, 3), float(i)), torch.zeros(BATCH, 3).bfloat16()])
            ends.device.run()
            kept.append(ends.receive(i))
        assert [tensors[0][0, 0].item() for tensors in kept] == [*range(3 * DEPTH)]


def test_a_peer_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(0, monkeypatch) as ends:
        ends.sender._pipes.close()
        with pytest.raises(PeerError, match="from rank 0") as raised:
            ends.receive(0)
        assert raised.value.peer == 0


@pytest.mark.parametrize(("schedule", "replicas", "messages"), jobs())
def test_slots_of_a_gpu_suffice_for_every_schedule(schedule: str, replicas: Sequence[int], messages: str) -> None:
    """No worker waits for a slot for ever: one of a forward is free after the backward, one of a backward at once."""
    made = job(schedule, replicas, messages)
    shape, routes = made.shape, made.routes
    in_flight = [w * r for w, r in zip(shape.in_flight, shape.replicas[: shape.pipeline_depth], strict=True)]
    free = {route.number: _device_layout(route, 1, in_flight).slots for route in routes}
    sent: set[tuple[int, int]] = set()
    lists = [deque(actions) for actions in SCHEDULES[schedule].build(shape, shape.representative_minibatches)]

    def carried(worker: int, action: Action, end: str, kind: str) -> list[Route]:
        stage = "destination" if end == "receiver" else "source"
        ends = [r for r in routes if getattr(r, end) == worker and getattr(r, stage) == action.stage]
        return [r for r in ends if r.direction == kind and r.has(action.minibatch)]

    def do(worker: int, action: Action) -> bool:
        i, kind = action.minibatch, "forward" if action.kind is ActionKind.FORWARD else "backward"
        moves = action.kind not in (ActionKind.UPDATE, ActionKind.BACKWARD_WEIGHT)
        into, out = (carried(worker, action, end, kind) if moves else [] for end in ("receiver", "sender"))
        if any((route.number, i) not in sent for route in into) or not all(free[route.number] for route in out):
            return False
        for route in out:
            free[route.number] -= 1
            sent.add((route.number, i))
        ended = into if kind == "backward" and moves else []
        if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            ended = [*ended, *carried(worker, action, "receiver", "forward")]
        for route in ended:
            free[route.number] += 1
        return True

    while any(lists):
        done = 0
        for worker, actions in enumerate(lists):
            while actions and do(worker, actions[0]):
                actions.popleft()
                done += 1
        assert done, f"all wait: {[str(actions[0]) for actions in lists if actions]}"


# --- how memory comes to be shared ------------------------------------------------------------------------------------


class SharedEvent:
    """As torch.cuda.Event(interprocess=True): whoever opens its handle has the same event."""

    by_handle: ClassVar[dict[bytes, SharedEvent]] = {}

    def __init__(self, *, interprocess: bool) -> None:
        assert interprocess
        self.records, self.waits = 0, 0

    def record(self) -> None:
        self.records += 1

    def wait(self) -> None:
        assert self.records, "it is waited for before it was recorded"
        self.waits += 1

    def ipc_handle(self) -> bytes:
        handle = str(len(self.by_handle)).encode()
        self.by_handle[handle] = self
        return handle

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> SharedEvent:
        return cls.by_handle[handle]


class Cuda:
    """What two workers, threads here, ask CUDA for; `refused` is the name of what it refuses, at which worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, int] | None = None) -> None:
        self._exported: list[Tensor] = []
        self._refused, self._worker = refused, threading.local()
        self._gathered: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=10)
        monkeypatch.setattr(torch, "empty", lambda size, **of: torch.full((size,), 1, **of))  # an earlier first message
        monkeypatch.setattr(torch.cuda, "Event", SharedEvent)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(reductions, "reduce_tensor", self._export)
        monkeypatch.setattr(reductions, "rebuild_cuda_tensor", self._map)
        monkeypatch.setattr(cuda_ipc_setup, "all_gather", self._gather)

    def share(self, routes: Sequence[Route]) -> list[tuple[set[int], dict[int, DeviceMemory]]]:
        """Share memory of GPUs 0 and 1 among the workers of these numbers; raises what one of them raises."""
        layouts = {route.number: SlotLayout.of(route, BATCH, DEPTH, SPARE_SLOTS) for route in routes}
        shared: Any = {route.number: SimpleNamespace(pipes=f"pipes of {route.number}") for route in routes}

        def worker(rank: int) -> tuple[set[int], dict[int, DeviceMemory]]:
            self._worker.rank = rank
            try:
                device = torch.device("cpu", rank)
                return share_device_memory(routes, shared, layouts, rank, None, device)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(2) as pool:
            return [future.result() for future in [pool.submit(worker, rank) for rank in range(2)]]

    def _gather(self, value: Any, kind: Any, group: object, what: str) -> list[Any]:
        self._gathered[self._worker.rank] = write_message(value, kind)
        self._barrier.wait()
        values = [read_message(message, kind) for message in self._gathered]
        self._barrier.wait()
        return values

    def _refuse(self, name: str, error: type[Exception] = RuntimeError) -> None:
        if self._refused == (name, self._worker.rank):
            raise error(f"CUDA error: {name} is not supported\nand more lines")

    def _export(self, tensor: Tensor) -> tuple[object, tuple[Any, ...]]:
        self._refuse("memory", torch.OutOfMemoryError)
        self._refuse("export")
        self._exported.append(tensor)
        return None, (len(self._exported) - 1, 7)

    def _map(self, handle: int, storage_device: int) -> Tensor:
        self._refuse("map")
        assert storage_device == self._worker.rank, "the number of the device is that of this process"
        other = self._refused == ("same memory", self._worker.rank)
        return torch.zeros_like(self._exported[handle]) if other else self._exported[handle]


def two_ways() -> list[Route]:
    """Route 0 from worker 0 to worker 1, and route 1 back."""
    sent = edge("a", "float32")
    return list_routes([replace(sent, tensor=sent.tensor.model_copy(update={"gradient": True}))], [[0], [1]])


def test_both_ends_of_a_route_come_to_the_same_memory_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = two_ways()
    (agreed, first), (also_agreed, second) = Cuda(monkeypatch).share(routes)
    assert agreed == also_agreed == {route.number for route in routes} == first.keys() == second.keys()
    for number in agreed:
        one, other = first[number], second[number]
        assert one.memory.data_ptr() == other.memory.data_ptr()
        assert one.pipes == other.pipes == f"pipes of {number}"
        assert one.memory.numel() == SlotLayout.of(routes[0], BATCH, DEPTH, SPARE_SLOTS).total_bytes
        assert (one.written, one.freed) == (other.written, other.freed)
        assert len(one.written) == len(one.freed) == DEPTH + SPARE_SLOTS
        assert all(event.records for event in (*one.written, *one.freed)), "who waits for one at first does not wait"


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (("export", 1), "CUDA error: export is not supported"),
        (("map", 0), "CUDA error: map is not supported"),
        (("same memory", 0), "one worker could not read the other's message"),
    ],
)
def test_what_cuda_refuses_is_said_once_and_no_end_shares_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: tuple[str, int], said: str
) -> None:
    """Route 0 is refused, when it is offered, accepted or checked; route 1 is not."""
    for agreed, memory in Cuda(monkeypatch, refused).share(two_ways()):
        assert agreed == memory.keys() == {1}
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: CUDA does not let the workers share GPU memory ({said}), so messages go")
    assert warning.count("\n") == 1


def test_a_gpu_without_memory_for_the_slots_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run needs less memory, not another way."""
    with pytest.raises(torch.OutOfMemoryError):
        Cuda(monkeypatch, ("memory", 0)).share(two_ways())
