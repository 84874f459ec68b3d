"""What training must come to, computed by one process from the definitions; shares no code with pdtool.

Legend (PipeDream, SOSP'19, section 3.3):
    n     stages;  s = 0 .. n-1 counts them, r[s] are the replicas of stage s
    w[s]  minibatches in flight at one replica: its forward of local minibatch q comes after q - w[s] + 1 backwards
    k[s]  minibatches in one update of stage s, over its replicas
    v(s, t)  the version of stage s's weights that minibatch t is computed with, forward and backward

Straight pipelines have r = 1, k = 1 and w[s] = n - s, so v(s, t) = max(0, t - (n - 1 - s)), the paper's
w(t+1) = w(t) − η·∇f(w_1(t−n+1), w_2(t−n+2), …, w_n(t)).

With replicas, minibatch t is the local minibatch q = t div r[s] of replica t mod r[s]; when its forward runs, that
replica has done b = max(0, q - w[s] + 1) backwards, which are k[s]/r[s] to a round, so v(s, t) = b div (k[s]/r[s]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Batch = tuple[Tensor, Any]


def version(t: int, replicas: int, in_flight: int, every: int) -> int:
    """v(s, t) for a stage of `replicas` with `in_flight` and an update every `every` minibatches."""
    backwards = max(0, t // replicas - in_flight + 1)
    return backwards // (every // replicas)


def peak_versions(minibatches: int, in_flight: int) -> int:
    """Most versions alive at a replica that updates after each backward: those of the minibatches in flight, and the
    newest, after each number of backwards."""
    return max(
        len({max(0, q - in_flight + 1) for q in range(done, min(done + in_flight - 1, minibatches))} | {done})
        for done in range(1, minibatches + 1)
    )


def asynchronous(
    model: nn.Module, stage_of: Callable[[str], int], epochs: Sequence[Sequence[Batch]],
    loss: Callable[[Any, Any], Tensor], make_optimizer: Callable[[Any], torch.optim.Optimizer],
    replicas: Sequence[int], in_flight: Sequence[int], every: Sequence[int],
) -> dict[str, Tensor]:  # fmt: skip
    """Train with 1F1B and weight stashing; the weights after the last epoch, by name.

    Args:
        stage_of: parameter name -> its stage.
    """
    named = dict(model.named_parameters())
    stages = range(len(replicas))
    optimizers = [make_optimizer([(n, p) for n, p in named.items() if stage_of(n) == s]) for s in stages]
    for batches in epochs:
        history = {n: [p.detach().clone()] for n, p in named.items()}  # by number of updates in this epoch
        gradients: list[dict[str, Tensor]] = []
        for t, (x, y) in enumerate(batches):
            weights = {
                n: history[n][version(t, replicas[s], in_flight[s], every[s])].requires_grad_()
                for n in named
                for s in [stage_of(n)]
            }
            value = loss(functional_call(model, weights, (x,)), y)
            gradients.append(dict(zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True)))
            for s in stages:
                if (t + 1) % every[s] == 0 or t + 1 == len(batches):
                    part = range(t - t % every[s], t + 1)
                    names = [n for n in named if stage_of(n) == s]
                    _step(optimizers[s], named, names, part, gradients, [len(b[1]) for b in batches])
                    for n in names:
                        history[n].append(named[n].detach().clone())
    return {n: p.detach() for n, p in named.items()}


def _step(optimizer: Any, named: Any, names: Any, part: range, gradients: Any, sizes: Sequence[int]) -> None:
    """One update with the mean over the samples of the minibatches `part`."""
    samples = sum(sizes[i] for i in part)
    for n in names:
        named[n].grad = sum(gradients[i][n] * sizes[i] for i in part) / samples
    optimizer.step()
    optimizer.zero_grad()


def asynchronous_tied(
    model: nn.Module, names: Sequence[str], stage_of: Callable[[str], int], epochs: Sequence[Sequence[Batch]],
    loss: Callable[[Any, Any], Tensor], make_optimizer: Callable[[Any], torch.optim.Optimizer],
    replicas: Sequence[int], in_flight: Sequence[int], every: Sequence[int],
) -> dict[str, Tensor]:  # fmt: skip
    """The same with one parameter held under `names` by as many stages; `model` holds it as separate parameters.

    All copies take the same sequence of steps: step j uses the sum over the holders of their gradients of round j.
    A holder s takes step j at its round j + lag, lag = ceil((r[f] w[f] - r[s] w[s]) / k), f being the first holder;
    so its forward of minibatch t sees max(0, v(s, t) - lag) steps. What is still due at an epoch's end is taken then.
    """
    named = dict(model.named_parameters())
    first = min(stage_of(n) for n in names)
    steps: list[Tensor] = [named[names[0]].detach().clone()]
    shared = nn.Parameter(steps[0].clone())
    shared_optimizer = make_optimizer([(names[0], shared)])
    stages = range(len(replicas))
    own = [[n for n in named if stage_of(n) == s and n not in names] for s in stages]
    optimizers = [make_optimizer([(n, named[n]) for n in own[s]]) if own[s] else None for s in stages]
    for batches in epochs:
        sizes = [len(y) for _, y in batches]
        history = {n: [p.detach().clone()] for n, p in named.items() if n not in names}
        steps = [shared.detach().clone()]
        gradients: list[dict[str, Tensor]] = []
        for t, (x, y) in enumerate(batches):
            weights = {}
            for n in named:
                s = stage_of(n)
                v = version(t, replicas[s], in_flight[s], every[s])
                if n in names:
                    ahead = replicas[first] * in_flight[first] - replicas[s] * in_flight[s]
                    v = max(0, v - max(0, -(-ahead // every[s])))
                weights[n] = (steps if n in names else history[n])[v].clone().requires_grad_()
            value = loss(functional_call(model, weights, (x,)), y)
            gradients.append(dict(zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True)))
            for s in stages:
                if (t + 1) % every[s] == 0 or t + 1 == len(batches):
                    part = range(t - t % every[s], t + 1)
                    if own[s]:
                        _step(optimizers[s], named, own[s], part, gradients, sizes)
                    for n in own[s]:
                        history[n].append(named[n].detach().clone())
                    if s == first:
                        samples = sum(sizes[i] for i in part)
                        shared.grad = sum(gradients[i][n] * sizes[i] for i in part for n in names) / samples
                        shared_optimizer.step()
                        steps.append(shared.detach().clone())
    return {n: shared.detach() if n in names else p.detach() for n, p in named.items()}


def synchronous(
    model: nn.Module, epochs: Sequence[Sequence[Batch]], loss: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer], every: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Train the unsplit model, an update every `every` minibatches with the mean over their samples."""
    optimizer = make_optimizer(model.named_parameters())
    for batches in epochs:
        for start in range(0, len(batches), every):
            part = batches[start : start + every]
            samples = sum(len(y) for _, y in part)
            for x, y in part:
                (loss(model(x), y) * len(y) / samples).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach() for n, p in model.state_dict().items()}
