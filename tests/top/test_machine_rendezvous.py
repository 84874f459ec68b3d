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

from pdtool.errors import PdtoolError, UsageError
from pdtool.machines import Machines
from pdtool.rendezvous import MachineFacts, check_reachable, gather_machines, interface_with

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os
import sys
import pdtool.rendezvous
from pdtool.errors import PdtoolError
from pdtool.rendezvous import gather_machines
from pdtool.machines import Machines

pdtool.rendezvous._NOTICE_S, pdtool.rendezvous._HELLO_S = 0.5, 2.0
count, rank, endpoint, timeout = sys.argv[1:]
try:
    machines = Machines(int(count), int(rank), endpoint)
    for machine in gather_machines(machines, float(timeout), lambda line: print(line, file=sys.stderr)):
        print(machine.node_rank, machine.pid)
    if interface := os.environ["GLOO_SOCKET_IFNAME"]:
        print(interface, file=sys.stderr)
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
    count: int,
    rank: int,
    endpoint: str,
    *,
    timeout_s: float = 20,
    netns: str = "",
    interface: str = "",
    token: str = "",
) -> Process:
    """Start a machine's part; it prints rank and process of every machine."""
    command = [sys.executable, "-c", SCRIPT, str(count), str(rank), endpoint, str(timeout_s)]
    inside = ["ip", "netns", "exec", netns] if netns else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": interface, "PDTOOL_TOKEN": token}
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
    assert [code for code, _, _ in ended] == [5 if "every machine can reach" in e else 1 for _, _, e in ended], ended
    return [errors for _, _, errors in ended]


def test_every_machine_gets_the_facts_of_all(endpoint: str) -> None:
    started = [machine(3, rank, endpoint) for rank in (2, 0, 1)]
    pids = [started[k].pid for k in (1, 2, 0)]
    told = "".join(f"{rank} {pid}\n" for rank, pid in enumerate(pids))
    assert outcomes(*started) == [(0, told, "")] * 3


def test_machines_that_do_not_come_are_named_by_those_that_did(endpoint: str) -> None:
    for errors in refusals(machine(4, 0, endpoint, timeout_s=2), machine(4, 2, endpoint)):
        assert f"waiting for machines 1 and 3 of 4 at {endpoint}" in errors
        assert f"machines 1 and 3 of 4 did not connect to {endpoint} within 2 s; start them with" in errors
        assert "--node-rank 1 and 3" in errors


def test_machine_0_that_does_not_come_is_named(endpoint: str) -> None:
    [errors] = refusals(machine(2, 1, endpoint, timeout_s=2))
    assert f"waiting for machine 0 of 2 at {endpoint}, for 2 s at most (Connection refused)" in errors
    assert f"machine 0 of 2 did not answer at {endpoint} within 2 s (Connection refused); start it with" in errors


def test_a_host_name_that_nobody_knows(endpoint: str) -> None:
    wrong = "no-such-host.invalid:29500"
    first, second = refusals(machine(2, 0, wrong, timeout_s=1), machine(2, 1, wrong, timeout_s=1))
    assert f"machine 0 cannot resolve no-such-host.invalid of the endpoint {wrong}" in first
    assert f"machine 0 of 2 did not answer at {wrong} within 1 s (" in second


def test_an_interface_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    message = "GLOO_SOCKET_IFNAME=lo,nope0: this machine has no network interface nope0; set it to one of lo"
    with pytest.raises(UsageError, match=message):
        gather_machines(Machines(), 1.0)


def test_an_endpoint_on_another_machine_than_machine_0() -> None:
    [errors] = refusals(machine(2, 0, "192.0.2.77:29500", timeout_s=1))
    assert "machine 1 of 2 did not connect" in errors
    assert "(192.0.2.77 is not this machine, but only the machine with that name may have --node-rank 0)" in errors


def test_two_machines_with_one_rank(endpoint: str) -> None:
    first = machine(3, 0, endpoint, timeout_s=4)
    for errors in refusals(first, machine(3, 1, endpoint), machine(3, 1, endpoint)):
        assert "two machines were started with --node-rank 1: " in errors or "machine 2 of 3 did not connect" in errors


def test_a_machine_that_does_not_belong_is_told_so_at_once_and_machine_0_waits_on(endpoint: str) -> None:
    first = machine(3, 0, endpoint)
    [errors] = refusals(machine(2, 1, endpoint))
    assert re.search(r"machine 1 \(.*\) was started with --nnodes 2, machine 0 \(.*\) with --nnodes 3; pass", errors)
    with connected(endpoint) as connection:
        assert b"missing" in say(connection, node_rank=2, count=3)
        [errors] = refusals(machine(3, 2, endpoint))
        assert "two machines were started with --node-rank 2: " in errors
        assert "give each machine its own --node-rank, from 0 to 2" in errors
    others = [machine(3, rank, endpoint) for rank in (1, 2)]
    assert [code for code, _, _ in outcomes(first, *others)] == [0, 0, 0]


