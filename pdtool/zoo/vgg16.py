"""VGG-16 (Simonyan and Zisserman, 2015), 138,357,544 parameters, on synthetic images of ImageNet's shape."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

# Output channels of the 3×3 convolutions; M is a 2×2 max-pooling.
LAYERS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


class VGG16(nn.Module):
    """Images (batch, 3, height, width) to scores (batch, classes)."""

    def __init__(self, classes: int = 1000, width: float = 1.0, hidden: int = 4096, pooled: int = 7) -> None:
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
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def model() -> nn.Module:
    """The paper's network."""
    return VGG16()


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
