"""Models with modules that torch.export cannot see through: each of these is opaque."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

HINTS = {}
INPUTS = {"packed_sequence": (5, 8), "scan": (5, 8), "called_twice": (8,)}


class SparseExperts(nn.Module):
    """Sends each sample to one of several experts, in a loop over those that are chosen."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = torch.where(chosen == index)[0]
            out[rows] = self.experts[index](x[rows]) * weights[rows, index, None]
        return out


class PackedLSTM(nn.Module):
    """An LSTM that skips what is zero at the end of each sequence."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        lengths = (x.abs().sum(-1) > 0).sum(-1).clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return out


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Binary(nn.Module):
    """Binary activations."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return Sign.apply(x) * self.scale


class Checkpointed(nn.Module):
    """Two layers whose activations are computed again in the backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=True)


class Branch(nn.Module):
    """Takes another way for large activations."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y.tanh() if y.abs().max().item() > 1 else y


class Scan(nn.Module):
    """A recurrence that stops when the state is small."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x):
        state, states = x[:, 0], []
        for t in range(x.shape[1]):
            state = torch.tanh(self.step(state) + x[:, t])
            if float(state.detach().norm()) < 1e-6:
                break
            states.append(state)
        return torch.stack(states, dim=1)


class TwoOutputs(nn.Module):
    """Returns a tensor that no gradient flows back through beside one that it does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale):
        y = self.linear(x) * scale
        return {"y": y, "largest": torch.tensor(y.argmax(-1).tolist(), dtype=torch.float32, device=y.device)}


class Named(nn.Module):
    """Calls a module that returns names."""

    def __init__(self):
        super().__init__()
        self.two = TwoOutputs()

    def forward(self, x):
        out = self.two(x, scale=0.5)
        return out["y"] + out["largest"][:, None]


def _around(module):
    return nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


class GradientReversal(torch.autograd.Function):
    """The identity, whose gradient is reversed."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Ramp(torch.autograd.Function):
    """Multiplies by a tensor that its forward makes; torch.export traces that."""

    @staticmethod
    def forward(ctx, x):
        ctx.ramp = torch.linspace(0.5, 1.5, 8)
        return x * ctx.ramp

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.ramp


class Ramped(nn.Linear):
    def forward(self, x):
        return Ramp.apply(super().forward(x))


def ramped():
    return _around(Ramped(8, 8))


class DomainAdversarial(nn.Module):
    """Two heads, of which one's gradient is reversed."""

    def __init__(self):
        super().__init__()
        self.features, self.classes, self.domains = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x):
        features = self.features(x).relu()
        return self.classes(features), self.domains(GradientReversal.apply(features, 0.5))


def gradient_reversal():
    return DomainAdversarial()


def experts():
    return _around(SparseExperts())


def packed_sequence():
    return _around(PackedLSTM())


def straight_through():
    return _around(Binary())


def reentrant_checkpoint():
    return _around(Checkpointed())


def branch_on_values():
    return _around(Branch())


def scan():
    return _around(Scan())


def two_outputs():
    return _around(Named())


def many_alike():
    return nn.Sequential(*(Branch() for _ in range(6)), nn.Linear(8, 4))


class WithTable(nn.Module):
    """Keeps a table in a mere attribute, and what it chose last."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.chosen = nn.Linear(8, 8), torch.linspace(0, 1, 80).reshape(10, 8), None

    def forward(self, x):
        y = self.linear(x)
        self.chosen = y.detach().argmax(-1)
        return y + self.table[self.chosen.tolist()]


def with_table():
    return _around(WithTable())


class TiedToTheOutside(nn.Module):
    """An opaque module shares its weight with an ordinary one."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.head = nn.Linear(8, 8), Branch(), nn.Linear(8, 4)
        self.branch.linear.weight = self.first.weight

    def forward(self, x):
        return self.head(self.branch(self.first(x)))


def tied_to_the_outside():
    return TiedToTheOutside()


