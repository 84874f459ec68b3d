"""Stage 1 of mnist-2, whose stages are 0 to 1; written by pdtool codegen."""

import torch
from torch import nn


class Stage1(nn.Module):
    """Shapes, for a minibatch of `batch` samples:

        takes   features_15: (batch, 576)
        returns classifier_4: (batch, 10)
    """

    def __init__(self):
        super().__init__()
        self.classifier = nn.ModuleDict({
            "0": nn.Linear(576, 1024),
            "1": nn.ReLU(),
            "2": nn.Linear(1024, 1024),
            "3": nn.ReLU(),
            "4": nn.Linear(1024, 10),
        })

    def forward(self, features_15):
        x = self.classifier["0"](features_15)
        x = self.classifier["1"](x)
        x = self.classifier["2"](x)
        x = self.classifier["3"](x)
        classifier_4 = self.classifier["4"](x)
        return classifier_4
