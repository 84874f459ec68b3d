"""Channels: what arrives is what was sent, in order; who is lost is named; nothing is left behind."""

from __future__ import annotations

import fcntl
import gc
import mmap
import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from harness import CONV2, SKIP3
from torch import Tensor, distributed

from pdtool.artifacts.bundle import Bundle, StageModule, TensorSpec
from pdtool.errors import UsageError
from pdtool.frontend.model_io import Structure
from pdtool.options.plan_options import WIRE_BYTES
from pdtool.runtime.groups import ProcessGroups
from pdtool.runtime.loading.minibatches import DataPass, DatasetSplit, Minibatches
from pdtool.runtime.messages import pinned
from pdtool.runtime.messages import shared_memory as shared_memory_setup
from pdtool.runtime.messages.distributed import DistributedReceiver, DistributedSender
from pdtool.runtime.messages.open_channels import Channels, open_channels
from pdtool.runtime.messages.pinned import PinnedReceiver, PinnedSender
from pdtool.runtime.messages.routes import WIRE_DTYPES, Edge, LocalChannel, Route, list_edges, list_routes
from pdtool.runtime.messages.shared_memory import SharedMemory, SharedMemoryReceiver, SharedMemorySender
from pdtool.runtime.messages.slots import SlotLayout, open_pipes
from pdtool.runtime.messages.stage_io import StageIO
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.status import PeerError

KINDS = {
    "a": (torch.float32, (3, 5)),
    "b": (torch.float64, (2,)),
    "c": (torch.int64, ()),
    "d": (torch.bool, (7,)),
    "e": (torch.bfloat16, (3,)),
    "f": (torch.float16, (0, 2)),
    "g": (torch.uint8, (65,)),
}
SENT_AS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # what float32 is sent as
BATCH = 4


def described(name: str, dtype: torch.dtype, *shape: int) -> TensorSpec:
    text = str(dtype).removeprefix("torch.")
    return TensorSpec(name=name, producer=0, consumers=(1,), shape=("batch", *shape), dtype=text, gradient=False)


def edge(name: str, dtype: torch.dtype, *shape: int) -> Edge:
    """From stage 0 to stage 1."""
    return Edge(name, 0, 1, described(name, dtype, *shape))


def route_of(*edges: Edge) -> Route:
    """From rank 0 to rank 1."""
    return list_routes(edges, [[0], [1]])[0]


def bundle_of(tensors: list[TensorSpec], stages: int) -> Bundle:
    """Stages that take and give these tensors."""
    modules = [
        StageModule(
            file=f"stage_{s}.py",
            class_name=f"Stage{s}",
            sha256="0" * 64,
            inputs=tuple(t.name for t in tensors if s in t.consumers),
            outputs=tuple(t.name for t in tensors if t.producer == s),
            parameters=(),
        )
        for s in range(stages)
    ]
    return Bundle(name="b", batch_size=BATCH, proof="values", inputs=(), stages=tuple(modules), tensors=tuple(tensors))


def value(tensor: TensorSpec, minibatch: int, samples: int) -> Tensor:
    """What a stage sends, everywhere the same; not contiguous."""
    generator = torch.Generator().manual_seed(1000 * minibatch + 10 * ord(tensor.name[0]) + tensor.producer)
    made = torch.randn(*tensor.sizes(samples)[::-1], generator=generator)
    return (made * 5).abs().to(getattr(torch, tensor.dtype)).permute(*range(made.dim())[::-1])


# channels within one process


def pair(route: Route, *, depth: int = 2, timeout_s: float = 30.0) -> tuple[SharedMemorySender, SharedMemoryReceiver]:
    """Both ends of a route from rank 0 to rank 1."""
    layout = SlotLayout.of(route, BATCH, depth, depth)
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, layout.total_bytes)
    first, second = (mmap.mmap(descriptor, layout.total_bytes) for _ in range(2))
    os.close(descriptor)
    pipes = open_pipes(layout.slots)
    for end in pipes:
        end.timeout_s = timeout_s
    sender = SharedMemorySender(route, layout, SharedMemory(first, pipes[0]), nullcontext())
    return sender, SharedMemoryReceiver(route, layout, SharedMemory(second, pipes[1]))


