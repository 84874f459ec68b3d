"""A small ResNet from `transformers`, on real images: scikit-learn's digits enlarged to 3×32×32."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Logits(nn.Module):
    """Images (batch, 3, height, width) to scores (batch, classes)."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x).logits


def model(width: int = 8) -> nn.Module:
    """The network, its first blocks `width` channels wide; needs `pip install transformers`."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[width, 2 * width, 4 * width],
        depths=[1, 2, 1],
        layer_type="basic",
        num_labels=10,
    )
    return Logits(ResNetForImageClassification(config))


def example_inputs(batch_size: int) -> torch.Tensor:
    """Noise."""
    return torch.rand(batch_size, 3, 32, 32)


def dataset(split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """1437 images to train on and 360 to validate with, always the same."""
    from sklearn.datasets import load_digits  # here, for most workers read no data

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
