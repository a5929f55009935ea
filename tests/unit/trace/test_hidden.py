"""What a graph cannot hold is refused, not lost."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace import trace


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.count, self.last, self.past = 0, None, []

    def forward(self, x):
        return self.b(self.a(x)).pow(2).mean()


class Counts(Base):
    def forward(self, x):
        self.count += 1
        return super().forward(x) * self.count


class Remembers(Base):
    def forward(self, x):
        before, self.last = self.last, self.a(x).detach()
        return super().forward(x) + (0.0 if before is None else before.mean())


class Collects(Base):
    def forward(self, x):
        self.past.append(1)
        return super().forward(x) * len(self.past)


class Draws(Base):
    def forward(self, x):
        return super().forward(x) * random.random()


class DrawsWithNumpy(Base):
    def forward(self, x):
        return super().forward(x) * float(np.random.rand())  # noqa: NPY002


class HooksInside(Base):
    def forward(self, x):
        h = self.a(x)
        h.register_hook(lambda grad: grad * 2)
        return self.b(h).mean()


def with_parameter_hook() -> nn.Module:
    model = Base()
    model.b.weight.register_hook(lambda grad: grad)
    return model


def with_accumulate_hook() -> nn.Module:
    model = Base()
    model.b.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def with_module_hook() -> nn.Module:
    model = Base()
    model.b.register_full_backward_hook(lambda *_: None)
    return model


def with_shared_data() -> nn.Module:
    model = Base()
    model.b.weight.data = model.a.weight.data
    return model


def with_buffer_on_parameter() -> nn.Module:
    model = Base()
    model.register_buffer("row", model.a.weight.data[1])
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Counts, "'count'"),
        (Remembers, "'last'"),
        (Collects, "'past'"),
        (Draws, "random"),
        (DrawsWithNumpy, r"numpy\.random"),
        (HooksInside, "gradient hook on a tensor"),
        (with_parameter_hook, r"b\.weight has a gradient hook"),
        (with_accumulate_hook, r"b\.weight has a gradient hook"),
        (with_module_hook, "module b has a backward hook"),
        (with_shared_data, r"a\.weight.*same memory"),
        (with_buffer_on_parameter, r"row.*same memory"),
    ],
)
def test_what_tracing_would_lose_is_refused(build: Callable[[], nn.Module], said: str) -> None:
    model = build()
    with pytest.raises(TraceError, match=said) as caught:
        trace(model, (torch.randn(2, 4),))
    assert caught.value.fix and caught.value.where
    if isinstance(model, Base):
        assert (model.count, model.last) == (0, None)


class Logs(Base):
    """Changes attributes of which the result does not depend."""

    def forward(self, x):
        self.count += 1
        self.last = self.a(x)
        return super().forward(x) + self.last.mean()


def test_state_that_does_not_matter_is_fine() -> None:
    model = Logs()
    trace(model, (torch.randn(2, 4),))
    assert (model.count, model.last) == (0, None)


def test_slices_of_one_buffer_that_do_not_overlap_are_fine() -> None:
    model, flat = Base(), torch.randn(32)
    model.a.weight.data, model.b.weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)
    trace(model, (torch.randn(2, 4),))
