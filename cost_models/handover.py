"""What the programs of a stage leave for other stages, and which memory that is.

A value is sent as it lies, or as a copy where its strides are not those of a contiguous tensor. The
memory of what a stage keeps for backward anyway outlives the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from autopar.cost_models.tape.program import Programs
from autopar.cost_models.tape.stage import StageTask
from autopar.cost_models.tape.tensors import Local, Memory, plain
from autopar.plan.stages import Boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A value for later stages, or the gradient of one for the stage that made it.

    Attributes:
        value: Name of the value.
        memory: Where it lies.
        size_bytes: Bytes of a message.
        contiguous: Whether it goes out as it lies; otherwise a copy does.
        kept: Whether its memory stays with the stage.
        peers: Stages that get it.
        missing: Of a gradient: whether there is none, so that zeros are made.
    """

    value: str
    memory: Memory
    size_bytes: int
    contiguous: bool
    kept: bool
    peers: tuple[int, ...]
    missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """What a stage passes on and gets.

    Attributes:
        given: What it leaves for other stages: values (``F``) and gradients (``B``).
        taken: Where lies what comes to it, by name of the value: values (``F``), gradients (``B``).
    """

    given: Mapping[str, tuple[Handed, ...]] = field(default_factory=dict)
    taken: Mapping[str, Mapping[str, Memory]] = field(default_factory=dict)


def passing_of(
    task: StageTask,
    programs: Programs,
    boundaries: Iterable[Boundary],
    local_bytes: Callable[[str], int],
) -> Passing:
    """What a stage passes on and gets.

    Args:
        task: The stage.
        programs: Its programs, or those of a stage of equal layers.
        boundaries: All values that pass between stages.
        local_bytes: Bytes of a value on this rank.
    """
    taped = programs.taped
    leaving = dict(zip(task.leaving, taped.task.leaving, strict=True))
    arriving = dict(zip(task.arriving, taped.task.arriving, strict=True))
    ahead: list[Handed] = []
    back: list[Handed] = []
    for item in boundaries:
        size = local_bytes(item.value)
        if item.value in leaving:
            local = taped.results[leaving[item.value]]
            ahead.append(
                Handed(
                    value=item.value,
                    memory=local.memory,
                    size_bytes=size,
                    contiguous=_contiguous(local),
                    kept=programs.parts["F"].given.get(local.memory) != "boundary",
                    peers=tuple(item.targets),
                )
            )
        elif item.value in arriving and item.gradient:
            gradient = taped.gradients.get(arriving[item.value])
            back.append(_back(item, gradient, size, programs))
    return Passing(
        given={"F": tuple(ahead), "B": tuple(back)},
        taken={
            "F": {
                name: taped.inputs[like].memory
                for name, like in arriving.items()
                if like in taped.inputs
            },
            "B": {
                name: taped.tangents[like].memory
                for name, like in leaving.items()
                if like in taped.tangents
            },
        },
    )


def _back(item: Boundary, gradient: Local | None, size: int, programs: Programs) -> Handed:
    part = programs.parts.get("I") or programs.parts["B"]
    memory = Memory(size) if gradient is None else gradient.memory
    return Handed(
        value=item.value,
        memory=memory,
        size_bytes=size,
        contiguous=gradient is None or _contiguous(gradient),
        kept=gradient is not None and part.given.get(memory) != "boundary",
        peers=(item.source,),
        missing=gradient is None,
    )


def _contiguous(local: Local) -> bool:
    return plain(local.shape, local.strides) is None
