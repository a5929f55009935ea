"""What goes into a model and comes out of it: checked by name, whole, and left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import InputError
from tests.models.cases import structure
from tests.models.check import Case, alone, losses, on_ranks

PLANS = (("dp=3", "ddp"), ("tp=2", "megatron"), ("dp=2,tp=2", "megatron_sp"))


def test_keyword_order_does_not_matter():
    case = structure.switches()
    turned = dict(reversed(case.kwargs.items()))
    compiled = alone(case)
    first = compiled.gradients(*case.args, **case.kwargs)[0]
    assert torch.equal(first, compiled.gradients(*case.args, **turned)[0])


@pytest.mark.parametrize(
    ("name", "value", "traced", "came"),
    [
        ("kind", "negative", "'plain'", "'negative'"),
        ("times", 3, "2", "3"),
        ("temperature", 1.0, "0.7", "1.0"),
        ("loud", False, "True", "False"),
        ("loud", 1, "True", "int 1"),
        ("gate", torch.ones(4), "None", "a float32 tensor of shape (4,)"),
        ("factors", None, "a float32 tensor of shape (5,)", "None"),
        ("factors", torch.ones(6), "shape (5,)", "shape (6,)"),
        ("factors", torch.ones(5, dtype=torch.float64), "float32", "float64"),
    ],
)
def test_another_value_is_refused_by_name(name: str, value, traced: str, came: str):
    case = structure.switches()
    compiled = alone(case)
    with pytest.raises(InputError) as caught:
        compiled.step(*case.args, **{**case.kwargs, name: value})
    text = str(caught.value)
    assert f"kwargs['{name}']" in text and traced in text and came in text and "fix:" in text


def test_a_nested_input_is_refused_by_its_path():
    case = structure.switches()
    compiled = alone(case)
    data = {**case.args[0], "deep": {"er": [torch.randn(3, 3)]}}
    with pytest.raises(InputError, match=r"args\[0\]\['deep'\]\['er'\]\[0\]"):
        compiled.step(data, **case.kwargs)
    extra = {**case.args[0], "new": torch.ones(4)}
    with pytest.raises(InputError, match=r"args\[0\]\['new'\] was not there"):
        compiled.step(extra, **case.kwargs)
    with pytest.raises(InputError, match=r"args\[0\]\['deep'\]\['er'\]\[0\] is missing"):
        compiled.step({"dense": torch.randn(4, 5)}, **case.kwargs)


def test_outputs_keep_their_nesting_and_are_whole():
    for case in (structure.switches(), structure.early_exit()):
        want = case.model(*case.args, **case.kwargs)
        leaves, spec = torch.utils._pytree.tree_flatten(want)
        for mesh, constraints in PLANS:
            ranks = on_ranks(
                case, mesh, constraints, lambda compiled, c=case: compiled(*c.args, **c.kwargs)
            )
            for outputs in ranks:
                have, have_spec = torch.utils._pytree.tree_flatten(outputs)
                assert have_spec == spec
                for a, b in zip(leaves, have, strict=True):
                    if not isinstance(a, torch.Tensor):
                        assert a is b or a == b
                        continue
                    assert a.dtype == b.dtype and not b.requires_grad
                    same = (
                        torch.allclose(a, b, 1e-5, 1e-6)
                        if a.is_floating_point()
                        else (torch.equal(a, b))
                    )
                    assert same
    assert isinstance(ranks[0]["parts"], dict)


def test_inputs_of_the_caller_are_not_modified():
    for case in (structure.writes(), structure.strides()):
        before = [tensor.clone() for tensor in case.args]
        strides = [tensor.stride() for tensor in case.args]

        def body(compiled, c=case):
            compiled.step(*c.args)
            compiled(*c.args)
            return compiled.state_dict()

        for state in on_ranks(case, "dp=2,tp=2", "megatron_sp", body):
            for name, parameter in case.model.named_parameters():
                assert state[name].shape == parameter.shape
        assert all(torch.equal(a, b) for a, b in zip(before, case.args, strict=True))
        assert strides == [tensor.stride() for tensor in case.args]


def test_a_model_that_writes_its_input_gets_a_copy():
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x.add_(1.0)).pow(2).mean()

    case = Case(model=Adds(), args=(torch.zeros(4, 3),))
    want = case.model(torch.zeros(4, 3))
    for rank in losses(case, "dp=2", "ddp", steps=1):
        assert rank[0].item() == pytest.approx(want.item(), rel=1e-6)
    assert not case.args[0].any()
