"""Wide linear layers: nearly all memory is weights, gradients and Adam's state."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def model(width: int = 2048, layers: int = 8) -> nn.Module:
    """The network; 16 MB of weights in a layer."""
    stack = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(64, width), *stack, nn.Linear(width, 10))


def dataset(split: str) -> TensorDataset:
    """Noise."""
    n = 512 if split == "train" else 8
    generator = torch.Generator().manual_seed(n)
    return TensorDataset(torch.randn(n, 64, generator=generator), torch.randint(10, (n,), generator=generator))


def example_inputs(batch_size: int) -> torch.Tensor:
    """Noise."""
    return torch.randn(batch_size, 64)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=1e-4)
