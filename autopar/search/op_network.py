"""How the ops of one period of a model are split, as a pairwise cost network.

Variables:
    op          one state per tuple of choices along the axes that are searched
    value       of a value that several take: the pair in which it is there for them; each takes it
                from there
    parameter   of one that several take: the pair in which it is held
Costs, in seconds of one microbatch of the whole depth on one rank:
    op          its kernels and collectives, forward and backward (`autopar.search.op_costs`); where
                it alone takes a parameter, that parameter's (`autopar.search.op_params`)
    edge        reshards of a value and of its gradient (`autopar.search.op_routes`)
    value       adding up its gradients
Bytes are costs of single states, too: what an op leaves for backward, and what parameters take.

Where the host launches kernels beside the device, seconds of both are weighed by what they add to
the time of a known solution (`_Builder.race`).

States that no solution better than a known one can have are dropped before any edge is priced: all
costs are at least 0, so that the least costs of all ops are a bound (`_Builder.prune`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.compute import RACE, race
from autopar.cost_models.evaluate import Software, fine_mesh_of
from autopar.cost_models.layout import Layout
from autopar.cost_models.ops.call import Rank
from autopar.cost_models.pricing import Prices
from autopar.graph.ir import TensorSpec
from autopar.plan.build import constraints_of
from autopar.plan.microbatch import choose_in_time
from autopar.plan.plan import Plan
from autopar.plan.strategies import MODEL, fine_axes
from autopar.search.network import Assignment, NetworkBuilder
from autopar.search.op_costs import Op, OpPricer, OpStates, Pairs, launch_of, local_bytes
from autopar.search.op_graph import Made, Use, period_of
from autopar.search.op_params import Holding
from autopar.search.op_problem import OpProblem, all_bytes
from autopar.search.op_routes import Routes
from autopar.search.solve import solve
from autopar.sharding.choices import Choices
from autopar.sharding.placement import Pair
from autopar.sharding.sharded import replicated

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FREE_AXES = 4
"""Most sub-axes that are searched at once unless asked for more."""
STARTS: tuple[tuple[str, ...], ...] = (
    (*MODEL, "seq"),
    MODEL,
    ("batch", "seq"),
    ("batch", *MODEL, "seq"),
)
"""What the axes searched split in known plans, best first."""


def op_problem(
    layout: Layout,
    plan: Plan,
    loss: str | None,
    cluster: ClusterSpec,
    software: Software | None = None,
    *,
    axes: Sequence[str] | None = None,
    prices: Sequence[float] = (0.0,),
    pinned: frozenset[str] = frozenset(),
) -> OpProblem:
    """The op problem of a model on the mesh of a plan.

    Args:
        layout: The model, with equal layers folded.
        plan: Mesh, microbatches, ZeRO; and the choices along axes that are not searched.
        loss: Name of the loss, None for a graph without.
        cluster: What it runs on.
        software: How it is carried out; this package's runtime by default.
        axes: Axes of the plan's mesh to search; by default all but the pipeline's, or, if these
            have more than `FREE_AXES` sub-axes, those that do not split data alone.
        prices: For which prices of memory the best solution is to be among those left, in units
            of `OpProblem.unit_price`; without any all states are left.
        pinned: Names of nodes that choose as the plan says.

    Raises:
        PlanError: If the plan does not fit the model.
    """
    return _Builder(layout, plan, loss, cluster, software, axes, prices, pinned).build()


class _Builder:
    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        loss: str | None,
        cluster: ClusterSpec,
        software: Software | None,
        axes: Sequence[str] | None,
        prices: Sequence[float],
        pinned: frozenset[str],
    ) -> None:
        self.prices = prices
        device = cluster.hardware(0)
        self.plan, self.loss, self.device = plan, loss, device
        self.software = software or Software.of(device)
        self.placement = layout.place(plan)
        self.layout = self.placement.layout
        self.pinned = {self.layout.indexes[self.layout.positions[name]] for name in pinned}
        self.constraints = constraints_of(plan)
        self.mesh, self.owner = fine_axes(plan.device_mesh, plan.pipeline)
        self.free = self._free(axes)
        self.rank = Rank.of(self.mesh)
        wires = Prices(cluster, *fine_mesh_of(plan))
        speed = self.software.speed
        bandwidth = device.memory_bytes_per_s * device.efficiency.memory_share
        self.wires, self.launch_s = wires, launch_of(device)
        self.byte_s = speed.element_factor * speed.time_factor / bandwidth
        self.weigh(1.0, 0.0)
        self.pricer = OpPricer(
            self.layout.folded.spec, self.rank, self.software.implementation, device, speed,
            wires,
        )  # fmt: skip
        self.period = period_of(self.placement, loss)

    def weigh(self, device: float, host: float) -> None:
        """Let a second of the device and one of the host cost so much from now on."""
        self.weights = (device, host)
        self.routes = Routes(self.rank, self.wires, self.byte_s, self.launch_s, self.weights)
        self.holding = Holding(
            self.plan, self.owner, self.rank, self.routes, self.software, self.device
        )

    def race(self, states: Sequence[OpStates]) -> None:
        """Weigh device and host as a program of a known solution does that waits for either.

        The time of a program is a convex function of both (`autopar.cost_models.compute.race`) that
        doubles with them, so that its slopes at a solution give its value there and never more
        elsewhere.
        """
        found = solve(self.assembled(states).network).assignment
        if not found or not self.launch_s:
            return
        values = []
        for weights in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
            self.weigh(*weights)
            values.append(self.assembled(states).network.value(found))
        rest, device, host = values
        device, host = device - rest, host - rest
        whole = float(race(device, host))
        self.weigh((device / whole) ** (RACE - 1), (host / whole) ** (RACE - 1))

    def _free(self, axes: Sequence[str] | None) -> tuple[int, ...]:
        names = [name for name in self.owner if name in dict(self.plan.mesh)]
        if axes is None:
            data = self.constraints.data_axes()
            many = len(names) > FREE_AXES
            axes = [name for name in names if not (many and name in data)]
        return tuple(
            index
            for index, name in enumerate(self.owner)
            if name in axes and self.mesh.shape[index] > 1
        )

    def build(self) -> OpProblem:
        """All of it."""
        states = self.pricer.states(self.ops())
        start = self.known(states)
        begun = [item.only(keep) for item, keep in zip(states, start, strict=True)]
        self.race(begun)
        few = self.assembled(begun)
        best = solve(few.network)
        chosen = [
            item.choices(state) for item, state in zip(few.states, best.assignment, strict=False)
        ]
        unit = 0.0
        if chosen:
            unit = best.value / max(few.size_bytes(few.bytes, best.assignment), 1.0)
            known = {part * unit: solve(few.priced(part * unit)).value for part in self.prices}
            states = self.prune(states, start, known) if known else states
        problem = self.assembled(states)
        return replace(problem, start=self.completed(problem, chosen), unit_price=unit)

    def ops(self) -> list[Op]:
        """The calls to price."""
        factors, choices = self.layout.factors, self.placement.sharded.choices
        kinds = {item.value.name: item.kind for item in self.layout.folded.inputs}
        return [
            Op(
                node=tied.node,
                rule=factors.rules[tied.index],
                units=factors.units[tied.index],
                kinds=tuple(kinds.get(name, "") for name in tied.node.operands),
                chosen=choices[tied.index],
                free=() if tied.fixed or not self.pinned.isdisjoint(tied.members) else self.free,
            )
            for tied in self.period.ops
        ]

    # Costs of single states

    def known(self, states: Sequence[OpStates]) -> list[list[int]]:
        """For every op the states that known plans choose."""
        found: list[dict[int, None]] = [{item.plan: None} for item in states]
        names = {self.owner[axis] for axis in self.free}
        for order in STARTS:
            rules = replace(
                self.constraints,
                explicit=False,
                order=tuple(
                    (axis, order if axis in names else own) for axis, own in self.constraints.order
                ),
            )
            choices = choose_in_time(
                self.layout.folded, self.layout.factors, self.mesh, self.owner, rules
            )
            for number, tied in enumerate(self.period.ops):
                place = states[number].find(choices[tied.index])
                if place >= 0:
                    found[number][place] = None
        return [sorted(item) for item in found]

    def alone(self, made: Made, target: Pairs) -> tuple[Floats, Floats]:
        """Seconds and bytes of a parameter that one op takes, by the op's states."""
        costs = []
        for pair in target.distinct:
            held = self.holding.pair(made.spec.shape, (pair,))
            costs.append(self.holding.cost(made.spec, held, (pair,)))
        seconds = made.count * np.array([item.seconds for item in costs])
        size = made.count * np.array([item.size_bytes for item in costs])
        return seconds[target.place], size[target.place]

    def prune(
        self,
        states: Sequence[OpStates],
        start: Sequence[list[int]],
        best: Mapping[float, float],
    ) -> list[OpStates]:
        """Drop states with which an op alone costs more than known solutions leave for it.

        Args:
            states: Of every op.
            start: States that stay.
            best: Value of a solution for every price of a byte.
        """
        every = _Assembly(self, states)
        every.singles()
        stays = [np.zeros(len(item), dtype=bool) for item in states]
        unary = every.build.build().unary[: len(states)]
        size = all_bytes(every.saved, every.held)
        for price, value in best.items():
            costs = [own + price * size.get(i, 0.0) for i, own in enumerate(unary)]
            room = value - sum(float(own.min()) for own in costs)
            for stay, own in zip(stays, costs, strict=True):
                stay |= own <= own.min() + room * (1 + 1e-9)
        for stay, keep in zip(stays, start, strict=True):
            stay[keep] = True
        return [item.only(np.flatnonzero(stay)) for item, stay in zip(states, stays, strict=True)]

    # The network

    def assembled(self, states: Sequence[OpStates]) -> OpProblem:
        """The network of some states of every op."""
        return _Assembly(self, states).run()

    def completed(self, problem: OpProblem, chosen: Sequence[Choices]) -> Assignment:
        """The best assignment in which ops choose so; none if they cannot."""
        if not chosen:
            return ()
        network = problem.network
        keep = [np.arange(size) for size in network.sizes]
        for number, (item, choices) in enumerate(zip(problem.states, chosen, strict=True)):
            keep[number] = np.array([item.find(choices)])
        found = solve(network.kept(keep))
        return tuple(int(own[state]) for own, state in zip(keep, found.assignment, strict=False))


