"""Models that cannot be one graph: what, where, and the way out."""

import dataclasses

import pytest
import torch
from torch import nn

from autopar.errors import InputError, TraceError
from autopar.trace import trace
from tests.models import zoo


class Odd(nn.Module):
    """A model that does one untraceable thing in its submodule `part`."""

    def __init__(self, part):
        super().__init__()
        self.fc, self.part = nn.Linear(4, 4), part

    def forward(self, x):
        return self.part(self.fc(x)).sum()


class Part(nn.Module):
    """Runs one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.inner = nn.Linear(4, 4)
        self.constant = torch.ones(4)

    def forward(self, x):
        return self.function(self, x)


def branch(self, x):
    return self.inner(x) if x.mean() > 0 else x


def number(self, x):
    return x * x.max().item()


def loop(self, x):
    for row in x.sum(1).nonzero().flatten().tolist():
        x = x + x[row]
    return x


def boolean(self, x):
    return x[x[:, 0] > 0]


def weight(self, x):
    with torch.no_grad():
        self.inner.weight.mul_(0.9)
    return self.inner(x)


def constant(self, x):
    self.constant.add_(1)
    return x * self.constant


def no_grad_write(self, x):
    y = self.inner(x)
    with torch.no_grad():
        y[:, 0] = 0
    return y


def many(self, x):
    y = [x * 1, x * 2]
    torch._foreach_add_(y, 1.0)
    return y[0]


def replaced(self, x):
    self.inner.weight = nn.Parameter(self.inner.weight * 2)
    return self.inner(x)


class Dirty(torch.autograd.Function):
    """Writes its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad


def dirty(self, x):
    return Dirty.apply(x * 1)


@pytest.mark.parametrize(
    ("function", "line", "words"),
    [
        (branch, 0, "torch.where"),
        (number, 0, "tensor"),
        (loop, 0, "experts"),
        (boolean, 0, "size"),
        (weight, 1, "part.inner.weight"),
        (constant, 0, "register_buffer"),
        (no_grad_write, 2, "clone"),
        (many, 1, "_foreach_add_"),
        (dirty, 0, "Dirty"),
    ],
)
def test_untraceable_parts(function, line, words):
    with pytest.raises(TraceError) as error:
        trace(Odd(Part(function)), (torch.randn(3, 4),))
    number = function.__code__.co_firstlineno + 1 + line
    assert words in str(error.value)
    assert "module 'part'" in error.value.where
    assert error.value.where.endswith(f"test_errors.py:{number}")
    assert error.value.fix


def test_replaced_parameter():
    with pytest.raises(TraceError, match=r"part\.inner\.weight"):
        trace(Odd(Part(replaced)), (torch.randn(3, 4),))


def test_nothing_is_printed(capfd):
    with pytest.raises(TraceError):
        trace(Odd(Part(branch)), (torch.randn(3, 4),))
    assert capfd.readouterr() == ("", "")


def test_batch_norm_that_counts():
    with pytest.raises(TraceError, match="momentum=None") as error:
        trace(Odd(nn.BatchNorm1d(4, momentum=None)), (torch.randn(3, 4),))
    assert "module 'part'" in error.value.where


def test_embedding_that_renormalises():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3, max_norm=1.0)

        def forward(self, ids):
            return self.table(ids).sum()

    with pytest.raises(TraceError, match=r"table\.weight") as error:
        trace(Net(), (torch.tensor([1, 2]),))
    assert "module 'table'" in error.value.where
    assert "max_norm" in error.value.fix


def test_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(self, x):
        q = x.view(1, 1, 4, 4)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device="cpu")
        return flex_attention(q, q, q, block_mask=mask)

    with pytest.raises(TraceError, match="flex_attention") as error:
        trace(Odd(Part(attend)), (torch.randn(4, 4),))
    assert "module 'part'" in error.value.where


def test_results_that_are_no_trees():
    class Thing:
        pass

    with pytest.raises(TraceError, match=r"\['thing'\].*Thing"):
        trace(Part(lambda self, x: {"thing": Thing()}), (torch.randn(2, 4),))
    model, args, kwargs = zoo.llama()
    with pytest.raises(TraceError, match="cache") as error:
        trace(model, args, kwargs | {"use_cache": True})
    assert "use_cache=False" in error.value.fix


