"""Eight wide linear layers with Adam: nearly all memory is weights."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def model(width=2048, layers=8):
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def dataset(split, width=2048):
    x = torch.randn(2048, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :10].argmax(1))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(named_parameters):
    return torch.optim.Adam([p for _, p in named_parameters], lr=1e-4)
