"""Collectives over all workers, and errors that name the worker who was lost."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from pdtool.errors import WorkerDiedError
from pdtool.run.processes.out_of_memory import is_out_of_memory
from pdtool.run.processes.status import ANY_PEER, wait_begins, wait_ends


class PeerError(WorkerDiedError):
    """A worker waited in vain for another.

    Attributes:
        peer: rank of the other, or ANY_PEER when it can be one of several.
    """

    def __init__(self, what: str, remedy: str = "", *, peer: int = ANY_PEER) -> None:
        super().__init__(what, remedy)
        self.peer = peer


class PeerErrorContext:
    """Context of a wait for other workers, which turns what torch.distributed raises into a PeerError.

    It is a class, not a generator, because it is entered for every all-reduce.

    Args:
        what: what did not happen, for the error's text.
        peer: rank of the worker that is waited for.
    """

    def __init__(self, what: str, peer: int = ANY_PEER) -> None:
        self._what, self._peer = what, peer

    def __enter__(self) -> None:
        wait_begins(self._peer)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            wait_ends()
        if isinstance(error, RuntimeError):
            raise PeerError(f"{self._what} ({short_reason(error)})", peer=self._peer) from error


def short_reason(error: RuntimeError) -> str:
    """Return the first sentence of what torch.distributed says, without the place in its sources.

    Raises:
        RuntimeError: `error` itself, when this worker ran out of memory: no other one is to blame.
    """
    if is_out_of_memory(error):
        raise error
    return re.sub(r"^\[\S*\] ?", "", str(error)).partition(". ")[0][:200]


def all_gather(value: object, group: Any, what: str) -> list[Any]:
    """Return the `value` of every rank of `group`, in order; raises PeerError, which says that `what` did not come."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with PeerErrorContext(f"{what} did not come from every worker"):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: object, source: int, what: str) -> Any:
    """Return the `value` of rank `source` on every rank; raises PeerError, which says that `what` did not come."""
    values = [value]
    with PeerErrorContext(f"{what} did not come from rank {source}", source):
        dist.broadcast_object_list(values, src=source, device=torch.device("cpu"))
    return values[0]
