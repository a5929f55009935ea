"""How a rule is made: from a text, or by a function that looks at the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.graph.ir import Arg, Node, Ref, TensorSpec, iter_refs
from autopar.sharding.grammar import Entry, Sizes, bare, parse, show
from autopar.sharding.rule import Letter, OpRule, Place, SpecOf, register

Hints = Mapping[str, str | tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op call as a rule function sees it.

    Attributes:
        node: The call.
        operands: Global specs of ``node.operands``.
        outputs: Global specs of ``node.outputs``.
    """

    node: Node
    operands: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """The argument at `position` of the schema, or given by keyword `name`."""
        if position < len(self.node.args):
            return self.node.args[position]
        return dict(self.node.kwargs).get(name, default)

    def int_arg(self, position: int, name: str, default: int) -> int:
        """An integer argument."""
        value = self.arg(position, name, default)
        assert isinstance(value, int), f"{self.node.op}: {name} is {value!r}"
        return value

    def dims(self, position: int, name: str, ndim: int) -> tuple[int, ...]:
        """A dim or list of dims, non-negative; all dims when None or empty."""
        value = self.arg(position, name)
        if value is None or value == ():
            return tuple(range(ndim))
        values = value if isinstance(value, tuple) else (value,)
        return tuple(v % max(ndim, 1) for v in values if isinstance(v, int))

    def slots(self, position: int, name: str) -> tuple[int | None, ...]:
        """Operand slots of a tensor argument (one) or of a list of tensors; None for no tensor."""
        start = 0
        for i, value in enumerate(self.node.args):
            if i == position:
                return _numbered(value, start)
            start += sum(1 for _ in iter_refs(value))
        for key, value in self.node.kwargs:
            if key == name:
                return _numbered(value, start)
            start += sum(1 for _ in iter_refs(value))
        return (None,)

    def slot(self, position: int, name: str) -> int | None:
        """Operand slot of a tensor argument; None when it is absent or no tensor."""
        return self.slots(position, name)[0]

    def names(self, prefix: str, ndim: int) -> list[str]:
        """`ndim` fresh letter names."""
        return [f"{prefix}{i}" for i in range(ndim)]

    def match(self, text: str, arguments: str, **options: object) -> OpRule:
        """The rule that `text` gives this call.

        Args:
            text: See `autopar.sharding.grammar`.
            arguments: Schema names of the arguments up to the last tensor of the text, in order,
                ``_`` for those that are no tensors: ``"input _ weight bias"``.
            **options: As for `rule`.

        Raises:
            RuleError: Text and shapes disagree; quotes both.
        """
        return _match(self, text, arguments, **options)  # type: ignore[arg-type]

    def build(
        self,
        operands: Mapping[int, Sequence[Entry]] | Sequence[Sequence[Entry]],
        outputs: Sequence[Sequence[Entry]],
        *,
        sizes: Mapping[str, int] | None = None,
        additive: Iterable[int] = (),
        linear: Iterable[Iterable[int]] = (),
        special: bool = False,
        size_arg: tuple[str, int] | None = None,
        hints: Hints | None = None,
    ) -> OpRule:
        """The rule with these entries per dim of every operand slot and output.

        Args:
            operands: Entries per operand slot; a slot left out carries no letters.
            outputs: Entries per output.
            sizes: Sizes of letters that no dim shows alone.
            additive: Operand slots.
            linear: Sets of operand slots.
            special: See `OpRule`.
            size_arg: See `OpRule`.
            hints: Factor name per letter, or (name, strength); strength 1 by default.

        Raises:
            RuleError: Entries and shapes disagree.
        """
        if not isinstance(operands, Mapping):
            operands = dict(enumerate(operands))
        problem = _check(self, operands, outputs, known := Sizes(dict(sizes or {})))
        if problem:
            raise RuleError(
                f"the rule of {self.node.op} does not fit: {problem[2]} "
                f"({problem[0]}, dim {problem[1]})\n    {show(operands)} -> {show(outputs)}",
                expected="letters that agree with the shapes "
                f"{_shapes(self.operands)} -> {_shapes(self.outputs)}",
                where=_where(self.node),
            )
        sets = {frozenset(item) for item in linear} - {frozenset()}
        return OpRule(
            letters=_letters(self, operands, outputs, known.known, hints or {}),
            additive=frozenset(additive),
            linear=tuple(sorted(sets, key=sorted)),
            special=special,
            size_arg=size_arg,
        )


