"""Small models with what real ones have: branches, skips, ties, recurrence, glue, buffers, frozen parts."""

import torch
import torch.nn.functional as F
from torch import nn


class Branchy(nn.Module):
    """Convolutions with a skip, a shared in-place ReLU, running statistics, a counter, an LSTM and attention."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 1)))
        self.pool = nn.MaxPool2d(2)
        self.lstm = nn.LSTM(32, 12, 2, batch_first=True, dropout=0.1)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 5)
        self.position = nn.Parameter(torch.zeros(4, 12))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mask", torch.ones(4, 1), persistent=False)

    def forward(self, x):
        y = self.relu(self.norm(self.conv(x)))
        self.steps += 1
        z = self.body(y)
        z += y
        z = self.pool(self.relu(z))
        batch = z.size(0)
        sequence, (hidden, _) = self.lstm(z.view(batch, 4, -1))
        sequence = sequence + self.position
        causal = torch.full((4, 4), float("-inf"), device=x.device).triu(1)
        mixed, _ = self.attention(sequence, sequence, sequence, attn_mask=causal, need_weights=False)
        left, right = (sequence + mixed).chunk(2, dim=-1)
        out = F.dropout(torch.cat([left, right], -1) * self.mask, 0.3, self.training)
        out = out[:, None]
        p = 0.1 if self.training else 0.0
        out = F.scaled_dot_product_attention(out, out, out, dropout_p=p, is_causal=True)[:, 0]
        out = out.reshape(batch * 2, -1).view(batch, 4, 12)
        logits = self.head(out[:, -1] + torch.arange(12, device=x.device).float())
        return {"logits": logits, "hidden": hidden.mean((0, 2))}


class Tied(nn.Module):
    """Embedding and decoder share a weight; a frozen layer; a parameter used directly; indices as inputs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.first = nn.LSTM(16, 16, batch_first=True)
        self.second = nn.GRU(16, 16)
        self.values = nn.Linear(16, 16)  # a name that ModuleDict has already
        self.frozen = nn.Linear(16, 16)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))
        self.decoder = nn.Linear(16, 50, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        x, _ = self.first(self.embedding(tokens))
        x, _ = self.second(x.transpose(0, 1))
        x = x.transpose(0, 1)
        x = self.frozen(self.values(x)) * self.scale * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x[..., :8].repeat(1, 1, 2) + x.flatten(1).unflatten(1, (-1, 16))
        return self.decoder(x).permute(0, 2, 1)


class Named(nn.Module):
    """Names that generated code might trip over."""

    def __init__(self):
        super().__init__()
        self.x = nn.Linear(8, 8)
        self.torch = nn.ReLU()
        self.batch = nn.Module()
        for name in ("x", "keys", "items"):
            self.batch.add_module(name, nn.Linear(8, 8))
        self.batch.values = nn.ModuleDict({"a": nn.Linear(8, 8), "lambda": nn.Linear(8, 8)})
        self.batch.scale = nn.Parameter(torch.ones(8))
        self.device = nn.ModuleList([nn.Linear(8, 8), nn.PReLU()])
        self.F = nn.Dropout(0.1)
        self.nn = nn.Linear(8, 8).double()

    def forward(self, self_):
        x = self.torch(self.x(self_)) + torch.arange(8.0)
        x = self.batch.items(self.batch.keys(self.batch.x(x))) * self.batch.scale
        x = self.batch.values["a"](x) + self.batch.values["lambda"](x)
        for layer in self.device:
            x = layer(x)
        return self.nn(self.F(x.view(x.shape[0], -1)).double())


class UNet(nn.Module):
    """Down, up, and a long skip; functional layers; two outputs, one of them from the first stage."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.deeper = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        skip = F.relu(self.down(x))
        y = F.relu_(self.deeper(skip))
        for layer in self.middle:
            y = y + F.gelu(layer(self.norm(y)))
        y = F.interpolate(self.up(y), size=skip.shape[-2:], mode="bilinear", align_corners=False)
        y = F.max_pool2d(F.adaptive_avg_pool2d(torch.cat((skip, y), 1), (4, 4)), 2)
        y = F.pad(y, (1, 1, 0, 0)).clamp(max=3)
        y = torch.where(y > 0.1, y, torch.zeros_like(y)).softmax(1)
        return self.out(y).squeeze(1), skip.mean()


class NoGrad(nn.Module):
    """A value computed without gradient from a tensor that has one; several outputs of one operator."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.norm(self.layer(x))
        with torch.no_grad():
            share = (y > 0).float().mean()
        best = self.norm(y).max(1)
        return y * share, [best.values, best.indices], y.std()


def branchy():
    return Branchy()


def tied():
    return Tied()


def unet():
    return UNet()


def named():
    return Named()


def no_grad():
    return NoGrad()


def sequential():
    inner = nn.Sequential(nn.BatchNorm1d(16), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(True), nn.Dropout(0.2), nn.Linear(16, 16), inner, nn.Linear(16, 4))


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


class Broken(nn.Module):
    """One fault, chosen by name."""

    def __init__(self, fault):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.rectifiers = nn.Sequential(nn.ReLU(inplace=True), nn.ReLU(inplace=True))
        self.fault = fault
        self.kept = None

    def forward(self, x):
        if self.fault == "input":
            x.mul_(2)
        y = self.layer(x)
        if self.fault == "branch":
            return y if y.sum() > 0 else -y
        if self.fault == "batch":
            return y.view(4, 8)
        if self.fault == "size" and len(y) > 3:
            y = y * 2
        if self.fault == "state":
            if self.kept is not None:
                y = y + self.kept.mean()
            self.kept = y.detach()
        if self.fault == "attribute":
            return self.missing(y)
        if self.fault == "backward":
            return self.rectifiers(y)
        return y


def broken(fault="none"):
    return Broken(fault)


def example_inputs(batch_size):
    return torch.randn(batch_size, 8)


def optimizer(named_parameters):
    return torch.optim.Adam([parameter for _, parameter in named_parameters])


class Teacher(nn.Module):
    """Compares a layer with what it was at the start."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("first_weight", self.layer.weight.detach().clone())
        self.register_buffer("first_bias", self.layer.bias.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            before = torch.func.functional_call(
                self.layer, {"weight": self.first_weight, "bias": self.first_bias}, (x,)
            )
        h = self.layer(x)
        return self.head(torch.tanh(h)), h - before


def teacher():
    return Teacher()