@pytest.fixture
def channel() -> Any:
    """A channel for one float32 tensor [batch, 3]; depth 2, so 4 slots."""
    ends = pair(route_of(edge("a", torch.float32, 3)))
    yield ends
    for end in ends:
        end._pipes.close()


def through(
    ends: tuple[SharedMemorySender, SharedMemoryReceiver], minibatch: int, tensors: list[Tensor]
) -> list[Tensor]:
    ends[0].send(minibatch, tensors)
    return ends[1].receive(minibatch, len(tensors[0]))


def test_tensors_kept_for_ever_stay_as_they_are_and_hold_nobody_up(channel: Any) -> None:
    sent = [torch.full((BATCH, 3), float(i)) for i in range(20)]
    kept = [through(channel, i, [tensor])[0] for i, tensor in enumerate(sent)]
    assert all(torch.equal(a, b) for a, b in zip(sent, kept, strict=True))


def test_a_slot_is_free_when_the_last_of_its_tensors_is_gone() -> None:
    """Three edges; parts and views of any of them keep the slot, and nothing else does."""
    ends = pair(route_of(*(edge(name, torch.bfloat16, 3) for name in "abc")))
    message = [torch.full((BATCH, 3), float(k)).bfloat16() for k in range(3)]
    for part in range(3):
        view = through(ends, part, message)[part][1:, 2:].t()
        gc.collect()
        for i in range(10):
            through(ends, part, [torch.full((BATCH, 3), -1.0 - i).bfloat16()] * 3)
        assert view.eq(part).all()
        assert len(ends[1]._lent) == 1
        del view
        assert not ends[1]._lent
    for end in ends:
        end._pipes.close()


def test_autograd_may_use_what_was_received_as_any_tensor(channel: Any) -> None:
    """A leaf that collects a gradient; a gradient that autograd keeps as a parameter's; changes in place."""
    leaf = through(channel, 0, [torch.ones(2, 3)])[0].requires_grad_()
    bias = torch.nn.Parameter(torch.zeros(2, 3))
    output = (leaf * 2 + bias).relu()
    output.backward(through(channel, 1, [torch.full((2, 3), 5.0)])[0])
    for i in range(2, 12):
        through(channel, i, [torch.full((2, 3), 9.0)])
    assert leaf.grad is not None
    assert bias.grad is not None
    assert leaf.grad.eq(10).all()
    assert bias.grad.div_(5).eq(1).all()
    assert leaf.eq(1).all()


def test_a_change_in_place_of_one_tensor_leaves_the_others_graph_valid() -> None:
    ends = pair(route_of(*(edge(name, torch.float32, 3) for name in "ab")))
    a, b = through(ends, 0, [torch.ones(2, 3), torch.ones(2, 3)])
    squared = a.requires_grad_().pow(2).sum()
    b.add_(1)
    squared.backward()
    assert a.grad is not None
    assert a.grad.eq(2).all()
    for end in ends:
        end._pipes.close()


def test_a_thousand_messages_leave_no_descriptor_and_touch_no_more_memory_than_is_in_use() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem")) << 10

    before, memory = descriptors(), resident()
    ends = pair(route_of(edge("a", torch.float32, 1 << 16)), depth=20)  # slots of 256 KiB
    open_now = descriptors()
    for i in range(1000):
        through(ends, i, [torch.zeros(1, 1 << 16)])
    assert descriptors() == open_now
    assert resident() - memory < 2 * (256 << 10)  # one slot, seen twice
    assert ends[0].shared_bytes == 256 << 10
    for end in ends:
        end._pipes.close()
    del ends, end
    gc.collect()
    assert descriptors() == before


