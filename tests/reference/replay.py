"""What training must come to, computed by one process from the definitions; shares no code with pdtool.

Legend (PipeDream, SOSP'19, section 3.3):
    n     stages;  s = 0 .. n-1 counts them, r[s] are the replicas of stage s, and minibatch t is replica t mod r[s]'s
    w[s]  minibatches in flight at one replica: each that enters after the first w[s] follows a backward
    k[s]  minibatches in one update of stage s, over its replicas
    v(s, t)  how many updates of stage s the weights have seen that it computes minibatch t with

When t enters stage s, the oldest minibatch in flight at its replica, itself included, is

    u(s, t) = max(t mod r[s], t - r[s] (w[s] - 1))

and all rounds before that one's are closed, so u(s, t) div k[s] updates were made. The policies:

    stash          v(s, t) = u(s, t) div k[s]. Straight pipelines have r = k = 1 and w[s] = n - s, which is the paper's
                   w(t+1) = w(t) − η·∇f(w_1(t−n+1), w_2(t−n+2), …, w_n(t))
    vertical-sync  v(s, t) = v(0, t) of stash: w(t+1) = w(t) − η·∇f(w_1(t−n+1), w_2(t−n+1), …, w_n(t−n+1))
    2bw            v(s, t) = max(0, t div k - 1): W(t+1) = W(t) − η·∇f(W(t−1)) (PipeDream-2BW, ICML'21, section 3.1)
    none           as stash in the forward; the backward runs after t div k[s] updates, with the weights of then
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

Batch = tuple[Tensor, Any]


@dataclass(frozen=True)
class Pipeline:
    """r, w and k of each stage, and the policy."""

    replicas: Sequence[int]
    in_flight: Sequence[int]
    every: Sequence[int]
    weights: str = "stash"

    def forward(self, s: int, t: int) -> int:
        """v(s, t)."""
        if self.weights == "2bw":
            return max(0, t // self.every[s] - 1)
        s = 0 if self.weights == "vertical-sync" else s
        r = self.replicas[s]
        return max(t % r, t - r * (self.in_flight[s] - 1)) // self.every[s]

    def backward(self, s: int, t: int) -> int:
        """The same for the backward."""
        return t // self.every[s] if self.weights == "none" else self.forward(s, t)

    def lag(self, s: int, first: int) -> int:
        """Updates by which stage s, holding a parameter that stage `first` holds too, is behind in its steps."""
        ahead = self.replicas[first] * self.in_flight[first] - self.replicas[s] * self.in_flight[s]
        return max(0, math.ceil(ahead / self.every[s]))

    def peak_versions(self, s: int, replica: int, minibatches: int) -> int:
        """Most versions alive together: the newest, and those that a minibatch computes with whose backward is to come.

        Without stashing there is one.
        """
        if self.weights == "none":
            return 1
        mine = range(replica, minibatches, self.replicas[s])
        newest = [t // self.every[s] for t in mine] + [math.ceil(minibatches / self.every[s])]
        return max(
            len({v for t in mine[done:] if (v := self.forward(s, t)) <= updates} | {updates})
            for done, updates in enumerate(newest)
        )

    def peak_stashed(self, s: int, replica: int, minibatches: int) -> int:
        """Most minibatches in flight at a replica."""
        return min(self.in_flight[s], len(range(replica, minibatches, self.replicas[s])))


@contextmanager
def _one_thread() -> Iterator[None]:
    """The models are so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def asynchronous(
    model: nn.Module,
    stage_of: Callable[[str], int],
    epochs: Sequence[Sequence[Batch]],
    loss: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    pipeline: Pipeline,
    tied: Sequence[str] = (),
    max_norm: float | None = None,
    after_update: Callable[[Any, int], object] = lambda named, update: None,
) -> dict[str, Tensor]:
    """Train with updates while minibatches are in flight; the weights after the last epoch, by name.

    Args:
        stage_of: parameter name -> its stage.
        tied: names of one parameter that several stages hold, the first holder's first; `model` has separate ones.
            All copies take the same steps, each with the sum over the holders of their gradients of one round, but
            holder s begins `lag` rounds late: its version v has seen max(0, v - lag) of them. At an epoch's end
            those still due are taken.
        max_norm: before a step the gradients of a stage are clipped by the norm of those that are not tied, and the
            tied one by its own.
        after_update: called with the named parameters of a stage and how many updates it has made. It, and an
            optimizer, may freeze parameters: one that is frozen in the version that a minibatch reads has no gradient
            of it, and one that is frozen now takes no step. Hooks on gradients are called for each minibatch.
    """
    named = dict(model.named_parameters())
    stage = {n: stage_of(n) for n in named}
    lag = {n: pipeline.lag(stage[n], stage[tied[0]]) if n in tied else 0 for n in named}
    own = [[n for n in named if stage[n] == s and n not in tied[1:]] for s in range(len(pipeline.replicas))]
    optimizers = [make_optimizer([(n, named[n]) for n in names]) for names in own]
    updates = [0] * len(own)
    for batches in epochs:
        history = {n: [_version(named[n])] for names in own for n in names}  # by updates in this epoch
        for n in tied[1:]:
            history[n] = history[tied[0]]
        gradients: list[dict[str, Tensor]] = []
        for t, (x, y) in enumerate(batches):
            weights = {n: _version(history[n][max(0, pipeline.forward(s, t) - lag[n])]) for n, s in stage.items()}
            value = loss(functional_call(model, weights, (x,)), y)
            for n, s in stage.items():  # into the memory that the graph has saved
                weights[n].data.copy_(history[n][max(0, pipeline.backward(s, t) - lag[n])])
            found = _gradients(value, weights, named)
            gradients.append(found | {n: sum(found[m] for m in tied) for n in tied})
            for s, names in enumerate(own):
                if (t + 1) % pipeline.every[s] == 0 or t + 1 == len(batches):
                    part = range(t - t % pipeline.every[s], t + 1)
                    _average(named, names, part, gradients, [len(b[1]) for b in batches])
                    if max_norm:
                        clip_grad_norm_([named[n] for n in names if n not in tied], max_norm)
                        clip_grad_norm_([named[n] for n in names if n in tied], max_norm)
                    optimizers[s].step()
                    optimizers[s].zero_grad()
                    updates[s] += 1
                    after_update([(n, named[n]) for n in names], updates[s])
                    for n in names:
                        history[n].append(_version(named[n]))
    return {n: named[tied[0] if n in tied else n].detach() for n in named}


