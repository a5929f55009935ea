"""Models whose inputs, outputs or weights have an unusual form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.check import Case


class Classes(nn.Module):
    """A plain classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 14), nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x)))


def samples(batch: int, weighted: bool = False) -> Case:
    """Mean over a batch that the ranks cannot share evenly."""
    torch.manual_seed(0)
    weight = torch.tensor([1.0, 3.0, 0.5]) if weighted else None

    def loss(y: Tensor, x: Tensor) -> Tensor:
        return F.cross_entropy(y, x[:, :3].argmax(1), weight=weight)

    return Case(model=Classes(), args=(torch.randn(batch, 6),), loss=loss)


class Adapter(nn.Module):
    """A frozen linear with a trainable detour of low rank."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(inner.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.5 * F.linear(F.linear(x, self.down), self.up)


class Adapted(nn.Module):
    """Nothing in the first half is trained; the second half only through adapters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fixed = nn.Sequential(nn.Linear(width, width), nn.GELU()).requires_grad_(False)
        self.wide, self.back = (
            Adapter(nn.Linear(width, 3 * width)), Adapter(nn.Linear(3 * width, width))
        )  # fmt: skip
        self.shift = nn.Parameter(torch.zeros(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.relu(self.wide(self.fixed(x)))) + self.shift


def adapters() -> Case:
    torch.manual_seed(0)
    return Case(model=Adapted(), args=(torch.randn(4, 8),), loss=lambda y, x: (y - x).abs().mean())


class Switches(nn.Module):
    """Nested inputs, Python values by keyword, nested outputs with a None in them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 8), nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(
        self,
        data: dict[str, Any],
        *,
        gate: Tensor | None = None,
        factors: Tensor,
        times: int = 1,
        temperature: float = 1.0,
        kind: str = "plain",
        loud: bool = False,
    ) -> dict[str, Any]:
        h = self.left(data["dense"] * factors) + self.right(data["deep"]["er"][0])
        for _ in range(times):
            h = torch.tanh(h) / temperature
        if gate is not None:
            h = h * gate[:, None]
        y = self.head(h)
        if kind == "negative":
            y = -y
        return {
            "y": y,
            "more": (h.mean(), None, [y.argmax(-1)]),
            "said": {"loud": loud, "n": times},
        }


def switches(batch: int = 4, factors: int = 5) -> Case:
    torch.manual_seed(0)
    assert factors == 5
    data = {"dense": torch.randn(batch, 5), "deep": {"er": [torch.randn(batch, 3)]}}
    values: dict[str, Any] = {
        "factors": torch.linspace(0.5, 2, 5), "gate": None, "times": 2, "temperature": 0.7,
        "kind": "plain", "loud": True,
    }  # fmt: skip

    def loss(out: dict[str, Any], data: dict[str, Any], *_: Any) -> Tensor:
        return (out["y"] - data["dense"][:, :2]).pow(2).mean() + 0.1 * out["more"][0]

    return Case(model=Switches(), args=(data,), kwargs=values, loss=loss)


class Lookup(NamedTuple):
    """An input that is a named tuple."""

    rows: Tensor
    table: Tensor


class TableOfBatchSize(nn.Module):
    """A table that happens to be as long as the batch: cutting it by name would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, lookup: Lookup) -> Tensor:
        return self.head(lookup.rows * lookup.table)


def table_of_batch_size() -> Case:
    torch.manual_seed(0)
    lookup = Lookup(torch.randn(4, 4), torch.linspace(1, 2, 4))
    return Case(model=TableOfBatchSize(), args=(lookup,), loss=lambda y, lookup: (y * y).mean())


class Writes(nn.Module):
    """In-place ops of every kind, through views and slices."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        h = self.first(x)
        h[:, -1] -= 0.5
        h[..., 1:4].mul_(2.0)
        h.view(h.shape[0], -1).clamp_(-1.5, 1.5)
        h.transpose(0, 1)[0].add_(0.25)
        h = F.silu(self.second(h), inplace=True)
        mask = keep.clone()
        mask[:, 0] = True
        h = h.masked_fill_(~mask[..., None], 0.0)
        room = torch.zeros(x.shape[0], x.shape[1] + 3, h.shape[-1])
        room[:, 2:-1] = h
        room[:, 0] = room[:, 2] * 3
        room = room + room.flip(1)
        room.index_add_(1, torch.tensor([1, 1]), h[:, :2])
        row, column = torch.tensor([0, 2]), torch.tensor([1, 0])
        room[row, column] = 1.0
        return self.last(room.sum(1))


def writes() -> Case:
    torch.manual_seed(0)
    return Case(
        model=Writes(),
        args=(torch.randn(4, 5, 10), torch.rand(4, 5) > 0.4),
        loss=lambda y, x, keep: F.cross_entropy(y, x[:, 0, :3].argmax(1)),
    )


class Strides(nn.Module):
    """Transposed, expanded, strided and channels-last tensors everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(10, 6).t() * 0.3)  # logically (6, 10)
        self.every_other = nn.Parameter(torch.randn(20)[::2])
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.mid, self.out = nn.Linear(10, 10), nn.Linear(10, 2)

    def forward(self, x: Tensor, picture: Tensor, wide: Tensor) -> Tensor:
        h = x @ self.turned + wide + self.every_other
        h = self.mid(h.transpose(0, 1)).transpose(0, 1)
        c = self.conv(picture).permute(0, 2, 3, 1).flatten(1)[:, ::8]
        return (self.out(torch.tanh(h)) + c[:, None, :2].expand(-1, h.shape[1], -1)).transpose(1, 2)


