"""Convolutional models: batch statistics, every kind of convolution, long skips."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.check import Case


def picture_class(logits: Tensor, pictures: Tensor) -> Tensor:
    """Cross-entropy against a class that depends on the picture."""
    return F.cross_entropy(logits, pictures.flatten(1)[:, : logits.shape[1]].argmax(1))


class Statistics(nn.Module):
    """Two batch norms, one after a convolution and one over plain features."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.spatial = nn.BatchNorm2d(6, **options)
        self.narrow = nn.Linear(6, 10)
        self.plain = nn.BatchNorm1d(10, **options)
        self.head = nn.Linear(10, 4)

    def forward(self, pictures: Tensor) -> Tensor:
        h = F.silu(self.spatial(self.conv(pictures))).mean((2, 3))
        return self.head(F.relu(self.plain(self.narrow(h))))


def batch_statistics(batch: int = 8, train: bool = True, **options: Any) -> Case:
    torch.manual_seed(0)
    # Samples of very different scale: statistics of a shard are far from those of the batch.
    scale = torch.logspace(-1, 1, batch).view(-1, 1, 1, 1)
    pictures = torch.randn(batch, 3, 6, 6) * scale
    model = Statistics(**options).train(train)
    return Case(model=model, args=(pictures,), loss=picture_class)


class Convolutions(nn.Module):
    """Strided, depthwise, grouped, dilated, transposed, circular; group norm, pooling, resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.depthwise = nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(16, 12, 3, padding=2, dilation=2, groups=4, bias=False)
        self.norm = nn.GroupNorm(3, 12)
        self.grow = nn.ConvTranspose2d(12, 8, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.line = nn.Conv1d(8, 6, 3, padding=1, padding_mode="circular")
        self.volume = nn.Conv3d(1, 2, 3, padding=1)
        self.head = nn.Linear(2 * 6 * 16, 5)

    def forward(self, pictures: Tensor) -> Tensor:
        h = F.gelu(self.depthwise(F.relu(self.stem(pictures))))
        h = F.mish(self.norm(self.grouped(h)))
        h = self.instance(F.avg_pool2d(self.grow(h), 2))
        h = F.interpolate(h, scale_factor=2.0, mode="bilinear", align_corners=False)
        h = self.line(F.adaptive_max_pool2d(h, (4, 4)).flatten(2))
        return self.head(self.volume(h.view(-1, 1, 6, 4, 4)).flatten(1))


def convolutions() -> Case:
    torch.manual_seed(0)
    return Case(model=Convolutions(), args=(torch.randn(4, 3, 16, 16),), loss=picture_class)


class LongSkips(nn.Module):
    """Down and up again, with early activations needed at the far end."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        c = channels
        self.inp = nn.Conv2d(2, c, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(c, 2 * c, 3, 2, 1), nn.Conv2d(2 * c, 4 * c, 3, 2, 1)])
        self.time = nn.Linear(1, 4 * c)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(4 * c, c, 2, 2)]
        )
        self.out = nn.Conv2d(2 * c, 2, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        kept = [F.silu(self.inp(x))]
        for layer in self.down:
            kept.append(F.silu(layer(kept[-1])))
        h = kept.pop() + self.time(t)[..., None, None]
        for layer in self.up:
            h = torch.cat([F.silu(layer(h)), kept.pop()], 1)
        return x + self.out(h)


def long_skips() -> Case:
    torch.manual_seed(0)
    return Case(
        model=LongSkips(),
        args=(torch.randn(4, 2, 8, 8), torch.rand(4, 1)),
        loss=lambda y, x, t: F.smooth_l1_loss(y, x.flip(-1)),
    )
