"""Plans whose predicted steps are compared with measured ones: models, meshes, constraints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.plan.build import make_plan
from autopar.plan.plan import Plan
from autopar.presets.resnet import ResNet, ResNetConfig
from autopar.runtime.tiny_gpt import GPT, GPTConfig, text_batches
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace

GPT_SIZES = GPTConfig(layers=6, heads=8, width=384)  # 10.8 M parameters
BATCH_SIZE, SEQ_LEN = 8, 128
RESNET_SIZES = ResNetConfig(layers=(1, 1, 1, 1), classes=100, image=128)  # 8.2 M parameters
IMAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan to price and to run.

    Attributes:
        model: ``"gpt"`` or ``"resnet"``.
        mesh: Its axes.
        constraints: What it divides, and how.
    """

    model: str
    mesh: str
    constraints: str

    @property
    def ranks(self) -> int:
        """Ranks it runs on."""
        return Mesh.parse(self.mesh).size

    @property
    def name(self) -> str:
        """All of it in words."""
        return f"{self.model} {self.mesh} {self.constraints}"

    def plan(self) -> Plan:
        """The plan."""
        traced = traced_model(self.model)
        mesh = Mesh.parse(self.mesh)
        return make_plan(traced.graph, mesh, self.constraints, notes=traced.notes)[0]


_PIPELINE = "ddp,microbatches=4,schedule="
CASES = tuple(
    Case(model=model, mesh=mesh, constraints=constraints)
    for model, mesh, constraints in (
        ("gpt", "dp=2", "ddp"),
        ("gpt", "dp=2", "zero1"),
        ("gpt", "dp=2", "ddp,zero=2,microbatches=4"),
        ("gpt", "dp=2", "zero3"),
        ("gpt", "dp=2", "ddp,recompute=full"),
        ("gpt", "dp=2", "ddp,recompute=selective,microbatches=2"),
        ("gpt", "tp=2", "megatron"),
        ("gpt", "tp=2", "megatron_sp"),
        ("gpt", "pp=2", _PIPELINE + "1f1b"),
        ("gpt", "pp=2", _PIPELINE + "interleaved_1f1b,chunks=2"),
        ("gpt", "pp=2", _PIPELINE + "zb_h1"),
        ("gpt", "dp=4", "ddp"),
        ("gpt", "dp=4", "zero3"),
        ("gpt", "dp=2,tp=2", "megatron,zero=1"),
        ("gpt", "tp=4", "megatron_sp"),
        ("gpt", "pp=2,dp=2", _PIPELINE + "1f1b,zero=1"),
        ("gpt", "pp=2,tp=2", "megatron,microbatches=4,schedule=1f1b,recompute=full"),
        ("resnet", "dp=2", "ddp"),
        ("resnet", "dp=2", "zero1"),
        ("resnet", "dp=2", "ddp,recompute=full"),
        ("resnet", "dp=4", "ddp"),
        ("resnet", "dp=4", "zero3"),
    )
)


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A GPT with seeded weights, and a batch of text."""
    torch.manual_seed(0)
    tokens, targets = next(text_batches(BATCH_SIZE, SEQ_LEN))
    return GPT(GPT_SIZES), (tokens.contiguous(), targets.contiguous())


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A small residual network of bottleneck blocks, and a batch of noise."""
    torch.manual_seed(0)
    images = torch.randn(IMAGES, 3, RESNET_SIZES.image, RESNET_SIZES.image)
    return ResNet(RESNET_SIZES), (images, torch.arange(IMAGES) % RESNET_SIZES.classes)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {"gpt": gpt, "resnet": resnet}


@functools.cache
def traced_model(name: str) -> Traced:
    """The trace of one of `MODELS`, made once in a process."""
    model, inputs = MODELS[name]()
    return trace(model, inputs, {}, None)
