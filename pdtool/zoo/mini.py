"""VGG-16, AlexNet and ResNet-50 made narrow, on real images: scikit-learn's digits enlarged to 3×32×32."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from pdtool.zoo.alexnet import AlexNet
from pdtool.zoo.resnet50 import ResNet
from pdtool.zoo.vgg16 import VGG16


def vgg() -> nn.Module:
    """VGG-16 at an eighth of its width."""
    return VGG16(classes=10, width=1 / 8, hidden=64, pooled=1)


def alexnet() -> nn.Module:
    """AlexNet at a quarter of its width, behind an enlargement to the 64 pixels that its strides need."""
    return nn.Sequential(nn.Upsample(scale_factor=2.0), AlexNet(classes=10, width=1 / 4, hidden=64, pooled=1))


def resnet() -> nn.Module:
    """ResNet-50's blocks, one or two of each size, at an eighth of their width."""
    return ResNet(depths=(1, 2, 1, 1), width=8, classes=10)


def dataset(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """1437 images to train on and 360 to validate with, always the same."""
    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    chosen = order[360:] if split == "train" else order[:360]
    images = torch.tensor(digits.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
    images = F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
    return TensorDataset(images.contiguous(), torch.tensor(digits.target)[chosen])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters):
    """SGD with momentum."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Share of digits recognised."""
    return {"accuracy": ((output.argmax(1) == target).sum().item(), len(target))}
