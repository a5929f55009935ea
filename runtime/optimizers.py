"""Optimizers by name, class or factory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from autopar.errors import InputError, meant

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _named() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
        and name not in _WHOLE_TENSOR
    }


# Their update looks at a whole tensor or at all of them, which a shard does not have.
_WHOLE_TENSOR = frozenset({"LBFGS", "Adafactor", "Muon", "SparseAdam"})


def optimizer_factory(
    optimizer: str | type[torch.optim.Optimizer] | Factory | None, options: Mapping[str, Any]
) -> Factory | None:
    """What makes the optimizer of a rank from its local parameters.

    Args:
        optimizer: Name of a class of `torch.optim` in any case (``"adamw"``), such a class, a
            factory that takes parameters, or None for no optimizer.
        options: Options such as ``lr``; passed to the class.

    Raises:
        InputError: For an unknown name, an optimizer that cannot run on shards, or unknown
            options.
    """
    if optimizer is None:
        if options:
            raise InputError(
                f"optimizer options {sorted(options)} without an optimizer",
                fix='pass optimizer="adamw" or leave the options out',
            )
        return None
    if isinstance(optimizer, str):
        known = _named()
        if optimizer.lower() not in known:
            raise InputError(
                f"unknown optimizer {optimizer!r}",
                expected="one of " + ", ".join(sorted(known)),
                fix=meant(optimizer, known),
            )
        optimizer = known[optimizer.lower()]
    if not callable(optimizer):
        raise InputError(
            f"optimizer is of type {type(optimizer).__name__}",
            expected='a name such as "adamw", a class of torch.optim, or a factory',
            fix="ranks hold parts of parameters, so the optimizer is made on each of them: pass "
            "its class and options, or a function of the parameters",
        )
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        if optimizer.__name__ in _WHOLE_TENSOR:
            raise InputError(
                f"{optimizer.__name__} needs whole tensors and cannot run on shards",
                expected="an elementwise optimizer such as AdamW or SGD",
            )
        allowed = set(inspect.signature(optimizer).parameters) - {"params"}
        unknown = set(options) - allowed
        if unknown:
            raise InputError(
                f"{optimizer.__name__} has no option {sorted(unknown)[0]!r}",
                expected="some of " + ", ".join(sorted(allowed)),
            )
        make = _checked(functools.partial(optimizer, **options))
        make([nn.Parameter(torch.zeros(1))])  # a wrong value is told now, not at the first step
        return make
    if options:
        raise InputError(
            f"optimizer options {sorted(options)} beside an optimizer factory",
            fix="set them inside the factory",
        )
    return _checked(cast(Factory, optimizer))


def _checked(make: Factory) -> Factory:
    """`make`, with its errors and its result as a user should see them."""

    def checked(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            made = make(parameters)
        except (TypeError, ValueError) as error:
            raise InputError(f"the optimizer cannot be made: {error}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(
                f"the optimizer factory made an object of type {type(made).__name__}",
                expected="a torch.optim.Optimizer",
            )
        return made

    return checked
