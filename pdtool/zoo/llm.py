"""A decoder-only language model as Llama (Touvron et al., 2023): RMSNorm, rotary positions, SwiGLU; 7B by default.

Its data are Python's own help texts as bytes, so that the file runs anywhere; a model of this size wants more.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

LENGTH = 2048


class Attention(nn.Module):
    """Causal self-attention of (batch, length, width) with rotary positions (Su et al., 2021)."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False, dtype=dtype)
        self.key = nn.Linear(width, width, bias=False, dtype=dtype)
        self.value = nn.Linear(width, width, bias=False, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (x[i], x[i + size / 2]) of (batch, heads, length, size) by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """Attention and a gated network, each beside a skip connection."""

    def __init__(self, width: int, heads: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, dtype=dtype)
        self.attention = Attention(width, heads, dtype)
        self.mlp_norm = nn.RMSNorm(width, dtype=dtype)
        self.gate = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.up = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LLM(nn.Module):
    """Tokens (batch, length) to the scores of each next token (batch, length, vocabulary)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, vocabulary: int, length: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, dtype) for _ in range(layers))
        self.norm = nn.RMSNorm(width, dtype=dtype)
        self.decoder = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        size = width // heads
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.decoder(self.norm(x))


def model(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    hidden: int = 11008,
    vocabulary: int = 32000,
    dtype: str = "float32",
) -> nn.Module:
    """The network; by default the sizes of Llama 7B, 6,738,415,616 parameters."""
    return LLM(layers, width, heads, hidden, vocabulary, LENGTH, getattr(torch, dtype))


def example_inputs(batch_size: int) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(256, (batch_size, LENGTH))


def dataset(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """Sequences of LENGTH tokens, 256 apart, and, as the target, the same shifted by one; the last tenth of the text is
    for validation."""
    from pydoc_data.topics import topics

    tokens = torch.tensor(list(" ".join(topics[key] for key in sorted(topics)).encode()))
    cut = len(tokens) * 9 // 10
    rows = (tokens[:cut] if split == "train" else tokens[cut:]).unfold(0, LENGTH + 1, 256)
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per token, in nats; output is (batch, LENGTH, vocabulary)."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(named_parameters):
    """AdamW."""
    return torch.optim.AdamW([p for _, p in named_parameters], lr=3e-4)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Nats per token and the share of tokens predicted."""
    nll = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum").item()
    right = (output.argmax(-1) == target).sum().item()
    return {"nll": (nll, target.numel()), "accuracy": (right, target.numel())}
