"""Print what a message costs between two workers of this machine: `python tests/bench/bench_transport.py`.

Three ways: gloo with receives posted ahead, shared memory, and shared memory whose receiver copies each tensor out.
Latency is half a round trip of one message; GB/s, and the CPU time of both sides, are of a one-way stream.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from pdtool.artifacts.bundle import TensorSpec
from pdtool.runtime.messages.distributed import DistributedReceiver, DistributedSender
from pdtool.runtime.messages.routes import Edge, Receiver, Route, Sender, list_routes
from pdtool.runtime.messages.shared_memory import SharedMemoryReceiver, SharedMemorySender, share_memory
from pdtool.runtime.messages.slots import SlotLayout

SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
KINDS = ("gloo", "shared", "shared, copied")
DEPTH = 4
CPU = torch.device("cpu")


def there_and_back(size: int) -> tuple[Route, Route]:
    """The two routes between rank 0 and rank 1 for messages of `size` bytes."""
    tensor = TensorSpec(
        name="a", producer=0, consumers=(1,), shape=("batch", size // 4), dtype="float32", gradient=True
    )
    there, back = list_routes([Edge("a", 0, 1, tensor)], [[0], [1]])
    return there, back


def open_ends(kind: str, size: int, rank: int) -> tuple[Sender, Receiver]:
    """This rank's ends: it sends on one route and receives on the other."""
    there = there_and_back(size)
    out, into = there if rank == 0 else there[::-1]
    if kind == "gloo":
        groups = [dist.new_group(backend="gloo") for _ in there]
        return (
            DistributedSender(out, groups[out.number], DEPTH, CPU, nullcontext()),
            DistributedReceiver(into, groups[into.number], CPU),
        )
    layout = SlotLayout.of(out, 1, DEPTH, DEPTH)
    _, shared = share_memory(there, rank, dist.group.WORLD, dict.fromkeys((0, 1), layout), 60.0)
    return (
        SharedMemorySender(out, layout, shared[out.number], nullcontext()),
        SharedMemoryReceiver(into, layout, shared[into.number]),
    )


class Ends:
    """Both ends of one rank, with a message's number for each."""

    def __init__(self, kind: str, size: int, rank: int) -> None:
        self.sender, self.receiver = open_ends(kind, size, rank)
        self.copied = kind.endswith("copied")
        self.tensor = torch.randn(1, size // 4)
        self.sent, self.got = itertools.count(), itertools.count()
        for i in range(DEPTH):
            self.receiver.expect(i, 1)

    def send(self) -> None:
        self.sender.send(next(self.sent), [self.tensor])

    def receive(self) -> None:
        i = next(self.got)
        [tensor] = self.receiver.receive(i, 1)
        if self.copied:
            tensor.clone()
        self.receiver.expect(i + DEPTH, 1)


def measured(work: Callable[[], None], count: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, for each of `count`."""
    dist.barrier()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(count):
        work()
    length, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return length / count, busy / count


def work(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for size, kind in itertools.product(SIZES, KINDS):
        ends = Ends(kind, size, rank)
        turn = (ends.send, ends.receive) if rank == 0 else (ends.receive, ends.send)
        count = max(30, min(1000, (400 << 20) // size))
        rounds, stream = [], []
        for _ in range(3):
            rounds.append(measured(lambda turn=turn: [step() for step in turn], count)[0])  # type: ignore[misc]
            stream.append(measured(turn[0], count))
            ends.sender.flush()
        results.put((size, kind, rank, sorted(rounds)[1] / 2, *sorted(stream)[1]))
    dist.barrier()
    os._exit(0)  # what is posted stays so


def table(found: list[tuple[Any, ...]]) -> Iterator[str]:
    yield f"{'message':>9}  {'way':<15}{'latency us':>11}{'GB/s':>7}{'CPU us: sender':>16}{'receiver':>10}"
    for size, kind in itertools.product(SIZES, KINDS):
        sides = sorted(entry for entry in found if entry[:2] == (size, kind))
        (_, _, _, latency, _, sender), (_, _, _, _, stream, receiver) = sides
        yield (
            f"{size >> 10:>6} KB  {kind:<15}{latency * 1e6:>11.0f}{size / stream / 1e9:>7.2f}{sender * 1e6:>16.0f}"
            f"{receiver * 1e6:>10.0f}"
        )


def main() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=work, args=(rank, folder, results)) for rank in (0, 1)]
        for process in processes:
            process.start()
        found = [results.get() for _ in range(2 * len(SIZES) * len(KINDS))]
        for process in processes:
            process.join()
    sys.stdout.writelines(f"{line}\n" for line in table(found))


if __name__ == "__main__":
    main()