def test_neither_end_waits_for_the_other_to_read() -> None:
    """As with GPipe, where thousands of microbatches go forward before one comes back."""
    sender, receiver = ends = pair(route_of(edge("a", torch.float32, 3)), depth=10_000, timeout_s=0.1)
    for rounds in range(3):
        for i in range(10_000):
            sender.send(i, [torch.full((BATCH, 3), float(rounds))])
        kept = [receiver.receive(i, BATCH)[0] for i in range(10_000)]
        assert all(tensor.eq(rounds).all() for tensor in kept)
        del kept
    for end in ends:
        end._pipes.close()


def test_a_sender_or_receiver_that_waits_too_long_says_for_what() -> None:
    sender, receiver = pair(route_of(edge("a", torch.float32, 3)), timeout_s=0.1)
    with pytest.raises(PeerError, match=r"forward 'a' of minibatch 7 did not arrive from rank 0 \(Timed out") as lost:
        receiver.receive(7, BATCH)
    assert lost.value.peer == 0
    for i in range(4):
        sender.send(i, [torch.ones(BATCH, 3)])
    with pytest.raises(PeerError, match=r"forward 'a' of minibatch 4 could not be sent to rank 1 \(Timed out") as lost:
        sender.send(4, [torch.ones(BATCH, 3)])
    assert lost.value.peer == 1
    sender._pipes.close()
    receiver._pipes.close()