CallRule = Callable[[Call], OpRule | None]


def rule(ops: str, text: str, arguments: str, **options: object) -> None:
    """Register one text as the rule of one or more ops.

    Args:
        ops: Op names separated by blanks.
        text: The rule, see `autopar.sharding.grammar`.
        arguments: See `Call.match`.
        **options: `additive` (terms), `linear` (sets of terms), `hints`, `sizes`, `special`.

    Raises:
        RuleError: The text is malformed or an op has a rule already.
    """
    parse(text)
    register_function(ops, lambda call: call.match(text, arguments, **options))


def register_function(ops: str | Iterable[str], function: CallRule) -> None:
    """Register a rule function for many ops (names separated by blanks, or an iterable)."""

    def of_node(node: Node, spec: SpecOf) -> OpRule | None:
        call = Call(
            node=node,
            operands=tuple(spec(name) for name in node.operands),
            outputs=tuple(value.spec for value in node.outputs),
        )
        return function(call)

    for op in ops.split() if isinstance(ops, str) else ops:
        register(op, of_node)


def family(ops: str | Iterable[str]) -> Callable[[CallRule], CallRule]:
    """Decorator form of `register_function`."""

    def register_it(function: CallRule) -> CallRule:
        register_function(ops, function)
        return function

    return register_it


def _numbered(value: Arg, start: int) -> tuple[int | None, ...]:
    if isinstance(value, tuple):
        found: list[int | None] = []
        for item in value:
            found.append(start if isinstance(item, Ref) else None)
            start += isinstance(item, Ref)
        return tuple(found)
    return (start if isinstance(value, Ref) else None,)


def _match(
    call: Call,
    text: str,
    arguments: str,
    *,
    additive: Iterable[int] = (),
    linear: Iterable[Iterable[int]] = (),
    hints: Hints | None = None,
    sizes: Mapping[str, int] | None = None,
    special: bool = False,
    size_arg: tuple[str, int] | None = None,
) -> OpRule:
    pattern = parse(text)
    places = [(i, name) for i, name in enumerate(arguments.split()) if name != "_"]
    assert len(places) == len(pattern.operands), f"{text!r} and {arguments!r} differ in length"
    slot_of = {}
    for number, (i, name) in enumerate(places):
        slot = call.slot(i, name)
        if slot is not None:
            slot_of[number] = slot
        elif not pattern.operands[number].optional:
            raise _misfit(call, text, pattern.operands[number].column, f"{name} is no tensor")
    tensors = [(pattern.operands[t], call.operands[s], ("operand", s)) for t, s in slot_of.items()]
    tensors += [
        (term, spec, ("output", i))
        for i, (term, spec) in enumerate(zip(pattern.outputs, call.outputs, strict=False))
    ]
    width = max((s.ndim - len(t.entries) + 1 for t, s, _ in tensors if t.has_ellipsis), default=0)
    entries: dict[tuple[str, int], tuple[Entry, ...]] = {}
    columns: dict[tuple[str, int], tuple[int, ...]] = {}
    for term, spec, key in tensors:
        expanded = term.expand(spec.ndim, width)
        if expanded is None:
            raise _misfit(call, text, term.column, f"{key[0]} {key[1]} has {spec.ndim} dims")
        entries[key], columns[key] = expanded
    operands = {slot: entries["operand", slot] for slot in slot_of.values()}
    outputs = [entries["output", i] for i in range(len(call.outputs)) if ("output", i) in entries]
    problem = _check(call, operands, outputs, Sizes(dict(sizes or {})))
    if problem:
        where, dim, complaint = problem
        kind, index = where.split()
        raise _misfit(call, text, columns[kind, int(index)][dim], complaint)
    return call.build(
        operands,
        outputs,
        sizes=sizes,
        additive=[slot_of[t] for t in additive if t in slot_of],
        linear=[[slot_of[t] for t in terms if t in slot_of] for terms in linear],
        special=special,
        size_arg=size_arg,
        hints=hints,
    )


