"""Training with a correction of delay, computed by one process from the formulas of the papers.

Shares no code with pdtool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def straight(
    model: nn.Module,
    stage: dict[str, int],
    epochs: Sequence[Sequence[tuple[Tensor, Any]]],
    loss: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    kind: str,
    value: float | None,
) -> dict[str, Tensor]:
    """A straight pipeline of p stages, one update a minibatch: at stage s minibatch t sees version t - tau, with
    tau = p - 1 - s, of what that stage lets forwards see."""
    named = dict(model.named_parameters())
    p = 1 + max(stage.values())
    tau = {n: p - 1 - stage[n] for n in named}
    optimizers = [make_optimizer([(n, named[n]) for n in named if stage[n] == s]) for s in range(p)]
    d = {n: torch.zeros_like(w) for n, w in named.items()}
    updates = 0

    def seen(n: str) -> Tensor:
        ahead = {"weight-prediction": tau[n], "nesterov": value if value is not None else 0.9}.get(kind, 0)
        return (named[n].detach() + ahead * d[n]).clone()

    for minibatches in epochs:
        history = [{n: seen(n) for n in named}]
        for t, (x, y) in enumerate(minibatches):
            used = {n: history[max(0, t - tau[n])][n].clone().requires_grad_() for n in named}
            gradients = torch.autograd.grad(loss(functional_call(model, used, (x,)), y), list(used.values()))
            before = {n: w.detach().clone() for n, w in named.items()}
            for n, gradient in zip(used, gradients, strict=True):
                named[n].grad = gradient
            for s, optimizer in enumerate(optimizers):
                power = 1.0 if value is None else max(0.0, 1 - updates / value)
                factor = max(1, p - 1 - s) ** power if kind == "lr-discount" else 1.0
                for group in optimizer.param_groups:
                    group["lr"] /= factor
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] *= factor
            updates += 1
            for n, w in named.items():
                step = w.detach() - before[n]
                gain = 0.9 if value is None else value
                d[n] = gain * d[n] + (1 - gain) * step if kind == "nesterov" else step
                if kind == "nesterov":
                    w.data.copy_(before[n] + d[n])
            history.append({n: seen(n) for n in named})
    return {n: w.detach() for n, w in named.items()}