def test_a_process_that_is_stopped_loses_little_of_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll that is under way goes on counting while Ctrl-Z has stopped the process."""
    polled: list[float] = []

    class Poll:
        def register(self, *_: int) -> None:
            pass

        def poll(self, timeout_ms: float) -> list[Any]:
            polled.append(timeout_ms)
            return []

    monkeypatch.setattr(select, "poll", Poll)
    first, _second = open_pipes(4)
    first.timeout_s = 300.5
    with pytest.raises(TimeoutError):
        first.read(8)
    assert max(polled) <= 1000
    assert sum(polled) == 300_500


def test_what_was_sent_before_the_sender_ended_arrives(channel: Any) -> None:
    sender, receiver = channel
    sender.send(0, [torch.ones(BATCH, 3)])
    sender._pipes.close()
    assert receiver.receive(0, BATCH)[0].eq(1).all()
    with pytest.raises(PeerError, match=r"minibatch 1 did not arrive from rank 0 \(Connection closed by peer\)"):
        receiver.receive(1, BATCH)


def test_a_message_of_another_size_is_refused(channel: Any) -> None:
    channel[0].send(0, [torch.ones(2, 3)])
    with pytest.raises(PeerError, match=r"got 24 bytes of minibatch 0, not 36"):
        channel[1].receive(0, 3)


@pytest.mark.parametrize("has_flags", [False, True])
def test_a_message_in_another_dtype_goes_through_slots(has_flags: bool) -> None:
    """Beside tensors that are sent as they are, with absent gradients, and in a minibatch that is short."""
    tensors = [edge("a", torch.float32, 3), edge("c", torch.int64), edge("f", torch.float32, 2)]
    [route] = list_routes(tensors, [[0], [1]], wire_dtype="bf16")
    route = replace(route, has_flags=has_flags)
    assert len(route.parts(BATCH)) == 3 + has_flags
    ends = pair(route)
    values = torch.tensor([[0.5, -2.0, 3.0]] * 2)
    ends[0].send(0, route.pack({"a": values, "c": torch.tensor([7, 2**40]), "f": None}, 2, torch.device("cpu")))
    a, c, f = route.unpack(ends[1].receive(0, 2))
    assert a is not None
    assert a.dtype == torch.float32
    assert a.tolist() == values.tolist()
    assert c is not None
    assert c.tolist() == [7, 2**40]
    assert f is None if has_flags else f is not None and f.tolist() == [[0, 0], [0, 0]]
    del a, c, f
    for end in ends:
        end._pipes.close()


def test_what_stays_on_a_worker_is_not_converted() -> None:
    [route] = list_routes([edge("a", torch.float32, 3)], [[0], [0]], wire_dtype="bf16")
    assert route.dtypes == [torch.float32]


def test_the_sizes_that_the_formulas_take_are_those_of_the_formats() -> None:
    assert WIRE_BYTES.keys() == WIRE_DTYPES.keys()
    for name, dtype in WIRE_DTYPES.items():
        assert dtype.itemsize == WIRE_BYTES[name]


# several processes


def together(folder: Path, world: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Exit codes of `function(rank, *arguments)` in processes that have met; 1 when it raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pdtool.runtime.worker.worker", "pdtool.runtime.launch.launcher", "harness"])
    store = folder / f"store-{time.monotonic_ns()}"
    processes = [context.Process(target=_met, args=(store, r, world, function, *arguments)) for r in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode for process in processes]


def _met(store: Path, rank: int, world: int, function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    function(rank, *arguments)
    os._exit(0)


def stages_here(
    rank: int,
    bundle: Bundle,
    ranks: list[list[int]],
    minibatches: Minibatches,
    transport: Any,
    wire_dtype: str = "fp32",
) -> dict[int, tuple[StageIO, WorkerMeter, list[int]]]:
    """Stage -> its inputs and outputs on this rank, in a phase, what measures them, and its minibatches."""
    device = torch.device("cpu")
    groups = ProcessGroups(distributed.new_group(backend="gloo"), [], [], device, uses_nccl=False)
    plan = SimpleNamespace(batch_size=minibatches.size)
    config: Any = SimpleNamespace(transport=transport, timeout_s=30.0, plan=plan)
    routes = list_routes(list_edges(bundle, []), ranks, wire_dtype=wire_dtype)
    channels = open_channels(routes, groups, config, [4], WorkerMeter(device))
    data = DataPass("train", DatasetSplit(len(minibatches.order), Structure.of(())), minibatches, 0, 1)
    made = {}
    for stage in [s for s, replicas in enumerate(ranks) if rank in replicas]:
        meter = WorkerMeter(device)
        io = StageIO(bundle, stage, channels, prefetch=3, device=device, meter=meter)
        mine = [i for i in range(len(minibatches)) if ranks[stage][i % len(ranks[stage])] == rank]
        io.begin_phase(data, None, mine, [])
        made[stage] = io, meter, mine
    return made


def test_a_missing_gradient_is_zeros_on_the_device_of_the_stage() -> None:
    device, channels, sent = torch.device("meta"), Channels(), []
    with_gradient = described("a", torch.float32, 3).model_copy(update={"gradient": True})
    bundle = bundle_of([with_gradient], 2)
    edges = list_edges(bundle, [])
    forward, backward = list_routes(edges, [[0], [1]])
    channels.receivers.append((forward, LocalChannel()))
    sender: Any = SimpleNamespace(send=lambda minibatch, tensors: sent.extend(tensors) or 0)
    channels.senders.append((backward, sender))
    io = StageIO(bundle, 1, channels, prefetch=0, device=device, meter=WorkerMeter(torch.device("cpu")))
    io.begin_phase(
        DataPass("train", DatasetSplit(BATCH, Structure.of(())), Minibatches(range(BATCH), BATCH), 0, 1), None, [0], [0]
    )
    io.send_gradients(0, [None])
    assert [(t.device, t.shape) for t in sent] == [(device, (BATCH, 3))]


def everything_arrives(rank: int, transport: str, wire_dtype: str) -> None:
    """Stages 0 and 2 on rank 0, the two replicas of stage 1 on ranks 1 and 2; every kind of tensor, 9 minibatches."""
    ranks, minibatches = [[0], [1, 2], [0]], Minibatches(range(8 * BATCH + 1), BATCH)
    tensors = [
        described(f"{name}{stage}", dtype, *shape).model_copy(update={"producer": stage, "consumers": consumers})
        for stage, consumers in ((0, (1, 2)), (1, (2,)))
        for name, (dtype, shape) in KINDS.items()
    ]
    bundle = bundle_of(tensors, 3)
    here = stages_here(rank, bundle, ranks, minibatches, transport, wire_dtype)
    order = sorted(((stage, i) for stage in here for i in here[stage][2]), key=lambda at: (at[0] + at[1], at[0]))

    def sent_as(tensor: TensorSpec) -> torch.dtype:
        return SENT_AS[wire_dtype] if tensor.dtype == "float32" else getattr(torch, tensor.dtype)

    for stage, i in order:
        io, samples = here[stage][0], minibatches.samples(i)
        arrived, target = io.receive_inputs(i)
        assert target == (() if stage == 2 else None)
        for tensor, found in zip([t for t in tensors if stage in t.consumers], arrived, strict=True):
            sent = value(tensor, i, samples)
            is_local = ranks[tensor.producer] == ranks[stage]
            expected = sent if is_local else sent.to(sent_as(tensor)).to(sent.dtype)
            assert found.dtype == sent.dtype
            assert torch.equal(found, expected), f"{tensor.name} of minibatch {i}"
        outputs = [value(t, i, samples) for t in tensors if t.producer == stage]
        io.send_outputs(i, [output.requires_grad_(output.is_floating_point()) for output in outputs])
    for stage, (io, meter, mine) in here.items():
        io.end_phase()
        travels = [t for t in tensors if t.producer == stage for c in t.consumers if ranks[c] != ranks[stage]]
        sizes = [value(t, i, minibatches.samples(i)).to(sent_as(t)).nbytes for i in mine for t in travels]
        assert meter.totals.sent_bytes == sum(sizes)


@pytest.mark.parametrize("wire_dtype", SENT_AS)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_everything_arrives_as_it_was_sent(tmp_path: Path, transport: str, wire_dtype: str) -> None:
    """All dtypes, strided, short, over both kinds of channels and within a worker; float32 alone is narrowed."""
    assert together(tmp_path, 3, everything_arrives, transport, wire_dtype) == [0, 0, 0]


def dies(rank: int, transport: str, sender_dies: bool) -> None:
    """The survivor is told at once, and whom it lost."""
    bundle = bundle_of([described("a", torch.float32, 3)], 2)
    here = stages_here(rank, bundle, [[0], [1]], Minibatches(range(40 * BATCH), BATCH), transport)
    [(io, _, _)] = here.values()
    distributed.barrier()
    start = time.monotonic()
    if rank != sender_dies:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    way = r"could not be sent to rank 1" if rank == 0 else r"did not arrive from rank 0"
    step = io.receive_inputs if rank else lambda i: io.send_outputs(i, [torch.ones(BATCH, 3)])
    with pytest.raises(PeerError, match=way) as lost:
        list(map(step, range(40)))
    assert lost.value.peer == 1 - rank
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("sender_dies", [True, False])
@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_who_is_killed_is_named_at_once_and_leaves_nothing(tmp_path: Path, transport: str, sender_dies: bool) -> None:
    before = shared_files()
    codes = together(tmp_path, 2, dies, transport, sender_dies)
    assert sorted(code or 0 for code in codes) == [-signal.SIGKILL, 0]
    assert shared_files() <= before


def shared_files() -> set[str]:
    """What is in /dev/shm, but for semaphores, which tests that run beside this one may make; messages have none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def apart(rank: int, why: str, transport: str) -> None:
    """Rank 1 cannot be reached through memory: all still arrives."""
    if why == "another machine" and rank:
        shared_memory_setup.machine_id = lambda: "elsewhere"  # type: ignore[assignment]
    if why == "refused":
        shared_memory_setup.offer_memory = lambda *_: None  # type: ignore[assignment]
    if why == "silent":
        shared_memory_setup.HANDSHAKE_TIMEOUT_S = 0.2
        shared_memory_setup.receive_memory = lambda *_: {}  # type: ignore[assignment]
    if transport == "shared":
        with pytest.raises(UsageError, match=r"rank 0 and rank 1 cannot share memory; leave out --transport"):
            everything_arrives(rank, transport, "fp32")
    else:
        everything_arrives(rank, transport, "fp32")


