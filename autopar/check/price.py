"""What a configuration of another framework takes, as the software that it is for carries it out.

The plan is the one that the file asks for: its mesh, its stages of as many layers as the framework
gives them, and what it computes again. Kernels, buffers and constants are those of its software
stack (`autopar.cost_models.software`), not those of this package's runtime.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Evaluator, Prediction, Software
from autopar.cost_models.software import on_device, stack
from autopar.graph.blocks import find_blocks
from autopar.graph.ir import Graph
from autopar.imports.imported import Imported
from autopar.plan.cost import is_matmul
from autopar.plan.plan import Plan
from autopar.plan.recompute import policy_nodes
from autopar.plan.stages import given_keys
from autopar.plan.strategies import parse_constraints

_REDUCTIONS = ("scaled_dot_product", "cross_entropy", "max", "topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A configuration and what it takes, predicted.

    Attributes:
        setting: The configuration, on its devices.
        plan: The plan that it asks for, without what depends on the model.
        prediction: Seconds and live bytes.
        device_bytes: Bytes of a device in use, for each pipeline rank.
        capacity_bytes: Bytes that a device has, for each pipeline rank.
        kinds: Bytes by kind at the peak of the fullest rank; they add up to its `device_bytes`.
        fullest: The pipeline rank with least room.
    """

    setting: Imported
    plan: Plan
    prediction: Prediction
    device_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    kinds: Mapping[str, int]
    fullest: int

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s

    @property
    def over_bytes(self) -> int:
        """Bytes beyond the memory of the fullest device; negative if it fits."""
        return self.device_bytes[self.fullest] - self.capacity_bytes[self.fullest]

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.over_bytes <= 0

    @property
    def binding(self) -> str:
        """The kind of memory of which there is most on the fullest rank."""
        return max(self.kinds, key=lambda kind: self.kinds[kind])


def software_of(setting: Imported, cluster: ClusterSpec, name: str | None = None) -> Software:
    """How the configuration's framework carries plans out on a cluster.

    Args:
        setting: The configuration.
        cluster: The cluster.
        name: Name of another software stack.
    """
    device = cluster.hardware(0)
    name = name or setting.stack
    optimizer = setting.optimizer
    if setting.master_weights and setting.precision != "fp32" and optimizer == "adamw":
        optimizer = "mixed_adamw"
    formats = {"bfloat16": "fp8"} if setting.precision == "fp8" else {}
    if device.kind == "cpu" or name == "autopar":
        return Software.of(device, optimizer, formats=formats)
    found = Software.of(device, optimizer, name, formats=formats)
    chosen = on_device(stack(name), device.name)
    implementation = found.implementation
    if setting.compiled is not None:
        implementation = replace(implementation, compiled=setting.compiled)
    return replace(
        found,
        implementation=implementation,
        context_bytes=chosen.context_bytes + chosen.bucket_bytes,
    )


