"""What a plan file says besides its choices: what they take, how good they are, what else was met.

Everything here was predicted when the plan was made; nothing of it steers how the plan is carried
out. `autopar.cost_models.forecast` makes it, and `autopar.cost_models.replay` makes timelines and
memory over time from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from autopar.plan.shapes import LARGEST, Range
from autopar.units import format_bytes

SignedBytes = Annotated[int, Range(low=-LARGEST)]
Signed = Annotated[float, Range(low=-LARGEST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesForecast:
    """Equal nodes of the cluster, as `autopar.cost_models.cluster.NodeGroup` has them.

    Attributes:
        device: Name of the device.
        nodes: Number of nodes.
        devices_per_node: Devices of each.
        figures: Figures that differ from the catalogue, by ``section.key``, in the key's unit.
        node_usd_per_hour: Price of a node; None if not known.
        source: Where `figures` come from.
    """

    device: str
    nodes: int
    devices_per_node: int
    figures: Mapping[str, float]
    node_usd_per_hour: float | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast:
    """A tier of switches above the nodes.

    Attributes:
        nodes: Nodes below one switch.
        oversubscription: Bandwidth of its nodes over its bandwidth upwards.
        latency_s: One hop of a collective that passes through it.
    """

    nodes: int
    oversubscription: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterForecast:
    """The cluster that predictions are for.

    Attributes:
        text: Its short text, such as ``8x8xH100-SXM``.
        groups: Its nodes.
        tiers: Switches above them.
        fingerprint: Hash of what decides predictions: devices, their figures, and how they are
            joined.
    """

    text: str
    groups: tuple[NodesForecast, ...]
    tiers: tuple[TierForecast, ...]
    fingerprint: str

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all of it; None where that of some nodes is not known."""
        prices = [group.node_usd_per_hour for group in self.groups]
        if not prices or None in prices:
            return None
        return sum(group.nodes * (group.node_usd_per_hour or 0.0) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecast:
    """The cost model that predicted.

    Attributes:
        version: Number that grows with every change of what is predicted.
        fingerprint: Hash of its constants, of the software's, and of the devices' figures.
        software: Software stack whose kernels and host are priced.
        optimizer: Name of the optimizer.
        precision: Dtype of most of the parameters, and formats of products that differ from it.
    """

    version: int
    fingerprint: str
    software: str
    optimizer: str
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """One pipeline rank; all ranks at its place do and hold the same.

    Attributes:
        rank: The pipeline rank.
        stages: Its stages.
        device: Name of its device.
        capacity_bytes: What the device has for it; None if that is only guessed.
        compute_s: Kernels, and what collectives beside them slow them down.
        inline_s: Collectives for whose result computation waits.
        exposed_s: Waiting for collectives that were started earlier.
        idle_s: Waiting for other stages.
        host_s: Work of the host once per step.
        kernels: Seconds of `compute_s` by kind of kernel, largest first.
        collectives: Seconds of `inline_s` by axes, largest first.
        beside: Seconds of collectives beside computation, by axes: `exposed_s` is what of them
            was waited for.
        resident: Bytes before the step, by kind.
        peak: Bytes at the high-water mark, by kind.
        peak_at: The action at that mark, and the op if it is one of a program.
        allocated_bytes: Live tensors at the mark, rounded as the allocator does.
        reserved_bytes: What the allocator then holds.
        context_bytes: What lies outside of the allocator.
    """

    rank: int
    stages: tuple[int, ...]
    device: str
    capacity_bytes: int | None
    compute_s: float
    inline_s: float
    exposed_s: float
    idle_s: float
    host_s: float
    kernels: Mapping[str, Signed]
    collectives: Mapping[str, Signed]
    beside: Mapping[str, float]
    resident: Mapping[str, int]
    peak: Mapping[str, int]
    peak_at: str
    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.inline_s + self.exposed_s + self.idle_s + self.host_s

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors live at one time."""
        return sum(self.peak.values())

    @property
    def device_bytes(self) -> int:
        """All memory of the device that is in use."""
        return self.reserved_bytes + self.context_bytes

    @property
    def over_bytes(self) -> int:
        """Bytes beyond the capacity; negative if it fits, 0 if the capacity is not known."""
        return 0 if self.capacity_bytes is None else self.device_bytes - self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskForecast:
    """What equal actions ask of their ranks; see `autopar.cost_models.simulate.Task`.

    Attributes:
        stages: The stages that act.
        kind: Kind of action.
        last: Whether it is the last of its kind before an update.
        compute_s: Kernels.
        inline_s: Collectives for whose result computation waits.
        beside_s: Collectives beside computation.
        parts: Into how many those are cut.
        joins: Whether the action ends only when they are done.
    """

    stages: tuple[int, ...]
    kind: str
    last: bool
    compute_s: float
    inline_s: float
    beside_s: float
    parts: Annotated[int, Range(low=1)]
    joins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForecast:
    """Messages of equal duration.

    Attributes:
        kind: ``SEND_F`` or ``SEND_B``.
        seconds_s: Seconds of each.
        pairs: Stages that send and receive.
    """

    kind: str
    seconds_s: float
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingForecast:
    """What the simulator needs beside the plan's schedule to make its timeline again.

    Attributes:
        tasks: What actions take.
        messages: What messages take.
        edges: Pairs of stages with a boundary tensor.
        gradient_edges: Those whose tensors get a gradient.
        slowdown: Seconds that computation loses per second of a collective beside it.
        factor: Factor on all seconds, because of what idle ranks leave to others.
    """

    tasks: tuple[TaskForecast, ...]
    messages: tuple[MessageForecast, ...]
    edges: tuple[tuple[int, int], ...]
    gradient_edges: tuple[tuple[int, int], ...]
    slowdown: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectForecast:
    """What something does to live bytes, by kind, over those when it begins.

    Attributes:
        net: Bytes that it leaves, or frees.
        peak: Bytes at its high-water mark; None if it has none of its own.
        where: Place of that mark; what begins with a colon follows stage and kind of the action.
    """

    net: Mapping[str, SignedBytes]
    peak: Mapping[str, SignedBytes] | None
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkForecast:
    """Memory of a pipeline rank over a step, as a walk over the events of its schedule.

    Attributes:
        start: Live bytes at the start of the step, by kind.
        events: By event (`autopar.cost_models.events.Event`; such as ``run 3F``, ``run 3B last``,
            ``send 3F 4``) the numbers of its effects, occurrence by occurrence: ``5*16 6`` is
            sixteen times effect 5, then effect 6.
        shared: Number of the effect of summing gradients over stages, after the last action.
        update: Number of the effect of the optimizer step.
    """

    start: Mapping[str, int]
    events: Mapping[str, str]
    shared: int
    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """What the memory of every pipeline rank over time is made from.

    Attributes:
        effects: What events do to live bytes.
        ranks: Each pipeline rank.
    """

    effects: tuple[EffectForecast, ...]
    ranks: tuple[WalkForecast, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateForecast:
    """What a search has proven.

    Attributes:
        strategy: The search.
        bound_s: No plan of the space takes less; None without a bound.
        gap: How much faster another plan could be at most, as a fraction of the step.
        space: What the bound covers, in words.
        points: Number of points of the space.
        pruned: How many of them each reason has ruled out.
        evaluated: Number of plans that were priced.
        complete: Whether the search ended by itself.
        seconds_s: Seconds that it took.
    """

    strategy: str
    bound_s: float | None
    gap: float
    space: str
    points: int
    pruned: Mapping[str, int]
    evaluated: int
    complete: bool
    seconds_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativeForecast:
    """Another plan that was priced.

    Attributes:
        text: The plan in a few words, such as ``pp=8 dp=16 tp=8 megatron_sp m=64 zero=1 1f1b``.
        mesh: Its mesh.
        recompute: What its layers compute again, in a few words.
        step_s: Seconds of its step.
        fits: Whether every rank has enough memory.
        over_bytes: Bytes beyond the capacity of the rank with least room; negative if it fits.
        device_bytes: Memory of that rank's device that is in use.
        capacity_bytes: What that device has; None if that is only guessed.
        peak: Bytes of that rank at its high-water mark, by kind.
        compute_s: Kernels, of the rank that waits least for others.
        inline_s: Collectives of that rank for whose result computation waits.
        exposed_s: Its waiting for collectives that were started earlier.
        idle_s: Its waiting for other stages.
        host_s: Work of the host.
        collectives: Seconds of `inline_s` by axes.
    """

    text: str
    mesh: tuple[tuple[str, int], ...]
    recompute: str
    step_s: float
    fits: bool
    over_bytes: SignedBytes
    device_bytes: int
    capacity_bytes: int | None
    peak: Mapping[str, int]
    compute_s: float
    inline_s: float
    exposed_s: float
    idle_s: float
    host_s: float
    collectives: Mapping[str, Signed]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeForecast:
    """What another cluster, or less memory, would change.

    Attributes:
        text: What would be different.
        step_s: Seconds of the step of the best plan then; None if none fits.
        plan: That plan in a few words.
        peak_bytes: Most bytes of live tensors on any of its ranks.
        gap: How much faster another plan could be then, as a fraction.
    """

    text: str
    step_s: float | None
    plan: str
    peak_bytes: int
    gap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is predicted of a plan.

    Attributes:
        choices: Hash of the choices that it is about (`autopar.plan.fingerprint`): a plan that was
            edited by hand has another.
        cluster: What the plan runs on.
        cost_model: What predicted.
        global_batch_size: Samples of a step; None if not known.
        sequence_length: Tokens of a sample; None if it has none.
        step_s: Seconds of a training step.
        ranks: Each pipeline rank.
        timing: What its timeline is made from.
        memory: What its memory over time is made from.
        certificate: What the search has proven; None without one.
        alternatives: The best other plans, those that fit first, best first.
        changes: What other clusters, and less memory, would change; empty if nobody asked.
    """

    choices: str
    cluster: ClusterForecast
    cost_model: ModelForecast
    global_batch_size: int | None
    sequence_length: int | None
    step_s: float
    ranks: tuple[RankForecast, ...]
    timing: TimingForecast
    memory: MemoryForecast
    certificate: CertificateForecast | None = None
    alternatives: tuple[AlternativeForecast, ...] = ()
    changes: tuple[ChangeForecast, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return all(rank.over_bytes <= 0 for rank in self.ranks)

    @property
    def slowest(self) -> RankForecast:
        """The pipeline rank that waits least for others."""
        return min(self.ranks, key=lambda rank: (rank.idle_s, rank.rank))

    @property
    def fullest(self) -> RankForecast:
        """The pipeline rank with least room."""
        return max(self.ranks, key=lambda rank: (rank.over_bytes, -rank.rank))


def room_words(forecast: Forecast) -> str:
    """Whether the plan fits, in words."""
    if not forecast.ranks or forecast.fullest.capacity_bytes is None:
        return "memory of the devices is not known"
    full = forecast.fullest
    where = f" on pipeline rank {full.rank}" if len(forecast.ranks) > 1 else ""
    if full.over_bytes > 0:
        return f"DOES NOT FIT: over by {format_bytes(full.over_bytes)}{where}"
    return f"fits, {format_bytes(-full.over_bytes)} free at least{where}"


def cost_words(
    price_per_hour: float, step_s: float, batch: int | None, tokens: int | None, unit: str = "USD"
) -> str:
    """What a step costs, such as ``1.23 USD per million tokens``.

    Args:
        price_per_hour: Price of the cluster, in `unit` per hour.
        step_s: Seconds of a step.
        batch: Samples of a step, if known.
        tokens: Tokens of a sample, if it has any.
        unit: In what it is paid.
    """
    price = price_per_hour * step_s / 3600
    if not batch:
        return f"{price:.4g} {unit} per step"
    what = "tokens" if tokens else "samples"
    return f"{price / (batch * (tokens or 1)) * 1e6:.4g} {unit} per million {what}"