@contextmanager
def listening(endpoint: str) -> Iterator[socket.socket]:
    host, port = endpoint.split(":")
    with socket.create_server((host, int(port))) as server:
        yield server


def test_a_port_that_is_taken(endpoint: str) -> None:
    with listening(endpoint):
        first, second = refusals(machine(2, 0, endpoint), machine(2, 1, endpoint, timeout_s=1))
    assert "machine 0 cannot listen on port" in first
    assert "(another program uses it); pass --rdzv-endpoint with another port, the same on all machines" in first
    assert f"machine 0 of 2 did not answer at {endpoint} within 1 s" in second


def connected(endpoint: str) -> socket.socket:
    """A connection to a process that has just been started."""
    host, port = endpoint.split(":")
    for _ in range(500):
        with suppress(OSError):
            return socket.create_connection((host, int(port)))
        time.sleep(0.02)
    raise TimeoutError(f"nobody listens at {endpoint}")


FACTS = asdict(MachineFacts(node_rank=1, count=2, host="stranger", pid=1, gloo_address="10.0.0.9"))


def say(connection: socket.socket, **facts: object) -> bytes:
    """Say what a machine says, with these facts; return the answer."""
    connection.recv(1000)
    connection.sendall(json.dumps(FACTS | {"nonce": "n", "mac": ""} | facts).encode() + b"\n")
    return connection.recv(1000)


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"node_rank": "1"}\n',
    b"[" * 100_000 + b"\n",
    b"x" * 2**21,
    b"",
    b"\xff\xfe\n",
    b"3\n",
    b'{"mac": "\\ud800", "nonce": []}\n',
]
CLAIMS: list[dict[str, object]] = [
    {"count": 3},
    {"node_rank": 0},
    {"node_rank": -1},
    {"node_rank": 2},
    {"node_rank": 1.0},
    {"node_rank": True},
    {"pid": 2**40},
    {"gloo_address": 3},
    {"gloo_address": "no address"},
    {"host": "\x1b[31m"},
    {"host": "a" * 3000},
    {"is_remote": 1},
    {"interface": None},
    {"mac": 1},
    {"more": 1},
]


def test_a_stranger_at_the_port_is_not_waited_for(endpoint: str) -> None:
    first = machine(2, 0, endpoint)
    with ExitStack() as strangers:
        for said in STRANGERS:
            with suppress(ConnectionError):  # it may hang up while it hears too much
                strangers.enter_context(connected(endpoint)).sendall(said)
        for claim in CLAIMS:
            answer = say(strangers.enter_context(connected(endpoint)), **claim)
            assert b"missing" not in answer, claim
        second = machine(2, 1, endpoint)
        for code, out, errors in outcomes(first, second):
            assert (code, out) == (0, f"0 {first.pid}\n1 {second.pid}\n")
            assert all(line.startswith("waiting for") for line in errors.splitlines()), errors


def test_a_stranger_is_reported(endpoint: str) -> None:
    first = machine(2, 0, endpoint, timeout_s=2)
    connected(endpoint).close()
    [errors] = refusals(first)
    assert "machine 1 of 2 did not connect to" in errors
    assert "within 2 s (127.0.0.1 connected, but is not a machine of this launch); start it with" in errors


def test_the_connections_of_strangers_end(endpoint: str) -> None:
    """The script lets them say nothing for two seconds."""
    first = machine(2, 0, endpoint, timeout_s=60)
    with ExitStack() as strangers:
        held = strangers.enter_context(connected(endpoint))
        held.sendall(b'{"node_rank"')
        held.settimeout(30)
        while held.recv(1000):
            pass
        flood = [strangers.enter_context(connected(endpoint)) for _ in range(1000)]
        second = machine(2, 1, endpoint)
        assert [code for code, _, _ in outcomes(first, second)] == [0, 0]
        assert len(flood) == 1000


def test_a_machine_that_says_more_than_it_should_has_left(endpoint: str) -> None:
    first = machine(3, 0, endpoint)
    with connected(endpoint) as connection:
        assert b"missing" in say(connection, node_rank=2, count=3)
        with suppress(ConnectionError):
            connection.sendall(b"x" * 2**21)
        others = [machine(3, rank, endpoint) for rank in (1, 2)]
        assert [code for code, _, _ in outcomes(first, *others)] == [0, 0, 0]


