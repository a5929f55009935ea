"""Constraints: named strategies and factor-to-axis maps, in one normal form.

A constraint says, for every mesh axis, which factors it splits and in which order of
preference. An op takes the first of them that it has; what it has none of, it replicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from autopar.errors import PlanError
from autopar.sharding.mesh import Mesh

MODEL = ("heads", "kv_heads", "group", "ffn", "vocab", "experts")
"""Factors that tensor parallelism splits, best first (Megatron-LM, arXiv 1909.08053)."""

STANDARD = (*MODEL, "batch", "seq", "hidden", "channels")
"""Factors that strategies put on axes, whether or not a model has them."""

STRATEGIES = ("ddp", "fsdp", "megatron", "megatron_sp", "2d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What every mesh axis splits.

    Attributes:
        strategy: The name they came by, ``custom`` for a factor map.
        order: For each axis the factors it splits, best first.
        storage: Axes over which parameters are also stored split (ZeRO-3 style): they are
            gathered before use and their gradients reduce-scattered.
        explicit: Whether a factor that cannot be split as asked is an error.
    """

    strategy: str
    order: tuple[tuple[str, tuple[str, ...]], ...]
    storage: tuple[str, ...] = ()
    explicit: bool = False

    def names(self, axis: str) -> tuple[str, ...]:
        """Factors that `axis` splits, best first."""
        return dict(self.order).get(axis, ())


def default_mesh(strategy: str, num_devices: int) -> Mesh:
    """The mesh a strategy uses when none is given.

    Args:
        strategy: Name of the strategy.
        num_devices: Number of ranks.
    """
    if strategy in ("megatron", "megatron_sp"):
        tensor = math.gcd(num_devices, 8)
        return _mesh(dp=num_devices // tensor, tp=tensor)
    if strategy == "2d":
        rows = max(n for n in range(1, math.isqrt(num_devices) + 1) if num_devices % n == 0)
        return _mesh(x=rows, y=num_devices // rows)
    return Mesh((("dp", num_devices),))


def _mesh(**axes: int) -> Mesh:
    kept = tuple((name, size) for name, size in axes.items() if size > 1)
    return Mesh(kept or (("dp", 1),))


def _named(strategy: str, mesh: Mesh) -> Constraints:
    batch = ("batch",)
    order: list[tuple[str, tuple[str, ...]]] = []
    tensor = [name for name in mesh.names if name not in ("dp", "batch", "replica")]
    for name in mesh.names:
        if strategy in ("ddp", "fsdp") or name not in tensor:
            order.append((name, batch))
        elif strategy == "megatron":
            order.append((name, MODEL))
        elif strategy == "megatron_sp":
            order.append((name, (*MODEL, "seq")))
        else:
            order.append((name, MODEL if name == tensor[0] else ("hidden", "channels")))
    if strategy == "2d" and len(tensor) != 2:
        raise PlanError(
            f"strategy 2d needs two tensor axes, mesh {mesh} has {len(tensor)}",
            expected='a mesh such as "x=2,y=2" or "dp=2,x=2,y=2"',
        )
    return Constraints(
        strategy=strategy,
        order=tuple(order),
        storage=mesh.names if strategy == "fsdp" else (),
    )


def parse_constraints(constraints: str | Mapping[str, object] | None, mesh: Mesh) -> Constraints:
    """Normal form of what a user passes as ``constraints=``.

    Args:
        constraints: A strategy name, a map from factor to mesh axis (or to several axes), or
            None for ``ddp``.
        mesh: The mesh the axes are looked up in.

    Raises:
        PlanError: For an unknown strategy or axis, or a value of the wrong type.
    """
    if constraints is None:
        constraints = "ddp"
    if isinstance(constraints, str):
        if constraints not in STRATEGIES:
            close = get_close_matches(constraints, STRATEGIES, 1)
            raise PlanError(
                f"unknown strategy {constraints!r}",
                expected="one of " + ", ".join(STRATEGIES) + ", or a map from factor to axis",
                fix=f"did you mean {close[0]!r}?" if close else None,
            )
        return _named(constraints, mesh)
    if not isinstance(constraints, Mapping):
        raise PlanError(
            f"constraints are of type {type(constraints).__name__}",
            expected='a strategy name or a map such as {"heads": "tp", "batch": "dp"}',
        )
    order: dict[str, list[str]] = {name: [] for name in mesh.names}
    for factor, axes in constraints.items():
        if not isinstance(factor, str):
            raise PlanError(
                f"constraints name a factor {factor!r}",
                expected='names such as "heads", "ffn", "vocab", "batch" or "seq"',
                where=f"constraints[{factor!r}]",
            )
        for axis in axes if isinstance(axes, list | tuple) else (axes,):
            if not isinstance(axis, str) or axis not in order:
                close = get_close_matches(str(axis), mesh.names, 1)
                raise PlanError(
                    f"factor {factor!r} is put on mesh axis {axis!r}, which mesh {mesh} lacks",
                    expected="one of " + ", ".join(mesh.names),
                    fix=f"did you mean {close[0]!r}?" if close else None,
                    where=f"constraints[{factor!r}]",
                )
            order[axis].append(factor)
    return Constraints(
        strategy="custom",
        order=tuple((name, tuple(factors)) for name, factors in order.items()),
        explicit=True,
    )


def check_factor_names(constraints: Constraints, known: tuple[str, ...]) -> None:
    """Refuse a factor that the model does not have.

    Args:
        constraints: The constraints; only explicit ones are checked.
        known: Names of all factors that some op of the model can split.

    Raises:
        PlanError: For an unknown factor.
    """
    if not constraints.explicit:
        return
    for axis, factors in constraints.order:
        for factor in factors:
            if factor.partition(".")[0] not in known:
                close = get_close_matches(factor, known, 1)
                raise PlanError(
                    f"the model has no factor {factor!r}",
                    expected="one of " + ", ".join(known),
                    fix=f"did you mean {close[0]!r}?" if close else None,
                    where=f"constraints[{factor!r}] -> {axis!r}",
                )


def split_axes(mesh: Mesh) -> tuple[Mesh, tuple[str, ...]]:
    """`mesh` with every axis split into prime sub-axes.

    A factor smaller than an axis (2 kv heads over 4 ranks) can then take a part of it, and the
    next factor the rest.

    Returns:
        The finer mesh and, for each of its axes, the axis of `mesh` it belongs to.
    """
    axes: list[tuple[str, int]] = []
    owner: list[str] = []
    for name, size in mesh.axes:
        primes = prime_factors(size) or [1]
        for index, prime in enumerate(primes):
            axes.append((name if len(primes) == 1 else f"{name}_{index}", prime))
            owner.append(name)
    return Mesh(tuple(axes)), tuple(owner)


def prime_factors(number: int) -> list[int]:
    """Prime factors in ascending order, with repeats."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found + ([number] if number > 1 else [])
