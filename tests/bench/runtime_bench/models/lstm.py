"""An LSTM language model on random words."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

VOCABULARY, LENGTH = 2000, 32


class LanguageModel(nn.Module):
    """Words (batch, LENGTH) to the scores of each next word."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


def model(layers: int = 4, width: int = 320) -> nn.Module:
    """The network."""
    return LanguageModel(layers, width)


def dataset(split: str) -> TensorDataset:
    """Random words, and others to predict."""
    n = 1024 if split == "train" else 8
    generator = torch.Generator().manual_seed(n)
    return TensorDataset(*(torch.randint(VOCABULARY, (n, LENGTH), generator=generator) for _ in range(2)))


def example_inputs(batch_size: int) -> torch.Tensor:
    """Random words."""
    return torch.randint(VOCABULARY, (batch_size, LENGTH))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per word."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=1e-4)
