"""Random cuts, schedules, microbatches and recompute sets, dropout on.

What is recomputed changes nothing, to the bit; what is cut changes nothing that rounding does not.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.plan.keys import op_keys
from autopar.plan.stages import input_only
from autopar.schedules.make import SCHEDULES
from tests.models.check import Case, on_ranks

SAMPLES = 8
SYNCHRONOUS = [name for name in SCHEDULES if not SCHEDULES[name].asynchronous]
CHUNKS = {"interleaved_1f1b": 2, "zbv": 2}


class Dropped(nn.Module):
    """Tied embeddings, dropout, attention with dropout, a skip from the first to the last op."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(11, 8), nn.Dropout(0.2)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.drop(self.embed(ids))
        parts = self.qkv(self.norm(first)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
        x = first + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(F.gelu(self.up(x)))) * first.sigmoid()
        logits = F.linear(x, self.embed.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@functools.cache
def dropped() -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (SAMPLES, 5))
    return Case(model=Dropped(), args=(ids,))


@functools.cache
def keys() -> tuple[list[str], list[str]]:
    """Op keys at which one may cut, and of ops that may be computed again."""
    graph = dropped().traced.graph
    every = op_keys(graph)
    free = input_only(graph)
    return [key for i, key in enumerate(every) if i not in free], every


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, dict[str, object], list[str]]:
    """Mesh, constraints, and recompute patterns to add to them."""
    cuttable, every = keys()
    schedule = draw(st.sampled_from(SYNCHRONOUS))
    pipe = draw(st.sampled_from((1, 2, 3, 4)))
    chunks = CHUNKS.get(schedule, 1)
    counts = [m for m in (1, 2, 4, 8) if schedule != "interleaved_1f1b" or m % pipe == 0]
    if not counts:
        pipe, counts = 2, [2, 4, 8]
    microbatches = draw(st.sampled_from(counts))
    places = st.integers(0, len(cuttable) - 1)
    cuts = sorted(draw(st.lists(places, min_size=pipe * chunks - 1, max_size=pipe * chunks - 1)))
    beside = draw(st.sampled_from(("", ",dp=2", ",tp=2")))
    zero = draw(st.sampled_from((0, 1, 2, 3))) if beside == ",dp=2" else 0
    found: dict[str, object] = {
        "strategy": "megatron" if beside == ",tp=2" else "ddp",
        "schedule": schedule,
        "microbatches": microbatches,
        "chunks": chunks,
        "zero": zero,
    }
    if cuts:
        found["cuts"] = [cuttable[place] for place in cuts]
    again = draw(st.sets(st.sampled_from(every), min_size=1))
    return f"pp={pipe}{beside}", found, [_exactly(key) for key in sorted(again)]


def _exactly(key: str) -> str:
    """A pattern that matches `key` only."""
    return key.replace("[", "[[]")


def gradients(mesh: str, constraints: object) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of the third step, so that its dropout has a seed of its own."""

    def body(compiled):
        case = dropped()
        for _ in range(2):
            compiled.gradients(*case.args)
        return compiled.gradients(*case.args)

    return on_ranks(dropped(), mesh, constraints, body, float64=True)[0]


@functools.cache
def on_one_device() -> tuple[Tensor, dict[str, Tensor | None]]:
    return gradients("dp=1", "ddp")


def check(plan: tuple[str, dict[str, object], list[str]]) -> None:
    mesh, constraints, again = plan
    want_loss, want = on_one_device()
    loss, kept = gradients(mesh, constraints)
    other, computed = gradients(mesh, constraints | {"recompute": again})
    assert torch.equal(loss, other)
    largest = max(float(gradient.abs().max()) for gradient in want.values())
    assert abs(float(loss - want_loss)) <= 1e-11 * abs(float(want_loss))
    for name, gradient in want.items():
        assert torch.equal(kept[name], computed[name]), name
        assert float((kept[name] - gradient).abs().max()) <= 1e-11 * largest, name


QUICK = settings(max_examples=6, suppress_health_check=list(HealthCheck))


@QUICK
@given(plans())
def test_nothing_changes(plan):
    check(plan)


@pytest.mark.long
@pytest.mark.timeout(7200)
@settings(QUICK, max_examples=300, derandomize=False)
@given(plans())
def test_nothing_changes_at_length(plan):
    check(plan)


def test_dropout_is_on():
    case = dropped()

    def body(compiled):
        return [compiled.gradients(*case.args)[0] for _ in range(2)]

    first, second = on_ranks(case, "dp=1", "ddp", body)[0]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("cuts", [0, 1])
def test_empty_stages_pass_everything_on(cuts: int):
    cuttable, _ = keys()
    place = (cuttable[0], cuttable[len(cuttable) // 2])[cuts]
    check(("pp=4", {"microbatches": 2, "schedule": "zb_h1", "cuts": [place] * 3}, ["*gelu*"]))


def test_a_stage_of_the_same_rank_gets_what_a_message_would_bring():
    # Stages 2 and 3 of a V are on one rank; what passes between them is permuted, not contiguous.
    names = ("embedding.default#0", "reshape.default#0", "reshape.default#2", "permute.default#1",
             "dropout.default#1")  # fmt: skip
    cuts = [next(key for key in keys()[0] if key.endswith(name)) for name in names]
    constraints = {"schedule": "zbv", "chunks": 2, "microbatches": 1, "cuts": cuts}
    check(("pp=3", constraints, ["embed/*"]))
