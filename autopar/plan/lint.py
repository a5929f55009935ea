"""Everything that is wrong with the choices of a plan file, as far as it shows without the model.

Types, unknown and missing fields are found while the file is read (`autopar.plan.shapes`); what is
here looks at fields that could be read. What is no more than odd is a warning.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autopar.errors import PlanError, meant
from autopar.graph.ir import ITEM_BYTES
from autopar.plan.forecast_lint import check_forecast
from autopar.plan.parts import MOST_ACTIONS, PipelinePlan, pipeline_problems, zero_problems
from autopar.plan.plan import ParameterPlan
from autopar.plan.shapes import BAD, LARGEST, Fault, Trail, path_of, shown
from autopar.plan.strategies import STANDARD, STRATEGIES, Constraints, prime_factors
from autopar.sharding.mesh import Mesh
from autopar.units import counted

MOST_RANKS = 2**24
"""Most ranks of a mesh."""
_WORD = re.compile(r"(?P<factor>[^@\s]+)@(?P<dim>\d{1,4}):(?P<stride>\d{1,18})x(?P<size>\d{1,18})")
_CHOICE = re.compile(r"replicate|gradient|linear:\d{1,4}|[^@\s]+@[^@:\s]+:\d{1,18}x\d{1,18}")
_SHAPE = re.compile(r"[A-Za-z]\w*\[(?P<sizes>(\d+(, \d+)*)?\])")
_HASH = re.compile(r"(\d:)?[0-9a-f]{32}|")
_OTHER_STRATEGIES = ("search", "custom")
Axes = tuple[tuple[str, int], ...]


def check(values: Mapping[str, Any], *, whole: bool) -> list[Fault]:
    """Faults of the fields of a plan.

    Args:
        values: The fields by name, `BAD` for those that could not be read.
        whole: Whether all of them could be read.
    """
    found: list[Fault] = []
    partly = ("parameters", "overrides", "inputs")
    values = {
        name: value if name in partly or _complete(value) else BAD for name, value in values.items()
    }
    mesh, pipeline = values["mesh"], values["pipeline"]
    if mesh is not BAD:
        mesh_faults = list(_mesh_faults(mesh))
        found += mesh_faults
        mesh = BAD if mesh_faults else mesh
    if mesh is not BAD and pipeline is not BAD:
        found += _problems("pipeline", pipeline_problems(pipeline, mesh))
        rest = tuple(item for item in mesh if item[0] != pipeline.axis)
        found += _axes_faults(values, rest, pipeline)
        found += _words_faults(values, rest, pipeline)
        found += _batch_faults(values, rest, pipeline)
    found += _texts_faults(values)
    if whole and all(fault.warning for fault in found):
        found += check_forecast(values)
    return found


def _complete(value: Any) -> bool:
    """Whether all of a value could be read."""
    return value is not BAD and not (isinstance(value, tuple) and not all(map(_complete, value)))


def _entries(value: Any) -> Any:
    """What could be read of a list."""
    return () if value is BAD else value


def _items(value: Any) -> list[tuple[str, Any]]:
    """What could be read of an object of lists."""
    return [] if value is BAD else [item for item in value.items() if _complete(item[1])]


def _fault(trail: Trail, what: str, expected: str | None = None, fix: str | None = None) -> Fault:
    return Fault(path=path_of(trail), what=what, expected=expected, fix=fix)


def _warning(trail: Trail, what: str, expected: str | None = None, fix: str | None = None) -> Fault:
    return Fault(path=path_of(trail), what=what, expected=expected, fix=fix, warning=True)


def _at(*keys: object) -> Trail:
    trail: Trail = ()
    for key in keys:
        trail = (trail, key)
    return trail


def _problems(
    part: str, problems: Iterable[tuple[str, str, str | None, str | None]]
) -> Iterator[Fault]:
    for field, what, expected, fix in problems:
        trail = _at("mesh") if field == "mesh" else _at(part, field)
        yield _fault(trail, what, expected, fix)


def _mesh_faults(mesh: Axes) -> Iterator[Fault]:
    for index, axis in enumerate(mesh):
        try:
            Mesh((axis,))
        except PlanError as error:
            yield _fault(_at("mesh", index), error.what, error.expected)
    for name, times in Counter(name for name, _ in mesh).items():
        if times > 1:
            index = [axis for axis, _ in mesh].index(name, 1)
            yield _fault(
                _at("mesh", index, 0), f"gives axis {shown(name)} twice", "every axis once"
            )
    size = math.prod(size for _, size in mesh)
    if size > MOST_RANKS:
        yield _fault(_at("mesh"), f"has {shown(size)} ranks", f"at most {MOST_RANKS:,}")


def _axes_faults(values: Mapping[str, Any], rest: Axes, pipeline: PipelinePlan) -> Iterator[Fault]:
    """What speaks of axes: order, storage, ZeRO."""
    names = [name for name, _ in rest]
    order, storage, zero = values["order"], values["storage"], values["zero"]
    expected = "one of " + (", ".join(names) or "none: the mesh has no axis but the pipeline's")

    def unknown(axis: str, trail: Trail) -> Fault:
        why = "holds the pipeline" if axis == pipeline.axis else "the mesh lacks"
        return _fault(trail, f"is axis {shown(axis)}, which {why}", expected, meant(axis, names))

    for index, axis in enumerate(_entries(storage)):
        if axis not in names:
            yield unknown(axis, _at("storage", index))
    if order is BAD:
        return
    seen: set[str] = set()
    for index, (axis, _) in enumerate(order):
        if axis not in names:
            yield unknown(axis, _at("order", index, 0))
        elif axis in seen:
            what = f"says a second time what axis {axis} splits"
            yield _fault(_at("order", index, 0), what, "every axis once")
        seen.add(axis)
    for axis in names:
        if axis not in seen:
            expected = f'an entry such as ["{axis}", ["batch"]], or ["{axis}", []]'
            yield _fault(_at("order"), f"does not say what axis {axis} splits", expected)
    if zero is not BAD and storage is not BAD:
        data = Constraints(strategy="", order=order).data_axes()
        yield from _problems("zero", zero_problems(zero, pipeline, data, storage))
    yield from _factor_faults(values, order)


def _factor_faults(values: Mapping[str, Any], order: Any) -> Iterator[Fault]:
    """Factors that neither a strategy nor a parameter of the file has."""
    known = set(STANDARD)
    for words in {item.placement for item in _entries(values["parameters"]) if item is not BAD}:
        known.update(word.partition("@")[0] for word in words if "@" in word)
    for _, words in _items(values["overrides"]):
        known.update(word.partition("@")[0] for word in words if "@" in word)
    known = {name.partition(".")[0] for name in known}
    for index, (_, factors) in enumerate(order):
        for place, name in enumerate(factors):
            fix = meant(name, sorted(known))
            if name.partition(".")[0] not in known:
                what = f"is factor {shown(name)}, which no parameter has"
                expected = "such as " + ", ".join(sorted(known))
                yield _warning(_at("order", index, 1, place), what, expected, fix)


def _words_faults(values: Mapping[str, Any], rest: Axes, pipeline: PipelinePlan) -> Iterator[Fault]:
    """Placements of parameters, and overrides."""
    sizes = tuple(n for _, size in rest for n in (prime_factors(size) or [1]))
    axes = ", ".join(f"{name}={size}" for name, size in rest) or "the mesh without its pipeline"
    words = f"{counted(len(sizes), 'word')}, one per sub-axis of the mesh's {axes}"
    seen: dict[object, int] = {}
    names: dict[str, int] = {}
    for index, item in enumerate(_entries(values["parameters"])):
        if item is BAD:
            continue
        first = names.setdefault(item.fqn, index)
        if first != index:
            what = f"is {shown(item.fqn)}, as parameters[{first}] is"
            yield _fault(_at("parameters", index, "fqn"), what, "every parameter once")
        if not item.fqn.strip():
            expected = "the name of a parameter, such as layers.0.weight"
            yield _fault(_at("parameters", index, "fqn"), f"is {shown(item.fqn)}", expected)
        if 0 in item.shape:
            what = f"is {list(item.shape)}: the parameter has no elements"
            yield _warning(_at("parameters", index, "shape"), what, "sizes from 1; [] for a scalar")
        if item.dtype not in ITEM_BYTES:
            what, expected = f"is {shown(item.dtype)}", "one of " + ", ".join(ITEM_BYTES)
            fix = meant(item.dtype, ITEM_BYTES)
            yield _fault(_at("parameters", index, "dtype"), what, expected, fix)
        key = (item.shape, item.placement)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1 or len(item.placement) != len(sizes):
            yield from _placement_faults(index, item, sizes, words)
    fine = len(sizes) + (pipeline.microbatches > 1)
    for name, choices in _items(values["overrides"]):
        trail = _at("overrides", name)
        if len(choices) != fine:
            time = ", the first for pipeline.microbatches" if fine > len(sizes) else ""
            expected = f"{fine}, one per sub-axis{time}"
            yield _fault(trail, f"has {counted(len(choices), 'choice')}", expected)
        for place, word in enumerate(choices):
            if not _CHOICE.fullmatch(word):
                expected = "replicate, gradient, linear:N or factor@letter:STRIDExSIZE"
                yield _fault((trail, place), f"is {shown(word)}", expected)


def _placement_faults(
    index: int, item: ParameterPlan, sizes: tuple[int, ...], words: str
) -> Iterator[Fault]:
    if math.prod(item.shape) > LARGEST:
        what, expected = "has more elements than a tensor can", f"a product up to {LARGEST}"
        yield _fault(_at("parameters", index, "shape"), what, expected)
    trail = _at("parameters", index, "placement")
    if len(item.placement) != len(sizes):
        yield _fault(trail, f"has {counted(len(item.placement), 'word')}", words)
        return
    parts: dict[tuple[int, int, int], int] = {}
    for place, word in enumerate(item.placement):
        match = _WORD.fullmatch(word)
        if word == "whole":
            continue
        if match is None:
            expected = '"whole", or FACTOR@DIM:STRIDExSIZE such as "heads@0:64x16"'
            fix = meant(word, ["whole"])
            yield _fault((trail, place), f"is {shown(word)}", expected, fix)
            continue
        dim, stride, size = int(match["dim"]), int(match["stride"]), int(match["size"])
        if dim >= len(item.shape):
            expected = f"a dim below {len(item.shape)}, as the shape is {list(item.shape)}"
            yield _fault((trail, place), f"splits dim {dim}", expected)
        elif not stride or not size or item.shape[dim] % (stride * size):
            what = f"splits a factor of stride {stride} and size {size} of dim {dim}"
            expected = f"stride times size to divide the dim's {item.shape[dim]}"
            yield _fault((trail, place), what, expected)
        else:
            key = (dim, stride, size)
            parts[key] = parts.get(key, 1) * sizes[place]
            if parts[key] > size:
                what = f"splits a factor of size {size} into {parts[key]} parts"
                yield _fault((trail, place), what, f"at most {size} parts")
            elif size % parts[key]:
                what = f"splits a factor of size {size} into {parts[key]} parts, which are unequal"
                yield _warning((trail, place), what, f"a divisor of {size}, for equal parts")


def _batch_faults(values: Mapping[str, Any], rest: Axes, pipeline: PipelinePlan) -> Iterator[Fault]:
    """Microbatches that do not divide the batch, as far as the inputs show it."""
    inputs, order, count = values["inputs"], values["order"], pipeline.microbatches
    if inputs is BAD or order is BAD:
        return
    shapes = []
    for index, item in enumerate(inputs):
        if not _complete(item):
            continue
        match = _SHAPE.fullmatch(item[1])
        if match is None or item[1].partition("[")[0] not in ITEM_BYTES:
            expected = 'a dtype and sizes, such as "int64[16, 2048]"'
            yield _fault(_at("inputs", index, 1), f"is {shown(item[1])}", expected)
        else:
            sizes = match["sizes"].rstrip("]")
            shapes.append(tuple(int(part[:18]) for part in sizes.split(", ") if part))
    batches = [shape[0] for shape in shapes if shape]
    if not batches or count < 1:
        return
    batch = max(Counter(batches).items(), key=lambda item: item[1])[0]
    if all(size % count for shape in shapes for size in shape):
        most = min(count, batch, MOST_ACTIONS)
        near = next((n for n in range(most, 0, -1) if batch % n == 0), None)
        what = f"is {count}, which divides no dim of the inputs"
        fix = f"{near} does" if near else None
        yield _fault(_at("pipeline", "microbatches"), what, f"a divisor of {batch}", fix)
        return
    data = Constraints(strategy="", order=order).data_axes()
    ranks = math.prod(size for name, size in rest if name in data)
    if batch % count == 0 and (batch // count) % ranks:
        what = f"leaves {batch // count} samples to {ranks} data ranks: some get more than others"
        yield _warning(_at("pipeline", "microbatches"), what, "microbatches that divide evenly")


def _texts_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Strategy, patterns, cuts and fingerprints."""
    strategy = values["strategy"]
    known = (*STRATEGIES, *_OTHER_STRATEGIES)
    if strategy is not BAD and strategy.partition(",")[0].strip() not in known:
        expected = "one of " + ", ".join(known)
        what = f"is {shown(strategy)}, which is no strategy"
        yield _warning(_at("strategy"), what, expected, meant(strategy, known))
    for name in ("graph", "structure"):
        if values[name] is not BAD and not _HASH.fullmatch(values[name]):
            what, expected = f"is {shown(values[name])}", "a hash as `autopar plan` writes it"
            yield _fault(_at(name), what, expected)
    for index, pattern in enumerate(_entries(values["recompute"])):
        if not pattern.removeprefix("!"):
            expected = "a pattern over op keys, such as *attention*"
            yield _fault(_at("recompute", index), "is an empty pattern", expected)
    pipeline = values["pipeline"]
    for index, cut in enumerate(pipeline.cuts if pipeline is not BAD else ()):
        if "/" not in cut or "#" not in cut:
            expected = "the key of an op, such as layers.4/aten.layer_norm.default#0"
            yield _fault(_at("pipeline", "cuts", index), f"is {shown(cut)}", expected)
