"""Hugging Face families: nothing unruled, and equal to one device under the standard plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopar.errors import TraceError
from autopar.runtime.verify import verify
from tests.models.check import Case, agree, on_ranks, placements
from tests.models.families import EAGER_PLANS, EXACT_PLANS, FAMILIES, family, has_dropout

EXACT_TO_1E12 = ("gpt2", "llama")
# Every plan meets a part of the families in every run, and the others in the long mode.
LATER = [pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3)]
QUARTERS = pytest.mark.parametrize("part", [0, *LATER])
HALVES = pytest.mark.parametrize("half", [0, LATER[0]])


def part_of(
    plans: tuple[tuple[str, str], ...], name: str, part: int, parts: int
) -> tuple[tuple[str, str], ...]:
    """Every so many-th plan, others for the next family."""
    return plans[(part + list(FAMILIES).index(name)) % parts :: parts]


TWINS = ("mistral", "bert_classes")
"""Families whose graphs another has but for a few ops; they take their turn in long runs."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.long) if name in TWINS else name for name in FAMILIES
    ],
)
def member(request: pytest.FixtureRequest) -> Iterator[tuple[str, Case]]:
    """A family as it comes, traced once for all tests of it."""
    yield request.param, family(request.param)


@QUARTERS
def test_exact_in_float64(member: tuple[str, Case], part: int):
    name, case = member
    for mesh, constraints in part_of(EXACT_PLANS, name, part, 4):
        report = agree(case, mesh, constraints, dtype="float64")
        assert report.worst.error <= (1e-12 if name in EXACT_TO_1E12 else 1e-11)
        assert not report.plan.unruled
        kinds = {row.kind for row in report.rows}
        assert kinds >= {"loss", "gradient", "parameter"}
        assert ("buffer" in kinds) == any(True for _ in case.model.buffers())
        names = {fqn for fqn, _ in case.model.named_parameters()}
        assert {row.name for row in report.rows if row.kind == "gradient"} == names


@HALVES
def test_equal_to_eager_in_float32(member: tuple[str, Case], half: int):
    name, case = member
    if has_dropout(name):
        case = family(name, dropout=False)
    for mesh, constraints in part_of(EAGER_PLANS, name, half, 2):
        assert agree(case, mesh, constraints).reference == "eager"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.distributed
def test_on_processes(name: str, ranks4):
    case = family(name)
    report = verify(
        case.model, case.args, case.kwargs, mesh="tp=2,dp=2", constraints="megatron",
        dtype="float64", ranks=ranks4, traced=case.traced,
    )  # fmt: skip
    assert report.equal, report.summary()
    assert report.worst.error <= 1e-12
    assert sum(report.traffic.values()) > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"attention": "eager"}),
        ("mixtral", {"experts": "batched_mm"}),
        ("qwen3_moe", {"experts": "grouped_mm"}),
        *(
            pytest.param(name, {"attention": "eager"}, marks=pytest.mark.long)
            for name in ("gpt2", "bert", "t5", "gemma3")
        ),
        pytest.param("mixtral", {"experts": "grouped_mm"}, marks=pytest.mark.long),
        pytest.param("qwen3_moe", {"experts": "batched_mm"}, marks=pytest.mark.long),
    ],
)
@HALVES
def test_other_implementations(name: str, options: dict[str, str], half: int):
    case = family(name, **options)
    plans = (("tp=2,dp=2", "megatron"), ("dp=3", "fsdp"))
    for mesh, constraints in part_of(plans, name, half, 2):
        report = agree(case, mesh, constraints, dtype="float64", steps=2)
        assert not report.plan.unruled


def test_a_loop_over_experts_is_refused_with_the_way_out():
    case = family("mixtral", experts="eager")
    with pytest.raises(TraceError) as caught:
        _ = case.traced
    text = str(caught.value)
    assert "'model.layers.0.mlp.experts'" in text and "modeling_mixtral.py:" in text
    assert "grouped" in text and "batched" in text


def test_caches_are_switched_off_and_said():
    case = family("llama")
    assert case.model.config.use_cache is True
    assert any("use_cache" in note for note in case.traced.notes)
    assert case.model.config.use_cache is True


def test_outputs_are_the_models_own():
    case = family("llama")
    case.model.config.use_cache = False
    with torch.no_grad():
        want = case.model(*case.args, **case.kwargs)
    case.model.config.use_cache = True
    for have in on_ranks(case, "tp=2,dp=2", "megatron", lambda c: c(*case.args, **case.kwargs)):
        assert type(have) is type(want)
        assert have.keys() == want.keys()
        assert torch.allclose(have.logits, want.logits, rtol=1e-4, atol=1e-5)
        assert torch.allclose(have["loss"], want.loss, rtol=1e-5)
        assert have.past_key_values is None


@pytest.mark.parametrize(
    ("name", "column", "row"),
    [
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_proj.weight"),
        ("llama", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("bert", "bert.encoder.layer.0.intermediate.dense.weight",
         "bert.encoder.layer.0.output.dense.weight"),
        ("t5", "encoder.block.0.layer.1.DenseReluDense.wi.weight",
         "encoder.block.0.layer.1.DenseReluDense.wo.weight"),
        ("vit", "vit.layers.0.mlp.fc1.weight", "vit.layers.0.mlp.fc2.weight"),
    ],
)  # fmt: skip
def test_megatron_splits_columns_then_rows(name: str, column: str, row: str):
    case = family(name)
    stored = placements(case, "tp=2", "megatron")
    assert stored[column] == stored[row] == ("ffn",)
    shapes = on_ranks(
        case, "tp=2", "megatron",
        lambda c: {
            item.fqn: item.shape
            for item in c.build(case.args, case.kwargs).units[0].parameters.items.values()
        },
    )[0]  # fmt: skip
    full = {fqn: p.shape for fqn, p in case.model.named_parameters()}
    out, inner = (0, 1) if name != "gpt2" else (1, 0)  # Conv1D holds its weight transposed
    assert shapes[column][out] * 2 == full[column][out]
    assert shapes[row][inner] * 2 == full[row][inner]
    assert shapes[row][1 - inner] == full[row][1 - inner]


def test_key_and_value_heads_are_split_with_their_groups():
    stored = placements(family("llama"), "tp=4", "megatron")
    query, key = (stored[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qk")
    # Two key heads of two query heads each, on four ranks: keys are split in two and copied.
    assert len(set(query)) == 2 and "whole" not in query
    assert key.count("whole") == 1