class _Assembly:
    """Puts a network together."""

    def __init__(self, builder: _Builder, states: Sequence[OpStates]) -> None:
        self.builder, self.states = builder, tuple(states)
        self.period = builder.period
        self.build = NetworkBuilder()
        self.saved: dict[int, Floats] = {}
        self.held: dict[int, Floats] = {}
        self.source = {(use.op, use.slot): made for made in self.period.values for use in made.uses}

    def run(self) -> OpProblem:
        """All variables and edges."""
        self.singles()
        for made in self.period.values:
            self.value(made)
        for made in self.period.parameters:
            if len(made.uses) > 1:
                self.parameter(made)
        builder = self.builder
        return OpProblem(
            network=self.build.build(),
            period=self.period,
            states=self.states,
            saved_bytes=self.saved,
            held_bytes=self.held,
            start=(),
            unit_price=0.0,
            placement=builder.placement,
            plan=builder.plan,
        )

    def singles(self) -> None:
        """The ops, and all costs of single states of theirs."""
        for tied, item in zip(self.period.ops, self.states, strict=True):
            device, host = self.builder.weights
            seconds = device * item.device + host * item.host
            self.build.variable(tied.node.name, tied.count * seconds)
        for made in self.period.parameters:
            if len(made.uses) == 1:
                (use,) = made.uses
                seconds, size = self.builder.alone(made, self.wanted(use))
                self.build.add_unary(use.op, seconds)
                self.add(self.held, use.op, size)
        self.ends()
        self.keep()

    def value(self, made: Made) -> None:
        """Edges of a value; a variable of its own if several take it."""
        routes = self.builder.routes
        sources = self.states[made.op].outputs(made.slot)
        wanted = [self.wanted(use) for use in made.uses]
        strided = self.strided(made)
        if not made.shared:
            (use,), (target,) = made.uses, wanted
            costs = routes.pairs(made.spec, sources.distinct, target.distinct, strided)
            costs = costs[np.ix_(sources.place, target.place)]
            self.build.add_edge(made.op, use.op, use.count * costs)
            return
        pairs = _unlike(
            [pair for item in (sources, *wanted) for pair in item.distinct],
            made.spec.requires_grad,
        )
        hub = self.build.variable(made.name, self.sums(made, pairs))
        costs = routes.pairs(made.spec, sources.distinct, pairs, strided)[sources.place]
        self.build.add_edge(made.op, hub, made.count * costs)
        for use, target in zip(made.uses, wanted, strict=True):
            costs = routes.pairs(made.spec, pairs, target.distinct)[:, target.place]
            self.build.add_edge(hub, use.op, use.count * costs)

    def wanted(self, use: Use) -> Pairs:
        return self.states[use.op].operands(use.slot)

    def sums(self, made: Made, pairs: Sequence[Pair]) -> Floats:
        """Seconds of adding up gradients that come from several uses."""
        extra = sum(use.count for use in made.uses) - made.count
        if not made.spec.requires_grad:
            extra = 0
        rank = self.builder.rank
        size = [local_bytes(made.spec, _gradient(pair), rank) for pair in pairs]
        device, host = self.builder.weights
        moved = 3 * self.builder.byte_s * np.array(size, dtype=np.float64)
        return extra * (device * moved + host * self.builder.launch_s)

    def parameter(self, made: Made) -> None:
        """A variable for how a parameter that several take is held."""
        holding = self.builder.holding
        shape = made.spec.shape
        wanted = [self.wanted(use) for use in made.uses]
        held = holding.ways(shape, [pair for target in wanted for pair in target.distinct])
        costs = [holding.cost(made.spec, pair, ()) for pair in held]
        seconds = np.array([item.seconds for item in costs])
        variable = self.build.variable(made.name, made.count * seconds + self.sums(made, held))
        self.held[variable] = made.count * np.array([item.size_bytes for item in costs])
        for use, target in zip(made.uses, wanted, strict=True):
            ways = self.builder.routes.pairs(made.spec, held, target.distinct)
            allowed = [[holding.allows(own, pair) for pair in target.distinct] for own in held]
            ways = np.where(allowed, ways, np.inf)
            self.build.add_edge(variable, use.op, use.count * ways[:, target.place])

    def ends(self) -> None:
        """The loss and buffers end up whole."""
        graph = self.builder.layout.folded
        whole = replicated(self.builder.mesh)
        ends = {out.value for out in graph.outputs if out.kind == "buffer"}
        ends.add(self.builder.loss)
        for index, node in enumerate(graph.nodes):
            number = self.period.of_node[index]
            for slot, value in enumerate(node.outputs):
                if number < 0 or value.name not in ends:
                    continue
                made = self.states[number].outputs(slot)
                costs = self.builder.routes.pairs(value.spec, made.distinct, [whole])[:, 0]
                time = self.builder.rank.time
                if time is not None:
                    costs = np.where(np.isfinite(costs), costs, 0.0)
                self.build.add_unary(number, costs[made.place])

    # Bytes

    def keep(self) -> None:
        """What forward leaves for backward; what several keep of one value counts once."""
        carried: set[tuple[int, int]] = set()
        for number, (tied, item) in enumerate(zip(self.period.ops, self.states, strict=True)):
            own = item.own_bytes
            for slot in np.flatnonzero(item.kept.any(axis=0)).tolist():
                made = self.source.get((number, slot))
                if made is None:
                    continue
                root = self.root(made)
                if root in carried:
                    continue
                carried.add(root)
                own = own + self.sizes(made.spec, item.operands(slot))
            for slot in item.results:
                if (number, slot) not in carried:
                    spec = tied.node.outputs[slot].spec
                    carried.add((number, slot))
                    own = own + self.sizes(spec, item.outputs(slot))
            self.add(self.saved, number, tied.count * own)

    def root(self, made: Made) -> tuple[int, int]:
        """The op and output whose memory a value shares."""
        last = list(self.chain(made))[-1]
        return last.op, last.slot

    def strided(self, made: Made) -> bool:
        """Whether a value's elements do not lie in a row."""
        return any(self.states[item.op].strided[item.slot] for item in self.chain(made))

    def chain(self, made: Made) -> Iterator[Made]:
        """A value and those that it is a view of."""
        found: Made | None = made
        while found is not None:
            yield found
            operand = self.states[found.op].views[found.slot]
            found = self.source.get((found.op, operand)) if operand >= 0 else None

    def sizes(self, spec: TensorSpec, pairs: Pairs) -> Floats:
        """Local bytes of a value in the pair of each state."""
        rank = self.builder.rank
        found = [local_bytes(spec, pair, rank) for pair in pairs.distinct]
        return np.array(found, dtype=np.float64)[pairs.place]

    def add(self, vectors: dict[int, Floats], variable: int, size: Floats) -> None:
        vectors[variable] = vectors[variable] + size if variable in vectors else size


def _unlike(pairs: Sequence[Pair], trains: bool) -> list[Pair]:
    """The distinct pairs; without a gradient, the distinct placements."""
    if trains:
        return list(dict.fromkeys(pairs))
    return list({pair.forward: pair for pair in pairs}.values())


def _gradient(pair: Pair) -> Pair:
    return Pair(pair.gradient, pair.forward)