def test_loss_must_be_a_scalar():
    with pytest.raises(TraceError, match=r"shape \(2, 4\)"):
        trace(nn.Linear(4, 4), (torch.randn(2, 4),), loss_fn=lambda y, x: y)


def test_errors_of_the_model_itself():
    with pytest.raises(TraceError, match=r"shape|dim") as error:
        trace(Odd(nn.Linear(5, 5)), (torch.randn(3, 4),))
    assert "module 'part'" in error.value.where


@dataclasses.dataclass
class Batch:
    """An input that nobody registered."""

    x: torch.Tensor


@dataclasses.dataclass
class Registered:
    """An input that was registered."""

    x: torch.Tensor
    scale: float = 2.0


torch.export.register_dataclass(Registered)


def test_dataclasses():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, batch):
            return (self.fc(batch.x) * batch.scale).sum()

    with pytest.raises(TraceError, match="Batch is not registered") as error:
        trace(Net(), (Batch(torch.randn(2, 4)),))
    assert "register_dataclass(Batch)" in error.value.fix
    traced = trace(Net(), (Registered(torch.randn(2, 4)),))
    x = torch.randn(2, 4)
    assert traced.flatten_inputs((Registered(x),)) == [x]
    with pytest.raises(InputError, match=r"args\[0\].scale is the float 3.0"):
        traced.flatten_inputs((Registered(x, 3.0),))


class Keywords(nn.Module):
    """Trees in, trees out, Python values between."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, batch, *, mask=None, mode="a", reps=1, table=None):
        h = self.fc(batch["x"] * table)
        for _ in range(reps):
            h = torch.tanh(h)
        return {"pred": h, "aux": (h.mean(), None), "n": reps, "mode": mode}


def _keywords():
    x, table = torch.randn(3, 4), torch.linspace(0, 1, 4)
    batch = {"x": x, "more": {"y": torch.zeros(2)}}
    kwargs = {"table": table, "mask": None, "mode": "b", "reps": 2}
    return trace(Keywords(), (batch,), kwargs), batch, kwargs


def test_trees_and_keyword_order():
    traced, batch, kwargs = _keywords()
    swapped = {"more": batch["more"], "x": batch["x"]}
    flat = traced.flatten_inputs((swapped,), dict(reversed(kwargs.items())))
    assert [id(t) for t in flat] == [id(t) for t in traced.flatten_inputs((batch,), kwargs)]
    targets = [item.target for item in traced.graph.inputs if item.kind == "input"]
    assert targets == ["args[0]['x']", "args[0]['more']['y']", "kwargs['table']"]
    assert [(o.target, o.literal) for o in traced.graph.outputs if o.value is None] == [
        ("['aux'][1]", None), ("['n']", 2), ("['mode']", "b")
    ]  # fmt: skip
    assert traced.unflatten_outputs([1, 2, 3, 4, 5])["aux"] == (2, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": torch.ones(3)}, r"kwargs\['mask'\] is a float32 tensor .* traced with None"),
        ({"table": None}, r"kwargs\['table'\] is None"),
        ({"table": torch.zeros(5)}, r"shape \(5,\).*traced with .*shape \(4,\)"),
        ({"table": torch.zeros(4, dtype=torch.float64)}, "float64"),
        ({"mode": "a"}, r"kwargs\['mode'\] is the str 'a'.*'b'"),
        ({"reps": True}, "bool True"),
        ({"extra": 1}, r"kwargs\['extra'\] was not there"),
    ],
)
def test_inputs_are_guarded(change, words):
    traced, batch, kwargs = _keywords()
    with pytest.raises(InputError, match=words):
        traced.flatten_inputs((batch,), kwargs | change)


def test_missing_inputs():
    traced, batch, kwargs = _keywords()
    del kwargs["table"]
    with pytest.raises(InputError, match=r"kwargs\['table'\] is missing"):
        traced.flatten_inputs((batch,), kwargs)
    with pytest.raises(InputError, match=r"args\[0\]\['x'\]"):
        traced.flatten_inputs(({"more": {"y": torch.zeros(2)}},), _keywords()[2])
