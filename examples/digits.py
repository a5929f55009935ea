"""A convolutional net with batch norm on scikit-learn's handwritten digits (1797 images, 8 x 8).

    python examples/digits.py                 one device
    autopar run -n 4 examples/digits.py       four ranks, each a quarter of every batch

Batch norm sees the whole batch on any number of ranks, so both print the same numbers; in double
precision, lest rounding drift apart over the run.
Needs scikit-learn, which ``pip install "autopar[test]"`` brings.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit('digits.py needs scikit-learn: pip install "autopar[test]"') from None

BATCH_SIZE, TEST_SIZE = 128, 397


class DigitNet(nn.Module):
    """Three convolutions with batch norm, then a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            layers += [
                nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (batch, 10) for images of shape (batch, 1, 8, 8)."""
        return self.classifier(self.features(images).mean((2, 3)))


class DigitLoss(nn.Module):
    """`DigitNet` with its loss: training inputs are images and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DigitNet()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the batch."""
        return F.cross_entropy(self.net(images), labels)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; shuffled once, pixels in [0, 1]."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float64)[order, None] / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    return images[TEST_SIZE:], labels[TEST_SIZE:], images[:TEST_SIZE], labels[:TEST_SIZE]


def batches(images: Tensor, labels: Tensor, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches, in a new order every epoch; the same order in every run."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH_SIZE):
            if len(rows) == BATCH_SIZE:
                yield images[rows], labels[rows]


def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The seeded model, and one global batch as its inputs."""
    torch.manual_seed(0)
    images, labels, _, _ = data()
    return DigitLoss().double(), (images[:BATCH_SIZE], labels[:BATCH_SIZE]), {}


def main() -> None:
    """Train, then print the accuracy on images not trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    train_images, train_labels, test_images, test_labels = data()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model, _, _ = build()
    compiled = autopar.compile(
        model,
        autopar.ClusterSpec.local(world_size),
        mesh=f"dp={world_size}",
        constraints="ddp",
        optimizer="adamw",
        lr=3e-3,
    )
    for images, labels in batches(train_images, train_labels, options.epochs):
        loss = compiled.step(images, labels)

    # The state is the whole model's, under its own names: evaluate on one device.
    trained = DigitLoss().double()
    trained.load_state_dict(compiled.state_dict())
    trained.eval()
    with torch.no_grad():
        accuracy = (trained.net(test_images).argmax(1) == test_labels).double().mean()
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {float(loss):.8f}  test accuracy {float(accuracy):.2%}")


if __name__ == "__main__":
    main()
