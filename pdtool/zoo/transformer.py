"""A small decoder-only Transformer with pre-normalised blocks and skip connections, on real English text."""

import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

VOCABULARY = 2000
LENGTH = 32


class Attention(nn.Module):
    """Causal self-attention of (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer network, each beside a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Words (batch, length) to the scores of each next word (batch, length, VOCABULARY)."""

    def __init__(self, layers: int, width: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.position[: words.shape[1]]
        return self.decoder(self.norm(self.blocks(x)))


def model(layers: int = 4, width: int = 128, heads: int = 4, tied: bool = False) -> nn.Module:
    """The network; `tied`: the decoder's weight is the embedding's."""
    return Transformer(layers, width, heads, tied)


def example_inputs(batch_size: int) -> torch.Tensor:
    """Random words."""
    return torch.randint(VOCABULARY, (batch_size, LENGTH))


def _tokens() -> torch.Tensor:
    """Python's own help texts (real English, in every Python) as word numbers; rare words are word 0."""
    from pydoc_data.topics import topics

    words = re.findall(r"[a-z]+|[.,;:()]", " ".join(topics[key] for key in sorted(topics)).lower())
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), start=1)}
    return torch.tensor([known.get(word, 0) for word in words])


def dataset(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """Sequences of LENGTH words and, as the target, the same shifted by one; the last tenth is for validation."""
    rows = _tokens().unfold(0, LENGTH + 1, LENGTH)
    cut = len(rows) * 9 // 10
    rows = rows[:cut] if split == "train" else rows[cut:]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per word, in nats; output is (batch, LENGTH, VOCABULARY)."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(named_parameters):
    """Adam."""
    return torch.optim.Adam([p for _, p in named_parameters], lr=1e-3)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Nats per word (its exponential is the perplexity) and the share of words predicted."""
    nll = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum").item()
    right = (output.argmax(-1) == target).sum().item()
    return {"nll": (nll, target.numel()), "accuracy": (right, target.numel())}
