"""A GPT on random words."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

VOCABULARY, LENGTH = 2000, 64


class Block(nn.Module):
    """Attention and two linear layers, with skips; x is (batch, LENGTH, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Words (batch, LENGTH) to the scores of each next word."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words, self.pipeline_depth = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.words(words) + self.pipeline_depth)))


def model(layers: int = 6, width: int = 192) -> nn.Module:
    """The network."""
    return GPT(layers, width)


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
