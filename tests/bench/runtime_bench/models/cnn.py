"""A VGG-like network on noise of 32×32 pixels."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def model(width: int = 32) -> nn.Module:
    """Pairs of 3×3 convolutions with batch norm; channels double where the image halves."""
    layers, channels = [], 3
    for out in (width, 2 * width, 4 * width, 8 * width):
        for _ in range(2):
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 4, 256), nn.ReLU(), nn.Linear(256, 10))


def dataset(split: str) -> TensorDataset:
    """Noise."""
    n = 2048 if split == "train" else 8
    generator = torch.Generator().manual_seed(n)
    return TensorDataset(torch.randn(n, 3, 32, 32, generator=generator), torch.randint(10, (n,), generator=generator))


def example_inputs(batch_size: int) -> torch.Tensor:
    """Noise."""
    return torch.randn(batch_size, 3, 32, 32)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters):
    """SGD with momentum."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=1e-3, momentum=0.9)
