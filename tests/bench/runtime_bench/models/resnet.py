"""A residual network with batch norm on noise of 32×32 pixels."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    """Two 3×3 convolutions with a skip; x is (batch, channels, height, width)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1, self.relu1 = nn.BatchNorm2d(out), nn.ReLU()
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(out), nn.ReLU()
        self.skip = nn.Identity()
        if stride > 1 or channels != out:
            self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(self.relu1(self.norm1(self.first(x)))))
        return self.relu2(y + self.skip(x))


def model(width: int = 32, blocks: int = 2) -> nn.Module:
    """Four groups of blocks; channels double where the image halves."""
    layers, channels = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()], width
    for group in range(4):
        for i in range(blocks):
            out = width * 2**group
            layers.append(Block(channels, out, 2 if group and not i else 1))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


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
