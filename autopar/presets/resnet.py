"""ResNet (arXiv 1512.03385) and Wide-ResNet (1605.07146) for images of 224 pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes of a `ResNet`.

    Attributes:
        layers: Bottleneck blocks in each of the four stages.
        base: Channels of the first stage's output over four.
        widening: Factor on the inner channels of a block (2 for Wide-ResNet-50-2).
        classes: Classes of images.
        image: Pixels a side.
    """

    layers: tuple[int, int, int, int]
    base: int = 64
    widening: int = 1
    classes: int = 1000
    image: int = 224


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the stride is in the middle (v1.5)."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` of shape (batch, channels, height, width)."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet(nn.Module):
    """An image classifier of bottleneck blocks."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, config.base, 7, 2, 3, bias=False)
        self.stem_norm = nn.BatchNorm2d(config.base)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        channels = config.base
        for stage, count in enumerate(config.layers):
            inner, outputs = config.base * config.widening * 2**stage, config.base * 4 * 2**stage
            for place in range(count):
                stride = 2 if stage and place == 0 else 1
                blocks.append(Bottleneck(channels, inner, outputs, stride))
                channels = outputs
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over images (batch, 3, side, side) with labels (batch,)."""
        x = self.pool(F.relu(self.stem_norm(self.stem(images))))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)
