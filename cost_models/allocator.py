"""What an allocator makes of live tensors: bytes allocated, bytes reserved, bytes of a device.

`CachingAllocator` is torch's CUDA allocator (c10/cuda/CUDACachingAllocator.cpp, torch 2.x with its
default settings), without a device: sizes are rounded to 512 bytes; up to 1 MiB comes from segments
of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones get segments of their own in multiples
of 2 MiB; the smallest free block that fits is taken and split; neighbours that are free are joined.
What is reserved is never given back. `replay` lets it see the steps of a stage in order, which is
how much fragmentation there is; `reserve` is the quick estimate with a factor instead.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.memory import RankMemory
from autopar.cost_models.tape.program import Program, Programs
from autopar.cost_models.tape.tensors import Memory
from autopar.units import MIB

ROUND_BYTES = 512
"""``kMinBlockSize``."""
SMALL_BYTES = MIB
"""``kSmallSize``: the largest block of a small segment."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""``kSmallBuffer``."""
MEDIUM_BYTES = 10 * MIB
"""``kMinLargeAlloc``: from here on a block gets a segment of its own."""
MEDIUM_SEGMENT_BYTES = 20 * MIB
"""``kLargeBuffer``."""
SEGMENT_ROUND_BYTES = 2 * MIB
"""``kRoundLarge``."""

FRAGMENTATION = 1.08
"""Bytes reserved over bytes allocated at a peak, where nothing better is known; published runs that
tell both lie between 1.0 and 1.2."""
CUBLAS_WORKSPACE_BYTES = 8_519_680
"""What torch gives cuBLAS per handle and stream: ``:4096:2:16:8`` in KiB (ATen CUDABlas.cpp,
`_parseChosenWorkspaceSize`), allocated like a tensor."""
CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
"""The same on compute capability 9.0."""
CUDA_CONTEXT_BYTES = 500_000_000
"""A process's CUDA context and loaded kernels on a data-centre device, outside of the allocator;
prior: about 0.4 to 0.6 GB with torch's kernels."""
NCCL_CHANNEL_BYTES = 4 * MIB
"""Default NCCL_BUFFSIZE: a buffer per channel and connection (NCCL user guide), outside of the
allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """What a device is asked for at the peak.

    Attributes:
        allocated_bytes: Live tensors, rounded; ``torch.cuda.max_memory_allocated``.
        reserved_bytes: What the allocator holds; ``torch.cuda.max_memory_reserved``.
        context_bytes: What lies outside of the allocator.
    """

    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """All memory of the device that is in use, as nvidia-smi shows it."""
        return self.reserved_bytes + self.context_bytes


def reserve(
    memory: RankMemory,
    *,
    context_bytes: int = 0,
    factor: float = FRAGMENTATION,
    workspace_bytes: int = 0,
    caching: bool = True,
) -> Reserve:
    """What a rank's peak asks of its device.

    Args:
        memory: What the rank holds.
        context_bytes: What lies outside of the allocator.
        factor: Bytes reserved over bytes allocated.
        workspace_bytes: What libraries allocate like tensors.
        caching: Whether memory is cached in segments; else what is freed is gone, as on a CPU.
    """
    allocated = memory.peak_bytes + workspace_bytes
    if not caching:
        return Reserve(
            allocated_bytes=allocated, reserved_bytes=allocated, context_bytes=context_bytes
        )
    allocated = rounded(allocated, ROUND_BYTES)
    return Reserve(
        allocated_bytes=allocated,
        reserved_bytes=rounded(int(allocated * factor), SEGMENT_ROUND_BYTES),
        context_bytes=context_bytes,
    )


def rounded(size_bytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-size_bytes // unit) * unit


def segment_bytes(size_bytes: int) -> int:
    """Size of the segment that is reserved for a block of this size if none is free."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MEDIUM_BYTES:
        return MEDIUM_SEGMENT_BYTES
    return rounded(size_bytes, SEGMENT_ROUND_BYTES)


class Block:
    """A piece of a segment.

    Attributes:
        size_bytes: Its size.
        free: Whether nobody has it.
        small: Whether it lies in a small segment.
        before: The piece in front of it in the segment.
        after: The piece behind it.
        number: Unique, ascending with the time of making.
    """

    __slots__ = ("after", "before", "free", "number", "size_bytes", "small")

    def __init__(self, size_bytes: int, small: bool, number: int) -> None:
        self.size_bytes, self.small, self.number = size_bytes, small, number
        self.free = False
        self.before: Block | None = None
        self.after: Block | None = None


