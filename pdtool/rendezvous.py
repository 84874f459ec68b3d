"""The machines of a launch meet before their workers start, so that missing machines can be named.

Machine 0 listens at the endpoint until every other machine has sent its facts. Then it sends everyone's facts to all,
and frees the port for the next program. Messages are lines of JSON:

    machine 0 ──▶ machine 1   {"nonce": "5c1e..."}
    machine 1 ──▶ machine 0   {"nonce": "f00d...", "node_rank": 1, "host": "b", ...}  what I am
    machine 0 ──▶ machine 1   {"missing": [2]}                                        as often as it changes
    machine 0 ──▶ machine 1   {"machines": [{...}, {...}, {...}]}                     all are there, or
                              {"error": "PdtoolError", "what": "two machines ...", "remedy": "..."}  ends this machine

Anybody can connect. Machine 0 ignores messages that no machine sends, and refuses a machine that does not belong to the
launch; neither ends it. If the machines share a token (PDTOOL_TOKEN), each message carries the HMAC of the other side's
nonce and of its content, so that nobody without the token can join.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from fcntl import ioctl
from typing import Any, get_type_hints

from pdtool.errors import PdtoolError, UsageError, WorkerDiedError, printable
from pdtool.machines import Machines

GLOO_VARIABLE, NCCL_VARIABLE, TOKEN_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PDTOOL_TOKEN"
Notify = Callable[[str], None]  # called with a line for the user
_NOTICE_S = 3.0  # of waiting, before a line says for which machines
_CONNECT_S = 5.0
_RETRY_S = 0.2
_MAX_LINE_BYTES, _MAX_HELLO_BYTES = 2**20, 2**12  # machine 0's; another machine's
_HELLO_S = 10.0  # until a connection must have sent its facts
_MAX_NUMBER, _MAX_CHARACTERS = 2**31, 255  # of a machine's facts
_MAX_REFUSAL = 2000  # characters
# Errors of reading if something else is connected.
_NO_MACHINE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_IFREQ_BYTES = 40


def gather_machines(machines: Machines, timeout_s: float, notify: Notify = lambda line: None) -> list[MachineFacts]:
    """Wait until all machines of the launch are there; return each one's facts, in order of node rank.

    Args:
        notify: called with a line that says which machines this one waits for, if that takes more than a few seconds.

    Raises:
        UsageError: GLOO_SOCKET_IFNAME names no interface of this machine.
        PdtoolError: a machine does not come in time, this one does not belong to machine 0 (another has its rank, their
            counts or tokens differ), the port is taken, or gloo would listen where other machines cannot reach it.
    """
    _check_interface(os.environ.get(GLOO_VARIABLE, ""))
    own = MachineFacts(
        node_rank=machines.node_rank,
        count=machines.count,
        host=socket.gethostname(),
        pid=os.getpid(),
        gloo_address=gloo_address() if machines.count > 1 else "",  # it may ask a name server
        has_own_choice=bool(os.environ.get(GLOO_VARIABLE)),
    )
    if machines.count == 1:
        return [own]
    meeting = (_MeetingServer if machines.node_rank == 0 else _MeetingClient)(own, machines)
    facts = asyncio.run(meeting.gather(timeout_s, notify))
    _take_interface(facts[own.node_rank], any(machine.is_remote for machine in facts), notify)
    return facts


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The facts that a machine of a launch sends; prints as `machine 1 (hostname)`.

    Attributes:
        node_rank, count: its --node-rank and --nnodes.
        pid: id of the process that starts its workers.
        gloo_address: where gloo expects the workers of other machines; "" if unknown.
        interface: network interface towards machine 0 (machine 0's towards another); "" if unknown.
        is_remote: whether it is another host than machine 0.
        has_own_choice: whether the user has set GLOO_SOCKET_IFNAME there.
    """

    node_rank: int
    count: int
    host: str
    pid: int
    gloo_address: str
    interface: str = ""
    is_remote: bool = False
    has_own_choice: bool = False

    def __str__(self) -> str:
        return f"machine {self.node_rank} ({self.host})"

    @property
    def taken_interface(self) -> str:
        """The interface that its workers use; "" if the user has named one, or if unknown."""
        return "" if self.has_own_choice else self.interface

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> MachineFacts:
        """Read a machine's facts; raises ValueError or TypeError if no machine could send them."""
        machine = cls(**fields)
        if any(type(getattr(machine, name)) is not kind for name, kind in get_type_hints(cls).items()):
            raise ValueError("a field has the wrong type")
        if not (0 <= machine.node_rank < machine.count < _MAX_NUMBER and 0 <= machine.pid < _MAX_NUMBER):
            raise ValueError("a rank, count or pid is out of range")
        texts = (machine.host, machine.gloo_address, machine.interface)
        if not all(text.isprintable() and len(text) <= _MAX_CHARACTERS for text in texts):
            raise ValueError("a name is not one")
        if machine.gloo_address:
            ipaddress.ip_address(machine.gloo_address.partition("%")[0])
        return machine


