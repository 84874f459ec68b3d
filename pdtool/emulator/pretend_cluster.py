"""A pretend cluster: a network namespace for each worker, behind links shaped to the cluster's bandwidths.

Every member of a level has one link to the bridge of that level, as in the simulator's network:

    4x4      bridge br0-0 ──(level 0)── bridge br1-1 ──(level 1)── eth0 of worker 5

All bridges are in the namespace of one process, the switch. Both ends of a link shape what they send. Nothing gets a
name on the machine: the kernel removes a namespace with its processes. Links have no latency, because few kernels can
add it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

from pdtool.artifacts.cluster import Cluster
from pdtool.errors import PdtoolError
from pdtool.units import format_rate

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # unshare(2)
_TIMEOUT_S = 60.0
INSTEAD = "`pdtool simulate` needs none of this and computes the same on a simulated clock"
INTERFACE = "eth0"  # of each worker
# Addresses for benchmarks (RFC 2544), which no name server knows. torch asks the name server for workers' names. It
# gives up at once if the server is unreachable, but would wait if packets vanished.
_ADDRESSES = ip_network("198.18.0.0/15")
_MTU = 4500
BURST_BYTES = 2 * _MTU  # an idle link sends this at once, however slow it is: little compared with a message
_BURST_S = 3e-4  # and as much as a fast link sends in this time, because the kernel may be late by it
_WINDOW_PACKETS = 8  # limit of a connection's packets under way, so that all get their share of a queue
_HEADERS = 1.02  # overhead of Ethernet, IP and TCP on a full packet, and of acknowledgements the other way
_SLOWEST_BYTES_PER_S, _FASTEST_BYTES_PER_S = 1e3, 1e12  # that tc can give a link
_QUEUE_BYTES = 1 << 30  # large enough to drop nothing: TCP would wait for 0.2 s before it sends again


def enter_own_network() -> None:
    """Leave the network of the machine: from here on this process and its children have interfaces of their own. Raises
    PdtoolError.

    Without root it also enters a user namespace, if the kernel allows it and the process has one thread.
    """
    user, group = os.geteuid(), os.getegid()
    if not _unshare(_CLONE_NEWNET):
        return
    try:
        if error := _unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            raise OSError(error, os.strerror(error))
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="utf-8")
    except OSError as failure:
        reason = ": ".join(filter(None, (failure.strerror, failure.filename)))
        what = f"emulation needs network namespaces, but this process is not allowed to make any ({reason})"
        raise PdtoolError(what, f"start pdtool as root, in a container also with CAP_SYS_ADMIN; {INSTEAD}") from failure


def _unshare(flags: int) -> int:
    """Return 0, or the error's number."""
    return ctypes.get_errno() if ctypes.CDLL(None, use_errno=True).unshare(flags) else 0


