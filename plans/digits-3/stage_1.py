"""Stage 1 of digits-3, whose stages are 0 to 2; written by pdtool codegen."""

import torch
from torch import nn
from torch.nn import functional as F


class Stage1(nn.Module):
    """Shapes, for a minibatch of `batch` samples:

        takes   stem_2: (batch, 32, 8, 8)
        takes   block1_conv2: (batch, 32, 8, 8)
        returns relu: (batch, 64, 4, 4)
        returns block2_conv1: (batch, 64, 4, 4)
    """

    def __init__(self):
        super().__init__()
        self.block1 = nn.ModuleDict({
            "norm2": nn.BatchNorm2d(32),
            "relu": nn.ReLU(),
        })
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.block2 = nn.ModuleDict({
            "conv1": nn.Conv2d(64, 64, 3, padding=1, bias=False),
        })

    def forward(self, stem_2, block1_conv2):
        # block1
        x = self.block1.norm2(block1_conv2)
        x = x + stem_2
        x = self.block1.relu(x)
        x = self.down(x)
        # the model
        relu = F.relu(x)
        block2_conv1 = self.block2.conv1(relu)
        return relu, block2_conv1
