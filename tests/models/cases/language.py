"""Language models that are hard to split: tied, uneven, grouped, padded, mixed in dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.check import Case


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of the following token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class TiedDecoder(nn.Module):
    """An embedding whose matrix also makes the logits, as a module or as a plain product."""

    def __init__(self, vocab: int = 30, width: int = 12, how: str = "module") -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)
        )
        self.final = nn.LayerNorm(width)
        if how == "module":
            self.unembed = nn.Linear(width, vocab, bias=False)
            self.unembed.weight = self.embed.weight
        elif how == "thrice":
            self.unembed = nn.Linear(width, vocab)
            self.unembed.weight = self.embed.weight
            self.position = nn.Embedding(vocab, width)
            self.position.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        if self.how == "thrice":
            h = h + self.position(torch.arange(ids.shape[1]))
        h = h + self.mix(h)
        h = h + self.mix(h)  # one module, used twice
        h = self.final(h)
        return F.linear(h, self.embed.weight) if self.how == "product" else self.unembed(h)


def tied(how: str = "module") -> Case:
    torch.manual_seed(0)
    return Case(model=TiedDecoder(how=how), args=(torch.randint(0, 30, (4, 7)),), loss=next_token)


class PrimeVocabulary(nn.Module):
    """Nothing about this model divides by anything: 53 tokens, 23 hidden."""

    def __init__(self, vocab: int, width: int = 12, padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=padding)
        self.up, self.down = nn.Linear(width, 23), nn.Linear(23, width)
        self.logits = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.logits(h + self.down(F.silu(self.up(h))))


def prime_vocabulary(
    vocab: int = 53,
    *,
    padding: int | None = None,
    smoothing: float = 0.0,
    weighted: bool = False,
    reduction: str = "mean",
) -> Case:
    torch.manual_seed(1)
    ids = torch.randint(0, vocab, (4, 6))
    ids[1, 2:] = vocab - 1  # the last shard, which is the short one
    classes = torch.linspace(0.5, 2, vocab) if weighted else None

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        target = (5 * ids + 2) % vocab
        target = target.masked_fill(ids % 4 == 1, -7)
        value = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), weight=classes, ignore_index=-7,
            label_smoothing=smoothing, reduction=reduction,
        )  # fmt: skip
        return value.sum() / ids.numel() if reduction != "mean" else value

    return Case(model=PrimeVocabulary(vocab, padding=padding), args=(ids,), loss=loss)


class Attention(nn.Module):
    """Attention with any number of heads, grouped or fused."""

    def __init__(self, heads: int, kv_heads: int, size: int = 4, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.fused = heads, kv_heads, size, fused
        width = heads * size
        if fused:
            assert heads == kv_heads
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.query = nn.Linear(width, width)
            self.key, self.value = (nn.Linear(width, kv_heads * size) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        if self.fused:
            parts = self.qkv(x).chunk(3, -1)
        else:
            parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.view(batch, seq, -1, self.size).transpose(1, 2) for part in parts)
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, seq, width))


def shifted_distance(y: Tensor, x: Tensor) -> Tensor:
    """A loss that is sensitive to every position and feature."""
    return (y - x.roll(1, 1)).pow(2).mean() + (y * x.roll(1, 2)).mean()


def heads(count: int, kv_heads: int | None = None, fused: bool = False) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(count, kv_heads or count, fused=fused) for _ in range(2)))
    return Case(model=model, args=(torch.randn(4, 5, count * 4),), loss=shifted_distance)


class Labeller(nn.Module):
    """Labels tokens; its loss is the mean over the tokens that have a label, however written."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        self.rest = nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 5))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.rest(self.embed(ids))
        if self.how == "channels":
            return F.cross_entropy(logits.transpose(1, 2), labels)
        flat, target = logits.flatten(0, 1), labels.flatten()
        if self.how == "smoothed":
            return F.cross_entropy(flat, target, label_smoothing=0.1)
        if self.how == "weighted":
            return F.cross_entropy(flat, target, weight=torch.arange(1.0, 6.0))
        if self.how == "masked":
            valid = target != -100
            each = F.cross_entropy(flat, target.clamp(min=0), reduction="none")
            return (each * valid).sum() / valid.sum()
        if self.how == "nll":
            return F.nll_loss(flat.log_softmax(-1), target)
        return F.cross_entropy(flat, target)


