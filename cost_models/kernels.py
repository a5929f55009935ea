"""From programs to kernels, moves and saved memory; pointwise ops fused if software does so."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.cost_models.ops.call import Rank
from autopar.cost_models.tape.liveness import weight_of
from autopar.cost_models.tape.program import FUSIBLE, Program, Programs, Run
from autopar.cost_models.tape.stage import Call
from autopar.cost_models.tape.tape import Step, Transfer
from autopar.cost_models.tape.tensors import Memory
from autopar.cost_models.work import Attention, Kernel, Matmul, Move, Saved

_LEADING = ("loss", "softmax", "norm", "reduction")
"""What a fused kernel is called after, first come first."""


def kernels_of(programs: Programs) -> tuple[Kernel, ...]:
    """What all programs of a stage compute; equal kernels are one with a count."""
    calls = programs.taped.task.calls
    compiled = programs.taped.tape.implementation.compiled
    found: dict[tuple[object, ...], tuple[int, str, str]] = {}
    for program in programs.parts.values():
        runs = [run for run in program.runs if not isinstance(run.step.detail, Transfer)]
        groups = _fused(program, calls) if compiled else [[run] for run in runs]
        readers = _readers(program) if compiled else {}
        for group in groups:
            key = step_key(group[0]) if len(group) == 1 else _fused_key(group, program, readers)
            node, module, count = _place(group[0].step, calls)
            before = found.get(key)
            if before is not None:
                count, node, module = before[0] + count, before[1], before[2]
            found[key] = (count, node, module)
    return tuple(_kernel(key, *entry) for key, entry in found.items())


def step_key(run: Run) -> tuple[object, ...]:
    """What the seconds of a step depend on."""
    step = run.step
    return (
        step.op, step.kind, run.phase, step.flops, step.read_bytes, step.write_bytes, step.dtype,
        step.detail, step.launches,
    )  # fmt: skip


def _kernel(key: tuple[object, ...], count: int, node: str, module: str) -> Kernel:
    op, kind, phase, flops, read_bytes, write_bytes, dtype, detail, launches = key
    return Kernel(
        node=node,
        op=op,  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        phase=phase,  # type: ignore[arg-type]
        flops=flops,  # type: ignore[arg-type]
        read_bytes=read_bytes,  # type: ignore[arg-type]
        write_bytes=write_bytes,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        matmul=detail if isinstance(detail, Matmul) else None,
        attention=detail if isinstance(detail, Attention) else None,
        launches=launches,  # type: ignore[arg-type]
        count=count,
        module=module,
    )


def kernel_of_step(run: Run) -> Kernel:
    """One run of a step that is no collective, as a kernel of its own."""
    return _kernel(step_key(run), 1, "", "")


def _fused(program: Program, calls: Sequence[Call]) -> list[list[Run]]:
    """Groups of runs that become one kernel.

    Two fusible steps are joined if one reads what the other makes, both are for the same phase and
    layer, and as many steps that cannot be fused lie before either: then none lies between.
    """
    depth: dict[Memory, int] = {}
    group_of: dict[Memory, tuple[int, tuple[object, ...]]] = {}
    groups: list[list[Run]] = []
    for run in program.runs:
        step = run.step
        here = max((depth.get(memory, 0) for memory in run.reads), default=0)
        moves = isinstance(step.detail, Transfer)
        if moves or step.kind not in FUSIBLE:
            groups += [] if moves else [[run]]
            depth.update(dict.fromkeys(run.writes, here + 1))
            continue
        copy = calls[step.origin].copy if 0 <= step.origin < len(calls) else -1
        label = (here, run.phase, copy)
        before = [group_of[memory] for memory in run.reads if memory in group_of]
        number = max((found for found, other in before if other == label), default=-1)
        if number < 0:
            number = len(groups)
            groups.append([])
        groups[number].append(run)
        depth.update(dict.fromkeys(run.writes, here))
        group_of.update(dict.fromkeys(run.writes, (number, label)))
    return groups


def _readers(program: Program) -> dict[Memory, set[int]]:
    """Runs that read each memory, by identity."""
    found: dict[Memory, set[int]] = {}
    for run in program.runs:
        for memory in run.reads:
            found.setdefault(memory, set()).add(id(run))
    return found


def _fused_key(
    group: Sequence[Run], program: Program, readers: dict[Memory, set[int]]
) -> tuple[object, ...]:
    """What `_kernel` needs of a group, which reads what others made and writes what they read."""
    inside = {id(run) for run in group}
    made = {memory for run in group for memory in run.writes}
    reads: dict[Memory, int] = {}
    for run in group:
        for memory in run.reads:
            if memory not in made:
                size = min(memory.size_bytes, run.step.read_bytes)
                reads[memory] = max(reads.get(memory, 0), size)
    kept = [m for m in made if m in program.given or not readers.get(m, inside) <= inside]
    write_bytes = sum(memory.size_bytes for memory in kept)
    write_bytes += sum(run.step.write_bytes for run in group if run.step.op == "copy_")
    steps = [run.step for run in group]
    largest = max(steps, key=lambda step: step.write_bytes)
    kinds = {step.kind for step in steps}
    kind = next((name for name in _LEADING if name in kinds), largest.kind)
    ops = "+".join(dict.fromkeys(step.op for step in steps))
    flops = sum(step.flops for step in steps)
    phase = group[0].phase
    return ops, kind, phase, flops, sum(reads.values()), write_bytes, largest.dtype, None, 1


def moves_of(programs: Programs, rank: Rank) -> tuple[Move, ...]:
    """What programs of a stage communicate."""
    names = rank.names
    calls = programs.taped.task.calls
    found: dict[tuple[object, ...], Move] = {}
    for program in programs.parts.values():
        for run in program.runs:
            detail = run.step.detail
            if not isinstance(detail, Transfer):
                continue
            node, module, count = _place(run.step, calls)
            if 0 <= run.step.maker < len(calls):
                node = calls[run.step.maker].node.name
            key = (detail, run.phase, node)
            before = found.get(key)
            found[key] = Move(
                kind=detail.kind,
                size_bytes=detail.size_bytes,
                axes=tuple(names[axis] for axis in detail.axes),
                group=detail.group,
                phase=run.phase,
                node=node,
                dtype=detail.dtype,
                count=count + (before.count if before is not None else 0),
                module=module,
            )
    return tuple(found.values())


def _place(step: Step, calls: Sequence[Call]) -> tuple[str, str, int]:
    """Node and module that a step serves, and for how many equal ones it stands."""
    if not 0 <= step.origin < len(calls):
        return "", "", 1
    call = calls[step.origin]
    return call.node.name, call.node.module, call.count


def saved_of(programs: Programs, memories: Collection[Memory] | None = None) -> tuple[Saved, ...]:
    """What forward leaves for backward.

    Args:
        programs: The programs of a stage.
        memories: What to look at instead.
    """
    calls = programs.taped.task.calls
    found = []
    for memory in programs.saved if memories is None else memories:
        step = memory.step
        node, module, _ = _place(step, calls) if step is not None else (memory.name, "", 1)
        found.append(
            Saved(
                node=node,
                what=memory.what,
                size_bytes=memory.size_bytes,
                count=weight_of(memory, programs),
                module=module,
            )
        )
    return tuple(found)