def check_reachable(machines: Sequence[MachineFacts]) -> None:
    """Check that the workers of each machine listen where those of other hosts can reach them; raises PdtoolError.

    If /etc/hosts maps the host name to 127.0.0.1, as on Debian, gloo would listen there.
    """
    affected = [machine for machine in machines if is_loopback(machine.gloo_address) and not machine.taken_interface]
    if affected and any(machine.is_remote for machine in machines):
        where = ", ".join(f"{machine.gloo_address} on {machine}" for machine in affected)
        settings = ", ".join(f"{GLOO_VARIABLE}=INTERFACE on {machine}" for machine in affected)
        what = f"gloo would listen at the address of the host name, {where}, which no other machine can reach"
        raise PdtoolError(what, f"set {settings}")


def _take_interface(own: MachineFacts, is_remote: bool, notify: Notify) -> None:
    """Make workers on several hosts use the interface that reaches the meeting, unless the user has named one."""
    if is_remote and own.taken_interface:
        os.environ[GLOO_VARIABLE] = own.taken_interface
        os.environ.setdefault(NCCL_VARIABLE, own.taken_interface)
        talking = f"workers talk over {own.taken_interface}, the interface of the rendezvous"
        notify(f"{talking}. To use another, set {GLOO_VARIABLE}")


class _Meeting:
    """One machine's part in the meeting.

    Attributes:
        missing: node ranks of the machines that this one knows it waits for.
        hint: why they may not have come; "" if unknown.
    """

    def __init__(self, own: MachineFacts, machines: Machines) -> None:
        self.own, self.endpoint = own, machines.endpoint
        self.host, self.port = machines.rendezvous_address
        self.missing: Sequence[int] = [0] if own.node_rank else range(1, own.count)
        self.hint = ""

    async def gather(self, timeout_s: float, notify: Notify) -> list[MachineFacts]:
        notices = asyncio.create_task(self._say_for_whom(timeout_s, notify))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._meet()
        except TimeoutError:
            did = "did not answer at" if 0 in self.missing else "did not connect to"
            raise WorkerDiedError(
                f"{self._whom()} {did} {self.endpoint} within {timeout_s:g} s{self._because()}",
                f"start {'them' if len(self.missing) > 1 else 'it'} with --node-rank {_listed(self.missing)}, and "
                f"check that every machine can reach {self.endpoint}",
            ) from None
        finally:
            notices.cancel()

    async def _meet(self) -> list[MachineFacts]:
        raise NotImplementedError

    async def _say_for_whom(self, timeout_s: float, notify: Notify) -> None:
        said = ""
        while True:
            await asyncio.sleep(_NOTICE_S)
            line = f"waiting for {self._whom()} at {self.endpoint}, for {timeout_s:g} s at most{self._because()}"
            if line != said:
                notify(line)
            said = line

    def _because(self) -> str:
        return f" ({self.hint})" if self.hint else ""

    def _whom(self) -> str:
        return f"machine{'s' * (len(self.missing) > 1)} {_listed(self.missing)} of {self.own.count}"