def labelled_tokens(how: str = "mean") -> Case:
    torch.manual_seed(0)
    ids = torch.randint(1, 16, (5, 7))
    labels = ids % 5
    for row, valid in enumerate((7, 0, 2, 0, 5)):
        labels[row, valid:] = -100
        ids[row, valid + 1 :] = 0
    return Case(model=Labeller(how), args=(ids, labels))


class Block(nn.Module):
    """A transformer block with a weight for every way of being replicated or split."""

    def __init__(self, width: int = 16, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        size = width // heads
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.query_norm, self.key_norm = nn.RMSNorm(size), nn.LayerNorm(size)
        self.sharpness = nn.Parameter(torch.linspace(0.8, 1.4, heads))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        p = self.dropout if self.training else 0.0
        y = self.before(x)
        q, k, v = (
            f(y).view(batch, seq, self.heads, -1) for f in (self.query, self.key, self.value)
        )
        q, k, v = (t.transpose(1, 2) for t in (self.query_norm(q), self.key_norm(k), v))
        q = q * self.sharpness[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, seq, width)), p)
        hidden = F.dropout(F.gelu(self.up(self.after(x)) * self.gain), p)
        return x + F.dropout(self.down(hidden), p)


def normed_regions() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(16))
    return Case(model=model, args=(torch.randn(2, 6, 16),), loss=shifted_distance)


def dropped(p: float = 0.3) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(p), Block(dropout=p), Block(dropout=p))
    return Case(model=model, args=(torch.randn(4, 6, 16),), loss=lambda y, x: y.pow(2).mean())


class Decoder(nn.Module):
    """A small transformer whose sizes are powers of two."""

    def __init__(self, vocab: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.logits = nn.Embedding(vocab, 16), nn.Linear(16, vocab)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.logits(h)


def decoder(layers: int = 2) -> Case:
    torch.manual_seed(0)
    return Case(
        model=Decoder(layers=layers), args=(torch.randint(0, 32, (10, 6)),), loss=next_token
    )


class Widths(nn.Module):
    """Half-precision body, float32 norm and head, a float64 scale, integer and bool inputs."""

    def __init__(self, body: torch.dtype, width: int = 16) -> None:
        super().__init__()
        self.body = body
        self.embed = nn.Embedding(20, width, dtype=body)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, dtype=body)
        self.down = nn.Linear(2 * width, width, dtype=body)
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
        self.head = nn.Linear(width, 20)

    def forward(self, ids: Tensor, keep: Tensor, kind: Tensor) -> Tensor:
        h = self.embed(ids)
        h = h + self.down(F.gelu(self.up(self.norm(h.float()).to(self.body))))
        h = h.float() * keep.unsqueeze(-1) + kind[:, None, None].to(torch.float32) / 99
        return self.head(h * self.scale.float())


def mixed_dtypes(body: torch.dtype = torch.bfloat16) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (4, 6))
    kind = torch.tensor([3, 0, 255, 9], dtype=torch.uint8)
    return Case(
        model=Widths(body),
        args=(ids, torch.rand(4, 6) > 0.3, kind),
        loss=lambda logits, ids, keep, kind: F.cross_entropy(logits.flatten(0, 1), ids.flatten()),
    )


class SlidingWindow(nn.Module):
    """Each block of positions sees itself and the block before, with a learned bias per head."""

    def __init__(self, width: int = 16, heads: int = 4, span: int = 3) -> None:
        super().__init__()
        self.heads, self.span = heads, span
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, span, 2 * span) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        n = self.span
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q = q.unflatten(2, (seq // n, n))
        k, v = (F.pad(t, (0, 0, n, 0)).unfold(2, 2 * n, n).mT for t in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias[:, None]
        row, column = torch.arange(n)[:, None] + n, torch.arange(2 * n)[None]
        unseen = (column > row) | (row - column >= n)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        return x + self.out((weights @ v).flatten(2, 3).transpose(1, 2).reshape(batch, seq, width))


def sliding_window() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(SlidingWindow(), SlidingWindow())
    return Case(model=model, args=(torch.randn(2, 12, 16),), loss=shifted_distance)
