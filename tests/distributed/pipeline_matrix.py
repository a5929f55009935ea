"""Every schedule, on 2 and 4 pipeline ranks, alone and beside every other way to divide a model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.verify import VerifyReport, verify
from autopar.schedules.make import SCHEDULES
from tests.models import zoo
from tests.models.check import Case

MICROBATCHES = 4
SAMPLES = 8
MODELS = ("gpt2", "llama", "t5", "unet", "resnet")
PIPES = (2, 4)
BESIDE = {
    "alone": ("", "ddp"),
    "dp": (",dp=2", "ddp"),
    "tp": (",tp=2", "megatron"),
    "zero1": (",dp=2", "zero1"),
    "zero2": (",dp=2", "zero2"),
    "zero3": (",dp=2", "zero3"),
}


def _batch(value: Any, seed: int) -> Any:
    """A batch of `SAMPLES` different samples of the kind of `value`."""
    if not isinstance(value, Tensor):
        return value
    generator = torch.Generator().manual_seed(seed)
    shape = (SAMPLES, *value.shape[1:])
    if value.is_floating_point():
        return torch.randn(shape, generator=generator)
    return torch.randint(int(value.max()) + 1, shape, generator=generator)


@functools.cache
def model(name: str, *, tied: bool = True) -> Case:
    """A model of the matrix with its batch, made and traced once.

    Args:
        name: One of `MODELS`.
        tied: Whether GPT-2 has one embedding for its input and its output.
    """
    torch.manual_seed(0)
    more: dict[str, Any] = {}
    if name in ("gpt2", "llama"):
        more = {"layers": 2} if tied else {"layers": 2, "tie_word_embeddings": False}
    if name in ("t5", "resnet"):
        more = {"layers": 1}
    module, args, kwargs = zoo.ALL[name](**more)
    module.train()
    return Case(
        model=module,
        args=tuple(_batch(value, seed) for seed, value in enumerate(args)),
        kwargs={k: _batch(value, seed) for seed, (k, value) in enumerate(kwargs.items())},
    )


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One combination.

    Attributes:
        schedule: Name of the schedule.
        pipe: Pipeline ranks.
        beside: One of `BESIDE`.
        model: One of `MODELS`.
    """

    schedule: str
    pipe: int
    beside: str
    model: str

    def __str__(self) -> str:
        return f"{self.schedule} pp={self.pipe} {self.beside} {self.model}"

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule updates while microbatches are under way."""
        return SCHEDULES[self.schedule].asynchronous

    @property
    def possible(self) -> bool:
        """Whether such a plan exists; the others are refused, each with its reason."""
        return not (self.asynchronous and (self.beside in ("zero2", "zero3") or self.model == "t5"))

    def run(self, **options: Any) -> VerifyReport:
        """Verify it in float64; `options` as for `verify`."""
        extent, strategy = BESIDE[self.beside]
        chunks = ",chunks=2" if self.schedule == "interleaved_1f1b" else ""
        case = model(self.model, tied=not self.asynchronous or self.model != "gpt2")
        return verify(
            case.model, case.args, case.kwargs, traced=case.traced,
            mesh=f"pp={self.pipe}{extent}",
            constraints=f"{strategy},microbatches={MICROBATCHES},schedule={self.schedule}{chunks}",
            **{"dtype": "float64", "steps": 5, "threads": True} | options,
        )  # fmt: skip


def cells() -> Iterator[Cell]:
    """All combinations that are possible."""
    for values in itertools.product(SCHEDULES, PIPES, BESIDE, MODELS):
        if (cell := Cell(*values)).possible:
            yield cell


def covering() -> list[Cell]:
    """Few combinations in which every pair of values that can be together is together."""
    everything = list(cells())
    fields = ("schedule", "pipe", "beside", "model")

    def pairs(cell: Cell) -> set[tuple[object, ...]]:
        return {
            (a, getattr(cell, a), b, getattr(cell, b)) for a, b in itertools.combinations(fields, 2)
        }

    missing = set().union(*map(pairs, everything))
    chosen = []
    while missing:
        # Of equals the one of fewest ranks, and not the slowest model.
        best = max(
            everything,
            key=lambda c: (
                len(pairs(c) & missing),
                -c.pipe * (1 if c.beside == "alone" else 2),
                c.model != "t5",
            ),
        )
        chosen.append(best)
        missing -= pairs(best)
    return chosen
