"""A small convolutional network on scikit-learn's real handwritten digits (1797 images of 8×8)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Block(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + x)


class Digits(nn.Module):
    """Images (batch, 1, 8, 8) to the scores of ten digits (batch, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block1 = Block(width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.block2 = Block(2 * width)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block2(F.relu(self.down(self.block1(self.stem(x)))))
        return self.head(self.dropout(self.pool(x).flatten(1)))


def model(width: int = 32) -> nn.Module:
    """The network; `width` is the number of channels in its first half."""
    return Digits(width)


def example_inputs(batch_size: int) -> torch.Tensor:
    """Noise."""
    return torch.rand(batch_size, 1, 8, 8)


def dataset(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """1437 images to train on and 360 to validate with, always the same."""
    from sklearn.datasets import load_digits  # here, for most workers read no data

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[360:] if split == "train" else order[:360]
    return TensorDataset(images[chosen], torch.tensor(digits.target)[chosen])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters, lr=0.02):
    """Plain SGD with momentum; small enough a step for weights that are two updates old."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=lr, momentum=0.9, weight_decay=1e-4)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Share of digits recognised."""
    return {"accuracy": ((output.argmax(1) == target).sum().item(), len(target))}