class CachingAllocator:
    """Torch's CUDA caching allocator, without a device.

    Attributes:
        allocated_bytes: Blocks in use.
        reserved_bytes: Segments.
        peak_allocated_bytes: Most that was in use.
    """

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = self.peak_allocated_bytes = 0
        # Free blocks by size, of small and of large segments.
        self._free: tuple[list[tuple[int, int, Block]], list[tuple[int, int, Block]]] = ([], [])
        self._count = 0

    def allocate(self, size_bytes: int) -> Block:
        """A block of at least this size."""
        size = max(rounded(size_bytes, ROUND_BYTES), ROUND_BYTES)
        small = size <= SMALL_BYTES
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        if place < len(pool):
            block = pool.pop(place)[2]
        else:
            block = self._block(segment_bytes(size), small)
            self.reserved_bytes += block.size_bytes
        block.free = False
        self._split(block, size)
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back."""
        assert not block.free
        self.allocated_bytes -= block.size_bytes
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                self._join(block, other)
        insort(self._free[block.small], (block.size_bytes, block.number, block))

    def _block(self, size_bytes: int, small: bool) -> Block:
        self._count += 1
        return Block(size_bytes, small, self._count)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size_bytes - size
        if not (rest >= ROUND_BYTES if block.small else rest > SMALL_BYTES):
            return
        other = self._block(rest, block.small)
        other.free = True
        other.before, other.after = block, block.after
        if block.after is not None:
            block.after.before = other
        block.after, block.size_bytes = other, size
        insort(self._free[block.small], (rest, other.number, other))

    def _take(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size_bytes, block.number))]

    def _join(self, block: Block, other: Block) -> None:
        block.size_bytes += other.size_bytes
        if other is block.before:
            block.before = other.before
            if other.before is not None:
                other.before.after = block
        else:
            block.after = other.after
            if other.after is not None:
                other.after.before = block


@dataclass(slots=True)
class _Replay:
    """Blocks of a stage's memory while its programs run."""

    allocator: CachingAllocator
    programs: Programs

    def run(self, program: Program, blocks: dict[Memory, list[Block]]) -> dict[Memory, list[Block]]:
        """Run a program; takes blocks of what it is handed, gives those of what it leaves."""
        last: dict[Memory, int] = {}
        for place, run in enumerate(program.runs):
            last.update(dict.fromkeys((*run.reads, *run.writes), place))
        ends: dict[int, list[Memory]] = {}
        for memory, place in last.items():
            if memory not in program.given:
                ends.setdefault(place, []).append(memory)
        for first, stop, times in _segments(program, self.programs):
            for _ in range(times):
                for place in range(first, stop):
                    for memory in program.runs[place].writes:
                        made = self.allocator.allocate(memory.size_bytes)
                        blocks.setdefault(memory, []).append(made)
                    for memory in ends.get(place, ()):
                        if blocks.get(memory):
                            self.allocator.free(blocks[memory].pop())
        return {memory: found for memory, found in blocks.items() if found}


def _segments(program: Program, programs: Programs) -> list[tuple[int, int, int]]:
    """Stretches of steps of one layer, and for how many layers they stand."""
    calls = programs.taped.task.calls
    found: list[tuple[int, int, int]] = []
    before: object = None
    for place, run in enumerate(program.runs):
        origin = run.step.origin
        call = calls[origin] if 0 <= origin < len(calls) else None
        times = call.count if call is not None else 1
        key = (call.copy if call is not None and times > 1 else -1, times)
        if key == before:
            found[-1] = (found[-1][0], place + 1, times)
        else:
            found.append((place, place + 1, times))
            before = key
    return found


def replay(programs: Programs, static_bytes: Sequence[int], in_flight: int = 1) -> Reserve:
    """Let the allocator see a stage's steps: forwards of microbatches, then their backwards.

    Args:
        programs: Programs of the stage.
        static_bytes: Sizes of what is there all the time: parameters, gradients, optimizer state.
        in_flight: Microbatches whose forward has run before the first backward.

    Returns:
        Bytes at the peak; nothing outside of the allocator.
    """
    allocator = CachingAllocator()
    for size in static_bytes:
        allocator.allocate(size)
    replayed = _Replay(allocator, programs)
    frames = [replayed.run(programs.parts["F"], {}) for _ in range(in_flight)]
    for frame in frames:
        blocks = frame
        for kind, program in programs.parts.items():
            if kind != "F":
                blocks = replayed.run(program, blocks)
    return Reserve(
        allocated_bytes=allocator.peak_allocated_bytes, reserved_bytes=allocator.reserved_bytes
    )
