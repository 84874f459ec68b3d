"""AlexNet (Krizhevsky, 2014: one tower), 61,100,840 parameters, on real digits enlarged to ImageNet's shape."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

PIXELS = {"paper": 224, "mini": 64}  # along a side of an image


class AlexNet(nn.Module):
    """Images (batch, 3, height, width) to scores (batch, classes)."""

    def __init__(
        self, classes: int = 1000, width: float = 1.0, hidden: int = 4096, pooled: int = 6, dropout: float = 0.5
    ) -> None:
        super().__init__()
        c1, c2, c3, c4 = (int(c * width) for c in (64, 192, 384, 256))
        self.features = nn.Sequential(
            nn.Conv2d(3, c1, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(c1, c2, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(c2, c3, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c3, c4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c4, c4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(c4 * pooled * pooled, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )
        for parameter in self.parameters():  # He et al., 2015: with PyTorch's default mini never leaves chance
            (nn.init.kaiming_uniform_ if parameter.dim() > 1 else nn.init.zeros_)(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def model(size: str = "paper") -> nn.Module:
    """The paper's network, or "mini": a quarter as wide, on 64 pixels."""
    if size == "paper":
        return AlexNet()
    if size == "mini":
        return AlexNet(classes=10, width=1 / 4, hidden=64, pooled=1, dropout=0.1)
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
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9, weight_decay=5e-4)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Top-1 accuracy."""
    return {"accuracy": ((output.argmax(1) == target).sum().item(), len(target))}
