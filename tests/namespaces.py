"""The mark of tests that emulate a cluster on this machine, in network namespaces."""

from __future__ import annotations

import os

import pytest

from pdtool.artifacts.cluster import make_cluster
from pdtool.emulator.pretend_cluster import PretendCluster, check_tools, enter_own_network
from pdtool.host import resident_bytes


def _can_emulate() -> bool:
    """Whether this machine allows network namespaces, and can shape links in them."""
    pid = os.fork()
    if not pid:
        try:
            check_tools()
            enter_own_network()
            PretendCluster(make_cluster((2, 2), (2e6, 2e7))).make_bridges()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


CAN_EMULATE = resident_bytes() is not None and _can_emulate()
namespaces = pytest.mark.skipif(not CAN_EMULATE, reason="needs root or user namespaces, iproute2 and sch_tbf")
