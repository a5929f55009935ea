"""What a dry run says a rank holds is what a rank of four gloo processes holds."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from autopar.plan.build import make_plan
from autopar.plan.plan import Plan
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.runtime.dryrun import RankMemory, dry_run
from autopar.runtime.launch import LocalRanks
from autopar.runtime.programs.measure import Tracker
from autopar.runtime.tiny_gpt import GPT, GPTConfig
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace
from tests.marks import later

pytestmark = pytest.mark.distributed

WORLD = 4
# Parameters outweigh positions, which are not divided, and messages, of which a dry run counts as
# many as may be under way.
CONFIG = GPTConfig(vocabulary=256, context=8, layers=4, heads=4, width=128)
BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One step of one rank.

    Attributes:
        resident_bytes: Before the step, inputs left out.
        peak_bytes: Most during it, inputs included.
        traffic: Bytes sent in it, by kind.
    """

    resident_bytes: int
    peak_bytes: int
    traffic: dict[str, int]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.context), generator=generator)
    return tokens, tokens.roll(-1, 1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG)


def tensors_alive() -> list[Tensor]:
    """Every tensor that Python knows of in this process."""
    gc.collect()
    # Not isinstance: some objects answer to it by importing things.
    return [item for item in gc.get_objects() if issubclass(type(item), Tensor)]


def keys(tensors: list[Tensor]) -> set[int]:
    return {
        item.untyped_storage()._cdata for item in tensors if type(item) in (Tensor, nn.Parameter)
    }


def measure_step(comm: Communicator, plan_text: str) -> Measured:
    """Train some steps and look at the later ones from outside.

    Gloo's own threads may let go of what they sent a moment late, so the peak is the least of
    three steps.
    """
    user, inputs = model(), batch()
    others = tensors_alive()
    known = keys(others)
    options = CompileOptions(plan=Plan.from_json(plan_text), optimizer="adamw")
    compiled = CompiledModel(user, comm, options)
    for _ in range(2):
        compiled.step(*inputs)
    mine = [
        item
        for item in tensors_alive()
        if type(item) in (Tensor, nn.Parameter) and item.untyped_storage()._cdata not in known
    ]
    tracker = Tracker([*user.parameters(), *user.buffers()])
    tracker.watch(mine)
    resident_bytes = tracker.live_bytes
    tracker.watch(inputs)
    del mine, others
    comm.take_traffic()
    peaks = []
    for _ in range(3):
        tracker.peak_bytes = tracker.live_bytes
        with tracker:
            compiled.step(*inputs)
        peaks.append(tracker.peak_bytes)
    traffic = {kind: size_bytes // 3 for kind, size_bytes in comm.take_traffic().items()}
    return Measured(resident_bytes=resident_bytes, peak_bytes=min(peaks), traffic=traffic)


@functools.cache
def traced_model() -> Traced:
    return trace(model(), batch(), {}, None)


def planned(mesh: str, constraints: str) -> tuple[Traced, Plan]:
    traced = traced_model()
    plan, _ = make_plan(traced.graph, Mesh.parse(mesh), constraints, notes=traced.notes)
    return traced, plan


def without_inputs(rank: RankMemory) -> int:
    """Resident bytes, the batch left out (its tensors are those of the caller)."""
    return rank.resident_bytes - sum(item.nbytes for item in batch())


# Bytes per parameter in float32 over N ranks (arXiv 1910.02054, sections 5 and 7): parameters,
# gradients, optimizer state (two numbers); and what a step sends, in parameters.
ZERO = {
    0: ((4, 4, 8), 2),
    1: ((4, 4, 8 / WORLD), 2),
    2: ((4, 4 / WORLD, 8 / WORLD), 2),
    3: ((4 / WORLD, 4 / WORLD, 8 / WORLD), 3),
}


@pytest.mark.parametrize("stage", [*later(0, 2), 1, 3])
def test_zero_holds_and_sends_what_its_paper_says(stage: int, ranks4: LocalRanks) -> None:
    """And what the dry run says."""
    traced, plan = planned("dp=4", f"ddp,zero={stage}")
    per_parameter, sent = ZERO[stage]
    numel = sum(parameter.numel() for parameter in model().parameters())
    measured: list[Measured] = ranks4.run(measure_step, plan.to_json())
    for have in measured:
        assert have.resident_bytes == pytest.approx(numel * sum(per_parameter), rel=0.01)
        expected = sent * (WORLD - 1) / WORLD * 4 * numel
        assert sum(have.traffic.values()) == pytest.approx(expected, rel=0.01)
    for say in dry_run(traced, plan, [0, WORLD - 1]).ranks:
        assert say.peak_bytes == pytest.approx(measured[say.rank].peak_bytes, rel=0.01), say.where
        assert without_inputs(say) == measured[say.rank].resident_bytes
        kinds = zip(("parameters", "gradients", "optimizer"), per_parameter, strict=True)
        for kind, size in kinds:
            assert say.resident[kind] == pytest.approx(numel * size, rel=0.01)


PIPELINES = {
    "1f1b": ("pp=2,dp=2", "ddp,zero=1,microbatches=4,schedule=1f1b"),
    "interleaved": ("pp=2,dp=2", "ddp,zero=1,microbatches=4,schedule=interleaved_1f1b,chunks=2"),
    "zbv": ("pp=2,dp=2", "ddp,zero=2,microbatches=4,schedule=zbv"),
    "recompute": ("pp=2,dp=2", "ddp,zero=3,microbatches=4,schedule=1f1b,recompute=full"),
}


@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        "zbv",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("interleaved", "recompute")),
    ],
)
def test_dry_run_of_a_pipeline_says_what_its_ranks_hold(name: str, ranks4: LocalRanks) -> None:
    """Messages may be gone earlier than the dry run can know; they are small here."""
    traced, plan = planned(*PIPELINES[name])
    measured: list[Measured] = ranks4.run(measure_step, plan.to_json())
    for say in dry_run(traced, plan, [0, WORLD - 1]).ranks:
        have = measured[say.rank]
        assert say.peak_bytes == pytest.approx(have.peak_bytes, rel=0.01), say.where
        assert without_inputs(say) == have.resident_bytes
