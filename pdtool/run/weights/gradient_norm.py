"""The norm of gradients, and clipping by it with the formula of torch.nn.utils.clip_grad_norm_."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

_EPSILON = 1e-6  # as in clip_grad_norm_


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """Clip the gradients of the parameters, of any shapes, by the norm of all of them.

    On a GPU the host does not read the norm, and a gradient that is not clipped is multiplied by 1.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if norm.is_cuda:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    else:
        scale(parameters, norm.double().item(), max_norm)


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the square of the norm of all gradients, taken as one vector."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).double().item() ** 2


def scale(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients of norm `norm`, together with those of other workers, to `max_norm` if that is less."""
    factor = max_norm / (norm + _EPSILON)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and not factor >= 1.0:  # nor where it is not a number, which shows in the weights as in a plain loop
        torch._foreach_mul_(gradients, factor)
