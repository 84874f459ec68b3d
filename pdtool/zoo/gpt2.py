"""GPT-2 from `transformers`, small, with its tied embedding, on real English text."""

import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

VOCABULARY = 2000
LENGTH = 32


class Logits(nn.Module):
    """Words (batch, length) to the scores of each next word, without the rest of what `transformers` returns."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.lm(words).logits


def model(layers: int = 4, width: int = 128, heads: int = 4) -> nn.Module:
    """The network; needs `pip install transformers`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=LENGTH,
        vocab_size=VOCABULARY,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return Logits(GPT2LMHeadModel(config))


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