@pytest.mark.parametrize("why", ["another machine", "refused", "silent"])
@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_where_memory_cannot_be_shared_gloo_carries_the_tensors(tmp_path: Path, why: str, transport: str) -> None:
    assert together(tmp_path, 3, apart, why, transport) == [0, 0, 0]


def test_where_pipes_may_not_be_large_enough_no_memory_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(fcntl, "fcntl", refused)
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen()
        layout = SlotLayout(depth=10_000, slots=10_000, starts=(0, 64))
        assert shared_memory_setup.offer_memory(listener.getsockname(), 5, layout) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_callers_that_are_no_workers_are_sent_away() -> None:
    """Somebody who says nothing sensible, then one without memory, then the worker."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(4)
    listener.settimeout(10)
    address = listener.getsockname()
    strangers = []
    for said in (b"hi", shared_memory_setup.ROUTE_NUMBER.pack(9), shared_memory_setup.ROUTE_NUMBER.pack(5)):
        line = socket.socket(socket.AF_UNIX)
        line.connect(address)
        line.sendall(said)
        strangers.append(line)
    layout = SlotLayout(depth=1, slots=1, starts=(0, 4096))
    made = shared_memory_setup.offer_memory(address, 5, layout)
    assert made
    taken = shared_memory_setup.accept_memory(listener, {5: layout})
    made[0][:5] = b"hello"
    assert taken.keys() == {5}
    assert taken[5][0][:5] == b"hello"
    for line in (*strangers, made[1], taken[5][1], listener):
        line.close()


# whole runs


@pytest.mark.parametrize(("toy", "replicas"), [(SKIP3, (1, 1, 1)), (SKIP3, (2, 1, 2)), (CONV2, (3, 1))])
def test_runs_through_memory_and_by_gloo_train_the_same(
    tmp_path: Path, toy: harness.Toy, replicas: tuple[int, ...]
) -> None:
    """Bit for bit."""
    found = [
        harness.run(harness.job(tmp_path / transport, toy, replicas, epochs=2, transport=transport))
        for transport in ("gloo", "shared")
    ]
    for by_gloo, through_memory in zip(*found, strict=True):
        assert all(torch.equal(value, through_memory.state[name]) for name, value in by_gloo.state.items())


@pytest.mark.parametrize("wire_dtype", ["fp16", "bf16"])
def test_a_run_with_narrow_messages_trains_nearly_the_same(tmp_path: Path, wire_dtype: str) -> None:
    """Not bit for bit, or nothing was narrowed."""
    narrow, wide = (
        harness.run(harness.job(tmp_path / kind, CONV2, optimizer="plain", wire_dtype=kind))[0].state
        for kind in (wire_dtype, "fp32")
    )
    assert any(not torch.equal(value, narrow[name]) for name, value in wide.items())
    for name, value in wide.items():
        torch.testing.assert_close(narrow[name], value, rtol=0.05, atol=0.01)


EXACT = """
def loss(output, target):
    assert torch.equal(target, torch.full_like(target, 1.2345678)), target
    return F.mse_loss(output, target)

