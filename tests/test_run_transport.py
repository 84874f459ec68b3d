"""Channels: what arrives is what was sent, in order; who is lost is named; nothing is left behind."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV2, SKIP3
from torch import Tensor, distributed

from pdtool.artifacts.bundle import TensorSpec
from pdtool.errors import UsageError
from pdtool.run import meeting
from pdtool.run.channel import Local
from pdtool.run.channels import Opening
from pdtool.run.groups import Groups
from pdtool.run.peers import PeerError
from pdtool.run.shared import SharedReceiver, SharedSender, Slots
from pdtool.run.staged import StagedReceiver, StagedSender
from pdtool.run.transport import Lane
from pdtool.run.wiring import Hop, Wire, hops

KINDS = {
    "a": (torch.float32, (3, 5)),
    "b": (torch.float64, (2,)),
    "c": (torch.int64, ()),
    "d": (torch.bool, (7,)),
    "e": (torch.bfloat16, (3,)),
    "f": (torch.float16, (0, 2)),
    "g": (torch.uint8, (65,)),
}
BATCH = 4


def described(name: str, dtype: torch.dtype, *shape: int) -> TensorSpec:
    text = str(dtype).removeprefix("torch.")
    return TensorSpec(name=name, producer=0, consumers=(1,), shape=("batch", *shape), dtype=text, gradient=False)


def wires_of(ends: list[tuple[int, int]], narrow: torch.dtype | None = None) -> list[Wire]:
    """One wire of every kind between these stages."""
    kinds = [(end, name, (dtype, *shape)) for end in ends for name, (dtype, shape) in KINDS.items()]
    return [Wire(n, name, *end, described(name, *kind), narrow) for n, (end, name, kind) in enumerate(kinds)]


def value(wire: Wire, minibatch: int, samples: int) -> Tensor:
    """What goes over a wire, everywhere the same; not contiguous."""
    generator = torch.Generator().manual_seed(100 * minibatch + wire.number)
    made = torch.randn(*wire.sizes(samples)[::-1], generator=generator)
    return (made * 5).abs().to(wire.dtype).permute(*range(made.dim())[::-1])


# channels within one process


def pair(wires: list[Wire], *, depth: int = 2, timeout_s: float = 30.0) -> tuple[SharedSender, SharedReceiver]:
    """Both ends of a hop from rank 0 to rank 1."""
    hop = hops(wires, [[0], [1]])[0]
    slots = Slots.of(hop, BATCH, depth)
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, slots.count * slots.size)
    first, second = (mmap.mmap(descriptor, slots.count * slots.size) for _ in range(2))
    os.close(descriptor)
    lines = socket.socketpair()
    for line in lines:
        line.settimeout(timeout_s)
    return SharedSender(hop, slots, first, lines[0], nullcontext), SharedReceiver(hop, slots, second, lines[1])


@pytest.fixture
def channel() -> Any:
    """A channel for one float32 tensor [batch, 3]; depth 2, so 4 slots."""
    ends = pair([Wire(0, "a", 0, 1, described("a", torch.float32, 3))])
    yield ends
    for end in ends:
        end.close()


def through(ends: tuple[SharedSender, SharedReceiver], minibatch: int, tensors: list[Tensor]) -> list[Tensor]:
    ends[1].expect(minibatch, len(tensors[0]))
    ends[0].send(minibatch, tensors)
    return ends[1].receive(minibatch)


def test_tensors_kept_for_ever_stay_as_they_are_and_hold_nobody_up(channel: Any) -> None:
    sent = [torch.full((BATCH, 3), float(i)) for i in range(20)]
    kept = [through(channel, i, [tensor])[0] for i, tensor in enumerate(sent)]
    assert all(torch.equal(a, b) for a, b in zip(sent, kept, strict=True))


def test_a_slot_is_free_when_the_last_of_its_tensors_is_gone() -> None:
    """Three wires; parts and views of any of them keep the slot, and nothing else does."""
    ends = pair([Wire(n, name, 0, 1, described(name, torch.bfloat16, 3)) for n, name in enumerate("abc")])
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
        end.close()


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
    ends = pair([Wire(n, name, 0, 1, described(name, torch.float32, 3)) for n, name in enumerate("ab")])
    a, b = through(ends, 0, [torch.ones(2, 3), torch.ones(2, 3)])
    squared = a.requires_grad_().pow(2).sum()
    b.add_(1)
    squared.backward()
    assert a.grad is not None
    assert a.grad.eq(2).all()
    for end in ends:
        end.close()


def test_a_thousand_messages_leave_no_descriptor_and_touch_no_more_memory_than_is_in_use() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem")) << 10

    before, memory = descriptors(), resident()
    ends = pair([Wire(0, "a", 0, 1, described("a", torch.float32, 1 << 16))], depth=20)  # slots of 256 KiB
    open_now = descriptors()
    for i in range(1000):
        through(ends, i, [torch.zeros(1, 1 << 16)])
    assert descriptors() == open_now
    assert resident() - memory < 2 * (256 << 10)  # one slot, seen twice
    for end in ends:
        end.close()
    del ends, end
    gc.collect()
    assert descriptors() == before


def test_a_sender_or_receiver_that_waits_too_long_says_for_what() -> None:
    sender, receiver = pair([Wire(0, "a", 0, 1, described("a", torch.float32, 3))], timeout_s=0.1)
    receiver.expect(7, BATCH)
    with pytest.raises(
        PeerError, match=r"forward 'a' of minibatch 7 did not get here: from rank 0 \(Timed out"
    ) as lost:
        receiver.receive(7)
    assert lost.value.peer == 0
    for i in range(4):
        sender.send(i, [torch.ones(BATCH, 3)])
    with pytest.raises(PeerError, match=r"forward 'a' of minibatch 4 did not get away: to rank 1 \(Timed out") as lost:
        sender.send(4, [torch.ones(BATCH, 3)])
    assert lost.value.peer == 1
    sender.close()
    receiver.close()


def test_what_was_sent_before_the_sender_ended_arrives(channel: Any) -> None:
    sender, receiver = channel
    for i in range(2):
        receiver.expect(i, BATCH)
    sender.send(0, [torch.ones(BATCH, 3)])
    sender.close()
    assert receiver.receive(0)[0].eq(1).all()
    with pytest.raises(PeerError, match=r"minibatch 1 did not get here: from rank 0 \(Connection closed by peer\)"):
        receiver.receive(1)


def test_a_message_of_another_size_is_refused(channel: Any) -> None:
    channel[1].expect(0, 3)
    channel[0].send(0, [torch.ones(2, 3)])
    with pytest.raises(PeerError, match=r"24 bytes of minibatch 0 came, not 36"):
        channel[1].receive(0)


# several processes


def together(folder: Path, world: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Exit codes of `function(rank, *arguments)` in processes that have met; 1 when it raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pdtool.run.worker", "pdtool.run.launch", "harness"])
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


def lanes(
    rank: int, all_hops: list[Hop], transport: Any, timeout_s: float = 30.0, batch_size: int = BATCH
) -> dict[int, tuple[Lane, list[int]]]:
    """Stage -> its forward lane on this rank, and the bytes it sent."""
    world = distributed.new_group(backend="gloo")
    opened = Opening(
        groups=Groups(world, [], [], nccl=False),
        rank=rank,
        transport=transport,
        batch_size=batch_size,
        in_flight=4,
        device=torch.device("cpu"),
        timeout_s=timeout_s,
        waiting=nullcontext,
    ).channels(all_hops)
    made = {}
    for stage in {hop.source for hop in all_hops if hop.sender == rank} | {
        hop.target for hop in all_hops if hop.receiver == rank
    }:
        into = [(h, opened.receivers[h.number]) for h in all_hops if h.target == stage and h.receiver == rank]
        out = [(h, opened.senders[h.number]) for h in all_hops if h.source == stage and h.sender == rank]
        sent: list[int] = []
        made[stage] = Lane(into, out, ahead=3, waiting=nullcontext, sent=sent.append), sent
    return made


def everything_arrives(rank: int, transport: str, narrow: torch.dtype | None) -> None:
    """Stages 0 and 2 on rank 0, the two replicas of stage 1 on ranks 1 and 2; every kind of tensor, 9 minibatches."""
    members, samples = [[0], [1, 2], [0]], [BATCH] * 8 + [1]
    wires = wires_of([(0, 1), (1, 2), (0, 2)], narrow)
    here = lanes(rank, hops(wires, members), transport)
    mine = {stage: [i for i in range(9) if members[stage][i % len(members[stage])] == rank] for stage in here}
    for stage, (lane, _) in here.items():
        lane.open([(i, samples[i]) for i in mine[stage]])
    order = sorted(((stage, i) for stage in here for i in mine[stage]), key=lambda at: (at[0] + at[1], at[0]))
    for stage, i in order:
        lane, _ = here[stage]
        arrived = lane.receive(i)
        for wire in (w for w in wires if w.destination == stage):
            sent = value(wire, i, samples[i])
            expected = sent if members[wire.source] == members[stage] else sent.to(wire.carried).to(wire.dtype)
            found = arrived.pop(wire.number)
            assert found.dtype == wire.dtype
            assert torch.equal(found, expected), f"{wire} of minibatch {i}"
        assert not arrived
        lane.send(
            i,
            {
                w.number: value(w, i, samples[i]).requires_grad_(w.dtype.is_floating_point)
                for w in wires
                if w.source == stage
            },
        )
    for stage, (lane, sent) in here.items():
        lane.close()
        travels = [w for w in wires if w.source == stage and members[w.destination] != members[stage]]
        sizes = [value(w, i, samples[i]).to(w.carried).nbytes for i in mine[stage] for w in travels]
        assert sum(sent) == sum(sizes)


@pytest.mark.parametrize("narrow", [None, torch.float16, torch.bfloat16], ids=["as-is", "fp16", "bf16"])
@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_everything_arrives_as_it_was_sent(tmp_path: Path, transport: str, narrow: torch.dtype | None) -> None:
    """All dtypes, strided, short, over both kinds of channels and within a worker; float32 alone is narrowed."""
    assert together(tmp_path, 3, everything_arrives, transport, narrow) == [0, 0, 0]


def dies(rank: int, transport: str, sender_dies: bool) -> None:
    """The survivor is told at once, and whom it lost."""
    wires = [Wire(0, "a", 0, 1, described("a", torch.float32, 3))]
    [(lane, _)] = lanes(rank, hops(wires, [[0], [1]]), transport).values()
    lane.open([(i, BATCH) for i in range(40)] if rank else [])
    distributed.barrier()
    start = time.monotonic()
    if rank != sender_dies:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    way = r"did not get away: to rank 1" if rank == 0 else r"did not get here: from rank 0"
    step = lane.receive if rank else lambda i: lane.send(i, {0: torch.ones(BATCH, 3)})
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
    """What is in /dev/shm, but for semaphores of joblib, which tests that run beside this one may make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky")}


