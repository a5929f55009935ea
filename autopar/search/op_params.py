"""What holding a parameter costs: bytes, the sum of its gradient, its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from autopar.cost_models.buckets import LIMIT_BYTES
from autopar.cost_models.device import Device
from autopar.cost_models.evaluate import Software, update_bandwidth
from autopar.cost_models.ops.call import Rank
from autopar.graph.ir import TensorSpec
from autopar.plan.assign import store_split
from autopar.plan.plan import Plan
from autopar.plan.strategies import split_axes
from autopar.search.op_costs import local_bytes, partial_axes
from autopar.search.op_routes import Routes
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import PARTIAL, REPLICATE, Pair, Placement, Shard, legal


@dataclass(frozen=True, slots=True)
class Held:
    """What a parameter takes.

    Attributes:
        seconds: Of one microbatch: to bring it to its uses and its gradient back, and a
            microbatch's part of what is done once per step.
        size_bytes: Of the parameter, its gradient and the optimizer's state.
    """

    seconds: float
    size_bytes: float


class Holding:
    """Prices parameters of a plan.

    Args:
        plan: The plan.
        owner: User axis of every sub-axis.
        rank: A rank of the mesh of sub-axes.
        routes: Prices of reshards.
        software: How the plan is carried out.
        device: What it runs on.
    """

    def __init__(
        self,
        plan: Plan,
        owner: tuple[str, ...],
        rank: Rank,
        routes: Routes,
        software: Software,
        device: Device,
    ) -> None:
        self.plan, self.rank, self.routes = plan, rank, routes
        self.software, self.device = software, device
        self.mesh = Mesh(tuple(zip(rank.names, rank.grid.sizes, strict=True)))
        self.stored = tuple(i for i, name in enumerate(owner) if name in plan.storage)
        zero = {
            sub
            for name, size in plan.mesh
            if name in plan.zero.axes
            for sub in split_axes(Mesh(((name, size),)))[0].names
        }
        self._known: dict[object, Held] = {}
        self.zero_axes = frozenset(
            i for i, name in enumerate(rank.names) if name in zero and rank.grid.sizes[i] > 1
        )

    def pair(self, shape: tuple[int, ...], uses: Sequence[Pair]) -> Pair:
        """How a parameter is held: as its uses agree, else whole, and divided as the plan says.

        Args:
            shape: Its global shape.
            uses: Pairs in which it is wanted.
        """
        forward: list[Placement] = []
        for axis in range(len(self.mesh.shape)):
            agreed = uses[0].forward[axis]
            alike = all(use.forward[axis] == agreed for use in uses)
            forward.append(agreed if alike and isinstance(agreed, Shard) else REPLICATE)
        if self.rank.time is not None:
            forward[self.rank.time] = REPLICATE  # a parameter is there at all times
        placed = store_split(tuple(forward), shape, self.stored, self.mesh)
        if legal(placed, shape, self.mesh.shape) is not None:
            placed = (REPLICATE,) * len(placed)
        gradient: list[Placement] = []
        for axis, item in enumerate(placed):
            partial = all(
                use.forward[axis] == REPLICATE and use.gradient[axis] == PARTIAL for use in uses
            )
            gradient.append(item if isinstance(item, Shard) else PARTIAL if partial else REPLICATE)
        return Pair(placed, tuple(gradient))

    def ways(self, shape: tuple[int, ...], uses: Sequence[Pair]) -> list[Pair]:
        """Every way to hold a parameter that several ops take.

        Args:
            shape: Its global shape.
            uses: Pairs in which any of them may want it.
        """
        alone = [self.pair(shape, (use,)) for use in uses]
        whole = [
            (REPLICATE, PARTIAL if axis == self.rank.time else REPLICATE)
            for axis in range(len(self.mesh.shape))
        ]
        columns = [
            list(
                dict.fromkeys([*((p.forward[axis], p.gradient[axis]) for p in alone), whole[axis]])
            )
            for axis in range(len(self.mesh.shape))
        ]
        found = []
        for sides in product(*columns):
            forward, gradient = zip(*sides, strict=True)
            if legal(forward, shape, self.mesh.shape) is None:
                found.append(Pair(forward, gradient))
        return found

    def allows(self, held: Pair, use: Pair) -> bool:
        """Whether a parameter may be held so while one of those that take it wants it so.

        It is split if all want it so, and its gradient stays a sum if all leave it one.
        """
        for axis in range(len(held.forward)):
            placed = held.forward[axis]
            if axis == self.rank.time or axis in self.stored:
                continue
            if isinstance(placed, Shard) and use.forward[axis] != placed:
                return False
            if held.gradient[axis] == PARTIAL and (
                use.forward[axis] != REPLICATE or use.gradient[axis] != PARTIAL
            ):
                return False
        return True

    def cost(self, spec: TensorSpec, held: Pair, uses: tuple[Pair, ...]) -> Held:
        """What a parameter takes that is held so.

        Args:
            spec: The parameter.
            held: How it is held.
            uses: The distinct pairs in which it is wanted.
        """
        key = (spec, held, uses)
        if key not in self._known:
            self._known[key] = self._cost(spec, held, uses)
        return self._known[key]

    def _cost(self, spec: TensorSpec, held: Pair, uses: tuple[Pair, ...]) -> Held:
        seconds = float(self.routes.pairs(spec, [held], uses).sum())
        size = local_bytes(spec, held, self.rank)
        if not spec.requires_grad:
            return Held(seconds, size)
        axes = tuple(axis for axis in partial_axes(held) if axis != self.rank.time)
        zero_axes = tuple(axis for axis in axes if axis in self.zero_axes)
        stage = self.plan.zero.stage if self.rank.group(zero_axes) > 1 else 0
        shards = self.rank.group(zero_axes) if stage else 1
        states = self.software.optimizer.state_bytes(spec.numel, spec.dtype)
        state = states * size / max(spec.size_bytes, 1)
        kept = size / (shards if stage >= 3 else 1) + size / (shards if stage >= 2 else 1)
        updated = size / shards * self.software.speed.update_passes
        per_step = updated / update_bandwidth(self.device)
        per_step += self._sync(spec.dtype, size, axes, zero_axes if stage else (), stage)
        return Held(seconds + per_step / self.rank.num_microbatches, kept + state / shards)

    def _sync(
        self,
        dtype: str,
        size: float,
        axes: tuple[int, ...],
        zero_axes: tuple[int, ...],
        stage: int,
    ) -> float:
        """Seconds per step that gradients (and parameters, with ZeRO) are under way.

        Buckets are large, so only bytes count. What runs beside computation costs what it slows
        that down, and the share that cannot hide.
        """
        speed = self.software.speed
        visible = 1 - speed.overlap * (1 - min(speed.slowdown, 1.0))
        often = self.rank.num_microbatches
        if not stage:
            return visible * self._bytes("all_reduce", size, axes, dtype)
        scatter = self._bytes("reduce_scatter", size, zero_axes, dtype)
        gather = self._bytes("all_gather", size, zero_axes, dtype)
        rest = tuple(axis for axis in axes if axis not in zero_axes)
        total = visible * scatter * (often if stage >= 2 else 1)
        total += self._bytes("all_reduce", size / self.rank.group(zero_axes), rest, dtype)
        if stage < 3:
            return total + gather
        return total + visible * 2 * gather * often

    def _bytes(self, kind: str, size: float, axes: tuple[int, ...], dtype: str) -> float:
        if self.rank.group(axes) < 2:
            return 0.0
        whole = max(size, LIMIT_BYTES)
        return self.routes.collective(kind, whole, axes, dtype) * size / whole
