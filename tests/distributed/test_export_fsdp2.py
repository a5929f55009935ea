"""The script that a plan becomes trains as the plan does, without autopar."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.export.targets import export
from autopar.runtime.comm import Communicator
from autopar.runtime.launch import LocalRanks
from tests.models import zoo
from tests.models.check import Case, on_ranks
from tests.unit.export.plans import HEADS, HIDDEN, KV, VOCAB, WIDTH, plan_of

STEPS, RATE = 3, 3e-3


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Grouped queries; the number of heads follows from what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KV * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, self.size).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        k, v = (item.repeat_interleave(HEADS // KV, 1) for item in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(), Attention()
        self.mlp_norm, self.mlp = Norm(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The model of `tests.unit.export.plans.llama_weights`."""

    def __init__(self, layers: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def case(name: str) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(3, 61, (8, 9), generator=torch.Generator().manual_seed(1))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    if name in ("llama", "tied"):
        return Case(model=Llama(tied=name == "tied"), args=batch)
    if name == "gpt":
        return Case(model=zoo.GPT(4, WIDTH, HEADS, VOCAB, 16), args=batch)
    model = getattr(zoo, name)(4)[0]
    return Case(model=model, kwargs={"input_ids": batch[0], "labels": batch[0]})


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported_script"] = module
    spec.loader.exec_module(module)
    return module


def train(comm: Communicator, path: str, name: str) -> list[float]:
    """Losses of the script on this rank."""
    torch.manual_seed(0)
    given = case(name)
    trainer = script(path).Trainer(given.model, lr=RATE)
    return [trainer.step(*given.args, **given.kwargs) for _ in range(STEPS)]


CASES = (
    ("llama", "dp=4", "ddp,microbatches=2"),
    ("llama", "dp=4", "zero3,microbatches=2"),
    ("tied", "dp=4", "zero1,microbatches=2,recompute=selective"),
    ("llama", "dp=2,tp=2", "megatron"),
    ("llama", "tp=2,dp=2", "megatron_sp,zero=3"),
    ("tied", "tp=4", "megatron"),
    ("gpt", "dp=2,tp=2", "megatron"),
    ("qwen3", "dp=2,tp=2", "megatron_sp"),
    ("llama", "pp=2,dp=2", "ddp,microbatches=4"),
    ("llama", "pp=2,dp=2", "ddp,zero=2,microbatches=4,recompute=full"),
    ("tied", "pp=2,tp=2", "megatron_sp,microbatches=4"),
    ("llama", "pp=2,dp=2", "ddp,microbatches=4,schedule=interleaved_1f1b,chunks=2"),
    ("llama", "pp=4", "ddp,microbatches=4,schedule=gpipe"),
)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "mesh", "constraints"), CASES)
def test_losses_are_those_of_the_plan(
    name: str, mesh: str, constraints: str, ranks4: LocalRanks, tmp_path: Path
):
    given = case(name)
    found = on_ranks(
        given, mesh, constraints,
        lambda compiled: (
            [float(compiled.step(*given.args, **given.kwargs)) for _ in range(STEPS)],
            compiled.plan,
        ),
        optimizer_options={"lr": RATE},
    )  # fmt: skip
    losses, plan = found[0]
    assert losses[-1] < losses[0]
    file = tmp_path / "train.py"
    file.write_text(export(plan, "fsdp2").text)
    for exported in ranks4.run(train, str(file), name):
        assert exported == pytest.approx(losses, rel=2e-6)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_script_of_one_rank_is_gradient_accumulation(alone: None, tmp_path: Path):
    plan = plan_of({"dp": 1}, pipeline={"microbatches": 4}, recompute=("layers.**/*",))
    file = tmp_path / "train.py"
    file.write_text(export(plan, "fsdp2").text)
    given = case("llama")
    optimizer = torch.optim.AdamW(given.model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = given.model(*given.args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    trainer = script(str(file)).Trainer(case("llama").model, lr=RATE)
    assert [trainer.step(*given.args) for _ in losses] == pytest.approx(losses, rel=2e-6)
