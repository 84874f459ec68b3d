"""Stage 0 of digits-3, whose stages are 0 to 2; written by pdtool codegen."""

import torch
from torch import nn


class Stage0(nn.Module):
    """Shapes, for a minibatch of `batch` samples:

        takes   x: (batch, 1, 8, 8)
        returns stem_2: (batch, 32, 8, 8)
        returns block1_conv2: (batch, 32, 8, 8)
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.ModuleDict({
            "0": nn.Conv2d(1, 32, 3, padding=1, bias=False),
            "1": nn.BatchNorm2d(32),
            "2": nn.ReLU(),
        })
        self.block1 = nn.ModuleDict({
            "conv1": nn.Conv2d(32, 32, 3, padding=1, bias=False),
            "norm1": nn.BatchNorm2d(32),
            "relu": nn.ReLU(),
            "conv2": nn.Conv2d(32, 32, 3, padding=1, bias=False),
        })

    def forward(self, x):
        x = self.stem["0"](x)
        x = self.stem["1"](x)
        stem_2 = self.stem["2"](x)
        x = self.block1.conv1(stem_2)
        x = self.block1.norm1(x)
        x = self.block1.relu(x)
        block1_conv2 = self.block1.conv2(x)
        return stem_2, block1_conv2