def _version(weight: Tensor) -> Tensor:
    """What it is now, and whether it is trained."""
    return weight.detach().clone().requires_grad_(weight.requires_grad)


def _gradients(value: Tensor, weights: dict[str, Tensor], named: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Of the loss of one minibatch, by name, as hooks on the parameters leave them; None of what it does not need."""
    trained = {n: weight for n, weight in weights.items() if weight.requires_grad}
    found = dict(zip(trained, torch.autograd.grad(value, list(trained.values()), allow_unused=True), strict=True))
    for n, gradient in found.items():
        for hook in (named[n]._backward_hooks or {}).values() if gradient is not None else ():
            found[n] = hook(found[n])
    return dict.fromkeys(weights) | found


def _average(named: Any, names: Any, part: range, gradients: Any, sizes: Sequence[int]) -> None:
    """The mean over the samples of the minibatches `part`, for one update."""
    samples = sum(sizes[i] for i in part)
    for n in names:
        found = [gradients[i][n] * sizes[i] for i in part if gradients[i][n] is not None]
        is_trained = bool(found) and named[n].requires_grad  # with the strides of the parameter, as autograd makes them
        named[n].grad = torch.empty_like(named[n]).copy_(sum(found) / samples) if is_trained else None


@_one_thread()
def synchronous(
    model: nn.Module,
    epochs: Sequence[Sequence[Batch]],
    loss: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    every: int,
    *,
    max_norm: float | None = None,
    after_update: Callable[[], object] = lambda: None,
    after_epoch: Callable[[], object] = lambda: None,
) -> dict[str, Tensor]:
    """Train the unsplit model, an update every `every` minibatches with the mean over their samples."""
    optimizer = make_optimizer(model.named_parameters())
    for batches in epochs:
        for start in range(0, len(batches), every):
            part = batches[start : start + every]
            samples = sum(len(y) for _, y in part)
            for x, y in part:
                (loss(model(x), y) * len(y) / samples).backward()
            if max_norm:
                clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            after_update()
        after_epoch()
    return {n: p.detach() for n, p in model.state_dict().items()}


def peak_stashed(schedule: str, replicas: Sequence[int], s: int, microbatches: int, chunks: int = 1) -> int:
    """Most minibatches in flight at a replica of stage s, with `microbatches` at each replica of it in an update. With
    chunks, those of all stages of its worker count.

    GPipe (NeurIPS'19, section 2.2) and breadth-first (MLSys'23): all. 1F1B: as many as it takes to keep the later
    workers busy (PipeDream, section 3.2: NOAM). ZB-H1 (ICLR'24, section 2.1): everywhere as many as 1F1B has at the
    first stage. Interleaved (SC'21, section 2.2): p minibatches go through one chunk, then through the next; worker d
    begins with 2 (p - d - 1) + (v - 1) p forwards, goes on by forward and backward in turns, and ends with backwards.
    """
    p = len(replicas)
    match schedule:
        case "gpipe" | "looped-bfs":
            return microbatches * chunks
        case "1f1b-flush":
            return min(math.ceil(sum(replicas[s:]) / replicas[s]), microbatches)
        case "zb-h1":
            return min(p, microbatches)
    units, d = range(microbatches * chunks), s % p
    chunk = [i % (p * chunks) // p for i in units]
    warm_up = min(2 * (p - d - 1) + (chunks - 1) * p, len(units))
    most, live = 0, Counter(chunk[:warm_up])
    for i in units:
        most = max(most, live.total())
        live.update(chunk[warm_up + i : warm_up + i + 1])
        most = max(most, live.total())
        live[chunks - 1 - chunk[i]] -= 1
    return most
