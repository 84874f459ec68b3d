"""Models that do one thing in training and another in evaluation."""

import torch
from torch import nn
from torch.nn import functional as F

INPUTS = {"auxiliary_head": (3, 8, 8), "counting_norm": (3, 8, 8)}


class VAE(nn.Module):
    """Draws the latent code in training, and takes its mean in evaluation."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.mu, self.logvar = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.training else mu
        return self.decoder(z), mu, logvar


class DropPath(nn.Module):
    """Drops whole samples of a residual branch."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1 - self.rate
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if keep > 0.0:
            mask.div_(keep)
        return x * mask


class ResidualBlocks(nn.Module):
    """Residual blocks with stochastic depth."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.drop_paths = nn.ModuleList(DropPath(rate) for rate in (0.0, 0.1, 0.2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block, drop_path in zip(self.blocks, self.drop_paths, strict=True):
            x = x + drop_path(block(x))
        return self.head(x)


class AuxiliaryHead(nn.Module):
    """Returns the output of an auxiliary head in training only."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.auxiliary = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        auxiliary = self.auxiliary(x) if self.training else None
        y = self.head(self.body(x).mean((2, 3)))
        if self.training:
            return y, auxiliary
        return y


class CountingNorm(nn.BatchNorm2d):
    """Batch normalisation with its own counter, as timm writes it."""

    def forward(self, x):
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            0.1,
            self.eps,
        )


def counting_norm():
    return nn.Sequential(nn.Conv2d(3, 8, 3), CountingNorm(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


class Codebook(nn.Module):
    """Vector quantisation whose codes follow what they stand for, in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 8))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 6).to(x.dtype)
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(chosen.t() @ x / self.counts[:, None], alpha=0.1)
        quantised = F.embedding(nearest, self.codes)
        return x + (quantised - x).detach()


class RunningMean(nn.Module):
    """Subtracts a mean that follows the activations in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class MovingTarget(nn.Module):
    """A target's weights, in a buffer, follow those that are trained."""

    def __init__(self):
        super().__init__()
        self.online, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("target_weight", torch.zeros(8, 8))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.target_weight.lerp_(self.online.weight, 0.1)
        return self.head(self.online(x) - F.linear(x, self.target_weight))


def moving_target():
    return MovingTarget()


def running_mean():
    return nn.Sequential(nn.Linear(8, 8), RunningMean(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def codebook():
    return nn.Sequential(nn.Linear(8, 8), Codebook(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


class EvaluationOnly(nn.Module):
    """Does more in evaluation than in training, and takes another input of a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        a, b = self.first(x), self.second(x)
        y = self.head(a if self.training else b)
        if not self.training:
            y = y.softmax(-1)
        return y


class ModesApart(nn.Module):
    """Computes a tensor in one block of training, and takes it in another."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        if self.training:
            noise = torch.randn_like(x) * 0.1
            x = x + noise
        x = self.second(torch.relu(self.first(x)))
        if self.training:
            x = x - noise
        return self.head(x)


def vae():
    return VAE()


def stochastic_depth():
    return ResidualBlocks()


def auxiliary_head():
    return AuxiliaryHead()


def evaluation_only():
    return EvaluationOnly()


def modes_apart():
    return ModesApart()


def spectral_norm():
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)
    )


def old_spectral_norm():
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)
    )


class Balanced(nn.Module):
    """Code that cannot be traced, whose second output has another shape in evaluation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("zero", torch.zeros(1), persistent=False)

    def forward(self, x):
        if float(x.detach().sum()) > 1e9:
            x = x.relu()
        y = self.linear(x)
        return y, y.square().mean() if self.training else self.zero


class OtherShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.balanced, self.last = nn.Linear(8, 8), Balanced(), nn.Linear(8, 4)

    def forward(self, x):
        x, loss = self.balanced(self.first(x))
        return self.last(x), 0 + loss


def other_shape():
    return OtherShape()