class TwoTied(nn.Module):
    """Two opaque modules share their weight."""

    def __init__(self):
        super().__init__()
        self.a, self.middle, self.b, self.head = Branch(), nn.Linear(8, 8), Branch(), nn.Linear(8, 4)
        self.b.linear.weight = self.a.linear.weight

    def forward(self, x):
        return self.head(self.b(self.middle(self.a(x))))


def two_tied():
    return TwoTied()


class InnerCalled(nn.Module):
    """Calls a part of an opaque module from outside."""

    def __init__(self):
        super().__init__()
        self.branch, self.head = Branch(), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.branch(x) + self.branch.linear(x))


def inner_called():
    return InnerCalled()


class Hooked(nn.Module):
    """Changes a gradient by a hook."""

    def __init__(self):
        super().__init__()
        self.branch, self.head = Branch(), nn.Linear(8, 4)
        self.branch.linear.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x):
        return self.head(self.branch(x))


def hooked():
    return Hooked()


class HookedAsAWhole(Branch):
    """The whole model has a hook."""


def hooked_as_a_whole():
    model = HookedAsAWhole()
    model.register_full_backward_pre_hook(lambda module, gradients: None)
    return model


class HookingParameter(Branch):
    """Puts a hook on a parameter in forward."""

    def forward(self, x):
        if self.training:
            self.linear.weight.register_hook(lambda gradient: gradient * 3)
        return super().forward(x)


def hooking_parameter():
    return _around(HookingParameter())


class HookingActivation(nn.Module):
    """Puts a hook on what has a gradient, as nothing seems to have while it is traced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 3)
        return x


def hooking_activation():
    return _around(HookingActivation())


class Overlapping(nn.Sequential):
    """Batch norms whose statistics overlap in memory."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self[3].running_mean = self[1].running_mean.view(8)


def overlapping():
    return Overlapping()


class Remembering(Branch):
    """Adds the minibatch before, if it is of the same size."""

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        y = super().forward(x)
        if self.last is not None and self.last.shape == x.shape:
            y = y + self.last
        self.last = x.detach()
        return y


def remembering():
    return _around(Remembering())


class MovingTeacher(Branch):
    """A teacher whose parameters follow those of a student in forward."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        if self.training:
            self.teacher.weight.data.mul_(0.9).add_(self.linear.weight.data, alpha=0.1)
        return super().forward(x) - self.teacher(x)


def moving_teacher():
    return _around(MovingTeacher())


class Pieces(Branch):
    """Returns a tensor for each sample."""

    def forward(self, x):
        return list(super().forward(x))


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.pieces, self.last = Pieces(), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.stack(self.pieces(x)))


def pieces():
    return Stacked()


class CalledTwice(nn.Module):
    """Calls one opaque module twice."""

    def __init__(self):
        super().__init__()
        self.branch = Branch()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.branch(self.branch(x) + 1))


def called_twice():
    return CalledTwice()


class SharedInside(nn.Module):
    """Calls a module inside of an opaque one."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(8, 8), Branch(), nn.Linear(8, 4)
        self.shared = self.branch.linear

    def forward(self, x):
        return self.last(self.shared(self.branch(self.first(x))))


def shared_inside():
    return SharedInside()


def averaging_norm():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4))


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, which fills part of a complex tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[:, :3] = spectrum[:, :3] * self.weight
        return torch.fft.irfft(out, n=8)


def spectral():
    return _around(Spectral())


class PythonTable(nn.Module):
    """Makes a table of Python numbers in each call."""

    def forward(self, x):
        return x * torch.tensor([[i * j / 64 for i in range(8)] for j in range(9)])[3]


def python_table():
    return _around(PythonTable())


class RandomProjection(nn.Module):
    """Draws the same numbers in each call."""

    def forward(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x @ torch.randn(8, 8)


def random_projection():
    return _around(RandomProjection())


class LoopInTheModel(nn.Module):
    """Branches on values in the model's own forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        y = self.linear(x)
        return y.tanh() if y.abs().max().item() > 1 else y


def loop_in_the_model():
    return LoopInTheModel()


def loss(output, target):
    return F.mse_loss(output, target)
