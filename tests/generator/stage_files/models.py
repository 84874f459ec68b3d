"""One model for each thing that ordinary models do; the stage files beside this one were written for them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Autoencoder(nn.Module):
    """Noise in training only."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar) if self.training else mean
        return self.decoder(z)


class Recurrent(nn.Module):
    """A loop over time that writes its outputs in place."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        state, out = torch.zeros_like(x[:, 0]), torch.empty_like(x)
        for t in range(x.shape[1]):
            state = torch.tanh(self.cell(x[:, t] + state))
            out[:, t] = state
        return self.head(out)


class Dropping(nn.Module):
    """Random numbers: a layer, a function, and a mask of the model's own."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x):
        x = F.dropout(self.dropout(self.first(x)), 0.1, self.training)
        mask = x.new_empty(x.shape[0], 1).bernoulli_(0.9)
        return self.second(x * mask)


class Expressions(nn.Module):
    """Numbers before tensors, a ParameterList, an embedding of positions, infinity in a mask."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.positions = nn.Embedding(5, 8)
        self.register_buffer("position_ids", torch.arange(5))

    def forward(self, x):
        frequencies = 10000 ** (-torch.arange(8) / 8)
        x = x * frequencies * self.scales[0] + self.positions(self.position_ids)
        scores = x @ x.mT
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        return scores.softmax(-1) @ (x * self.scales[1])


class Masked(nn.Module):
    """Attention with a mask and a table of positions, casts, and scales of one, as libraries write it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 4)
        self.register_buffer("frequencies", 10000 ** (-torch.arange(4) / 4))

    def forward(self, x, padding):
        q, k, v = (layer(x).view(len(x), 5, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = (torch.arange(5) + 0)[:, None] * self.frequencies.to(x.device, torch.float32)
        q, k = q.expand(len(x), 2, 5, 4) * angles.cos() * 1.0, k * angles.sin()
        causal = torch.ones(5, 5).tril().bool()
        mask = (causal & padding.to(torch.bool)[:, None, None]).to(torch.bool)
        x = F.dropout(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), 0.0, self.training)
        x = x.transpose(1, 2).reshape(len(x), 5, 8)
        return self.head(x + self.relu(x * 1.0).to(torch.float32))


@dataclass
class Output:
    logits: Tensor
    hidden: dict[str, Tensor]


class Structured(nn.Module):
    """Arguments by name, one of them None; a dataclass with a dict as output."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, tokens, mask=None, scale=1.0):
        hidden = self.embed(tokens) * scale
        if mask is not None:
            hidden = hidden * mask
        return Output(self.head(hidden), {"last": hidden})


class Counter(nn.Module):
    """A loop over data, which cannot be seen through."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x):
        while x.abs().max() > 0.5:
            x = torch.tanh(self.step(x)) * 0.5
        return x


class Opaque(nn.Module):
    """An opaque module between two that are seen through."""

    def __init__(self):
        super().__init__()
        self.first, self.counter, self.last = nn.Linear(8, 8), Counter(), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.counter(F.gelu(self.first(x))))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.mlp = nn.LayerNorm(8), nn.Linear(8, 24), nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.mlp(x)


class Layers(nn.Module):
    """Layers that a person would divide between two of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


INPUTS = {
    "Autoencoder": lambda n: (torch.randn(n, 8),),
    "Recurrent": lambda n: (torch.randn(n, 3, 8),),
    "Dropping": lambda n: (torch.randn(n, 8),),
    "Expressions": lambda n: (torch.randn(n, 5, 8),),
    "Masked": lambda n: (torch.randn(n, 5, 8), torch.ones(n, 5, dtype=torch.bool)),
    "Structured": lambda n: {"tokens": torch.randint(0, 10, (n, 5)), "mask": None, "scale": 2.0},
    "Opaque": lambda n: (torch.randn(n, 8),),
    "Layers": lambda n: (torch.randn(n, 5, 8),),
}
