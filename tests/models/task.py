"""What a model of the collection trains on: random samples that are the same each time, a loss and an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, nn
from torch.utils._pytree import tree_map_only

# Two epochs are 20 minibatches each, the last one short, and 20 updates in all with two minibatches in each.
SAMPLES, VALIDATION_SAMPLES = 78, 6
Draw = Callable[[Generator], Any]


@dataclass(frozen=True)
class Task:
    """A model and all that trains it.

    Attributes:
        build: makes the model.
        inputs: draws the inputs of one sample.
        target: draws the target of one sample; None if it is the inputs.
        loss: of (output, target).
        optimizer: of the named parameters.
        noisy: whether the model draws random numbers of its own.
        pin: stages of some modules.
        refused: a piece of the message with which pdtool refuses the model; "" where it must train.
    """

    build: Callable[[], nn.Module]
    inputs: Draw
    target: Draw | None
    loss: Callable[[Any, Any], torch.Tensor] = F.cross_entropy
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda named: sgd(named)
    noisy: bool = False
    pin: dict[str, int] | None = None
    refused: str = ""

    def dataset(self, split: str) -> list[Any]:
        """Return the samples of a split."""
        generator = Generator().manual_seed(1 if split == "train" else 2)
        return [self._sample(generator) for _ in range(SAMPLES if split == "train" else VALIDATION_SAMPLES)]

    def _sample(self, generator: Generator) -> tuple[Any, Any]:
        inputs = self.inputs(generator)
        return inputs, self.target(generator) if self.target else inputs


def sgd(named_parameters):
    """Without Adam's division by small gradients, which would enlarge rounding errors."""
    return torch.optim.SGD([p for _, p in named_parameters if p.requires_grad], lr=0.02, momentum=0.9)


def gentle(named_parameters):
    """SGD in small steps."""
    return torch.optim.SGD([p for _, p in named_parameters if p.requires_grad], lr=1e-4, momentum=0.9)


def adamw(named_parameters):
    """Weight decay for matrices only, in two parameter groups, as language models are trained."""
    named = [p for _, p in named_parameters if p.requires_grad]
    decayed, others = [p for p in named if p.dim() > 1], [p for p in named if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, eps=1e-4)


def numbers(*shape: int) -> Draw:
    """Normal numbers of this shape."""
    return lambda generator: torch.randn(shape, generator=generator)


def in_double(task: Task) -> Task:
    """The same in double precision and small steps, for networks in which rounding errors grow: norms over few
    numbers, many layers with the same weights."""

    def inputs(generator: Generator) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, task.inputs(generator))

    return replace(task, build=lambda: task.build().double(), inputs=inputs, optimizer=gentle)


def classes(count: int, *shape: int) -> Draw:
    """Whole numbers below `count`: of shape () for a class, (length,) for a sentence."""
    return lambda generator: torch.randint(0, count, shape, generator=generator)


def lengths(longest: int) -> Draw:
    """Numbers of tokens from 1 to `longest`."""
    return lambda generator: torch.randint(1, longest + 1, (), generator=generator)


def both(*draws: Draw) -> Draw:
    """Several inputs or targets, as a tuple."""
    return lambda generator: tuple(draw(generator) for draw in draws)


def named(**draws: Draw) -> Draw:
    """Several inputs or targets, as a dict."""
    return lambda generator: {name: draw(generator) for name, draw in draws.items()}


def token_loss(output, target):
    """Cross entropy of each token."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