def check_tools() -> None:
    """Check that iproute2 is installed; raises PdtoolError."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        what = f"emulation needs {' and '.join(missing)} of iproute2, but PATH does not contain it"
        raise PdtoolError(what, f"install iproute2; {INSTEAD}")


def configure(tool: str, commands: Iterable[str]) -> None:
    """Run commands of `ip` or `tc`, such as `link set lo up`, in the namespace of this process; raises PdtoolError."""
    lines = "".join(f"{command}\n" for command in commands)
    try:
        ended = subprocess.run(
            [tool, "-batch", "-"], input=lines, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PdtoolError(f"`{tool} -batch` did not end within {_TIMEOUT_S:g} s", INSTEAD) from error
    if ended.returncode:
        said = " ".join(ended.stderr.split())
        needs = "the kernel module sch_tbf" if tool == "tc" else "the kernel modules veth and bridge"
        raise PdtoolError(f"`{tool}` could not set up the links ({said})", f"it needs {needs}; {INSTEAD}")


@dataclass(frozen=True)
class PretendCluster:
    """Links between the workers of a cluster; its commands are those of iproute2.

    Attributes:
        cluster: with the bandwidths for the links.
    """

    cluster: Cluster

    def address(self, worker: int) -> str:
        """Return the IPv4 address of a worker."""
        return str(_ADDRESSES[1 + worker])

    def make_bridges(self) -> None:
        """Make all bridges and the links between them, in the namespace of this process; raises PdtoolError."""
        workers, spans = self.cluster.workers, (self.cluster.workers, *self.cluster.below[:-1])
        bridges = [(depth, first) for depth, span in enumerate(spans) for first in range(0, workers, span)]
        names, joined = [self._bridge(*bridge) for bridge in bridges], bridges[1:]
        configure("ip", ["link set dev lo up", *(f"link add name {name} mtu {_MTU} type bridge" for name in names)])
        configure("ip", (command for bridge in joined for command in self._join_commands(*bridge)))
        configure("ip", (f"link set dev {name} up" for name in names))
        ends = [(f"{end}{self._bridge(depth, first)}", depth - 1) for depth, first in joined for end in "ud"]
        configure("tc", (self._shape(device, level) for device, level in ends))

    def add_worker(self, worker: int, pid: int) -> None:
        """Link a worker's namespace, that of process `pid`, to its bridge; raises PdtoolError."""
        device, bridge = _device_of(pid), self._bridge(len(self.cluster.levels) - 1, worker)
        configure(
            "ip",
            [
                f"link add name {device} mtu {_MTU} type veth peer name {INTERFACE} mtu {_MTU} netns {pid}",
                f"link set dev {device} gso_max_size {_MTU} master {bridge}",
                f"link set dev {device} up",
            ],
        )
        configure("tc", [self._shape(device, len(self.cluster.levels) - 1)])

    def remove_worker(self, pid: int) -> None:
        """Remove the link of a process that has ended; raises PdtoolError.

        The kernel would do so only later, and until then the next worker would share its address with the old link.
        """
        device = _device_of(pid)
        try:
            configure("ip", [f"link del dev {device}"])
        except PdtoolError:
            if device in (name for _, name in socket.if_nameindex()):
                raise

    def enter(self, worker: int) -> None:
        """Set up the worker's end of its link, in its namespace, which is that of this process; raises PdtoolError."""
        configure(
            "ip",
            [
                "link set dev lo up",
                f"link set dev {INTERFACE} gso_max_size {_MTU}",
                f"addr add {self.address(worker)}/{_ADDRESSES.prefixlen} dev {INTERFACE}",
                f"link set dev {INTERFACE} up",
                f"route replace {_ADDRESSES} dev {INTERFACE} src {self.address(worker)} congctl cubic quickack 1 "
                f"cwnd lock {_WINDOW_PACKETS}",
            ],
        )
        configure("tc", [self._shape(INTERFACE, len(self.cluster.levels) - 1)])

    def _bridge(self, depth: int, worker: int) -> str:
        """Name of the bridge that joins the members of a level around a worker: `br0-0`, `br1-3`; an interface's name
        has at most 15 characters."""
        return f"br{depth}-{worker // (self.cluster.workers, *self.cluster.below)[depth]}"

    def _join_commands(self, depth: int, worker: int) -> list[str]:
        inner, outer = self._bridge(depth, worker), self._bridge(depth - 1, worker)
        return [
            f"link add u{inner} mtu {_MTU} type veth peer name d{inner} mtu {_MTU}",
            f"link set u{inner} gso_max_size {_MTU} master {inner}",
            f"link set d{inner} gso_max_size {_MTU} master {outer}",
            f"link set u{inner} up",
            f"link set d{inner} up",
        ]

    def _shape(self, device: str, level: int) -> str:
        bandwidth = self.cluster.levels[level].bandwidth_bytes_per_s
        if not _SLOWEST_BYTES_PER_S <= bandwidth <= _FASTEST_BYTES_PER_S:
            speeds = " and ".join(map(format_rate, (_SLOWEST_BYTES_PER_S, _FASTEST_BYTES_PER_S)))
            what = f"a link of {format_rate(bandwidth)} cannot be emulated"
            choose = f"choose --scale and --slowdown so that bandwidth / (scale x slowdown) is between {speeds}"
            raise PdtoolError(what, f"{choose}, or simulate the plan")
        bytes_per_s = _HEADERS * bandwidth
        burst = max(BURST_BYTES, round(_BURST_S * bytes_per_s))
        return f"qdisc add dev {device} root tbf rate {round(8 * bytes_per_s)}bit burst {burst} limit {_QUEUE_BYTES}"


def _device_of(pid: int) -> str:
    """Name of the switch's end of a worker's link: a new one for each process."""
    return f"pid{pid}"
