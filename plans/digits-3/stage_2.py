"""Stage 2 of digits-3, whose stages are 0 to 2; written by pdtool codegen."""

import torch
from torch import nn


class Stage2(nn.Module):
    """Shapes, for a minibatch of `batch` samples:

        takes   relu: (batch, 64, 4, 4)
        takes   block2_conv1: (batch, 64, 4, 4)
        returns head: (batch, 10)
    """

    def __init__(self):
        super().__init__()
        self.block2 = nn.ModuleDict({
            "norm1": nn.BatchNorm2d(64),
            "relu": nn.ReLU(),
            "conv2": nn.Conv2d(64, 64, 3, padding=1, bias=False),
            "norm2": nn.BatchNorm2d(64),
        })
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(p=0.2)
        self.head = nn.Linear(256, 10)

    def forward(self, relu, block2_conv1):
        # block2
        x = self.block2.norm1(block2_conv1)
        x = self.block2.relu(x)
        x = self.block2.conv2(x)
        x = self.block2.norm2(x)
        x = x + relu
        x = self.block2.relu(x)
        x = self.pool(x)
        # the model
        x = x.flatten(start_dim=1)
        x = self.dropout(x)
        head = self.head(x)
        return head
