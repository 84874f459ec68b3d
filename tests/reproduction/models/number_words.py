"""The zoo's GNMT with four LSTM layers of 64, two that encode and two that decode, on half of its sentences."""

import torch
from torch import nn

from pdtool.zoo import gnmt
from pdtool.zoo.gnmt import loss, metrics

__all__ = ["dataset", "example_inputs", "loss", "metrics", "model", "optimizer"]


def model() -> nn.Module:
    """English and German words to the scores of each next German word."""
    return gnmt.model("mini", layers=4)


def example_inputs(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words."""
    return gnmt.example_inputs(batch_size, "mini")


def dataset(split: str) -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """2000 pairs to train on and 500 to validate with."""
    pairs = gnmt.dataset(split, "mini")
    return pairs[: len(pairs) // 2]


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=4e-3)
