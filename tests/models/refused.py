"""Models that no pipeline can train as a plain loop would: each is refused, with the reason.

`refused` of each is a piece of the message.
"""

import random

import torch
import torch.nn.functional as F
from task import Task, classes, numbers, token_loss
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class StatefulLSTM(nn.Module):
    """Carries its hidden state from one minibatch to the next."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 20)
        self.hidden = None

    def forward(self, tokens):
        if self.hidden is None or self.hidden[0].size(1) != tokens.size(0):
            self.hidden = (torch.zeros(1, tokens.size(0), 8), torch.zeros(1, tokens.size(0), 8))
        output, hidden = self.rnn(self.embedding(tokens), self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return self.out(output)


class StepCounter(nn.Module):
    """Counts its calls in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.step = nn.Linear(8, 8), nn.Linear(8, 3), 0

    def forward(self, x):
        if self.training:
            self.step += 1
        return self.fc2(torch.relu(self.fc1(x)) * min(1.0, self.step / 10))


class LayerDrop(nn.Module):
    """Skips layers at random, by Python's random."""

    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]), nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < 0.5:
                continue
            x = x + torch.tanh(layer(x))
        return self.out(x)


class TeacherForcing(nn.Module):
    """Takes the target's token or its own, at random."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell, self.out = nn.Embedding(20, 8), nn.GRUCell(8, 8), nn.Linear(8, 20)

    def forward(self, tokens):
        h, token, outputs = torch.zeros(tokens.size(0), 8), tokens[:, 0], []
        for t in range(1, tokens.size(1)):
            h = self.cell(self.embedding(token), h)
            outputs.append(self.out(h))
            token = tokens[:, t] if random.random() < 0.5 else outputs[-1].argmax(1)
        return torch.stack(outputs, 1)


class Renormalised(nn.Module):
    """Keeps the vectors of its words short."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 20)

    def forward(self, tokens):
        return self.out(torch.tanh(self.embedding(tokens)))


class OneSize(nn.Module):
    """Knows minibatches of four only."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(16, 3)

    def forward(self, x):
        return self.fc2(self.fc1(x).view(4, 8).repeat(1, 2))


class WritesData(nn.Module):
    """Scales its input where autograd does not see it, and is opaque."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x.detach().numpy()[:] *= 0.5
        return self.linear(x)


class Kept(nn.Module):
    """The output before this one, as a baseline."""

    def __init__(self):
        super().__init__()
        self.net, self.average = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), None

    def forward(self, x):
        y = self.net(x)
        mean = y.detach().mean(0)
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        return y - self.average


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class MergingLoRA(nn.Linear):
    """A low-rank adapter as loralib has it: evaluation adds it to the weight."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

    def train(self, mode=True):
        if mode != self.training:
            self.weight.data += (-1 if mode else 1) * self.b @ self.a
        return super().train(mode)

    def forward(self, x):
        result = F.linear(x, self.weight, self.bias)
        return result + x @ self.a.t() @ self.b.t() if self.training else result


def wrapped_for_checkpointing():
    """Its state_dict has the names that the layers have without their wrappers."""
    layers = [checkpoint_wrapper(nn.Linear(8, 8)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 3))


centers = nn.Parameter(torch.zeros(3, 3))


def center_loss(output, target):
    """Owns a parameter, which an optimizer would have to be told of."""
    return F.cross_entropy(output, target) + 0.1 * (output - centers[target]).pow(2).mean()


def accuracy_loss(output, target):
    """Has no gradient."""
    return (output.argmax(1) != target).float().mean()


def numpy_loss(output, target):
    """Leaves the graph."""
    return torch.tensor(((output.detach().numpy() - F.one_hot(target, 3).numpy()) ** 2).mean())


def next_token_loss(output, target):
    return token_loss(output, target[:, 1:])


INPUT, CLASS, TOKENS = numbers(8), classes(3), classes(20, 6)
MODELS = {
    "stateful_lstm": Task(StatefulLSTM, TOKENS, TOKENS, token_loss, refused="self.hidden of the model"),
    "step_counter": Task(StepCounter, INPUT, CLASS, refused="self.step of the model"),
    "kept_average": Task(Kept, INPUT, CLASS, refused="self.average of the model"),
    "writes_data": Task(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), WritesData(), nn.Linear(8, 3)),
        INPUT,
        CLASS,
        refused="2 overwrites its input; work on a copy",
    ),
    "layer_drop": Task(LayerDrop, INPUT, CLASS, refused="random"),
    "teacher_forcing": Task(TeacherForcing, TOKENS, TOKENS, next_token_loss, refused="random"),
    "max_norm": Task(Renormalised, TOKENS, TOKENS, token_loss, refused="embedding renormalises its weight in forward"),
    "one_size": Task(OneSize, INPUT, CLASS, refused="the model fails on inputs of shape (2, 8)"),
    "merging_lora": Task(
        lambda: nn.Sequential(MergingLoRA(8, 8), MergingLoRA(8, 8), MergingLoRA(8, 3)),
        INPUT,
        CLASS,
        refused="overrides train()",
    ),
    "checkpoint_wrapper": Task(
        wrapped_for_checkpointing, INPUT, CLASS, refused="state_dict() of the model has 0.weight"
    ),
    "center_loss": Task(Perceptron, INPUT, CLASS, center_loss, refused="a parameter of its own"),
    "accuracy_loss": Task(Perceptron, INPUT, CLASS, accuracy_loss, refused="without a gradient"),
    "numpy_loss": Task(Perceptron, INPUT, CLASS, numpy_loss, refused="without a gradient"),
}
