"""The steps of a program with every copy of what stands in it once, with a count."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from autopar.cost_models.tape.program import Program, Programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps in a row that are repeated together.

    Attributes:
        start: First step.
        stop: Step behind the last.
        times: How often they are done.
        position: Place of the first among all steps, repeated ones included.
    """

    start: int
    stop: int
    times: int
    position: int

    @property
    def end(self) -> int:
        """Place behind the last repetition."""
        return self.position + self.times * (self.stop - self.start)


def segments(programs: Programs, program: Program) -> list[Segment]:
    """Segments of a program of a stage, in order."""
    calls = programs.taped.task.calls
    runs, found = program.runs, list[Segment]()
    start = position = 0
    before: tuple[int, int] | None = None

    def close(stop: int) -> None:
        nonlocal start, position
        if before is not None:
            found.append(Segment(start=start, stop=stop, times=before[1], position=position))
            start, position = stop, found[-1].end

    for place, run in enumerate(runs):
        here = (-1, 1)
        if 0 <= run.step.origin < len(calls):
            call = calls[run.step.origin]
            here = (call.copy, call.count) if call.count > 1 else here
        if here != before:
            close(place)
            before = here
    close(len(runs))
    return found


class Unfolded:
    """A program of a stage, all copies of its layers spelled out.

    Args:
        programs: Programs of the stage.
        kind: Which of them.

    Attributes:
        count: Steps, repeated ones included.
    """

    def __init__(self, programs: Programs, kind: str) -> None:
        self.program = programs.parts[kind]
        self.segments = segments(programs, self.program)
        self.count = self.segments[-1].end if self.segments else 0
        # Backward begins with the last copy.
        self.backward = kind != "F"
        self.copies: dict[str, list[str]] = {}
        for name, like in programs.taped.task.like.items():
            self.copies.setdefault(like, [like]).append(name)

    def name(self, parameter: str, turn: int, times: int) -> str:
        """The parameter that stands in `parameter`'s place in one of the repetitions."""
        names = self.copies.get(parameter, ())
        if len(names) != times:
            return parameter
        return names[times - 1 - turn if self.backward else turn]

    def steps(self, wanted: Collection[int]) -> Iterator[tuple[int, int, int, int]]:
        """Steps at places of `wanted`: place among all, place, which repetition, of how many."""
        for item in self.segments:
            length = item.stop - item.start
            mine = [place for place in range(item.start, item.stop) if place in wanted]
            for turn in range(item.times) if mine else ():
                first = item.position + turn * length - item.start
                for place in mine:
                    yield first + place, place, turn, item.times
