"""A residual network with batch norm: nearly all memory is activations."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + x).relu()


def model(width=64, blocks=6):
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *[Block(width) for _ in range(blocks)], head)


def dataset(split):
    x = torch.randn(512, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.mean((2, 3)).argmax(1))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9)