def apart(rank: int, why: str, transport: str) -> None:
    """Rank 1 cannot be reached through memory: all still arrives."""
    if why == "another machine" and rank:
        meeting.machine = lambda: "elsewhere"  # type: ignore[assignment]
    if why == "refused":
        meeting._call = lambda *_: None  # type: ignore[assignment]
    if why == "silent":
        meeting.PATIENCE_S = 0.2
        meeting._take = lambda *_: None  # type: ignore[assignment]
    if transport == "shared":
        with pytest.raises(UsageError, match=r"rank 0 and rank 1 cannot share memory; leave --transport out"):
            everything_arrives(rank, transport, None)
    else:
        everything_arrives(rank, transport, None)


@pytest.mark.parametrize("why", ["another machine", "refused", "silent"])
@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_where_memory_cannot_be_shared_gloo_carries_the_tensors(tmp_path: Path, why: str, transport: str) -> None:
    assert together(tmp_path, 3, apart, why, transport) == [0, 0, 0]


def test_callers_that_are_no_workers_are_sent_away() -> None:
    """Somebody who says nothing sensible, then one without memory, then the worker."""
    listener = meeting._listener("here", 4)
    address = listener.getsockname()
    strangers = []
    for said in (b"hi", meeting.HELLO.pack(9), meeting.HELLO.pack(5)):
        line = socket.socket(socket.AF_UNIX)
        line.connect(address)
        line.sendall(said)
        strangers.append(line)
    made = meeting._call(address, 5, 4096)
    assert made
    taken = meeting._answer(listener, {5: 4096})
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("narrow", [None, torch.float16])
def test_what_goes_through_pinned_memory_is_as_it_was_when_it_was_sent(narrow: torch.dtype | None) -> None:
    """Kernels of both sides are still running while the copies wait for them."""
    device = torch.device("cuda")
    wire = Wire(0, "a", 0, 1, described("a", torch.float32, 1 << 20), narrow)
    [hop] = hops([wire], [[0], [1]])
    local = Local()
    sender, receiver = StagedSender(hop, local, device), StagedReceiver(local, device)
    slow = torch.randn(2048, 2048, device=device)
    for i in range(10):
        for _ in range(5):
            slow = slow @ slow / 50
        tensor = torch.full((BATCH, 1 << 20), float(i), device=device)
        sender.send(i, [tensor])
        del tensor
        torch.full((BATCH, 1 << 20), -1.0, device=device)  # would get its memory, had nobody kept it
        sender.finish()
        receiver.expect(i, BATCH)
        [found] = receiver.receive(i)
        assert found.dtype == wire.carried
        assert found.is_cuda
        assert found.eq(i).all()
