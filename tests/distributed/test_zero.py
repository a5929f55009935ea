"""What ZeRO leaves on a rank and what it sends (arXiv 1910.02054, section 5.3 and 7)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.verify import verify
from tests.models.check import Case, agree, on_ranks
from tests.models.overrides import split_across

RANKS = 4


def stack() -> Case:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return Case(
        model=nn.Sequential(*parts),
        args=(torch.randn(8, 64),),
        loss=lambda y, x: (y - x).pow(2).mean(),
    )


def resident(compiled, case: Case) -> tuple[int, int, int, dict[str, int]]:
    """Elements of parameters, gradients and optimizer state after a step; bytes of another."""
    for _ in range(2):
        before = compiled.traffic
        compiled.step(*case.args)
    sent = {kind: size - before.get(kind, 0) for kind, size in compiled.traffic.items()}
    engine = compiled.build(case.args, {})
    parameters: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for unit in engine.units.values():
        held = unit.parameters
        every = [*held.values.values(), *(h.parameters for h in held.held.values())]
        for found, tensors in (
            (parameters, every),
            (gradients, [*held.gradients.values(), *(h.gradients for h in held.held.values())]),
        ):
            for tensor in tensors:
                if tensor is not None:
                    memory = tensor.untyped_storage()
                    found[memory.data_ptr()] = memory.nbytes()
    state = sum(
        value.numel() * value.element_size()
        for entry in compiled.optimizer.state.values()
        for name, value in entry.items()
        if name != "step"
    )
    return sum(parameters.values()), sum(gradients.values()), state, sent


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_on_a_rank_and_on_the_wire(zero: int, microbatches: int):
    case = stack()
    size = 4 * sum(p.numel() for p in case.model.parameters())  # P, in bytes of float32
    found = on_ranks(
        case, f"dp={RANKS}", f"zero={zero},microbatches={microbatches}",
        lambda compiled: resident(compiled, case),
    )  # fmt: skip
    part = size / RANKS
    want = (
        part if zero == 3 else size,
        part if zero >= 2 else size,
        2 * (part if zero >= 1 else size),  # AdamW keeps two moments
    )
    for parameters, gradients, state, sent in found:
        for have, expected in zip((parameters, gradients, state), want, strict=True):
            assert have == pytest.approx(expected, rel=0.01)
        # A reduce-scatter or all-gather of P sends (N - 1)/N of it, an all-reduce twice that.
        once = size * (RANKS - 1) / RANKS
        times = {
            0: {"all_reduce": 2.0},
            1: {"reduce_scatter": 1.0, "all_gather": 1.0},
            2: {"reduce_scatter": 1.0 * microbatches, "all_gather": 1.0},
            3: {"reduce_scatter": 1.0 * microbatches, "all_gather": 2.0 * microbatches},
        }[zero]
        for kind, count in times.items():
            assert sent[kind] == pytest.approx(count * once, rel=0.01), kind
        small = sum(size for kind, size in sent.items() if kind not in times)
        assert small < 0.01 * size


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=4", "dp=3", "dp=2,tp=2", "a=2,b=2"])
def test_trains_as_one_device_does(zero: int, mesh: str):
    constraints: dict[str, object] = {"strategy": "megatron" if "tp" in mesh else "ddp"}
    if mesh.startswith("a"):  # batch over two axes, ZeRO over one of them or both
        constraints = {"batch": ["a", "b"]}
        for axes in (["a"], ["b"], ["a", "b"]):
            agree(
                stack(), mesh, constraints | {"zero": {"stage": zero, "axes": axes}},
                dtype="float64", steps=2,
            )  # fmt: skip
        return
    report = agree(stack(), mesh, constraints | {"zero": zero}, dtype="float64", steps=5)
    assert report.worst.error <= 1e-12


class Tied(nn.Module):
    """Norms that a plan may split otherwise than the rest, and one at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.middle = nn.LayerNorm(7), nn.LayerNorm(7)
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.down(self.up(self.ends(x)).tanh()))
        return (self.ends(x) * x).square().mean()


def tied() -> Case:
    torch.manual_seed(0)
    return Case(model=Tied(), args=(torch.randn(12, 7),))


@pytest.mark.parametrize(
    ("mesh", "extra"),
    [
        ("dp=2,tp=2", "zero=1"),
        ("dp=2,tp=2", "zero=2,microbatches=2"),
        ("dp=2,tp=2", "zero=3,microbatches=2"),
        pytest.param("dp=3,tp=2", "zero=1,microbatches=2", marks=pytest.mark.long),
        pytest.param("dp=2,tp=3", "zero=3", marks=pytest.mark.long),
        pytest.param("pp=2,dp=2,tp=2", "zero=1,microbatches=2", marks=pytest.mark.long),
        ("pp=2,dp=2,tp=2", "zero=2,microbatches=2"),
        pytest.param("pp=2,dp=2,tp=2", "zero=3,microbatches=2,schedule=zb_h1",
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_gradients_that_no_divided_axis_sums_are_summed_along_the_others(mesh: str, extra: str):
    case = tied()
    plan = split_across(case.traced.graph, mesh, f"megatron,{extra}", "norm")
    assert plan.zero.axes == ("dp",)
    report = verify(
        case.model, case.args, {}, plan=plan, threads=True, dtype="float64", steps=2,
        traced=case.traced,
    )  # fmt: skip
    assert report.equal, report.summary()


def test_zero_over_an_axis_of_one_rank_divides_nothing():
    plan = ("dp=1,tp=2", "megatron_sp,zero=2")
    agree(stack(), *plan, dtype="float64", steps=2)


@pytest.mark.parametrize(("mesh", "extra"), [("dp=2", ""), ("pp=2,dp=2", ",microbatches=2")])
def test_outputs_of_the_model_under_zero(mesh: str, extra: str):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs = torch.randn(8, 4)
    case = Case(model=model, args=(inputs,), loss=lambda out, _: out.square().mean())
    with torch.no_grad():
        want = model(inputs)
    for stage in (1, 2, 3):
        for have in on_ranks(case, mesh, f"zero{stage}{extra}", lambda c: c(inputs)):
            assert torch.allclose(have, want, atol=1e-6)