class Pricer:
    """Prices configurations of one model on one cluster.

    Args:
        graph: The model.
        loss: Name of its loss.
        cluster: The cluster.
        software: How plans are carried out.
        batch: Samples of a step.
        gradient_bytes: Bytes of an element of a gradient of a 16-bit parameter.
    """

    def __init__(
        self,
        graph: Graph,
        loss: str,
        cluster: ClusterSpec,
        software: Software,
        batch: int,
        gradient_bytes: int,
    ) -> None:
        self.graph, self.cluster, self.software = graph, cluster, software
        self.batch, self.gradient_bytes = batch, gradient_bytes
        self.evaluator = Evaluator(graph, loss, cluster, software)
        self.blocks = find_blocks(graph)
        self._again: dict[object, frozenset[str]] = {}

    def plan(self, setting: Imported) -> Plan:
        """The plan that a configuration asks for.

        Raises:
            PlanError: If it contradicts itself, the model or the cluster.
        """
        mesh = setting.mesh()
        constraints = parse_constraints(setting.constraints(self.batch), mesh)
        # What is computed again is told node by node: frameworks choose otherwise than policies.
        pipeline = replace(constraints.pipeline, cuts=self.cuts(setting))
        return Plan(
            mesh=mesh.axes,
            strategy=constraints.strategy,
            order=constraints.order,
            pipeline=pipeline,
            zero=constraints.zero,
        )

    def cuts(self, setting: Imported) -> tuple[str, ...]:
        """Where the framework cuts stages; empty for where work balances, if it cannot be told."""
        paths = self.paths()
        layers = setting.stage_layers(len(paths)) if paths else None
        if layers is None or len(layers) == 1:
            return ()
        starts = itertools.accumulate(layers[:-1])
        return given_keys(self.graph, tuple(paths[start] for start in starts))

    def paths(self) -> tuple[str, ...]:
        """Module paths of the model's layers; empty if they are not of one kind."""
        repeated = [block for block in self.blocks if block.count > 1]
        return repeated[0].paths if len(repeated) == 1 else ()

    def price(self, setting: Imported) -> Priced:
        """What a configuration takes.

        Raises:
            PlanError: If it cannot be carried out.
        """
        plan = self.plan(setting)
        prediction = self.evaluator.evaluate(plan, self.again(setting))
        return self.priced(setting, plan, prediction)

    def priced(self, setting: Imported, plan: Plan, prediction: Prediction) -> Priced:
        """A prediction with the memory that is the framework's own."""
        extra = [self._wider(setting, prediction, rank) for rank in range(len(prediction.ranks))]
        used = tuple(
            rank.reserve.device_bytes + round(more * self._reserved(rank.rank))
            for rank, more in zip(prediction.ranks, extra, strict=True)
        )
        room = tuple(rank.capacity_bytes for rank in prediction.ranks)
        fullest = max(range(len(used)), key=lambda rank: (used[rank] - room[rank], -rank))
        cost = prediction.ranks[fullest]
        kinds = Counter({name: int(size) for name, size in cost.memory.peak.items() if size})
        kinds["gradients"] += extra[fullest]
        rest = used[fullest] - sum(kinds.values()) - cost.reserve.context_bytes
        kinds["context and buffers"] += cost.reserve.context_bytes
        kinds["held by the allocator"] += rest
        return Priced(
            setting=setting, plan=plan, prediction=prediction, device_bytes=used,
            capacity_bytes=room, kinds={k: v for k, v in kinds.most_common() if v > 0},
            fullest=fullest,
        )  # fmt: skip

    def _reserved(self, rank: int) -> float:
        return 1.0 if self.cluster.hardware(0).kind == "cpu" else self.software.reserved_factor

    def _wider(self, setting: Imported, prediction: Prediction, rank: int) -> int:
        """Bytes of gradients beyond those in the type of their parameters."""
        memory = prediction.ranks[rank].memory
        gradients = max(memory.resident["gradients"], memory.peak["gradients"])
        if setting.precision == "fp32" or self.gradient_bytes == 2:
            return 0
        return gradients * (self.gradient_bytes - 2) // 2

    # What is computed again

    def again(self, setting: Imported) -> frozenset[str]:
        """Names of the nodes that backward computes again under a configuration."""
        share = (setting.recompute_layers, setting.recompute_every)
        key = (setting.recompute, *share, setting.pp * setting.chunks if share[0] else 1)
        if key not in self._again:
            self._again[key] = frozenset(self._nodes(setting))
        return self._again[key]

    def _nodes(self, setting: Imported) -> Iterator[str]:
        kind, nodes = setting.recompute or "none", self.graph.nodes
        if kind == "none":
            return
        if kind in ("selective", "attention"):
            chosen = policy_nodes(self.graph, "selective")
            for node in nodes:
                attention = "scaled_dot_product" in node.op
                if attention if kind == "attention" else node.name in chosen:
                    yield node.name
            return
        full = policy_nodes(self.graph, "full")
        whole = setting.recompute_layers is None and setting.recompute_every == 1
        if kind == "full" and whole:
            yield from full
            return
        for block in self.blocks:
            for copy in self._copies(setting, block.count):
                inside = [i for i in block.nodes[copy] if nodes[i].name in full]
                yield from (nodes[i].name for i in self._within(inside, kind))

    def _copies(self, setting: Imported, count: int) -> Iterator[int]:
        """Copies of a block to which recomputation applies."""
        layers = setting.stage_layers(count) or (count,)
        most = setting.recompute_layers
        for start, size in zip((0, *itertools.accumulate(layers)), layers, strict=False):
            for place in range(size):
                every = (start + place + 1) % setting.recompute_every == 0
                if every and (most is None or place < most):
                    yield start + place

    def _within(self, inside: list[int], kind: str) -> Iterator[int]:
        """All nodes of a layer, or those that per-op checkpointing does not keep."""
        if kind == "full":
            yield from inside
            return
        products = 0
        for index in inside:
            node = self.graph.nodes[index]
            if any(name in node.op for name in _REDUCTIONS):
                continue
            products += is_matmul(node)
            if not is_matmul(node) or products % 2 == 0:
                yield index


def gradient_bytes_of(setting: Imported, name: str | None = None) -> int:
    """Bytes of an element of a gradient of a 16-bit parameter.

    Args:
        setting: The configuration.
        name: Name of another software stack.
    """
    if setting.gradient_bytes is not None and name is None:
        return setting.gradient_bytes
    name = name or setting.stack
    if setting.zero == 3 or name == "autopar":
        return 2  # of what is sharded, float32 sums live as long as a block's backward
    return stack(name).gradient_bytes
