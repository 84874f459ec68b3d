"""The training loop that anyone would write for one process: what pdtool's training must equal. Imports no pdtool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with the inputs of a minibatch: a dict by name, a tuple by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def train(
    model: nn.Module,
    dataset: Sequence[Any],
    orders: Sequence[Sequence[int]],
    loss: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    batch_size: int,
    accumulation: int,
    validation: Sequence[Any] = (),
) -> None:
    """Train a model, and validate it after each epoch, in which a model may change parameters, too.

    Args:
        validation: a minibatch of (inputs, target).
        dataset: of (inputs, target).
        orders: the numbers of the samples in each epoch, in the order in which they come.
        accumulation: minibatches in an update, which takes the mean over all their samples.
    """
    for order in orders:
        minibatches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        for first in range(0, len(minibatches), accumulation):
            group = minibatches[first : first + accumulation]
            samples = sum(map(len, group))
            for numbers in group:
                inputs, target = default_collate([dataset[i] for i in numbers])
                (loss(call(model, inputs), target) * len(numbers) / samples).backward()
            optimizer.step()
            optimizer.zero_grad()
        if validation:
            model.eval()
            with torch.no_grad():
                call(model, default_collate(validation)[0])
            model.train()
