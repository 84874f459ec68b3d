"""What torch.distributed says when another worker is lost, as an error that names it; and talking to everyone."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from pdtool.errors import WorkerDiedError


class PeerError(WorkerDiedError):
    """A worker waited in vain for another; `peer` is its rank, or -1 when it can be one of several."""

    def __init__(self, what: str, remedy: str = "", *, peer: int = -1) -> None:
        super().__init__(what, remedy)
        self.peer = peer


class Blame:
    """Context: re-raise what torch.distributed raises as a PeerError that says what was waited for, and whom.

    A class, not a generator: it is entered for every message.
    """

    def __init__(self, what: str, peer: int = -1) -> None:
        self.what, self.peer = what, peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            reason = re.sub(r"^\[\S*\] ?", "", str(error)).partition(". ")[0][:200]
            raise PeerError(f"{self.what} ({reason})", peer=self.peer) from error


def gather(value: object, group: Any, what: str) -> list[Any]:
    """Everyone's `value`, by rank; `what` is named when somebody is lost meanwhile."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with Blame(f"{what} did not come from every worker"):
        dist.all_gather_object(values, value, group=group)
    return values


def tell(value: object, source: int, what: str) -> Any:
    """The value that rank `source` gives, to every rank."""
    told = [value]
    with Blame(f"{what} did not come from rank {source}", source):
        dist.broadcast_object_list(told, src=source, device=torch.device("cpu"))
    return told[0]
