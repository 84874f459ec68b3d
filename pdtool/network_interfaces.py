"""The network interfaces of this machine: which one has an address, and which one gloo listens on."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from contextlib import suppress

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_IFREQ_BYTES = 40


def gloo_address() -> str:
    """Return the address at which gloo expects the other workers; "" when it cannot be told.

    That is the address of the interface in GLOO_SOCKET_IFNAME; where that is not set, the first of the host name's
    addresses that belongs to this machine, as `ProcessGroupGloo::createDefaultDevice` of torch chooses it.
    """
    if name := os.environ.get(GLOO_VARIABLE, "").partition(",")[0]:
        return interface_addresses().get(name, "")
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if _can_bind(family, str(address[0])):
                return str(address[0])
    return "127.0.0.1"


def loopback_hint() -> str:
    """Return what to do where gloo listens at an address that no other machine reaches; "" where it does not."""
    address = gloo_address()
    if not is_loopback(address):
        return ""
    return f"gloo listens at {address}: set {GLOO_VARIABLE} to this machine's interface towards the others"


def interface_with(address: str) -> str:
    """Return the name of the interface that has an IPv4 address; "" when none is known to have it."""
    return next((name for name, its in interface_addresses().items() if its == address), "")


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one; empty where the system does not say (not Linux)."""
    addresses = {}
    with suppress(ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        from fcntl import ioctl

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


def is_own_name(host: str) -> bool:
    """Whether a host name or address means this machine; raises OSError when it cannot be resolved."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return any(_can_bind(family, str(address[0])) for family, _, _, _, address in found)


def _can_bind(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
