"""The folder of a run: used by one run at a time, and the same folder on every machine."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pdtool.errors import UsageError
from pdtool.run.processes.collectives import all_gather, broadcast

_TOKEN_FILE = ".token"
_VISIBLE_WITHIN_S = 10.0  # until a file that one machine wrote is seen by another; NFS caches folders for seconds
_POLL_S = 0.1


def check_shared(out: Path, group: Any, timeout_s: float) -> None:
    """Check that all workers of `group` have the same folder before them: each must see what the first one writes.

    Args:
        timeout_s: how long workers wait for each other.

    Raises:
        UsageError: on every worker, when one does not; ranks and machines are named.
        PeerError: a worker is lost.
    """
    token, path = "", out / _TOKEN_FILE
    if dist.get_rank(group) == 0:
        token = secrets.token_hex(16)
        path.write_text(token, encoding="ascii")
    token = broadcast(token, 0, "the token of the run's folder")
    limit_s = min(_VISIBLE_WITHIN_S, timeout_s / 2)
    seen = all_gather((_comes_to_hold(path, token, limit_s), socket.gethostname()), group, "word of the run's folder")
    blind = {f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees}
    if blind:
        raise UsageError(
            f"{out} is not one folder for all workers: what rank 0 on {seen[0][1]} writes there is not seen by "
            f"{', '.join(sorted(blind))}",
            "name with -o a folder that all machines share",
        )


def _comes_to_hold(path: Path, text: str, limit_s: float) -> bool:
    """Whether a file holds a text, or comes to hold it within the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if path.read_text(encoding="ascii") == text:
                return True
        except (OSError, UnicodeDecodeError):
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
