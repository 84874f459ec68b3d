"""What the machines of a launch say of themselves to each other, and whether their workers can reach one another."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pdtool.errors import PdtoolError
from pdtool.machines import Machines
from pdtool.network_interfaces import GLOO_VARIABLE, gloo_address, is_loopback


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What a machine of a launch says of itself; prints as `machine 1 (hostname)`.

    Attributes:
        node_rank, count: what it was started with (--node-rank, --nnodes).
        pid: of the process that starts its workers.
        gloo_address: where gloo expects the workers of other machines; "" when unknown.
        interface: network interface towards machine 0 (machine 0's towards another); "" when unknown.
        is_remote: whether it is another host than machine 0.
    """

    node_rank: int
    count: int
    host: str
    pid: int
    gloo_address: str
    interface: str = ""
    is_remote: bool = False

    def __str__(self) -> str:
        return f"machine {self.node_rank} ({self.host})"

    @classmethod
    def of_this_machine(cls, machines: Machines) -> MachineFacts:
        """Return what the machine of this process says."""
        return cls(
            node_rank=machines.node_rank,
            count=machines.count,
            host=socket.gethostname(),
            pid=os.getpid(),
            gloo_address=gloo_address() if machines.count > 1 else "",  # it may ask a name server
        )

    @classmethod
    def parse(cls, line: bytes) -> MachineFacts:
        """Read a line of JSON; raises ValueError or TypeError when no machine has written it."""
        machine = cls(**json.loads(line))
        if not all(type(number) is int for number in (machine.node_rank, machine.count, machine.pid)):
            raise ValueError("a rank, count or pid is no number")
        return machine


def check_reachable(machines: Sequence[MachineFacts]) -> None:
    """Check that the workers of each machine listen where those of other hosts can reach them; raises PdtoolError.

    Where the host name stands for 127.0.0.1 in /etc/hosts, as Debian has it, gloo would listen there.
    """
    affected = [machine for machine in machines if is_loopback(machine.gloo_address)]
    if affected and any(machine.is_remote for machine in machines):
        where = ", ".join(f"{machine.gloo_address} on {machine}" for machine in affected)
        settings = ", ".join(f"{GLOO_VARIABLE}={machine.interface or 'INTERFACE'} on {machine}" for machine in affected)
        raise PdtoolError(
            f"gloo would listen at the address of the host name, {where}: no other machine reaches that",
            f"set {settings}",
        )
