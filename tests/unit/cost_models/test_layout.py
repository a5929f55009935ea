"""Equal layers are looked at once: the same numbers as layer by layer, for work of their kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from autopar.cost_models.implementation import CPU, CUDA, Implementation
from autopar.cost_models.layout import KEPT, Layout
from autopar.cost_models.memory import rank_memory
from autopar.cost_models.optimizer import OPTIMIZERS
from autopar.cost_models.stages import StageModel, stage_models
from autopar.plan.plan import Plan
from tests.unit.cost_models.models import layout, planned, traced

CASES = [
    ("dp=2,tp=2", "megatron_sp,zero=1,microbatches=2", CUDA),
    ("dp=2", "ddp,recompute=full,zero=3", CPU),
    ("pp=2,tp=2", "megatron,recompute=selective,microbatches=4,schedule=zb_h1", CUDA),
    ("pp=3", "ddp,microbatches=8,schedule=1f1b", CPU),
]


def both(plan: Plan, how: Implementation) -> tuple[list[StageModel], list[StageModel]]:
    found = traced("deep_gpt")
    layouts = (layout("deep_gpt"), Layout.of(found.graph, fold=False))
    folded, plain = (
        list(stage_models(item.place(plan), plan, found.loss, how)) for item in layouts
    )
    return folded, plain


def counted(items: Iterable[object], names: tuple[str, ...]) -> Counter[tuple[object, ...]]:
    """How many there are of each kind, whatever layer they are of."""
    found: Counter[tuple[object, ...]] = Counter()
    for item in items:
        found[tuple(getattr(item, name) for name in names)] += getattr(item, "count", 1)
    return found


KERNEL = ("op", "kind", "phase", "flops", "read_bytes", "write_bytes", "matmul", "attention")
MOVE = ("kind", "size_bytes", "axes", "group", "phase", "per")
SAVED = ("what", "size_bytes")


@pytest.mark.parametrize(("mesh", "constraints", "how"), CASES)
def test_folding_changes_no_number(mesh: str, constraints: str, how: Implementation) -> None:
    plan = planned("deep_gpt", mesh, constraints)
    folded, plain = both(plan, how)
    assert len(folded) == len(plain) == plan.num_stages
    for one, other in zip(folded, plain, strict=True):
        assert counted(one.work.kernels, KERNEL) == counted(other.work.kernels, KERNEL)
        assert counted(one.work.moves, MOVE) == counted(other.work.moves, MOVE)
        assert counted(one.work.saved, SAVED) == counted(other.work.saved, SAVED)
        assert [p.name for p in one.parameters] == [p.name for p in other.parameters]
        assert one.buckets == other.buckets
    states = OPTIMIZERS["adamw"]
    for rank in range(plan.pipeline.ranks(plan.mesh)):
        one, other = (rank_memory(models, plan, rank, states) for models in (folded, plain))
        assert (one.resident, one.peak) == (other.resident, other.peak)


def test_work_does_not_grow_with_equal_layers() -> None:
    [deep], _ = both(planned("deep_gpt", "dp=1", "ddp"), CPU)
    layers = {call.copy for call in deep.programs.taped.task.calls if call.copy >= 0}
    assert len(layers) == KEPT
    assert max(call.count for call in deep.programs.taped.task.calls) == 6 - KEPT + 1


def test_layers_that_backward_treats_otherwise_are_told_apart() -> None:
    rules = {"batch": "dp", "recompute": ["blocks.2/aten.gelu*"]}
    plan = planned("deep_gpt", "dp=2", rules)
    folded, plain = both(plan, CPU)
    [one], [other] = folded, plain
    assert counted(one.work.saved, SAVED) == counted(other.work.saved, SAVED)
    again = [kernel for kernel in one.work.kernels if kernel.phase == "recompute"]
    assert sum(kernel.count for kernel in again if "gelu" in kernel.op) == 1


def test_placements_of_copies_left_out_are_those_of_the_one_that_stands_for_them() -> None:
    found, plan = traced("deep_gpt"), planned("deep_gpt", "dp=2,tp=2", "megatron_sp")
    folded = layout("deep_gpt").place(plan)
    whole = Layout.of(found.graph, fold=False).place(plan)
    for node in found.graph.nodes:
        for value in node.outputs:
            assert folded.pair(value.name) == whole.pair(value.name), value.name
