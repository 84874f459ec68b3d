"""The zoo's S2VT with LSTMs of 64, which captions clips of moving digits."""

import torch
from torch import nn
from torch.utils.data import Dataset

from pdtool.zoo import s2vt
from pdtool.zoo.s2vt import loss, metrics

__all__ = ["dataset", "example_inputs", "loss", "metrics", "model", "optimizer"]


def model() -> nn.Module:
    """Frames and words to the scores of each next word."""
    features = s2vt.PIXELS["mini"] ** 2
    return s2vt.S2VT(features, len(s2vt.WORDS), embedding=64, width=64, dropout=0.0)


def example_inputs(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and random words."""
    return s2vt.example_inputs(batch_size, "mini")


def dataset(split: str) -> Dataset[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """2874 clips to train on and 720 to validate with."""
    return s2vt.dataset(split, "mini")


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=3e-3)
