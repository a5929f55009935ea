"""Stages: any cut of the graph in execution order, and what must pass between the parts.

A value is sent from the stage that makes it to every later stage that uses it, directly: a skip
connection jumps over the stages between. Ops that depend on nothing but user inputs, constants
and buffers that are never written (masks, positions, casts of labels) belong to no stage: every
stage that needs one computes it for itself. As execution order is a topological order, values only
flow forward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan.cost import node_costs
from autopar.plan.cuts import balance, borders
from autopar.plan.keys import op_keys
from autopar.sharding.factors import Factors
from autopar.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A value that passes from one stage to others.

    Attributes:
        value: Name of the value; a node's output, or a buffer that the source stage updates.
        source: The stage that makes it.
        targets: The stages that use it, ascending, all after `source`.
        gradient: Whether its gradient flows back.
    """

    value: str
    source: int
    targets: tuple[int, ...]
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Two stages between which values pass.

    Attributes:
        source: The earlier stage.
        target: The later stage.
        gradient: Whether a gradient of any of the values flows back.
    """

    source: int
    target: int
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A graph in stages.

    Attributes:
        count: Number of stages; some may have no ops.
        stage_of: Stage of every node by name, None where every stage that needs it computes it.
        nodes: For every stage the indexes of the nodes it computes, ascending.
        starts: For every stage the index of its first own node (``len(graph.nodes)`` for none
            from there on).
        boundaries: What passes between stages, in order of making.
        inputs: For every stage the graph inputs it reads, by value name, of all kinds but those
            that come as a boundary.
        shared: Parameters used in several stages, with these stages.
        outputs: For every stage the values of ``Graph.outputs`` that it gives; each once.
        owner: Stage that gives each output value.
    """

    count: int
    stage_of: dict[str, int | None]
    nodes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    inputs: tuple[tuple[str, ...], ...]
    shared: dict[str, tuple[int, ...]]
    outputs: tuple[tuple[str, ...], ...]
    owner: dict[str, int]

    def edges(self) -> tuple[Edge, ...]:
        """Pairs of stages between which values pass, ascending."""
        found: dict[tuple[int, int], bool] = {}
        for item in self.boundaries:
            for target in item.targets:
                key = (item.source, target)
                found[key] = found.get(key, False) or item.gradient
        return tuple(
            Edge(source=a, target=b, gradient=gradient)
            for (a, b), gradient in sorted(found.items())
        )

    def received(self, stage: int) -> tuple[Boundary, ...]:
        """Boundaries that `stage` receives."""
        return tuple(item for item in self.boundaries if stage in item.targets)

    def sent(self, stage: int) -> tuple[Boundary, ...]:
        """Boundaries that `stage` sends."""
        return tuple(item for item in self.boundaries if item.source == stage)

    def inputs_of(self, stage: int, graph: Graph, kind: str) -> tuple[str, ...]:
        """Graph inputs of one kind that `stage` reads: its parameters, buffers and so on."""
        wanted = {item.value.name for item in graph.inputs if item.kind == kind}
        return tuple(name for name in self.inputs[stage] if name in wanted)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What placing ops in stages needs to know of a graph."""

    staged: tuple[int, ...]
    free: frozenset[int]
    written: frozenset[str]


def is_random(op: str) -> bool:
    """Whether an op draws random numbers."""
    return op.split(".")[1] in _RANDOM


_RANDOM = frozenset(
    (
        "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm",
        "bernoulli", "uniform", "exponential", "normal", "normal_functional", "rrelu", "dropout",
        "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout",
        "multinomial", "random", "cauchy", "geometric", "log_normal", "poisson", "binomial",
    )
)  # fmt: skip


def input_only(graph: Graph, *, buffers: bool = True) -> frozenset[int]:
    """Indexes of nodes that depend on nothing trained, written or random.

    Args:
        graph: The graph.
        buffers: Whether buffers that forward does not write count as constants.
    """
    written = {out.target for out in graph.outputs if out.kind == "buffer"}
    tied = {
        item.value.name
        for item in graph.inputs
        if item.kind == "parameter"
        or (item.kind == "buffer" and (not buffers or item.target in written))
    }
    free = set()
    for index, node in enumerate(graph.nodes):
        if is_random(node.op) or not tied.isdisjoint(node.operands):
            tied.update(value.name for value in node.outputs)
        else:
            free.add(index)
    return frozenset(free)


def staged_nodes(graph: Graph) -> tuple[int, ...]:
    """Indexes of the nodes that belong to a stage, in order of execution."""
    free = input_only(graph)
    return tuple(index for index in range(len(graph.nodes)) if index not in free)


def resolve_cut(graph: Graph, keys: Sequence[str], text: str) -> int | None:
    """Index of the first node of `text`, an op key or a module path; None if there is none."""
    for index, key in enumerate(keys):
        if key == text:
            return index
    for index, node in enumerate(graph.nodes):
        if text and (node.module == text or node.module.startswith(text + ".")):
            return index
    return None


def _given(
    graph: Graph, staged: tuple[int, ...], cuts: Sequence[str], where: str
) -> tuple[int, ...]:
    """Places in `staged` at which the given cuts are."""
    keys = op_keys(graph)
    places: list[int] = []
    for position, text in enumerate(cuts):
        index = resolve_cut(graph, keys, text)
        here = f"{where}[{position}]"
        if index is None:
            raise PlanError(
                f"the graph cannot be cut before {text!r}, which the model lacks",
                expected="op keys such as "
                + repr(keys[staged[len(staged) // 2]])
                + ", or module paths"
                if staged
                else None,
                where=here,
            )
        place = bisect_left(staged, index)
        if places and place < places[-1]:
            raise PlanError(
                f"cut {text!r} lies before cut {cuts[position - 1]!r} in order of execution",
                expected="cuts in the order in which the model runs",
                where=here,
            )
        places.append(place)
    return tuple(places)


def assign_stages(
    graph: Graph,
    factors: Factors,
    num_stages: int,
    cuts: Sequence[str] | None = None,
    *,
    where: str = "cuts",
) -> Stages:
    """Cut `graph` into stages.

    Without `cuts` the work of the largest stage is made least, on borders of repeated blocks
    where that costs little, and among equally good cuts those that send the fewest bytes.

    Args:
        graph: The graph.
        factors: Its factors.
        num_stages: Number of stages.
        cuts: First op of every stage but the first, as op keys or module paths.
        where: Name of the cuts, for errors.

    Returns:
        The stages.

    Raises:
        PlanError: If there are fewer ops than stages, or the given cuts are wrong.
    """
    staged = staged_nodes(graph)
    if cuts:
        if len(cuts) != num_stages - 1:
            raise PlanError(
                f"{counted(len(cuts), 'cut')} for {counted(len(cuts) + 1, 'stage')}, not "
                f"{num_stages}",
                expected=counted(num_stages - 1, "cut"),
                where=where,
            )
        places = _given(graph, staged, cuts, where)
    elif num_stages == 1:
        places = ()
    else:
        places = _automatic(graph, factors, staged, num_stages)
    return _Assembly(graph, staged, places).stages(where)


def cut_keys(graph: Graph, stages: Stages) -> tuple[str, ...]:
    """The cuts of `stages` as a plan names them: op keys of first ops."""
    keys = op_keys(graph)
    return tuple(keys[min(start, len(keys) - 1)] for start in stages.starts[1:])


def given_keys(graph: Graph, cuts: Sequence[str]) -> tuple[str, ...]:
    """Op keys of `cuts`, op keys or module paths that `assign_stages` has accepted."""
    keys = op_keys(graph)
    found = [resolve_cut(graph, keys, text) for text in cuts]
    return tuple(keys[index] for index in found if index is not None)


def _automatic(
    graph: Graph, factors: Factors, staged: tuple[int, ...], num_stages: int
) -> tuple[int, ...]:
    forbidden = forbidden_places(graph, staged)
    free = [place for place in range(1, len(staged)) if place not in forbidden]
    if len(free) < num_stages - 1:
        few = f"{counted(len(staged), 'op')} that belong to a stage"
        raise PlanError(
            f"{counted(num_stages, 'stage')} are asked for, but "
            f"the model has {few}, which can be cut "
            f"in at most {counted(len(free) + 1, 'stage')}",
            expected=f"at most {counted(len(free) + 1, 'stage')} (pipeline ranks times chunks)",
            fix="use fewer pipeline ranks or chunks, or say where to cut: cuts=[...] may leave "
            "stages empty",
            where="mesh",
        )
    costs = node_costs(graph, factors)
    return balance(
        [costs[index] for index in staged],
        crossing_bytes(graph, staged),
        free,
        borders(graph, staged),
        num_stages,
    )


def forbidden_places(graph: Graph, staged: tuple[int, ...]) -> set[int]:
    """Places at which a cut would part the first use of a buffer from its update."""
    place_of = {index: place for place, index in enumerate(staged)}
    maker = {
        value.name: place_of[index] for index in staged for value in graph.nodes[index].outputs
    }
    named = {item.target: item.value.name for item in graph.inputs if item.kind == "buffer"}
    first: dict[str, int] = {}
    for place, index in enumerate(staged):
        for name in graph.nodes[index].operands:
            first.setdefault(name, place)
    forbidden: set[int] = set()
    for out in graph.outputs:
        if out.kind == "buffer" and out.value in maker and out.target in named:
            read = first.get(named[out.target])
            if read is not None:
                forbidden.update(range(read + 1, maker[out.value] + 1))
    return forbidden


def crossing_bytes(graph: Graph, staged: tuple[int, ...]) -> list[int]:
    """For every place in `staged` the bytes made before it and used at or after it."""
    last: dict[str, int] = {}
    for place, index in enumerate(staged):
        for name in graph.nodes[index].operands:
            last[name] = place
    change = [0] * (len(staged) + 2)
    for place, index in enumerate(staged):
        for value in graph.nodes[index].outputs:
            end = last.get(value.name, place)
            if end > place:
                change[place + 1] += value.spec.size_bytes
                change[end + 1] -= value.spec.size_bytes
    found, total = [], 0
    for place in range(len(staged)):
        total += change[place]
        found.append(total)
    return found


class _Assembly:
    """Everything that follows from where the cuts are."""

    def __init__(self, graph: Graph, staged: tuple[int, ...], places: tuple[int, ...]) -> None:
        self.graph, self.count = graph, len(places) + 1
        self.starts = tuple(
            staged[place] if place < len(staged) else len(graph.nodes) for place in (0, *places)
        )
        self.stage: dict[int, int | None] = dict.fromkeys(range(len(graph.nodes)))
        ends = (*places, len(staged))
        for stage, (low, high) in enumerate(zip((0, *places), ends, strict=True)):
            for index in staged[low:high]:
                self.stage[index] = stage
        self.made = {
            value.name: index for index, node in enumerate(graph.nodes) for value in node.outputs
        }
        self.kinds = {item.value.name: item.kind for item in graph.inputs}
        self.buffers = {i.target: i.value.name for i in graph.inputs if i.kind == "buffer"}
        self.updates = {
            self.buffers[out.target]: out.value
            for out in graph.outputs
            if out.kind == "buffer" and out.value is not None and out.target in self.buffers
        }

    def maker(self, name: str) -> int | None:
        """The stage that makes a value; None for graph inputs and what each stage computes."""
        index = self.made.get(name)
        return None if index is None else self.stage[index]

    def stages(self, where: str) -> Stages:
        holder = self.holders(where)
        owner = self.owners(holder)
        wanted: list[set[str]] = [set() for _ in range(self.count)]
        for name, stage in owner.items():
            wanted[stage].add(name)
        nodes, reads = [], []
        for stage in range(self.count):
            mine, read = self.closure(stage, wanted[stage])
            nodes.append(mine)
            reads.append(read)
        boundaries = self.boundaries(reads, holder)
        inputs = self.inputs(reads, holder)
        users = {
            item.value.name: tuple(s for s in range(self.count) if item.value.name in inputs[s])
            for item in self.graph.parameters()
        }
        return Stages(
            count=self.count,
            stage_of={node.name: self.stage[i] for i, node in enumerate(self.graph.nodes)},
            nodes=tuple(nodes),
            starts=self.starts,
            boundaries=boundaries,
            inputs=inputs,
            shared={name: stages for name, stages in users.items() if len(stages) > 1},
            outputs=tuple(
                tuple(name for name, stage in owner.items() if stage == s)
                for s in range(self.count)
            ),
            owner=owner,
        )

    def holders(self, where: str) -> dict[str, int]:
        """The stage that keeps each buffer that forward writes."""
        found: dict[str, int] = {}
        readers: dict[str, set[int]] = {name: set() for name in self.updates}
        for index, node in enumerate(self.graph.nodes):
            stage = self.stage[index]
            if stage is not None:
                for name in readers.keys() & set(node.operands):
                    readers[name].add(stage)
        for name, new in self.updates.items():
            made = self.maker(new)
            first = min(readers[name], default=made)
            found[name] = first if first is not None else 0
            if made is not None and made != found[name]:
                raise PlanError(
                    f"buffer {name} is read in stage {found[name]} and updated in stage {made}: "
                    "an update cannot go back",
                    expected="cuts that leave the uses of a buffer before its update in one stage",
                    where=where,
                )
        return found

    def owners(self, holder: dict[str, int]) -> dict[str, int]:
        """The stage that gives each output."""
        owner: dict[str, int] = {}
        # A buffer's new value stays where the buffer is, even if it is a result as well.
        for out in sorted(self.graph.outputs, key=lambda out: out.kind != "buffer"):
            if out.value is None or out.value in owner:
                continue
            made = self.maker(out.value)
            if made is None and out.kind == "buffer":
                made = holder.get(self.buffers.get(out.target, ""))
            if made is None:
                made = holder.get(out.value)
            owner[out.value] = made if made is not None else self.count - 1
        return owner

    def closure(self, stage: int, wanted: set[str]) -> tuple[tuple[int, ...], set[str]]:
        """Nodes a stage computes and all values it takes from elsewhere."""
        mine = {index for index, own in self.stage.items() if own == stage}
        read: set[str] = set()
        queue = [name for index in mine for name in self.graph.nodes[index].operands]
        queue += wanted
        seen: set[str] = set()
        while queue:
            name = queue.pop()
            if name in seen:
                continue
            seen.add(name)
            index = self.made.get(name)
            if index is None or self.stage[index] not in (None, stage):
                read.add(name)
            elif self.stage[index] is None and index not in mine:
                mine.add(index)
                queue += self.graph.nodes[index].operands
        return tuple(sorted(mine)), read

    def boundaries(self, reads: list[set[str]], holder: dict[str, int]) -> tuple[Boundary, ...]:
        targets: dict[str, list[int]] = {}
        for stage, names in enumerate(reads):
            for name in names:
                source = holder.get(name, self.maker(name))
                if source is not None and source != stage:
                    targets.setdefault(name, []).append(stage)
        order = {name: place for place, name in enumerate((*self.kinds, *self.made))}
        found = []
        for name in sorted(targets, key=order.__getitem__):
            source = holder.get(name, self.maker(name))
            assert source is not None and source < min(targets[name]), f"{name} flows back"
            found.append(
                Boundary(
                    value=name,
                    source=source,
                    targets=tuple(targets[name]),
                    gradient=self.graph.spec(name).requires_grad,
                )
            )
        return tuple(found)

    def inputs(self, reads: list[set[str]], holder: dict[str, int]) -> tuple[tuple[str, ...], ...]:
        """Graph inputs by stage; the first holds parameters and buffers that nothing uses."""
        used = set().union(*reads) if reads else set()
        found = []
        for stage, names in enumerate(reads):
            mine = []
            for name, kind in self.kinds.items():
                here = name in names and holder.get(name, stage) == stage
                here = here or holder.get(name) == stage
                idle = kind in ("parameter", "buffer") and name not in used and name not in holder
                if here or (stage == 0 and idle):
                    mine.append(name)
            found.append(tuple(mine))
        return tuple(found)