class _MeetingServer(_Meeting):
    """Machine 0's part: it receives from all others, and answers all at once."""

    def __init__(self, own: MachineFacts, machines: Machines) -> None:
        super().__init__(own, machines)
        self._present = {0: own}
        self._admitted: dict[int, tuple[asyncio.StreamWriter, str]] = {}
        self._result: asyncio.Future[list[MachineFacts]]

    async def gather(self, timeout_s: float, notify: Notify) -> list[MachineFacts]:
        try:
            machines = await super().gather(timeout_s, notify)
        except PdtoolError as error:
            await self._tell_all(_refusal(error))
            raise
        await self._tell_all({"machines": [asdict(machine) for machine in machines]})
        return machines

    async def _meet(self) -> list[MachineFacts]:
        self._result = asyncio.get_running_loop().create_future()
        if not await asyncio.to_thread(self._is_own_endpoint):
            self.hint = f"{self.host} is not this machine, but only the machine with that name may have --node-rank 0"
        server = await self._listen()
        try:
            machines = await self._result
            check_reachable(machines)
            return machines
        finally:
            server.close()

    def _is_own_endpoint(self) -> bool:
        try:
            return any(_own_addresses(self.host))
        except OSError as error:
            what = f"machine 0 cannot resolve {self.host} of the endpoint {self.endpoint} ({error.strerror})"
            raise PdtoolError(what, "pass a name or address of machine 0 that every machine knows") from error

    async def _listen(self) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._hear, port=self.port, limit=_MAX_HELLO_BYTES)
        except OSError as error:
            reason = "another program uses it" if error.errno == errno.EADDRINUSE else error.strerror
            what = f"machine 0 cannot listen on port {self.port} ({reason})"
            raise PdtoolError(what, "pass --rdzv-endpoint with another port, the same on all machines") from error

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive a machine's facts; it is present until it hangs up or sends anything more."""
        with suppress(OSError, asyncio.CancelledError), closing(writer):  # cancelled: the meeting is over
            try:
                machine, nonce, mac = await self._hello(reader, writer)
            except (OSError, *_NO_MACHINE):
                self.hint = (
                    f"{(writer.get_extra_info('peername') or '?')[0]} connected, but is not a machine of this launch"
                )
                return
            if self._result.done():
                return
            if problem := self._problem_with(machine, *mac):
                self.hint = problem.what
                await _tell(writer, _refusal(problem), nonce)
                return
            self._admit(machine, writer, nonce)
            await self._tell_missing()
            await reader.read(1)
            if self._present.get(machine.node_rank) is machine and not self._result.done():
                del self._present[machine.node_rank], self._admitted[machine.node_rank]
            await self._tell_missing()

    async def _hello(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[MachineFacts, str, tuple[bytes, bytes]]:
        """Ask for a connection's facts; return them, its nonce, its HMAC and the expected HMAC."""
        nonce = secrets.token_hex(16)
        async with asyncio.timeout(_HELLO_S):
            await _tell(writer, {"nonce": nonce})
            said = dict(json.loads(await reader.readline()))
        mac = said.pop("mac").encode(), _mac(nonce, said).encode()
        return MachineFacts.parse({k: v for k, v in said.items() if k != "nonce"}), str(said["nonce"]), mac

    def _admit(self, machine: MachineFacts, writer: asyncio.StreamWriter, nonce: str) -> None:
        if before := self._admitted.get(machine.node_rank):
            before[0].transport.abort()
        self._admitted[machine.node_rank] = writer, nonce
        self._present[machine.node_rank] = machine
        if machine.is_remote:
            own_address = str(writer.get_extra_info("sockname")[0])
            self._present[0] = replace(self.own, interface=interface_with(own_address))

    def _problem_with(self, machine: MachineFacts, mac: bytes, expected: bytes) -> PdtoolError | None:
        if not hmac.compare_digest(mac, expected):
            has, lacks = (machine, self.own) if mac else (self.own, machine)
            what = f"{has} has a {TOKEN_VARIABLE}, but {lacks} has none"
            if mac and expected:
                what = f"{machine} and {self.own} have different {TOKEN_VARIABLE}s"
            return PdtoolError(what, f"set {TOKEN_VARIABLE} to the same text on all machines")
        if machine.count != self.own.count:
            what = f"{machine} was started with --nnodes {machine.count}, {self.own} with --nnodes {self.own.count}"
            return PdtoolError(what, "pass the same --nnodes on all machines")
        other = self._present.get(machine.node_rank)
        if other and (other.host, other.pid) != (machine.host, machine.pid):
            what = (
                f"two machines were started with --node-rank {machine.node_rank}: {other.host} (process {other.pid}) "
                f"and {machine.host} (process {machine.pid})"
            )
            return PdtoolError(what, f"give each machine its own --node-rank, from 0 to {self.own.count - 1}")
        return None

    async def _tell_missing(self) -> None:
        """Tell all machines which ones are missing; if none is, the meeting is over."""
        if self._result.done():
            return
        self.missing = [rank for rank in range(self.own.count) if rank not in self._present]
        if self.missing:
            await self._tell_all({"missing": self.missing})
        else:
            self._result.set_result([self._present[rank] for rank in range(self.own.count)])

    async def _tell_all(self, message: Mapping[str, object]) -> None:
        for writer, nonce in list(self._admitted.values()):
            with suppress(OSError):  # it has hung up
                await _tell(writer, message, nonce)


class _MeetingClient(_Meeting):
    """The part of every other machine: it reports to machine 0, and again whenever the connection is lost."""

    async def _meet(self) -> list[MachineFacts]:
        while True:
            try:
                connection = await asyncio.to_thread(socket.create_connection, (self.host, self.port), _CONNECT_S)
                connection.setblocking(False)
                reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_LINE_BYTES)
                with closing(writer):
                    return await self._converse(reader, writer)
            except OSError as error:
                self.hint = str(error.strerror or error)
            except _NO_MACHINE:
                self.hint = "another program answers there, not machine 0"
            self.missing = [0]
            await asyncio.sleep(_RETRY_S)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[MachineFacts]:
        """Send this machine's facts, and receive the list of missing machines until none is missing."""
        here, there = (str(writer.get_extra_info(name)[0]) for name in ("sockname", "peername"))
        own = replace(self.own, interface=interface_with(here), is_remote=here != there)
        nonce = secrets.token_hex(16)
        greeting = dict(json.loads(await reader.readline()))
        await _tell(writer, {"nonce": nonce, **asdict(own)}, str(greeting["nonce"]))
        while True:
            answer = dict(json.loads(await reader.readline()))
            mac = answer.pop("mac").encode()
            if "what" in answer:  # also from a machine 0 with another token
                kind = WorkerDiedError if answer.get("error") == WorkerDiedError.__name__ else PdtoolError
                raise kind(*(printable(str(answer[part]))[:_MAX_REFUSAL] for part in ("what", "remedy")))
            if not hmac.compare_digest(mac, _mac(nonce, answer).encode()):
                raise ValueError("it does not know the token")
            if "machines" in answer:
                return [MachineFacts.parse(machine) for machine in answer["machines"]]
            missing = answer["missing"]
            if not (isinstance(missing, list) and missing and all(type(rank) is int for rank in missing)):
                raise ValueError("it names no machines")
            self.missing, self.hint = missing[: self.own.count], ""


