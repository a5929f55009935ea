"""The repeated layers of a plan's model, and what the plan does by layer.

A plan file has no graph. Names say where layers are (``model.layers.3.mlp.up.weight``: layer 3 of
``model.layers``); registration order, which parameters keep, says what comes before and after.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate
from typing import Literal

from autopar.plan.plan import Plan

Again = Literal["none", "selective", "full", "mixed"]
_SPAN = re.compile(r"stage (\d+): (?:(\S+) to )?(\S+), [\d,]+ ops?, ")
_PRODUCTS = ("linear.default", "addmm.default", "mm.default", "matmul.default", "einsum.default")
_ATTENTION = ("scaled_dot_product_attention.default", "softmax.int", "bmm.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The longest list of like modules.

    Attributes:
        prefix: Path of the list, ``""`` for the model itself.
        numbers: Numbers of the layers, ascending.
        modules: Modules with parameters in the first layer, relative to it.
        lead: Parameters registered before the first layer.
        tail: Parameters registered after the last one.
        others: Paths of other lists of modules with parameters.
    """

    prefix: str
    numbers: tuple[int, ...]
    modules: tuple[str, ...]
    lead: tuple[str, ...]
    tail: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.numbers)

    @property
    def pattern(self) -> str:
        """Paths of all layers, as one pattern."""
        return f"{self.prefix}.*" if self.prefix else "*"

    def path(self, layer: int) -> str:
        """Path of the layer at a place."""
        return f"{self.prefix}.{self.numbers[layer]}" if self.prefix else str(self.numbers[layer])

    def place(self, path: str) -> int | None:
        """Place of the layer that a module path lies in; None outside of layers."""
        rest = path.removeprefix(f"{self.prefix}.") if self.prefix else path
        head = rest.partition(".")[0]
        if (rest == path and self.prefix) or not head.isdigit() or int(head) not in self.numbers:
            return None
        return self.numbers.index(int(head))

    def before(self, fqn: str) -> bool:
        """Whether a parameter is registered before the layers."""
        return fqn in self.lead


def layers_of(plan: Plan) -> Layers:
    """The repeated layers of the plan's model; none where nothing repeats."""
    lists: dict[str, dict[int, list[str]]] = {}
    for item in plan.parameters:
        parts = item.fqn.split(".")
        place = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
        if place is not None:
            entries = lists.setdefault(".".join(parts[:place]), {})
            entries.setdefault(int(parts[place]), []).append(".".join(parts[place + 1 :]))
    repeated = {prefix: entries for prefix, entries in lists.items() if len(entries) > 1}
    names = [item.fqn for item in plan.parameters]
    if not repeated:
        return Layers(
            prefix="", numbers=(), modules=(), lead=(), tail=tuple(names), others=tuple(lists)
        )
    prefix = max(repeated, key=lambda name: sum(map(len, repeated[name].values())))
    entries = repeated[prefix]
    inside = [
        index
        for index, name in enumerate(names)
        if name.startswith(f"{prefix}.") or (not prefix and name.partition(".")[0].isdigit())
    ]
    first = entries[min(entries)]
    return Layers(
        prefix=prefix,
        numbers=tuple(sorted(entries)),
        modules=tuple(dict.fromkeys(name.rpartition(".")[0] for name in first)),
        lead=tuple(names[: inside[0]]),
        tail=tuple(names[inside[-1] + 1 :]),
        others=tuple(name for name in lists if name != prefix),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Which layers each stage has.

    Attributes:
        counts: Layers of every stage.
        inside: Paths of modules at which a stage begins in the midst of a layer; the layer is
            counted to the later stage.
        unknown: Cuts of which the file does not say where they lie.
    """

    counts: tuple[int, ...]
    inside: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def even(self) -> bool:
        """Whether all stages have the same number of layers."""
        return len(set(self.counts)) == 1


def stage_layers(plan: Plan, layers: Layers) -> StageLayers:
    """Layers of every stage, by the plan's cuts."""
    spans = stage_spans(plan.notes)
    borders, inside, unknown = [0], [], []
    for number, cut in enumerate(plan.pipeline.cuts):
        module = cut.rpartition("/")[0]
        place = layers.place(module)
        before = spans.get(number, ("", ""))[1]
        if place is None:
            late = any(name.startswith(f"{module}.") for name in layers.tail) and module
            borders.append(layers.count if late else borders[-1])
            if not late:
                unknown.append(cut)
            continue
        if not before:
            unknown.append(cut)
        elif layers.place(before) == place:
            inside.append(module)
        borders.append(max(place, borders[-1]))
    borders.append(layers.count)
    counts = tuple(high - low for low, high in itertools.pairwise(borders))
    return StageLayers(counts=counts, inside=tuple(inside), unknown=tuple(unknown))


def stage_spans(notes: Iterable[str]) -> dict[int, tuple[str, str]]:
    """First and last module of stages, from what `autopar.plan.remarks.stage_remarks` writes."""
    found = {}
    for note in notes:
        match = _SPAN.match(note)
        if match is not None:
            found[int(match[1])] = (match[2] or match[3], match[3])
    return found


def recomputed(plan: Plan, layers: Layers) -> tuple[Again, ...]:
    """What of each layer backward computes again.

    ``full`` is all its matrix products, ``selective`` none of them (norms, activations, attention
    scores), ``mixed`` some of them.
    """
    rules = [
        (not text.startswith("!"), re.compile(translate(text.removeprefix("!"))))
        for text in plan.recompute
    ]

    def hit(key: str) -> bool:
        chosen = False
        for add, rule in rules:
            if rule.match(key):
                chosen = add
        return chosen

    found: list[Again] = []
    matrices = [name for name in layers.modules if _matrix(plan, layers, name)]
    for layer in range(layers.count):
        path = layers.path(layer)
        if not rules:
            found.append("none")
            continue
        products = [any(hit(f"{path}.{name}/aten.{op}#0") for op in _PRODUCTS) for name in matrices]
        places = {path, *(f"{path}.{name}" for name in layers.modules)}
        places |= {name.rpartition(".")[0] for name in places if name != path}
        some = any(_touches(plan, place, hit) for place in places)
        if products and all(products):
            found.append("full")
        elif any(products):
            found.append("mixed")
        else:
            found.append("selective" if some else "none")
    return tuple(found)


def _matrix(plan: Plan, layers: Layers, module: str) -> bool:
    prefix = f"{layers.path(0)}.{module}."
    return any(len(item.shape) > 1 and item.fqn.startswith(prefix) for item in plan.parameters)


def _touches(plan: Plan, module: str, hit: object) -> bool:
    """Whether some pattern speaks of ops of `module` itself."""
    assert callable(hit)
    calls = {text.rpartition("/")[2] for text in plan.recompute}
    names = [call.replace("*", "0") for call in calls]
    return any(hit(f"{module}/{name}") for name in (*names, *(f"aten.{op}#0" for op in _ATTENTION)))
