"""Let all copies of a parameter begin with equal values: the replicas of a stage, and stages that share a parameter.

The seeds of torch, numpy and Python see to that, unless model() draws from somewhere else. Digests are compared, so
that only what differs travels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdtool.artifacts.bundle import TiedParameter
from pdtool.run.processes.collectives import PeerErrorContext, all_gather
from pdtool.run.processes.process_groups import ProcessGroups


def equalize_weights(
    modules: Mapping[int, nn.Module], tied: Sequence[TiedParameter], groups: ProcessGroups
) -> list[str]:
    """Give parameters and buffers that differ between copies the values of the first worker that holds them.

    All workers call it together.

    Args:
        modules: of this worker's stages, by their number; with the names of the whole model.

    Returns:
        The names of those that differed anywhere, on every worker.

    Raises:
        PeerError: a worker is lost.
    """
    shares = any(len(group.ranks) > 1 for group in groups.replicas) or bool(tied)
    if not shares:
        return []
    own = {(s, name): tensor for s, module in modules.items() for name, tensor in _state(module).items()}
    digests = all_gather({key: _digest(tensor) for key, tensor in own.items()}, groups.world, "the initial weights")
    different: dict[str, None] = {}
    for group in groups.replicas:
        for key in [key for key in digests[group.ranks[0]] if key[0] == group.stage]:
            if len({digests[rank][key] for rank in group.ranks}) > 1:
                different[key[1]] = None
                if key in own:
                    _broadcast(own[key], group.ranks[0], group.group, group.device)
    for parameter, tied_group in zip(tied, groups.tied, strict=True):
        keys = list(zip(parameter.stages, parameter.names, strict=True))
        source = groups.replicas[parameter.stages[0]].ranks[0]
        if len({held[key] for held in digests for key in keys if key in held}) > 1:
            different[parameter.names[0]] = None
            for key in keys:
                if key in own:
                    _broadcast(own[key], source, tied_group, torch.device("cpu"))
    return list(different)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _digest(tensor: Tensor) -> bytes:
    content = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(content.view(torch.uint8).numpy().data).digest()


def _broadcast(tensor: Tensor, source: int, group: Any, device: torch.device) -> None:
    """Give a tensor the values that it has at rank `source`.

    Args:
        device: where the group takes tensors.
    """
    values = tensor.detach().to(device).contiguous()
    with PeerErrorContext(f"the initial weights did not come from rank {source}", source):
        dist.broadcast(values, source, group=group)
    with torch.no_grad():
        tensor.copy_(values)
