"""Activations per layer: the formulas of arXiv 2205.05198, in the stack that the paper assumes.

16-bit activations, unfused attention scores, masks of dropout of a byte per element, sequence
parallel activations gathered again in backward. Statistics of norms, which the paper leaves out as
small, are left out here too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_models.implementation import Implementation
from autopar.cost_models.layout import Layout
from autopar.cost_models.stages import stage_models
from autopar.plan.build import make_plan
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace

PAPER = Implementation(device="cuda", attention="unfused", dropout="native", regather=True)
B, S, H, A = 2, 32, 64, 4


class Block(nn.Module):
    """Figure 2 of the paper."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.drop1, self.drop2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(B, S, 3, A, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.drop1(self.out(y.transpose(1, 2).reshape(B, S, H)))
        return x + self.drop2(self.down(F.gelu(self.up(self.norm2(x)))))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, H)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


@functools.cache
def stack(layers: int) -> tuple[Traced, Layout]:
    ids = torch.zeros(B, S, dtype=torch.int64)
    found = trace(Stack(layers).bfloat16(), (ids,), {}, None)
    return found, Layout.of(found.graph)


def kept(layers: int, mesh: str, constraints: object) -> int:
    found, layout = stack(layers)
    rules = dict(constraints) if isinstance(constraints, Mapping) else constraints
    plan, _ = make_plan(found.graph, Mesh.parse(mesh), rules)  # type: ignore[arg-type]
    [model] = stage_models(layout.place(plan), plan, found.loss, PAPER)
    saved = [item for item in model.work.saved if item.what not in ("mean", "rstd")]
    return sum(item.size_bytes * item.count for item in saved)


SCORES = "blocks.*/aten.scaled_dot_product_attention*"
T = 2


@pytest.mark.parametrize(
    ("mesh", "constraints", "per_element"),
    [
        ("dp=1", "ddp", 34 + 5 * A * S / H),
        (f"tp={T}", "megatron", 10 + 24 / T + 5 * A * S / (H * T)),
        (f"tp={T}", "megatron_sp", (34 + 5 * A * S / H) / T),
        ("dp=1", {"strategy": "ddp", "recompute": [SCORES]}, 34),
        (f"tp={T}", {"strategy": "megatron_sp", "recompute": [SCORES]}, 34 / T),
        ("dp=1", "ddp,recompute=full", 2),
        (f"tp={T}", "megatron,recompute=full", 2),
    ],
)
def test_bytes_per_layer(mesh: str, constraints: object, per_element: float) -> None:
    layer = kept(6, mesh, constraints) - kept(5, mesh, constraints)
    assert layer == S * B * H * per_element
