"""Remembered results of fake tensors look, and share memory, as torch's own do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autopar.runtime.programs import compat, fakes
from autopar.runtime.programs.tracer import Recording, record


def described(recording: Recording) -> list[object]:
    """Every node: its operator, what it looks like, and the first node in whose memory it lies."""
    first: dict[int, str] = {}
    found: list[object] = []
    for node in recording.graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, tuple | list) else [value]
        for item in values:
            if isinstance(item, Tensor):
                storage = item.untyped_storage()
                home = first.setdefault(storage._cdata, node.name)
                found.append((str(node.target), fakes.look(item), home, storage.nbytes()))
            else:
                found.append((str(node.target), item is None))
    return found


def trace(function: Callable[..., list[Tensor]], *like: Tensor) -> Recording:
    with compat.fake_mode() as mode, compat.one_thread():
        args = [mode.from_tensor(item) for item in like]
        return record(function, args)


def same_with_and_without(function: Callable[..., list[Tensor]], *like: Tensor) -> None:
    fakes._KNOWN.clear()
    first = described(trace(function, *like))
    again = described(trace(function, *like))  # from memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakes.Memo, "key", lambda *_: None)
        plain = described(trace(function, *like))
    assert first == again == plain


def attention(x: Tensor, w: Tensor) -> list[Tensor]:
    q, k, v = F.linear(x, w).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    loss = F.layer_norm(out + x, (8,)).square().mean()
    return [loss, *torch.autograd.grad(loss, [x, w])]


def convolution(x: Tensor, w: Tensor) -> list[Tensor]:
    y = F.conv2d(x.contiguous(memory_format=torch.channels_last), w, padding=1)
    y = F.batch_norm(y, None, None, training=True)
    y = F.max_pool2d(F.relu(y), 2)
    loss = F.interpolate(y, scale_factor=2.0).half().float().sum()
    return [loss, *torch.autograd.grad(loss, [x, w])]


def memory(x: Tensor, w: Tensor) -> list[Tensor]:
    y = x.clone()
    y.t_()  # changes what y looks like
    z = y + 1
    y.transpose_(0, 1)
    z = [z, y + 1, x.expand(3, *x.shape), x[None].expand(3, *x.shape)[1], x.diagonal()]
    parts = x.split(2, 1)
    same = x.to(x.dtype)
    return [*z, *parts, same, x.narrow(0, 1, 1), torch.full((2,), 1.0), torch.full((2,), 1), w.T]


def numbers(x: Tensor, w: Tensor) -> list[Tensor]:
    found = [x * 1, x * 1.0, x * True, x.sum(0), x.sum(0, keepdim=True), x.float().sum(dtype=None)]
    index = torch.arange(3)
    return [*found, x[index], torch.where(x > 0, x, 0.0), x.topk(2)[0], x.sort().indices, w.exp()]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (attention, ((2, 6, 8), (24, 8))),
        (convolution, ((2, 3, 8, 8), (5, 3, 3, 3))),
        (memory, ((4, 4), (2, 3))),
        (numbers, ((4, 4), (2, 3))),
    ],
)
def test_models_are_traced_as_torch_traces_them(function, shapes):
    same_with_and_without(function, *(torch.randn(s, requires_grad=True) for s in shapes))


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x.t(),
    "rows": lambda x: x[1:],
    "every second": lambda x: x[:, ::2],
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "expand": lambda x: x[None].expand(2, *x.shape)[0],
    "half": lambda x: x.half(),
    "exp": lambda x: x.exp(),
    "add": lambda x: x + x.t() if x.shape[0] == x.shape[1] else x + 1,
    "product": lambda x: x @ x.t(),
    "softmax": lambda x: x.softmax(-1),
    "in place": lambda x: x.clone().t_(),
    "cat": lambda x: torch.cat([x, x]),
    "cumsum": lambda x: x.cumsum(0),
}


@given(st.lists(st.sampled_from(sorted(UNARY)), min_size=1, max_size=8), st.booleans())
def test_chains_of_operators_look_as_torch_makes_them(names, transposed):
    def function(x: Tensor) -> list[Tensor]:
        found = [x]
        for name in names:
            if found[-1].numel():
                found.append(UNARY[name](found[-1]))
        return found

    start = torch.randn(4, 4)
    same_with_and_without(function, start.t() if transposed else start)


def test_what_depends_on_values_is_not_remembered():
    fakes._KNOWN.clear()
    with compat.fake_mode() as mode:
        x = mode.from_tensor(torch.ones(3))
        memo = fakes.Memo(mode)
        memo.note(x)
        assert memo.key(torch.ops.aten.nonzero.default, (x,), {}) is None
        assert memo.key(torch.ops.aten.add_.Tensor, (x, x), {}) is None
        assert memo.key(torch.ops.aten.exp.default, (x,), {}) is not None
        unknown = mode.from_tensor(torch.ones(3))
        assert memo.key(torch.ops.aten.exp.default, (unknown,), {}) is None
