"""Custom autograd functions keep their own backward."""

import torch
from torch import nn

from autopar.trace import Slot
from tests.unit.trace.support import check_against_eager


class Sign(torch.autograd.Function):
    """Straight-through sign."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Scale(torch.autograd.Function):
    """Scales and reverses the gradient; two results, one of them no tensor."""

    @staticmethod
    def forward(x, factor, y):
        return x.view_as(x), "kept", (x * y).long()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad, _, __):
        return -ctx.factor * grad, None, None


scale = Scale.apply  # taken before tracing begins


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.heads = nn.ModuleList(Head() for _ in range(layers))

    def forward(self, x):
        total = 0.0
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = Sign.apply(layer(x))
            total = total + head(x)
        reversed_x, word, counts = scale(x, 0.7, x)
        assert word == "kept"
        return total + (reversed_x * counts).mean()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x):
        return scale(self.fc(x), 0.3, self.fc.bias)[0].mean()


def test_backward_survives():
    torch.manual_seed(0)
    traced = check_against_eager(Net(2), (torch.randn(3, 4),), {})
    assert set(traced.custom) == {"Sign", "Scale", "Scale_1"}
    assert traced.custom["Scale"].function is Scale
    assert traced.custom["Scale"].arguments == (Slot(0), 0.3, Slot(1))
    ops = {node.op for node in traced.graph.nodes}
    assert "autopar.custom_function.Sign" in ops


def test_inside_repeated_layers():
    torch.manual_seed(0)
    traced = check_against_eager(Net(6), (torch.randn(3, 4),), {})
    assert set(traced.custom) == {"Sign", "Scale", "Scale_1"}


class Double(Sign):
    """Calls the forward of its base, which is not the base being applied."""

    @staticmethod
    def forward(ctx, x):
        return Sign.forward(ctx, x) * 2


class Steep(Sign):
    """Inherits all but its gradient."""

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Power(torch.autograd.Function):
    """Applies itself; its exponent has a default."""

    @staticmethod
    def forward(x, n=2):
        return x * power(x, n - 1) if n > 1 else x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.n = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None


double, steep, power = Double.apply, Steep.apply, Power.apply


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.fc(x)
        same, _, _ = Scale.forward(x, 0.5, x)  # no call of the function: a plain gradient
        return (double(same) + steep(x) * power(x) + Power.apply(x, 3)).mean()


def test_inherited_nested_and_called_directly():
    torch.manual_seed(0)
    before = [dict(vars(cls)) for cls in (torch.autograd.Function, Sign, Scale, Double, Steep)]
    traced = check_against_eager(Odd(), (torch.randn(3, 4),), {})
    called = {node.op.rsplit(".", 1)[-1] for node in traced.graph.nodes if "custom" in node.op}
    assert {traced.custom[key].function for key in called} == {Double, Steep, Power}
    assert len(called) == 4
    after = [dict(vars(cls)) for cls in (torch.autograd.Function, Sign, Scale, Double, Steep)]
    assert after == before


class Sloped(torch.autograd.Function):
    """Takes all but its input by keyword, if this torch lets it."""

    @staticmethod
    def forward(ctx, x, shift, slope=1.0):
        ctx.slope = slope
        return x * 2 + shift

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.slope, grad, None


sloped = Sloped.apply


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x, shift = self.fc(x), self.fc.bias
        try:
            early = sloped(x, slope=0.5, shift=shift)
            late = Sloped.apply(x, slope=3.0, shift=shift)
        except TypeError:  # releases whose functions take none
            early, late = sloped(x, shift, 0.5), Sloped.apply(x, shift, 3.0)
        return (early + late).mean()


def test_keywords():
    torch.manual_seed(0)
    traced = check_against_eager(Keywords(), (torch.randn(3, 4),), {})
    assert traced.custom["Sloped"].arguments == (Slot(0), Slot(1), 0.5)
    assert traced.custom["Sloped_1"].arguments == (Slot(0), Slot(1), 3.0)
