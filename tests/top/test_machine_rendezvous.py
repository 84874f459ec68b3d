"""The machines of a launch meet, or each of them says within the timeout who is missing or started otherwise."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from pdtool.rendezvous import MachineFacts

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import pdtool.rendezvous
from pdtool.errors import PdtoolError
from pdtool.rendezvous import gather_machines
from pdtool.machines import Machines

pdtool.rendezvous._NOTICE_S = 0.5
count, rank, endpoint, timeout = sys.argv[1:]
try:
    machines = Machines(int(count), int(rank), endpoint)
    for machine in gather_machines(machines, float(timeout), lambda line: print(line, file=sys.stderr)):
        print(machine.node_rank, machine.pid)
except PdtoolError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
Process = subprocess.Popen[str]


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def machine(
    count: int, rank: int, endpoint: str, *, timeout_s: float = 20, netns: str = "", interface: str = ""
) -> Process:
    """Start a machine's part; it prints rank and process of every machine."""
    command = [sys.executable, "-c", SCRIPT, str(count), str(rank), endpoint, str(timeout_s)]
    inside = ["ip", "netns", "exec", netns] if netns else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": interface}
    return subprocess.Popen(
        [*inside, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcomes(*machines: Process) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    ended = [process.communicate(timeout=60) for process in machines]
    return [(m.returncode, out, errors) for m, (out, errors) in zip(machines, ended, strict=True)]


def refusals(*machines: Process) -> list[str]:
    """What each says when it exits with 1."""
    ended = outcomes(*machines)
    assert [code for code, _, _ in ended] == [1] * len(machines), ended
    return [errors for _, _, errors in ended]


def test_every_machine_gets_the_facts_of_all(endpoint: str) -> None:
    started = [machine(3, rank, endpoint) for rank in (2, 0, 1)]
    pids = [started[k].pid for k in (1, 2, 0)]
    told = "".join(f"{rank} {pid}\n" for rank, pid in enumerate(pids))
    assert outcomes(*started) == [(0, told, "")] * 3


def test_machines_that_do_not_come_are_named_by_those_that_did(endpoint: str) -> None:
    for errors in refusals(machine(4, 0, endpoint, timeout_s=2), machine(4, 2, endpoint)):
        assert f"waiting for machines 1 and 3 of 4 at {endpoint}" in errors
        assert f"machines 1 and 3 of 4 did not come to {endpoint} within 2 s; start what is missing, with" in errors
        assert "--node-rank 1 or 3" in errors


def test_machine_0_that_does_not_come_is_named(endpoint: str) -> None:
    [errors] = refusals(machine(2, 1, endpoint, timeout_s=2))
    assert f"waiting for machine 0 of 2 at {endpoint}, for 2 s at most (Connection refused)" in errors
    assert f"machine 0 of 2 did not come to {endpoint} within 2 s (Connection refused); start what is missing" in errors


def test_a_host_name_that_nobody_knows(endpoint: str) -> None:
    wrong = "no-such-host.invalid:29500"
    first, second = refusals(machine(2, 0, wrong, timeout_s=1), machine(2, 1, wrong, timeout_s=1))
    assert f"machine 0 cannot resolve no-such-host.invalid of the endpoint {wrong}" in first
    assert f"machine 0 of 2 did not come to {wrong} within 1 s (" in second


def test_an_endpoint_on_another_machine_than_machine_0() -> None:
    [errors] = refusals(machine(2, 0, "192.0.2.77:29500", timeout_s=1))
    assert "machine 1 of 2 did not come" in errors
    assert "(192.0.2.77 is not this machine, and only the one there is to have --node-rank 0)" in errors


def test_two_machines_with_one_rank(endpoint: str) -> None:
    for errors in refusals(machine(3, 0, endpoint), machine(3, 1, endpoint), machine(3, 1, endpoint)):
        assert "two machines were started with --node-rank 1: " in errors
        assert "give each machine its own --node-rank, from 0 to 2" in errors


def test_a_machine_that_was_told_of_another_number_of_machines(endpoint: str) -> None:
    for errors in refusals(machine(2, 0, endpoint), machine(3, 2, endpoint)):
        assert "machine 2 (" in errors
        assert "was started with --nnodes 3, machine 0 (" in errors
        assert "with --nnodes 2; give all machines the same --nnodes" in errors


@contextmanager
def listening(endpoint: str) -> Iterator[socket.socket]:
    host, port = endpoint.split(":")
    with socket.create_server((host, int(port))) as server:
        yield server


def test_a_port_that_is_taken(endpoint: str) -> None:
    with listening(endpoint):
        first, second = refusals(machine(2, 0, endpoint), machine(2, 1, endpoint, timeout_s=1))
    assert "machine 0 cannot listen on port" in first
    assert "(another program has it); give --rdzv-endpoint with another port, the same on all machines" in first
    assert f"machine 0 of 2 did not come to {endpoint} within 1 s" in second


def connected(endpoint: str) -> socket.socket:
    """A connection to a process that has just been started."""
    host, port = endpoint.split(":")
    for _ in range(500):
        with suppress(OSError):
            return socket.create_connection((host, int(port)))
        time.sleep(0.02)
    raise TimeoutError(f"nobody listens at {endpoint}")


STRANGERS = [b"GET / HTTP/1.1\r\n\r\n", b'{"node_rank": "1"}\n', b"[" * 100_000 + b"\n", b"x" * 2**21, b""]


def test_a_stranger_at_the_port_is_not_waited_for(endpoint: str) -> None:
    first = machine(2, 0, endpoint)
    with ExitStack() as strangers:
        for said in STRANGERS:
            with suppress(ConnectionError):  # it may hang up while it hears too much
                strangers.enter_context(connected(endpoint)).sendall(said)
        second = machine(2, 1, endpoint)
        assert outcomes(first, second) == [(0, f"0 {first.pid}\n1 {second.pid}\n", "")] * 2


def test_a_machine_that_leaves_is_waited_for_again(endpoint: str) -> None:
    first = machine(3, 0, endpoint, timeout_s=6)
    third = MachineFacts(node_rank=2, count=3, host="c", pid=1, gloo_address="")
    with connected(endpoint) as connection:
        connection.sendall(json.dumps(asdict(third)).encode() + b"\n")
        assert b"missing" in connection.recv(100)
    for errors in refusals(first, machine(3, 1, endpoint)):
        assert "machine 2 of 3 did not come" in errors


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, which reach each other through eth7 of each."""
    names = tuple(f"pdtool-{os.getpid()}-{k}" for k in (0, 1))
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs root and `ip netns`")
    try:
        ip("-n", names[0], "link", "add", "eth7", "type", "veth", "peer", "name", "eth7", "netns", names[1])
        for k, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", "eth7")
            for device in ("lo", "eth7"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def test_a_host_name_that_means_this_machine_only_names_the_interface_to_take(two_hosts: tuple[str, str]) -> None:
    """Debian's /etc/hosts has `127.0.1.1 hostname`, and gloo listens at the address of the host name."""
    started = [machine(2, rank, "10.77.0.1:29500", netns=name) for rank, name in enumerate(two_hosts)]
    for errors in refusals(*started):
        assert "gloo would listen at the address of the host name, 127.0." in errors
        for rank in (0, 1):
            assert re.search(rf"GLOO_SOCKET_IFNAME=eth7 on machine {rank} ", errors)
    started = [machine(2, rank, "10.77.0.1:29500", netns=name, interface="eth7") for rank, name in enumerate(two_hosts)]
    assert [code for code, _, _ in outcomes(*started)] == [0, 0]


def test_a_machine_without_a_route(two_hosts: tuple[str, str]) -> None:
    [errors] = refusals(machine(2, 1, "10.78.0.1:29500", timeout_s=1, netns=two_hosts[1]))
    assert "machine 0 of 2 did not come to 10.78.0.1:29500 within 1 s (Network is unreachable)" in errors
