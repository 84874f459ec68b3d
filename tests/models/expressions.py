"""Models with expressions that ordinary models have: each a function that builds it, with inputs of its own.

`INPUTS` gives the shape of one sample where it is not a vector of 8.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

INPUTS = {"functional_norms": (3, 8, 8), "unpooling": (3, 8, 8), "short_time_fourier": (64,), "causal_encoder": (4, 8)}


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


class _Layer(_Net):
    def forward(self, x):
        return torch.tanh(self.linear(x))


class _Pow(_Net):
    def forward(self, x):
        return 10000 ** torch.tanh(self.linear(x)) + 2 ** -torch.tanh(x)


class _Remainder(_Net):
    def forward(self, x):
        return torch.remainder(7, x.detach()) * self.linear(x)


class _FunctionalNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        x = F.batch_norm(self.conv(x), self.mean, self.var, training=self.training)
        return F.instance_norm(x)


class _Infinities(_Net):
    def forward(self, x):
        mask = torch.tensor([True] + [False] * 7)
        return torch.softmax(self.linear(x).masked_fill(mask, float("-inf")), -1)


class _NotFinite(_Net):
    def forward(self, x):
        y = self.linear(x).clamp(max=float("inf")) * torch.tensor([1.0, float("inf"), float("nan"), *range(5)])
        return torch.where(y.abs() > 9, complex(float("-inf"), -0.0), y).real.nan_to_num(0.5, 0.5, 0.5)


class _Permuted(_Net):
    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.randperm(8), requires_grad=False)

    def forward(self, x):
        return self.linear(x)[:, self.order]


class _Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 2)
        self.register_buffer("position_ids", torch.arange(8))

    def forward(self, x):
        return self.head(self.embed(self.position_ids) * x[:, :, None])


class _Diagonal(_Net):
    def forward(self, x):
        a, i = self.linear(x)[:, :, None] * x[:, None], torch.arange(8)
        a[:, i, i] = 1
        return a.mT @ a


class _Spectrum(_Net):
    def forward(self, x):
        spectrum = torch.fft.rfft(self.linear(x))
        return spectrum.real + spectrum.imag


class _Fill(_Net):
    def forward(self, x):
        noise = torch.empty_like(x).uniform_(-1, 1) + x.new_empty(x.shape).normal_(0.0, 2.0)
        return (self.linear(x) + noise) * x.new_empty((x.shape[0], 1)).bernoulli_(0.9)


class _Reparameterised(_Net):
    def forward(self, x):
        return Normal(self.linear(x), 1.0).rsample()


class _ParameterLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(3)])
        self.scales.append(self.scales[0])
        self.shifts = nn.ParameterDict({"first": nn.Parameter(torch.randn(8))})

    def forward(self, x):
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x + self.shifts["first"]


class _ReturnedParameter(_Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.linear(x), self.scale


class _Unpooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x):
        x, indices = self.pool(self.conv(x))
        return self.unpool(x, indices)


class _ShortTimeFourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.stft(self.linear(x), 16, return_complex=True, window=torch.hann_window(16)).abs()


class _CausalEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(4))


class _Columns(_Net):
    def forward(self, x):
        out = torch.zeros(x.shape[0], 3, 8)
        for t in range(3):
            x = torch.tanh(self.linear(x))
            out[:, t] = x
        return out


class _PartialSum(_Net):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x):
        y = self.norm(self.linear(x))
        y[:, 0] += self.shift
        self.calls[2] += 1
        return y


class _ConstantMask(_Net):
    def forward(self, x):
        mask = torch.zeros(8)
        mask[3] = 5.0
        return self.linear(x) + mask


class _Overwritten(_Net):
    """Whole tensors are overwritten, by others of their shape and dtype, or not."""

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        same, row, wide = torch.zeros_like(y), x * 3, torch.empty_like(y, dtype=torch.float64)
        same[:] = y * 2
        same += 1
        row.copy_(y.mean(1, keepdim=True))
        wide[...] = self.linear.bias
        return F.relu_(row) + same * wide.float()


class _Dashes(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"left-eye": nn.Linear(8, 8), "right-eye": nn.Linear(8, 8)})

    def forward(self, x):
        return self.heads["left-eye"](x) - self.heads["right-eye"](x)


def compiled():
    return torch.compile(_Layer())


def data_parallel():
    return nn.DataParallel(_Layer())


dashes, permuted = _Dashes, _Permuted
columns, partial_sum, constant_mask, overwritten = _Columns, _PartialSum, _ConstantMask, _Overwritten
pow_, remainder, functional_norms = _Pow, _Remainder, _FunctionalNorms
infinities, not_finite, positions, diagonal, spectrum, fill = (
    _Infinities,
    _NotFinite,
    _Positions,
    _Diagonal,
    _Spectrum,
    _Fill,
)
reparameterised, parameter_lists, returned_parameter = _Reparameterised, _ParameterLists, _ReturnedParameter
unpooling, short_time_fourier, causal_encoder = _Unpooling, _ShortTimeFourier, _CausalEncoder


class Where(nn.Module):
    """torch.where with a number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.where(x > 0, self.linear(x), -1.0)


def where_number():
    return Where()
