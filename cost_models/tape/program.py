"""A taped stage cut into programs, as `autopar.runtime.programs.split` cuts the captured one.

Forward keeps what backward reads and does not compute again. Gradients of parameters are written
into memory that is there anyway: a product writes there itself, any other gradient is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.tape.stage import Taped
from autopar.cost_models.tape.tape import AGAIN, Step, Transfer
from autopar.cost_models.tape.tensors import Local, Memory, contiguous_strides, view_strides
from autopar.cost_models.work import Matmul, Phase

FUSIBLE = frozenset(("elementwise", "norm", "softmax", "reduction", "copy", "random", "loss"))
"""Kinds of steps that a compiler makes one kernel of where they meet."""
PRODUCTS = frozenset(("mm", "bmm", "addmm"))
"""What can write its result into a gradient's memory."""
_GIVEN_AGAIN = frozenset(("parameter", "constant", "input", "buffer"))
_MANY = "several gradients"


class Run:
    """A step of a program.

    Attributes:
        step: What is done.
        reads: Memory it reads.
        writes: Memory it makes.
        phase: When it is done.
    """

    __slots__ = ("phase", "reads", "step", "writes")

    def __init__(
        self, step: Step, reads: tuple[Memory, ...], writes: tuple[Memory, ...], phase: Phase
    ) -> None:
        self.step, self.reads, self.writes, self.phase = step, reads, writes, phase


