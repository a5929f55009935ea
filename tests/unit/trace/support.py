"""Eager and traced runs side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.graph.text import parse, to_text
from autopar.trace import Traced, trace
from autopar.trace.reference import run_graph
from tests.models import zoo


def same_in_both_ways(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Traced:
    """Trace with and without shared layers; both must print alike and parse back."""
    shared = trace(model, args, kwargs, loss_fn)
    full = trace(model, args, kwargs, loss_fn, share_layers=False)
    assert to_text(shared.graph) == to_text(full.graph)
    assert parse(to_text(shared.graph)) == shared.graph
    return shared


def check_against_eager(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    tolerance: float = 2e-6,
) -> Traced:
    """The graph equals eager: loss and buffers bit for bit, gradients within `tolerance`."""
    eager = copy.deepcopy(model)
    traced = trace(model, args, kwargs, loss_fn)
    assert parse(to_text(traced.graph)) == traced.graph
    if hasattr(eager, "config"):
        eager.config.use_cache = False
    torch.manual_seed(3)
    result = eager(*args, **kwargs)
    loss = loss_fn(result, *args, *kwargs.values()) if loss_fn else zoo.own_loss(result)
    loss.backward()
    torch.manual_seed(3)
    run = run_graph(traced, args, kwargs)
    assert run.loss is not None
    run.loss.backward()
    assert torch.equal(run.loss, loss)
    own = dict(eager.named_parameters())
    for name, parameter in traced.parameters.items():
        expected = own[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            scale = expected.abs().max().clamp_min(1e-12)
            assert (parameter.grad - expected).abs().max() <= tolerance * scale, name
    for name, buffer in eager.named_buffers():
        name = traced.aliases.get(name, name)
        assert torch.equal(run.buffers.get(name, traced.buffers[name]), buffer), name
    return traced