def metrics(output, target):
    return {"error": ((output - target).abs().sum(), target.numel())}
"""


@pytest.mark.parametrize("wire_dtype", ["fp16", "bf16"])
def test_narrow_messages_leave_what_the_dataset_gives_as_it_is(tmp_path: Path, wire_dtype: str) -> None:
    """Targets, and inputs that a later stage takes; neither dtype has 1.2345678."""
    first, second, (source, inputs, outputs) = SKIP3.stages
    checked = source.replace(
        "        return", "        assert torch.equal(x, torch.full_like(x, 1.2345678)), x\n        return"
    )
    data = SKIP3.model.replace("torch.randn(n, 6, generator=g)", "torch.full((n, 6), 1.2345678)")
    data = data.replace("torch.randint(0, 4, (n,), generator=g)", "torch.full((n, 4), 1.2345678)")
    toy = replace(SKIP3, model=data + EXACT, stages=(first, second, (checked, inputs, outputs)))
    assert (checked != source, data.count("1.2345678")) == (True, 2)
    harness.run(harness.job(tmp_path, toy, optimizer="plain", wire_dtype=wire_dtype))


def test_in_a_validation_no_more_messages_are_under_way_than_the_channel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nothing else holds up the first stage: its tensors filled the GPU, and pinned memory."""

    class Download:
        """Stands in for DeviceDownload without a GPU."""

        def __init__(self, *_: object) -> None:
            self.thread = ThreadPoolExecutor(1)

        def start(self, tensors: Any, dtypes: Any, work: Any) -> Any:
            return self.thread.submit(work, tensors)

    class Inner:
        """Receives slowly; counts the messages that were received."""

        received = 0

        def send(self, minibatch: int, parts: Any) -> int:
            time.sleep(0.01)
            self.received += 1
            return 0

    monkeypatch.setattr(pinned, "DeviceDownload", Download)
    [route] = list_routes([edge("a", torch.float32, 2)], [[0], [1]])
    inner: Any = Inner()
    sender = PinnedSender(route, inner, 3, torch.device("cpu"), nullcontext())
    for i in range(20):
        sender.send(i, [torch.zeros(BATCH, 2)])
        assert i + 1 - inner.received <= 3


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(6, dtype=torch.int16).reshape(2, 3),
        torch.tensor([True, False]),
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.empty(0, 3),
        torch.arange(6.0).reshape(2, 3).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}",
)
def test_by_torch_distributed_a_message_is_its_bytes(monkeypatch: pytest.MonkeyPatch, sent: Tensor) -> None:
    """NCCL does not send int16, and no backend a conjugated view."""
    under_way: list[Tensor] = []
    work = SimpleNamespace(wait=lambda: None)

    def isend(tensor: Tensor, *_: object, **__: object) -> Any:
        assert tensor.dtype == torch.uint8
        under_way.append(tensor)
        return work

    def irecv(tensor: Tensor, *_: object, **__: object) -> Any:
        tensor.copy_(under_way.pop())
        return work

    monkeypatch.setattr(distributed, "isend", isend)
    monkeypatch.setattr(distributed, "irecv", irecv)
    ends: Any = SimpleNamespace(dtypes=[sent.dtype], sender=0, receiver=1, number=0)
    ends.parts = lambda samples: [(sent.shape, sent.dtype)]
    cpu = torch.device("cpu")
    assert DistributedSender(ends, None, 2, cpu, nullcontext()).send(0, [sent]) == sent.nbytes
    receiver = DistributedReceiver(ends, None, cpu)
    receiver.expect(0, BATCH)
    [found] = receiver.receive(0, BATCH)
    assert torch.equal(found, sent)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wire_dtype", ["fp32", "fp16"])
def test_what_goes_through_pinned_memory_is_as_it_was_when_it_was_sent(wire_dtype: str) -> None:
    """Kernels of both sides are still running while the copies wait for them."""
    device = torch.device("cuda", torch.cuda.current_device())
    [route] = list_routes([edge("a", torch.float32, 1 << 20)], [[0], [1]], wire_dtype=wire_dtype)
    local = LocalChannel()
    sender, receiver = PinnedSender(route, local, 2, device, nullcontext()), PinnedReceiver(local, device)
    slow = torch.randn(2048, 2048, device=device)
    for i in range(10):
        for _ in range(5):
            slow = slow @ slow / 50
        tensor = torch.full((BATCH, 1 << 20), float(i), device=device)
        sender.send(i, [tensor])
        del tensor
        torch.full((BATCH, 1 << 20), -1.0, device=device)  # would get its memory, had nobody kept it
        sender.flush()
        receiver.expect(i, BATCH)
        [found] = receiver.receive(i, BATCH)
        assert found.dtype == SENT_AS[wire_dtype]
        assert found.is_cuda
        assert found.eq(i).all()
