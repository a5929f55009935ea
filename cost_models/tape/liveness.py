"""Live bytes over a program, as `autopar.runtime.programs.liveness` counts them.

Equal layers stand in a program once, with a count. What happens to live bytes in one of them
happens in each, so a count adds the net change of one for each of the others, and the high-water
mark lies in the first or in the last of them, unless buckets come and go meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.tape.program import Program, Programs
from autopar.cost_models.tape.tape import Transfer
from autopar.cost_models.tape.tensors import Memory
from autopar.cost_models.tape.unfold import Segment, segments

KINDS = ("saved", "boundary", "outputs", "buffers", "collective", "temporary")
"""Kinds of memory that come and go in a program."""
Bytes = Counter[str]
_TEMPORARY, _COLLECTIVE = KINDS.index("temporary"), KINDS.index("collective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one call of a program does to live bytes.

    Attributes:
        kind: Action kind of the program.
        start: Bytes that are handed over, by kind.
        peak: Bytes at the high-water mark, by kind.
        end: Bytes that it leaves behind, by kind.
        where: The op at the high-water mark, and the node it serves; empty for the start.
    """

    kind: str
    start: Bytes
    peak: Bytes
    end: Bytes
    where: str = ""


def weight_of(memory: Memory, programs: Programs) -> int:
    """For how many equal memories one stands: those of equal layers."""
    calls = programs.taped.task.calls
    step = memory.step
    if step is None or not 0 <= step.origin < len(calls):
        return 1
    return calls[step.origin].count


def summarise(
    programs: Programs,
    kind: str,
    held: Collection[Memory] = (),
    extra: Sequence[int] | None = None,
) -> Summary:
    """Walk over a program.

    Args:
        programs: Programs of a stage.
        kind: Which of them.
        held: Memory that is handed over but kept by the caller, for a later program.
        extra: Bytes of buckets live at each step, those of equal layers spelled out, and at the
            end; none by default.
    """
    program = programs.parts[kind]
    return _Walk(programs, program, frozenset(held), extra or ()).run()


def kept_for_later(programs: Programs) -> dict[str, frozenset[Memory]]:
    """What each program reads and a later one of the same microbatch reads too."""
    later: set[Memory] = set()
    found: dict[str, frozenset[Memory]] = {}
    for kind in reversed(list(programs.parts)):
        # What arrives is handed over to forward, which hands it on as a saved value.
        mine = set(programs.parts[kind].taken) if kind != "F" else set()
        found[kind] = frozenset(mine & later)
        later |= mine
    return {kind: found[kind] for kind in programs.parts}


def summarise_stage(
    programs: Programs, extra: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Summary]:
    """Walk over all programs of a stage; what several of them read is kept until the last.

    Args:
        programs: The programs.
        extra: Bytes of buckets live at each step of a program; see `summarise`.
    """
    return {
        kind: summarise(programs, kind, held, (extra or {}).get(kind))
        for kind, held in kept_for_later(programs).items()
    }


class _Walk:
    def __init__(
        self,
        programs: Programs,
        program: Program,
        held: frozenset[Memory],
        extra: Sequence[int],
    ) -> None:
        self.programs, self.program, self.held = programs, program, held
        self.extra = extra
        self.calls = programs.taped.task.calls
        self.live = [0] * len(KINDS)
        self.peak = list(self.live)
        self.top = 0
        self.where = ""

    def kind_of(self, memory: Memory) -> int:
        program = self.program
        found = program.given.get(memory) or program.taken.get(memory)
        if found is not None:
            return KINDS.index(found)
        step = memory.step
        moved = memory.what == "bucket" or (step is not None and isinstance(step.detail, Transfer))
        return _COLLECTIVE if moved else _TEMPORARY

    def run(self) -> Summary:
        program = self.program
        last = self._last_uses()
        start: Bytes = Counter()
        kinds: dict[Memory, int] = {}
        for memory, name in program.taken.items():
            if memory in self.held:
                continue
            size = memory.size_bytes * weight_of(memory, self.programs)
            start[name] += size
            kinds[memory] = self.kind_of(memory)
            self.live[kinds[memory]] += size
        self.peak, self.top = list(self.live), sum(self.live)
        unread = [m for m in kinds if m not in last and m not in program.given]
        for memory in unread:
            self.live[kinds[memory]] -= memory.size_bytes * weight_of(memory, self.programs)
        ends: dict[int, list[Memory]] = {}
        for memory, place in last.items():
            if memory not in program.given and memory not in self.held:
                ends.setdefault(place, []).append(memory)
        self._walk(kinds, ends)
        end = Counter({name: size for name, size in zip(KINDS, self.live, strict=True) if size})
        peak = Counter({name: size for name, size in zip(KINDS, self.peak, strict=True) if size})
        return Summary(kind=program.kind, start=start, peak=peak, end=end, where=self.where)

    def _last_uses(self) -> dict[Memory, int]:
        last: dict[Memory, int] = {}
        for place, run in enumerate(self.program.runs):
            for memory in run.reads:
                if memory.step is not None or memory in self.program.taken:
                    last[memory] = place
            for memory in run.writes:
                last[memory] = place
        return last

    def _walk(self, kinds: dict[Memory, int], ends: dict[int, list[Memory]]) -> None:
        live, runs = self.live, self.program.runs
        for part in segments(self.programs, self.program):
            before, rows = list(live), []
            for here in range(part.start, part.stop):
                for memory in runs[here].writes:
                    if memory not in kinds:
                        kinds[memory] = self.kind_of(memory)
                        live[kinds[memory]] += memory.size_bytes
                rows.append(list(live))
                for memory in ends.get(here, ()):
                    if memory in kinds:
                        live[kinds[memory]] -= memory.size_bytes
            net = [now - then for now, then in zip(live, before, strict=True)]
            self._repeat(part, rows, net)
            for kind, size in enumerate(net):
                live[kind] += (part.times - 1) * size
        self._look(list(live), self.extra[-1] if self.extra else 0, "end")

    def _repeat(self, part: Segment, rows: list[list[int]], net: list[int]) -> None:
        """Look for the high-water mark in every repetition of a segment.

        Args:
            part: The segment.
            rows: Live bytes by kind at each of its steps, the first time.
            net: What each repetition adds.
        """
        totals, length = [sum(row) for row in rows], part.stop - part.start
        # Without buckets it is in the first or the last.
        turns = range(part.times) if self.extra else sorted({0, part.times - 1})
        for turn in turns:
            start = part.position + turn * length
            extra = self.extra[start : start + length] if self.extra else [0] * length
            sums = [a + b for a, b in zip(totals, extra, strict=True)]
            place = sums.index(max(sums))
            row = [a + turn * b for a, b in zip(rows[place], net, strict=True)]
            here = part.start + place
            where = f"{self.program.runs[here].step.op} {self._node(here)}"
            self._look(row, extra[place], where)

    def _look(self, live: list[int], extra: int, where: str) -> None:
        """Compare with the high-water mark so far."""
        total = sum(live) + extra
        if total > self.top:
            live[_COLLECTIVE] += extra
            self.peak, self.top, self.where = live, total, where

    def _node(self, place: int) -> str:
        origin = self.program.runs[place].step.origin
        return self.calls[origin].node.name if 0 <= origin < len(self.calls) else ""