def test_a_machine_that_leaves_is_waited_for_again(endpoint: str) -> None:
    first = machine(3, 0, endpoint, timeout_s=6)
    with connected(endpoint) as connection:
        assert b"missing" in say(connection, node_rank=2, count=3)
    for errors in refusals(first, machine(3, 1, endpoint)):
        assert "machine 2 of 3 did not connect" in errors


def test_machines_that_share_a_token(endpoint: str) -> None:
    """A stranger who does not know it takes no place, whatever it says."""
    first = machine(2, 0, endpoint, token="secret")
    for mac in ("", "0" * 64, "é"):
        with connected(endpoint) as stranger:
            assert b"PDTOOL_TOKEN" in say(stranger, mac=mac)
    second = machine(2, 1, endpoint, token="secret")
    for code, out, errors in outcomes(first, second):
        assert (code, out) == (0, f"0 {first.pid}\n1 {second.pid}\n"), errors


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (("secret", ""), r"machine 0 \(.*\) has a PDTOOL_TOKEN, but machine 1 \(.*\) has none; set PDTOOL_TOKEN to"),
        (("", "secret"), r"machine 1 \(.*\) has a PDTOOL_TOKEN, but machine 0 \(.*\) has none; set PDTOOL_TOKEN to"),
        (("one", "other"), r"machine 1 \(.*\) and machine 0 \(.*\) have different PDTOOL_TOKENs; set PDTOOL_TOKEN"),
    ],
)
def test_machines_of_which_one_has_another_token(endpoint: str, tokens: tuple[str, str], said: str) -> None:
    first, second = (machine(2, rank, endpoint, timeout_s=4, token=token) for rank, token in enumerate(tokens))
    at_0, at_1 = refusals(first, second)
    assert re.search(said, at_1)
    assert re.search(said.partition(";")[0], at_0)


def test_who_answers_without_the_token_is_not_machine_0(endpoint: str) -> None:
    with listening(endpoint) as server:
        second = machine(2, 1, endpoint, timeout_s=3, token="secret")
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"nonce": "n", "mac": ""}\n')
            said = json.loads(connection.recv(10_000))
            for answer in ({"missing": [0]}, {"machines": [FACTS, FACTS]}):
                connection.sendall(json.dumps(answer | {"mac": said["mac"]}).encode() + b"\n")
            [errors] = refusals(second)
    assert "machine 0 of 2 did not answer" in errors


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize(
    "answer",
    [
        b"3\n",
        b"[]\n",
        b'{"missing": "all", "mac": ""}\n',
        b'{"missing": [], "mac": ""}\n',
        b'{"mac": 3}\n',
        b"x" * 2**21,
    ],
)
def test_who_answers_what_machine_0_does_not_say(endpoint: str, answer: bytes) -> None:
    with listening(endpoint) as server:
        second = machine(2, 1, endpoint, timeout_s=3)
        connection, _ = server.accept()
        with connection, suppress(ConnectionError):
            connection.sendall(b'{"nonce": "n", "mac": ""}\n' + answer)
            connection.recv(10_000)
        [errors] = refusals(second)
    assert errors.splitlines()[-1].startswith(f"machine 0 of 2 did not answer at {endpoint} within 3 s")
    assert "Traceback" not in errors


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


@pytest.mark.parametrize("named", ["", "eth7"])
def test_workers_take_the_interface_by_which_the_machines_met(two_hosts: tuple[str, str], named: str) -> None:
    """Debian's /etc/hosts has `127.0.1.1 hostname`, and gloo listens at the address of the host name."""
    started = [machine(2, rank, "10.77.0.1:29500", netns=name, interface=named) for rank, name in enumerate(two_hosts)]
    for code, _, errors in outcomes(*started):
        assert code == 0
        assert ("workers talk over eth7, the interface of the rendezvous" in errors) == (not named)
        assert errors.splitlines()[-1] == "eth7"


def test_a_host_name_that_means_this_machine_only_is_refused_where_the_interface_is_unknown() -> None:
    facts = [MachineFacts(**{**FACTS, "node_rank": r, "gloo_address": "127.0.1.1", "is_remote": r > 0}) for r in (0, 1)]
    with pytest.raises(PdtoolError, match=r"host name, 127\.0\.1\.1 on .*set GLOO_SOCKET_IFNAME=INTERFACE on"):
        check_reachable(facts)


def test_no_worker_of_several_hosts_is_told_to_talk_over_loopback() -> None:
    assert interface_with("127.0.0.1") == ""


def test_a_machine_without_a_route(two_hosts: tuple[str, str]) -> None:
    [errors] = refusals(machine(2, 1, "10.78.0.1:29500", timeout_s=1, netns=two_hosts[1]))
    assert "machine 0 of 2 did not answer at 10.78.0.1:29500 within 1 s (Network is unreachable)" in errors
