"""How two workers of one machine come to share memory: the sender makes it and hands it over a Unix socket.

1. Everyone tells where it is, and the name of a socket it listens on: an abstract one, which leaves no file and is seen
   within one network namespace only, so that containers do not meet by mistake.
2. The sender of each hop between neighbours connects, and sends the hop's number with the memory's descriptor.
3. Everyone tells which hops it took: both ends of those, and of no others, share memory.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdtool.run.peers import gather
from pdtool.run.wiring import Hop

HELLO = struct.Struct("=I")
OWNER = struct.Struct("=3i")  # pid, uid, gid
PATIENCE_S = 10.0

Share = tuple[mmap.mmap, socket.socket]


def machine() -> str:
    """The same for processes that can meet, on one kernel; empty where there is no way to."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return kernel + os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def meet(
    hops: Sequence[Hop], rank: int, world: Any, sizes: Mapping[int, int], timeout_s: float, *, willing: bool = True
) -> tuple[set[int], dict[int, Share]]:
    """All workers call it together.

    Args:
        sizes: hop number -> bytes of its memory.
        timeout_s: of the sockets, once in use.
        willing: whether this worker shares memory.

    Returns:
        The numbers of all hops that share memory, and the memory and socket of this worker's ones.
    """
    here = machine() if willing else ""
    with _listener(here, len(hops)) as listener:
        told = gather((here, listener.getsockname() if here else b""), world, "the place of each worker")
        near = [hop for hop in hops if hop.sender != hop.receiver and here and told[hop.sender][0] == here]
        made = {
            hop.number: share
            for hop in near
            if hop.sender == rank
            and told[hop.receiver][0] == here
            and (share := _call(told[hop.receiver][1], hop.number, sizes[hop.number]))
        }
        called = set().union(*gather(set(made), world, "the offers to share memory"))
        taken = _answer(listener, {n: sizes[n] for n in called if hops[n].receiver == rank})
    agreed = set().union(*gather(set(taken), world, "the memory shared"))
    own = {n: share for n, share in (made | taken).items() if n in agreed}
    for _, line in own.values():
        line.settimeout(timeout_s)
    return agreed, own


def _listener(here: str, calls: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX if here else socket.AF_INET, socket.SOCK_STREAM)
    if here:
        listener.bind("")  # Linux chooses a free abstract name
        listener.listen(calls)
        listener.settimeout(PATIENCE_S)
    return listener


def _call(address: bytes, number: int, size: int) -> Share | None:
    """Connect and hand over new memory; None when the other cannot be reached."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(PATIENCE_S)
    try:
        line.connect(address)
        descriptor = os.memfd_create("pdtool")
        try:
            os.ftruncate(descriptor, size)
            socket.send_fds(line, [HELLO.pack(number)], [descriptor])
            return mmap.mmap(descriptor, size), line
        finally:
            os.close(descriptor)
    except OSError:
        line.close()
        return None


def _answer(listener: socket.socket, expected: Mapping[int, int]) -> dict[int, Share]:
    """Take the calls of these hops, and the memory that comes with them."""
    taken: dict[int, Share] = {}
    while len(taken) < len(expected):
        try:
            line, _ = listener.accept()
        except TimeoutError:
            break
        line.settimeout(PATIENCE_S)
        found = _take(line, expected)
        if found is None:
            line.close()
        else:
            taken[found[0]] = found[1], line
    return taken


def _take(line: socket.socket, expected: Mapping[int, int]) -> tuple[int, mmap.mmap] | None:
    """The hop and its memory; None for a caller that is not a worker of this run."""
    _, owner, _ = OWNER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, OWNER.size))
    descriptors: list[int] = []
    try:
        said, descriptors, *_ = socket.recv_fds(line, HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
        if owner != os.getuid() or len(said) != HELLO.size or len(descriptors) != 1:
            return None
        (number,) = HELLO.unpack(said)
        return (number, mmap.mmap(descriptors[0], expected[number])) if number in expected else None
    except (OSError, ValueError):
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
