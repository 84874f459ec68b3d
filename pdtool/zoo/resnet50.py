"""ResNet-50 (He et al., 2016), 25,557,032 parameters, on real digits enlarged to ImageNet's shape."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

PIXELS = {"paper": 224, "mini": 56}  # along a side of an image


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to scores (batch, classes)."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        for i, depth in enumerate(depths):
            blocks = []
            for b in range(depth):
                blocks.append(Bottleneck(channels, width << i, stride=2 if i and not b else 1))
                channels = 4 * (width << i)
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.layers = len(depths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(self.layers):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def model(size: str = "paper") -> nn.Module:
    """The paper's network, or "mini": five blocks, an eighth as wide, on 56 pixels."""
    if size == "paper":
        return ResNet()
    if size == "mini":
        return ResNet(depths=(1, 2, 1, 1), width=8, classes=10)
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


def dataset(split: str, size: str = "paper") -> EnlargedDigits:
    """scikit-learn's handwritten digits for want of ImageNet: 1437 to train on and 360 to validate with."""
    from sklearn.datasets import load_digits  # here, for most workers read no data

    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    chosen = order[360:] if split == "train" else order[:360]
    images = torch.tensor(digits.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
    return EnlargedDigits(images, torch.tensor(digits.target)[chosen], PIXELS[size])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters):
    """The paper's SGD."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9, weight_decay=1e-4)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Top-1 accuracy."""
    return {"accuracy": ((output.argmax(1) == target).sum().item(), len(target))}