def _misfit(call: Call, text: str, column: int, complaint: str) -> RuleError:
    column += len(text[column:]) - len(text[column:].lstrip())
    return RuleError(
        f"the rule of {call.node.op} does not fit: {complaint}\n    {text}\n    {' ' * column}^",
        expected=f"dims that fit {_shapes(call.operands)} -> {_shapes(call.outputs)}",
        where=_where(call.node),
    )


def _shapes(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(str(list(spec.shape)) for spec in specs)


def _where(node: Node) -> str:
    return ", ".join(part for part in (node.name, node.module, node.source) if part)


def _check(
    call: Call,
    operands: Mapping[int, Sequence[Entry]],
    outputs: Sequence[Sequence[Entry]],
    sizes: Sizes,
) -> tuple[str, int, str] | None:
    """Learn all sizes; the first (tensor, dim, complaint) where they disagree."""
    tensors = [(f"operand {s}", e, call.operands[s].shape) for s, e in operands.items()]
    tensors += [(f"output {i}", e, call.outputs[i].shape) for i, e in enumerate(outputs)]
    sizes.learn_all([(entries, shape) for _, entries, shape in tensors])
    for label, entries, shape in tensors:
        if len(entries) != len(shape):
            return label, 0, f"{label} has {len(shape)} dims, the rule {len(entries)}"
        for dim, (entry, size) in enumerate(zip(entries, shape, strict=True)):
            complaint = sizes.learn(entry, size)
            if complaint:
                return label, dim, complaint
    return None


def _letters(
    call: Call,
    operands: Mapping[int, Sequence[Entry]],
    outputs: Sequence[Sequence[Entry]],
    sizes: Mapping[str, int],
    hints: Hints,
) -> tuple[Letter, ...]:
    places: dict[str, tuple[list[Place], list[Place]]] = {}
    flags: dict[str, str] = {}
    tensors = [(0, s, e, call.operands[s].shape) for s, e in sorted(operands.items())]
    tensors += [(1, i, e, call.outputs[i].shape) for i, e in enumerate(outputs)]
    for side, slot, entries, shape in tensors:
        for dim, entry in enumerate(entries):
            if entry is None or shape[dim] == 1:
                continue
            stride = 1
            for name in reversed((entry,) if isinstance(entry, str) else entry):
                key = bare(name)
                flags[key] = flags.get(key, "") + name[len(key) :]
                size = sizes[key]
                if size > 1:
                    found = places.setdefault(key, ([], []))
                    found[side].append(Place(slot=slot, dim=dim, stride=stride, size=size))
                stride *= size
    return tuple(
        _letter(name, sizes[name], *found, flags[name], hints.get(name, ""))
        for name, found in places.items()
    )


def _letter(
    name: str,
    size: int,
    operands: list[Place],
    outputs: list[Place],
    flags: str,
    hint: str | tuple[str, int],
) -> Letter:
    text, strength = hint if isinstance(hint, tuple) else (hint, 1 if hint else 0)
    # A letter twice in one tensor is a diagonal: a part of it is no block of that tensor.
    twice = any(len({place.slot for place in side}) < len(side) for side in (operands, outputs))
    return Letter(
        name=name,
        size=size,
        operands=tuple(operands),
        outputs=tuple(outputs),
        split="!" not in flags and not twice,
        missing="replicate" if "=" in flags else "partial",
        special="~" in flags,
        hint=text,
        hint_strength=strength,
    )
