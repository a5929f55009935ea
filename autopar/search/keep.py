"""What constraints of a search mean for a model: its units, its factors and its parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from autopar.cost_models.evaluate import Evaluator
from autopar.cost_models.layout import Layout, Placement
from autopar.errors import PlanError, meant
from autopar.graph.ir import Graph
from autopar.plan.assign import kept_whole
from autopar.plan.build import constraints_of, words_of
from autopar.plan.keys import op_keys
from autopar.plan.microbatch import choose_in_time
from autopar.plan.placements import Wanted, lies, wanted_of
from autopar.plan.plan import Plan
from autopar.plan.stages import resolve_cut, staged_nodes
from autopar.plan.strategies import Constraints, check_factor_names, fine_axes
from autopar.search.asked import Asked
from autopar.search.space import Point, Space, divisors
from autopar.search.units import Units

Edges = tuple[int, ...]
"""First unit of every stage but the first."""
Sharding = tuple[int, str]
"""Size of a tensor axis and what it splits."""
_CUTS = "constraints['cuts']"


# Cuts


def asked_edges(units: Units, asked: Asked) -> Edges | None:
    """First unit of every stage but the first, if constraints fix that.

    Raises:
        PlanError: If stages cannot begin there.
    """
    if asked.cuts:
        return edges_of(units, asked.cuts)
    return None if asked.layers is None else edges_of_layers(units, *asked.layers)


def edges_of(units: Units, cuts: Sequence[str]) -> tuple[int, ...]:
    """First unit of every stage but the first.

    Args:
        units: The units of a model.
        cuts: Where these stages begin, as op keys or module paths.

    Raises:
        PlanError: If one is not where a unit begins; names those that are near.
    """
    graph = units.graph
    keys, staged = op_keys(graph), staged_nodes(graph)
    first = {mine[0]: unit for unit, mine in enumerate(units.nodes)}
    found: list[int] = []
    for position, text in enumerate(cuts):
        where = f"{_CUTS}[{position}]"
        index = resolve_cut(graph, keys, text)
        if index is None:
            raise _unknown(graph, units, text, where)
        place = bisect_left(staged, index)
        unit = first.get(staged[place]) if place < len(staged) else None
        if not unit:  # inside of a unit, or at an end of the model
            raise _no_border(units, staged, place, text, where)
        if found and unit <= found[-1]:
            twice = unit == found[-1]
            raise PlanError(
                f"cut {text!r} lies {'where' if twice else 'before'} cut {cuts[position - 1]!r}"
                + (
                    " does, which leaves a stage without ops" if twice else " in order of execution"
                ),
                expected="cuts in the order in which the model runs, each at another place",
                where=where,
            )
        found.append(unit)
    return tuple(found)


def edges_of_layers(units: Units, first: int | None, last: int | None, stages: int) -> Edges | None:
    """First unit of every stage but the first, of stages of so many layers.

    Args:
        units: The units of a model.
        first: Layers of the first stage; None for as many as others have.
        last: Layers of the last stage.
        stages: Number of stages.

    Returns:
        The units; None for a model whose layers are not of one kind.

    Raises:
        PlanError: If the layers do not divide so.
    """
    layers = [unit for unit, block in enumerate(units.block) if block >= 0]
    if len({units.block[unit] for unit in layers}) != 1:
        return None
    ends = [number for number in (first, last) if number is not None]
    each, left = divmod(len(layers) - sum(ends), max(stages - len(ends), 1))
    if left or each < 1:
        raise PlanError(
            f"{len(layers)} layers do not divide among {stages} stages of which the first has"
            f" {first or 'as many as others'} and the last {last or 'as many as others'}",
            expected="as many layers on each of the others",
            where="constraints['stage_layers']",
        )
    sizes = [each if first is None else first, *[each] * (stages - 2)]
    return tuple(layers[begun] for begun in accumulate(sizes))


def _unknown(graph: Graph, units: Units, text: str, where: str) -> PlanError:
    paths = {node.module for node in graph.nodes if node.module}
    return PlanError(
        f"stages cannot begin at {text!r}, which the model lacks",
        expected="module paths or op keys, such as " + repr(border_name(units, units.count // 2)),
        fix=meant(text, sorted(paths)),
        where=where,
    )


def _no_border(units: Units, staged: Sequence[int], place: int, text: str, where: str) -> PlanError:
    """That a cut is in a unit, or leaves a stage without ops."""
    if place in (0, len(staged)):
        end = "first" if place == 0 else "last"
        what = f"cut {text!r} leaves the {end} stage without ops"
        near = [1] if place == 0 else [units.count - 1]
    else:
        unit = units.unit_of[staged[place]]
        what = f"cut {text!r} is inside of what a search takes as a whole"
        near = [unit, unit + 1]
    names = [border_name(units, unit) for unit in near if 0 < unit < units.count]
    return PlanError(
        what,
        expected=f"borders of repeated blocks; the nearest {'are' if len(names) > 1 else 'is'} "
        + " and ".join(map(repr, names))
        if names
        else "no cut: the model is one piece",
        fix="plan without a search to cut there (name a strategy)",
        where=where,
    )


def border_name(units: Units, unit: int) -> str:
    """The shortest module path, or else the op key, at which a unit begins."""
    graph = units.graph
    keys, staged = op_keys(graph), staged_nodes(graph)
    first = units.nodes[unit][0]
    parts = graph.nodes[first].module.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        index = resolve_cut(graph, keys, path)
        if index is not None and staged[bisect_left(staged, index)] == first:
            return path
    return keys[first]


def handed_on(units: Units, names: frozenset[str]) -> frozenset[str]:
    """Nodes of some whose values other units take: a stage that ends there does not need them.

    Args:
        units: The units of a model.
        names: Of nodes.
    """
    nodes = units.graph.nodes
    made = {
        value.name: (node.name, unit)
        for node, unit in zip(nodes, units.unit_of, strict=True)
        if node.name in names
        for value in node.outputs
    }
    return frozenset(
        made[name][0]
        for node, unit in zip(nodes, units.unit_of, strict=True)
        for name in node.operands
        if name in made and made[name][1] != unit
    )


# What the tensor axis splits


@dataclass(slots=True)
class Whole:
    """Points as plans in which parameters that have to stay whole do.

    Attributes:
        layout: The model.
        placements: How single parameters have to lie.
    """

    layout: Layout
    placements: tuple[Wanted, ...]
    _unfolded: list[Layout] = field(default_factory=list)
    _known: dict[object, dict[str, tuple[str, ...]]] = field(default_factory=dict)

    def plan(self, point: Point, cuts: tuple[str, ...] = ()) -> Plan:
        """A point as a plan, with overrides where what its axes split would split these.

        Raises:
            PlanError: If the plan does not fit the model.
        """
        plan, key = point.plan(cuts), (point.mesh, point.role, point.microbatches)
        if point.tensor == 1 or not any(item.whole for item in self.placements):
            return plan
        if key not in self._known:
            self._known[key] = self._overrides(plan)
        return replace(plan, overrides=self._known[key])

    def _overrides(self, plan: Plan) -> dict[str, tuple[str, ...]]:
        free, (mesh, owner) = constraints_of(plan), fine_axes(plan.device_mesh, plan.pipeline)
        forced = replace(free, placements=self.placements)
        if not self._unfolded:
            alike = _alike(self.layout, kept_whole(self.layout.graph, forced))
            self._unfolded.append(
                self.layout if alike else Layout.of(self.layout.graph, fold=False)
            )
        layout = self._unfolded[0]
        found, implied = (
            choose_in_time(layout.folded, layout.factors, mesh, owner, rules)
            for rules in (forced, free)
        )
        return {
            key: tuple(map(str, found[like]))
            for key, like in zip(op_keys(layout.graph), layout.indexes, strict=True)
            if found[like] != implied[like]
        }


def _alike(layout: Layout, values: frozenset[str]) -> bool:
    """Whether parameters of copies that are folded away are among some as those that stay are."""
    names = layout.names
    return all(
        (item.value.name in values) == (names.get(item.value.name, item.value.name) in values)
        for item in layout.graph.parameters()
    )


def kept_shardings(
    evaluator: Evaluator,
    space: Space,
    splits: Sequence[str],
    placements: Sequence[Wanted],
    plan_of: Callable[[Point], Plan],
) -> tuple[Sharding, ...]:
    """Sizes of the tensor axis, and what it splits, that keep constraints.

    Args:
        evaluator: Of the model.
        space: What is searched.
        splits: Factors that the axis has to split, all of it.
        placements: How single parameters have to lie.
        plan_of: A point as a plan, in which what has to stay whole does.

    Raises:
        PlanError: If there are none; says what each would give.
    """
    layout = evaluator.layout
    names = tuple(item.target for item in layout.graph.parameters())
    wanted = wanted_of(placements, names, layout.factors.names())
    rules = Constraints(strategy="custom", order=(("tp", tuple(splits)),), explicit=True)
    check_factor_names(rules, layout.factors.names())
    found: list[Sharding] = []
    refused: list[PlanError] = []
    given: dict[Sharding, Mapping[str, tuple[str, ...]]] = {}
    for tensor, role in _shardings(space):
        point = Point(tensor=tensor, role=role)
        try:
            if splits:
                _refuse_narrow(evaluator, point, rules)
            placement = evaluator.place(plan_of(point))
        except PlanError as error:
            refused.append(error)
            continue
        given[tensor, role] = placed = words_by_name(placement, tuple(wanted))
        if all(item.holds(placed[name]) for name, mine in wanted.items() for item in mine):
            found.append((tensor, role))
    if found:
        return tuple(found)
    if not given and refused:
        raise refused[0]
    raise _never(wanted, given) if given else _no_axis(space)


def _shardings(space: Space) -> Iterator[Sharding]:
    """Pairs of the space that what is fixed otherwise leaves."""
    for tensor in divisors(space.num_devices):
        if tensor > space.tensor_limit:
            break
        for role in space.roles if tensor > 1 else ("",):
            if tensor in space.allowed.get("tensor", (tensor,)) and role in space.allowed.get(
                "role", (role,)
            ):
                yield tensor, role


def _refuse_narrow(evaluator: Evaluator, point: Point, rules: Constraints) -> None:
    """Refuse a tensor axis that is wider than a factor that it has to split."""
    plan, layout = point.plan(), evaluator.layout
    if point.tensor == 1:
        raise PlanError(
            f"without a tensor axis nothing splits {rules.order[0][1][0]}",
            expected="a mesh axis tp of at least 2 ranks",
            where=f"constraints[{rules.order[0][1][0]!r}]",
        )
    mesh, owner = fine_axes(plan.device_mesh, plan.pipeline)
    choose_in_time(layout.folded, layout.factors, mesh, owner, rules)


def words_by_name(placement: Placement, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """How parameters lie, a word for every sub-axis, by name.

    Args:
        placement: Of the model.
        names: Of the parameters.
    """
    alias, values = placement.layout.names, {}
    for item in placement.layout.graph.parameters():
        values[item.target] = alias.get(item.value.name, item.value.name)
    return {name: words_of(placement.sharded, values[name]) for name in names}


def _no_axis(space: Space) -> PlanError:
    """That what is fixed otherwise leaves no tensor axis that could be as constraints want it."""
    if space.allowed.get("tensor") == (1,):
        return PlanError(
            "constraints say what a tensor axis splits, and the mesh has none",
            expected="a mesh with an axis tp of at least 2 ranks, or no mesh",
            where="mesh",
        )
    return PlanError(
        f"no tensor axis of this model, on {space.num_devices} devices, splits what is asked for",
        expected="one of " + (", ".join(space.roles) or "none: a model without such factors"),
        where="constraints",
    )


def _never(
    wanted: Mapping[str, Sequence[Wanted]],
    given: Mapping[Sharding, Mapping[str, tuple[str, ...]]],
) -> PlanError:
    """That nothing of the space lays parameters as wanted, with what each way gives."""
    name, item = next(
        (
            (name, item)
            for name, mine in wanted.items()
            for item in mine
            if not any(item.holds(words[name]) for words in given.values())
        ),
        next((name, mine[0]) for name, mine in wanted.items()),
    )
    each: dict[str, dict[str, None]] = {}
    for (_, role), words in given.items():
        label = f"tensor={role}" if role else "no tensor axis"
        each.setdefault(label, {})[lies(words[name])] = None
    return PlanError(
        f"no plan that is searched keeps {name} {' '.join(item.words)}"
        + (" beside the other placements" if len(wanted) > 1 else ""),
        expected="; ".join(f"{label}: {' or '.join(ways)}" for label, ways in each.items()),
        where=item.where,
    )


# Op by op


def pinned_nodes(
    evaluator: Evaluator, plan: Plan, splits: Sequence[str], placements: Sequence[Wanted]
) -> frozenset[str]:
    """Names of the nodes whose choice constraints fix: those that refinement leaves alone.

    Args:
        evaluator: Of the model.
        plan: A plan without overrides.
        splits: Factors that the tensor axis has to split.
        placements: How single parameters have to lie.
    """
    graph, placement = evaluator.layout.graph, evaluator.place(plan)
    names = tuple(item.target for item in graph.parameters())
    wanted = wanted_of(placements, names, evaluator.layout.factors.names())
    values = {item.value.name for item in graph.parameters() if item.target in wanted}
    factors = {factor.partition(".")[0] for factor in splits}
    indexes, choices = placement.layout.indexes, placement.sharded.choices
    return frozenset(
        node.name
        for index, node in enumerate(graph.nodes)
        if not values.isdisjoint(node.operands)
        or any(choice.unit and choice.unit.base in factors for choice in choices[indexes[index]])
    )


def keeps_placements(evaluator: Evaluator, plan: Plan, placements: Sequence[Wanted]) -> bool:
    """Whether a plan lays parameters as wanted."""
    names = tuple(item.target for item in evaluator.layout.graph.parameters())
    wanted = wanted_of(placements, names, evaluator.layout.factors.names())
    placed = words_by_name(evaluator.place(plan), tuple(wanted))
    return all(item.holds(placed[name]) for name, mine in wanted.items() for item in mine)
