"""Stage 0 of mnist-2, whose stages are 0 to 1; written by pdtool codegen."""

import torch
from torch import nn


class Stage0(nn.Module):
    """Shapes, for a minibatch of `batch` samples:

        takes   input: (batch, 1, 28, 28)
        returns features_15: (batch, 576)
    """

    def __init__(self):
        super().__init__()
        self.features = nn.ModuleDict({
            "0": nn.Conv2d(1, 16, 3, padding=1),
            "1": nn.ReLU(),
            "2": nn.Conv2d(16, 16, 3, padding=1),
            "3": nn.ReLU(),
            "4": nn.MaxPool2d(2, stride=2),
            "5": nn.Conv2d(16, 32, 3, padding=1),
            "6": nn.ReLU(),
            "7": nn.Conv2d(32, 32, 3, padding=1),
            "8": nn.ReLU(),
            "9": nn.MaxPool2d(2, stride=2),
            "10": nn.Conv2d(32, 64, 3, padding=1),
            "11": nn.ReLU(),
            "12": nn.Conv2d(64, 64, 3, padding=1),
            "13": nn.ReLU(),
            "14": nn.MaxPool2d(2, stride=2),
            "15": nn.Flatten(),
        })

    def forward(self, input):
        x = self.features["0"](input)
        x = self.features["1"](x)
        x = self.features["2"](x)
        x = self.features["3"](x)
        x = self.features["4"](x)
        x = self.features["5"](x)
        x = self.features["6"](x)
        x = self.features["7"](x)
        x = self.features["8"](x)
        x = self.features["9"](x)
        x = self.features["10"](x)
        x = self.features["11"](x)
        x = self.features["12"](x)
        x = self.features["13"](x)
        x = self.features["14"](x)
        features_15 = self.features["15"](x)
        return features_15