async def _tell(writer: asyncio.StreamWriter, message: Mapping[str, object], nonce: str = "") -> None:
    """Send a message as a line of JSON; raises OSError if nobody takes it in time."""
    writer.write(json.dumps({**message, "mac": _mac(nonce, message)}).encode() + b"\n")
    async with asyncio.timeout(_HELLO_S):
        await writer.drain()


def _mac(nonce: str, message: Mapping[str, object]) -> str:
    """Return the HMAC of a message to the side that chose the nonce; "" without a token."""
    token = os.environ.get(TOKEN_VARIABLE, "").encode(errors="surrogateescape")
    return hmac.new(token, json.dumps([nonce, message]).encode(), "sha256").hexdigest() if token else ""


def _refusal(error: PdtoolError) -> dict[str, object]:
    return {"error": type(error).__name__, "what": error.what, "remedy": error.remedy}


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


def gloo_address() -> str:
    """Return the address at which gloo expects the other workers; "" if unknown.

    That is the address of the interface in GLOO_SOCKET_IFNAME. If that is not set, it is the first address of the host
    name that belongs to this machine, as in torch's `ProcessGroupGloo::createDefaultDevice`.
    """
    if name := os.environ.get(GLOO_VARIABLE, "").partition(",")[0]:
        return interface_addresses().get(name, "")
    with suppress(OSError, StopIteration):
        return next(_own_addresses(socket.gethostname()))
    return "127.0.0.1"


def _check_interface(given: str) -> None:
    names = [name for _, name in socket.if_nameindex()]
    if unknown := [name for name in given.split(",") if name and name not in names]:
        what = f"{GLOO_VARIABLE}={given}: this machine has no network interface {unknown[0]}"
        raise UsageError(what, f"set it to one of {', '.join(names)}")


def loopback_hint() -> str:
    """Return a remedy if gloo listens at an address that no other machine reaches; "" otherwise."""
    address = gloo_address()
    if not is_loopback(address):
        return ""
    return f"gloo listens at {address}: set {GLOO_VARIABLE} to this machine's network interface that reaches the others"


def interface_with(address: str) -> str:
    """Return the name of the interface with this IPv4 address, if others reach it; "" if none is known."""
    if is_loopback(address):
        return ""
    return next((name for name, its in interface_addresses().items() if its == address), "")


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                reply = ioctl(query, _SIOCGIFADDR, struct.pack(f"{_IFREQ_BYTES}s", name.encode()))
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def is_loopback(address: str) -> bool:
    """Whether only processes of the same machine can reach an address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _own_addresses(host: str) -> Iterator[str]:
    """Yield a host's addresses that belong to this machine; raises OSError if the host cannot be resolved."""
    for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        if _can_bind(family, str(address[0])):
            yield str(address[0])


def _can_bind(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
