"""What listens while all workers are on one machine can be reached from this machine only (SECURITY.md)."""

from __future__ import annotations

import multiprocessing.util
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import harness
import pytest
from conftest import Folder
from graphs import chain, plan_of
from namespaces import namespaces

from pdtool.artifacts.cluster import make_cluster
from pdtool.machines import Machines
from pdtool.planner.choice.plan_figures import refresh
from pdtool.profiler.probe import ProbeRequest, probe
from pdtool.runtime.launch.launcher import launch

_LISTEN = "0A"  # the state, in /proc/net/tcp


def descendants(pid: int) -> Iterator[int]:
    """A process and all that it has started, in whatever generation."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def listening_addresses() -> set[tuple[str, str]]:
    """(address, socket) at which this process and its descendants listen for TCP connections."""
    sockets = set()
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in sockets:
                found.add((address(fields[1].partition(":")[0]), fields[9]))
    return found


def address(text: str) -> str:
    """Read `0100007F`: words of four bytes, each in the order of this processor."""
    words = [bytes.fromhex(text[k : k + 8])[::-1] for k in range(0, len(text), 8)]
    packed = ip_address(b"".join(words))
    mapped = packed.ipv4_mapped if isinstance(packed, IPv6Address) else None
    return str(mapped or packed)


def test_addresses_are_read():
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("::", 0), family=socket.AF_INET6):
        assert {"127.0.0.1", "::"} <= {found for found, _ in listening_addresses()}


@contextmanager
def watching(look: Callable[[], None]) -> Iterator[None]:
    """Look again and again meanwhile."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            with suppress(FileNotFoundError):
                look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def new_addresses() -> Iterator[set[str]]:
    """Collect the addresses at which something listens meanwhile, and did not before."""
    before, seen = listening_addresses(), set[str]()
    with watching(lambda: seen.update(found for found, _ in listening_addresses() - before)):
        yield seen


def test_a_run_of_one_machine_cannot_be_reached_from_another(tmp_path):
    with new_addresses() as seen:
        launch(harness.job(tmp_path, harness.CONV2))
    assert seen, "gloo's connections between the workers were not seen"
    assert all(ip_address(found).is_loopback for found in seen), seen


def test_nor_can_a_probe():
    request = ProbeRequest(name="here", sizes=(2,), device="cpu", timeout_s=60, round_s=0.01)
    with new_addresses() as seen:
        assert probe(request, Machines(), on_step=lambda step: None)
    assert seen
    assert all(ip_address(found).is_loopback for found in seen), seen


def test_nor_can_train(road: Folder) -> None:
    options = ("--topology", "2", "--straight", "--bandwidth", "1GB/s", "--batch-size", "8", "--steps", "2")
    with new_addresses() as seen:
        road.pdtool("train", "model.py", *options, "--epochs", "1")
    assert seen
    assert all(ip_address(found).is_loopback for found in seen), seen


@pytest.mark.rows_of_the_day(days=2)
@namespaces
def test_nor_can_emulate(folder: Folder) -> None:
    """Its workers listen in a network that has no interface in common with this one."""
    cluster, net = make_cluster((2,), (2e7,)), chain([0.006] * 2, parameters=20_000, crossing=40_000)
    net.save("net.json")
    plan = plan_of(net, (["x", "a0"], ["a1"]), ((0,), (1,)), cluster, digests={"net.json": net.content_sha256})
    refresh(plan, net).save("net.yaml")
    interfaces, networks, own = set(socket.if_nameindex()), set[str](), os.readlink("/proc/self/ns/net")

    def look() -> None:
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                networks.add(os.readlink(f"/proc/{pid}/ns/net"))
        interfaces.update(socket.if_nameindex())

    before = set(interfaces)
    with new_addresses() as seen, watching(look):
        folder.pdtool("emulate", "net.yaml", "--slowdown", "2", "--minibatches", "10", "-o", "out")
    assert networks > {own}
    assert interfaces == before
    assert all(ip_address(found).is_loopback for found in seen), seen


def test_where_workers_meet_is_of_this_user_alone_and_goes_with_the_run(tmp_path):
    def folders() -> list[Path]:
        return list(Path(multiprocessing.util.get_temp_dir()).glob("meeting-*"))

    seen: list[int] = []
    with watching(lambda: seen.extend(folder.stat().st_mode for folder in folders())):
        launch(harness.job(tmp_path, harness.CONV2))
    assert set(map(stat.S_IMODE, seen)) == {0o700}
    assert folders() == []