def strides() -> Case:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4).permute(2, 1, 0)
    picture = torch.randn(4, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    wide = torch.randn(1, 1, 10).expand(4, 5, 10)
    return Case(
        model=Strides(),
        args=(x, picture, wide),
        loss=lambda y, x, picture, wide: (y - x[..., :2].transpose(1, 2)).pow(2).mean(),
    )


class EarlyExit(nn.Module):
    """Three losses; one is a sum over the batch divided by the batch size as a literal."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(width, classes) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        parts: dict[str, Tensor] = {}
        logits = x
        for index, (stage, leave) in enumerate(zip(self.stages, self.exits, strict=True)):
            x = F.gelu(stage(x))
            logits = leave(x)
            how = "sum" if index == 1 else "mean"
            value = F.cross_entropy(logits, y, reduction=how)
            parts[f"exit {index}"] = value / 6 if how == "sum" else value
        total = sum(
            weight * part for weight, part in zip((0.2, 0.3, 1.0), parts.values(), strict=True)
        )
        return {
            "parts": parts,
            "loss": total,
            "choice": logits.argmax(-1),
            "sure": logits.amax(-1) > 0,
        }


def early_exit() -> Case:
    torch.manual_seed(0)
    return Case(
        model=EarlyExit(),
        args=(torch.randn(6, 8), torch.arange(6) % 3),
        loss=lambda out, x, y: out["loss"],
    )


class Recurrent(nn.Module):
    """LSTM and GRU with given states; the state's batch is its dim 1, that of `x` its dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x, (h0, c0))
        z, _ = self.gru(y.transpose(0, 1))
        return self.out(z[-1]), h, c


def recurrent() -> Case:
    torch.manual_seed(0)

    def loss(out: tuple[Tensor, ...], x: Tensor, h0: Tensor, c0: Tensor) -> Tensor:
        return (out[0] - x[:, -1, :2]).pow(2).mean() + 0.1 * out[2].pow(2).mean()

    return Case(
        model=Recurrent(),
        args=(torch.randn(4, 3, 4), torch.randn(4, 4, 6), torch.zeros(4, 4, 6)),
        loss=loss,
    )


class Bags(nn.Module):
    """Bags of a flat list of indices, and an embedding that asks for sparse gradients."""

    def __init__(self, mode: str, last: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 6, mode=mode, include_last_offset=last)
        self.person = nn.Embedding(9, 6, sparse=True)
        self.out = nn.Linear(18, 1)

    def forward(self, flat: Tensor, offsets: Tensor, person: Tensor) -> Tensor:
        b, p = self.bag(flat, offsets), self.person(person)
        return self.out(torch.cat([b, p, b * p], -1)).squeeze(-1)


def bags(mode: str = "mean", last: bool = False) -> Case:
    torch.manual_seed(0)
    offsets = [0, 3, 3, 7] + [8] * last
    return Case(
        model=Bags(mode, last),
        args=(
            torch.tensor([1, 5, 5, 0, 10, 3, 2, 7]),
            torch.tensor(offsets),
            torch.tensor([8, 0, 4, 8]),
        ),
        loss=lambda y, flat, offsets, person: F.binary_cross_entropy_with_logits(
            y, (person > 3).float()
        ),
    )


class OrderSensitive(nn.Module):
    """Sums whose result depends on the order of additions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        pairs = torch.arange(h.shape[1], device=h.device) // 2
        return self.head(torch.zeros_like(h).index_add(1, pairs, h))


def order_sensitive(device: str = "cpu") -> Case:
    torch.manual_seed(0)
    with torch.device(device):
        model = OrderSensitive()
    ids = torch.randint(0, 24, (6, 5))
    return Case(
        model=model,
        args=(ids,),
        loss=lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()),
    )


class Deep(nn.Module):
    """One of many small layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.down(torch.relu(self.up(self.norm(x))))


def deep(layers: int, width: int = 16) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(Deep(width) for _ in range(layers)), nn.Linear(width, 3))
    return Case(
        model=model,
        args=(torch.randn(8, width),),
        loss=lambda y, x: F.cross_entropy(y, x[:, :3].argmax(1)),
    )