@dataclass(slots=True, kw_only=True)
class Program:
    """What a stage runs for an action.

    Attributes:
        kind: ``F``, ``B``, ``I`` or ``W``.
        runs: Its steps.
        taken: Memory that is handed over to it: saved values, what arrives, gradients of results.
        given: Memory that it leaves behind, and what for.
    """

    kind: str
    runs: list[Run] = field(default_factory=list)
    taken: dict[Memory, str] = field(default_factory=dict)
    given: dict[Memory, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Programs:
    """The programs of a stage.

    Attributes:
        taped: What was cut.
        parts: Program by action kind.
        saved: What forward leaves for backward.
        resident: Memory of gradients of parameters that products write.
        owners: Parameter whose gradient, or a part of it, a memory holds.
        made_by: Kind of the program that finishes the gradient of a parameter.
        buffers: Buffers that backward reads.
    """

    taped: Taped
    parts: dict[str, Program]
    saved: tuple[Memory, ...]
    resident: frozenset[Memory]
    owners: Mapping[Memory, str]
    made_by: Mapping[str, str]
    buffers: tuple[Memory, ...] = ()


def split(taped: Taped, recompute: Collection[str] = (), *, weight: bool = False) -> Programs:
    """Cut a taped stage.

    Args:
        taped: The stage.
        recompute: Names of nodes whose values backward computes again.
        weight: Make a program of its own of what only gradients of parameters wait for.
    """
    return _Split(taped, frozenset(recompute), weight).run()


class _Split:
    def __init__(self, taped: Taped, recompute: frozenset[str], weight: bool) -> None:
        self.taped, self.weight = taped, weight
        calls = taped.task.calls
        self.again = frozenset(
            place for place, call in enumerate(calls) if call.node.name in recompute
        )
        self.forward = taped.tape.steps[: taped.num_forward]
        steps = taped.tape.steps[taped.num_forward :]
        self.backward = _separated(steps) if weight else steps
        self.saved: dict[Memory, None] = {}
        self.buffers: dict[Memory, None] = {}
        self.resident: set[Memory] = set()
        how = taped.tape.implementation
        self.cheap = _cheap(self.forward) if how.recompute_fused else frozenset[Step]()

    def repeats(self, step: Step) -> bool:
        """Whether backward computes a forward step again instead of keeping what it made."""
        if step.maker in self.again:
            return True
        if step.random:
            return False
        # What reads nothing costs nothing.
        return not step.reads or step.maker == AGAIN or step in self.cheap

    def run(self) -> Programs:
        taped = self.taped
        owned = {
            name: value
            for name, value in taped.gradients.items()
            if taped.inputs[name].memory.kind == "parameter"
        }
        arriving = {name: value for name, value in taped.gradients.items() if name not in owned}
        steps = self._live(arriving.values(), owned)
        steps, writes = self._accumulated(steps, owned)
        late = _weight_steps(steps, arriving.values(), writes)
        early = [step for step in steps if not self.weight or step not in late]
        rest = [step for step in steps if step in late] if self.weight else []
        first = _Part(self, "I" if self.weight else "B")
        for step in early:
            first.add(step, "weight_gradient" if step in late else "input_gradient")
        for value in arriving.values():
            first.require(value.memory)
            first.program.given[first.env.get(value.memory, value.memory)] = "boundary"
        parts = {first.program.kind: first.program}
        if self.weight:
            second = _Part(self, "W", before=first)
            for step in rest:
                second.add(step, "weight_gradient")
            parts["W"] = second.program
        made_by = {
            writes[memory]: kind
            for kind, program in parts.items()
            for run in program.runs
            for memory in run.step.writes
            if memory in writes
        }
        return Programs(
            taped=taped,
            parts={"F": self._forward(), **parts},
            saved=tuple(self.saved),
            resident=frozenset(self.resident),
            owners=writes,
            made_by=made_by,
            buffers=tuple(self.buffers),
        )

    def _live(self, arriving: Iterable[Local], owned: dict[str, Local]) -> list[Step]:
        """Backward steps that lead to a gradient."""
        wanted = {value.memory for value in (*arriving, *owned.values())}
        found: list[Step] = []
        for step in reversed(self.backward):
            if (
                not step.writes
                or isinstance(step.detail, Transfer)
                or not wanted.isdisjoint(step.writes)
            ):
                found.append(step)
                wanted.update(step.reads)
        found.reverse()
        return found

    def _accumulated(
        self, steps: list[Step], owned: dict[str, Local]
    ) -> tuple[list[Step], dict[Memory, str]]:
        """Let gradients be written where they are kept (`autopar.runtime.programs.accumulate`).

        Returns:
            The steps, and for all memory that holds part of a parameter's gradient its name.
        """
        count: dict[Memory, int] = {}
        for step in steps:
            for memory in set(step.reads):
                count[memory] = count.get(memory, 0) + 1
        for value in owned.values():
            count[value.memory] = count.get(value.memory, 0) + 1
        gone: set[Step] = set()
        copies: dict[Step, list[tuple[Memory, str]]] = {}
        front: list[tuple[Memory, str]] = []
        writes: dict[Memory, str] = {}
        for name, value in owned.items():
            pending = [value.memory]
            while pending:
                memory = pending.pop()
                maker = memory.step
                writes.setdefault(memory, name)
                if maker is None or maker.forward:
                    front.append((memory, name))
                elif count[memory] > 1:
                    copies.setdefault(maker, []).append((memory, name))
                elif maker.op == "add" and len(set(maker.reads)) == 2:
                    del writes[memory]
                    gone.add(maker)
                    pending += maker.reads
                elif maker.op in PRODUCTS and (memory is not value.memory or _fits(value, maker)):
                    self.resident.add(memory)
                else:
                    copies.setdefault(maker, []).append((memory, name))
        kept: list[Step] = [_copy(memory, writes) for memory, _ in front]
        for step in steps:
            if step not in gone:
                kept.append(step)
                kept += [_copy(memory, writes) for memory, _ in copies.get(step, ())]
        return kept, writes

    def _forward(self) -> Program:
        taped = self.taped
        program = Program(kind="F")
        kinds = dict.fromkeys(taped.results, "outputs")
        kinds |= dict.fromkeys(taped.task.leaving, "boundary")
        kinds |= {name: "buffers" for name, _ in taped.task.buffers}
        for name, value in taped.results.items():
            if value.memory.kind not in _GIVEN_AGAIN:
                program.given.setdefault(value.memory, kinds[name])
        for memory in self.saved:
            if program.given.get(memory) != "buffers":
                program.given[memory] = "saved"
        wanted = set(program.given)
        found: list[Run] = []
        for step in reversed(self.forward):
            if isinstance(step.detail, Transfer) or not wanted.isdisjoint(step.writes):
                found.append(Run(step, step.reads, step.writes, "forward"))
                wanted.update(step.reads)
        found.reverse()
        program.runs = found
        for memory in wanted:
            if memory.kind == "boundary":
                program.taken[memory] = "boundary"
        return program


class _Part:
    """A later program under construction."""

    def __init__(self, split: _Split, kind: str, before: _Part | None = None) -> None:
        self.split, self.before = split, before
        self.program = Program(kind=kind)
        self.env: dict[Memory, Memory] = {}

    def add(self, step: Step, phase: Phase) -> None:
        for memory in step.reads:
            self.require(memory)
        self.program.runs.append(self._run(step, phase))

    def _run(self, step: Step, phase: Phase) -> Run:
        env, resident = self.env, self.split.resident
        reads = tuple([env.get(memory, memory) for memory in step.reads])
        writes = tuple([env.get(m, m) for m in step.writes if m not in resident])
        return Run(step, reads, writes, phase)

    def require(self, memory: Memory) -> None:
        """See that a memory that a step reads is there."""
        if memory in self.env or memory in self.program.taken:
            return
        step = memory.step
        if step is None:
            if memory.kind in ("boundary", "tangent"):
                self._take(memory, "saved" if memory.kind == "boundary" else "boundary")
            elif memory.kind == "buffer":
                self.split.buffers.setdefault(memory)
            return
        if not step.forward:
            if self.before is not None and self._made_before(memory):
                self._hand_over(memory)
            return
        before = self.before
        if before is not None and memory in before.env:
            self._hand_over(before.env[memory], memory)
        elif self.split.repeats(step):
            self._again(step)
        else:
            self._take(memory, "saved")

    def _take(self, memory: Memory, kind: str) -> None:
        self.program.taken[memory] = kind
        if kind == "saved":
            self.split.saved.setdefault(memory)

    def _made_before(self, memory: Memory) -> bool:
        assert self.before is not None
        return any(memory in run.writes for run in self.before.program.runs if run.writes)

    def _hand_over(self, memory: Memory, original: Memory | None = None) -> None:
        """What the program before made is kept for this one."""
        assert self.before is not None
        self.before.program.given[memory] = "saved"
        self.program.taken[memory] = "saved"
        if original is not None:
            self.env[original] = memory

    def _again(self, step: Step) -> None:
        """Compute a forward step again, and first what it reads."""
        pending: list[Step] = [step]
        todo: dict[Step, None] = {}
        while pending:
            item = pending.pop()
            if item in todo:
                continue
            todo[item] = None
            for memory in item.reads:
                if memory in self.env or memory in self.program.taken or memory.step is None:
                    continue
                if self.before is not None and memory in self.before.env:
                    continue
                if self.split.repeats(memory.step):
                    pending.append(memory.step)
        order = {item: place for place, item in enumerate(self.split.forward)}
        for item in sorted(todo, key=order.__getitem__):
            for memory in item.reads:
                self.require(memory)
            for memory in item.writes:
                twin = Memory(memory.size_bytes, item)
                twin.what = memory.what
                self.env[memory] = twin
            self.program.runs.append(self._run(item, "recompute"))


def _fits(gradient: Local, product: Step) -> bool:
    """Whether a product can write into a contiguous gradient, seen as the product sees it."""
    if gradient.strides is None or not isinstance(product.detail, Matmul):
        return True
    strides, kept = gradient.strides, contiguous_strides(gradient.shape)
    order = sorted(range(gradient.ndim), key=lambda dim: -strides[dim])
    shape, detail = tuple([gradient.shape[dim] for dim in order]), product.detail
    lead = (detail.batch,) if product.op == "bmm" else ()
    seen = view_strides(shape, tuple([kept[dim] for dim in order]), (*lead, detail.m, detail.n))
    return seen is not False


def _cheap(steps: Sequence[Step]) -> frozenset[Step]:
    """Steps that a compiler computes again rather than keep what they made.

    Those that can be fused, but for sums of what lies behind different numbers of others: a
    shortcut computed again would ask for the one before it, and so on.
    """
    depth: dict[Memory, int] = {}
    found = set()
    for step in steps:
        depths = [depth.get(memory, 0) for memory in step.reads]
        fuses = step.kind in FUSIBLE
        depth.update(dict.fromkeys(step.writes, max(depths, default=0) + (not fuses)))
        if fuses and not (step.op == "add" and len(set(depths)) > 1):
            found.add(step)
    return frozenset(found)


def _copy(memory: Memory, writes: dict[Memory, str]) -> Step:
    """The step that copies a gradient to where it is kept."""
    maker = memory.step
    step = Step("copy_", "elementwise", maker.origin if maker is not None else -1, False, ())
    step.reads = (memory,)
    step.read_bytes = step.write_bytes = memory.size_bytes
    step.dtype = maker.dtype if maker is not None else "float32"
    target = Memory(0, step)
    step.writes = (target,)
    writes[target] = writes[memory]
    return step


def _separated(steps: Iterable[Step]) -> list[Step]:
    """`steps` with backward of a convolution in two: for its input, and for weight and bias."""
    found: list[Step] = []
    for step in steps:
        if step.op != "convolution_backward" or len(step.writes) < 2 or step.launches < 2:
            found.append(step)
            continue
        for writes in (step.writes[:1], step.writes[1:]):
            part = Step(step.op, step.kind, step.origin, False, ())
            part.reads, part.writes = step.reads, writes
            part.read_bytes, part.flops = step.read_bytes, step.flops // 2
            part.write_bytes = sum(memory.size_bytes for memory in writes)
            part.dtype, part.detail = step.dtype, step.detail
            for memory in writes:
                memory.step = part
            found.append(part)
    return found


def _weight_steps(
    steps: list[Step], arriving: Iterable[Local], writes: dict[Memory, str]
) -> set[Step]:
    """Steps that lead to exactly one gradient of a parameter and to nothing else."""
    leads: dict[Memory, str] = dict(writes)
    for value in arriving:
        leads[value.memory] = _MANY
    found: set[Step] = set()
    for step in reversed(steps):
        slots = {leads[memory] for memory in step.writes if memory in leads}
        slot = slots.pop() if len(slots) == 1 else _MANY
        only_weights = (
            step.op == "convolution_backward"
            and step.launches == 1
            and _MANY not in slots
            and all(memory in writes for memory in step.writes)
        )
        if slot != _MANY or only_weights:
            found.add(step)
        for memory in step.reads:
            known = leads.get(memory)
            leads[memory] = slot if known is None or known == slot else _MANY
    # What an earlier program makes beside other things is put away there.
    copies = [step for step in found if step.op == "copy_"]
    found -= {step for step in copies if step.reads[0].step not in found}
    return found
