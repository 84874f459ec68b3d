"""AlexNet (Krizhevsky, 2014: one tower), 61,100,840 parameters, on synthetic images of ImageNet's shape."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class AlexNet(nn.Module):
    """Images (batch, 3, height, width) to scores (batch, classes)."""

    def __init__(self, classes: int = 1000, width: float = 1.0, hidden: int = 4096, pooled: int = 6) -> None:
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
            nn.Dropout(),
            nn.Linear(c4 * pooled * pooled, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def model() -> nn.Module:
    """The paper's network."""
    return AlexNet()


def example_inputs(batch_size: int) -> torch.Tensor:
    """Noise."""
    return torch.randn(batch_size, 3, 224, 224)


def dataset(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """64 (train) or 16 (valid) images of noise: for speed, not for accuracy."""
    generator = torch.Generator().manual_seed(len(split))
    count = 64 if split == "train" else 16
    images = torch.randn(count, 3, 224, 224, generator=generator)
    return TensorDataset(images, torch.randint(0, 1000, (count,), generator=generator))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, target)


def optimizer(named_parameters):
    """The paper's SGD."""
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9, weight_decay=5e-4)


def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Top-1 accuracy."""
    return {"accuracy": ((output.argmax(1) == target).sum().item(), len(target))}
