"""Memory that buckets of ZeRO take while a program runs (`autopar.runtime.programs.zero`).

Stage 1 reduces a bucket as soon as the last backward of an update has written it. Stage 2 makes a
bucket's gradients inside the backward program and scatters their sum when the last of them is
written, one bucket under way. Stage 3 gathers a bucket of parameters one bucket ahead of its first
use, though never before a collective that comes earlier (`autopar.runtime.programs.overlap`), and
drops it after its last use; backward gathers again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from autopar.cost_models.buckets import Bucket
from autopar.cost_models.tape.program import Programs
from autopar.cost_models.tape.tape import Transfer
from autopar.cost_models.tape.tensors import Memory
from autopar.cost_models.tape.unfold import Unfolded

SMALL_BYTES = 64 * 1024
"""What is gathered and not larger may be under way besides another bucket."""


def bucket_bytes(
    programs: Programs, kind: str, buckets: Sequence[Bucket], *, exchanges_rows: bool = False
) -> list[int]:
    """Bytes of buckets that are live at each step of a program, and at its end.

    Args:
        programs: Programs of a stage.
        kind: Which of them; of ZeRO-1 the last of an update.
        buckets: All buckets of the stage with ZeRO, those of one rank included.
        exchanges_rows: Whether a reduce-scatter exchanges rows and adds them up afterwards (gloo),
            so that it needs as much memory again.

    Returns:
        Bytes at each step, steps of all equal layers spelled out.
    """
    whole = Unfolded(programs, kind)
    change = [0] * (whole.count + 2)

    def live(first: int, last: int, size: int) -> None:
        change[first] += size
        change[last + 1] -= size

    mine = [bucket for bucket in buckets if bucket.made_by == kind]
    spans = _written(whole, mine, programs.owners)
    gathered = [bucket for bucket in buckets if bucket.zero == 3]
    starts = [start + 1 for bucket, _, start in spans if bucket.group > 1]
    for first, last, size in _gathered(whole, gathered, starts):
        live(first, last, size)
    for place, (bucket, low, high) in enumerate(spans):
        rows = exchanges_rows and bucket.group > 1
        size = bucket.size_bytes if rows else bucket.shard_bytes
        if bucket.zero == 1:
            live(high + 1, whole.count, size)
            continue
        # The one before is waited for when the next one starts.
        end = spans[place + 1][2] if place + 1 < len(spans) else whole.count
        live(low, end, bucket.size_bytes)
        live(min(high + 1, end), end, size)
    return list(accumulate(change[:-1]))


def _gathered(
    whole: Unfolded, buckets: Sequence[Bucket], starts: Sequence[int]
) -> list[tuple[int, int, int]]:
    """First and last step at which each bucket of parameters is there, and its bytes.

    Args:
        whole: The program.
        buckets: Of parameters.
        starts: Steps before which reductions of buckets of gradients start.
    """
    if not buckets:
        return []
    bucket_of = {item.name: n for n, bucket in enumerate(buckets) for item in bucket.members}
    wanted: dict[int, list[str]] = {}
    for place, run in enumerate(whole.program.runs):
        names = [m.name for m in run.reads if m.kind == "parameter" and m.name in bucket_of]
        if names or isinstance(run.step.detail, Transfer):
            wanted[place] = names
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    others = list(starts)
    for here, place, turn, times in whole.steps(wanted):
        for name in wanted[place]:
            number = bucket_of[whole.name(name, turn, times)]
            first.setdefault(number, here)
            last[number] = here
        if isinstance(whole.program.runs[place].step.detail, Transfer):
            others.append(here + 1)
    others.sort()
    found, landed, before = [], 0, 0
    for number in sorted(first, key=first.__getitem__):
        size, use = buckets[number].size_bytes, first[number]
        earlier = bisect_left(others, use + 1)
        before = max(before, others[earlier - 1] if earlier else 0)
        if size > SMALL_BYTES:
            before, landed = max(before, landed), use
        found.append((before, last[number], size))
    return found


def _written(
    whole: Unfolded, buckets: Sequence[Bucket], owners: Mapping[Memory, str]
) -> list[tuple[Bucket, int, int]]:
    """First and last step that writes to each bucket; reductions start in their order."""
    bucket_of = {item.name: n for n, bucket in enumerate(buckets) for item in bucket.members}
    wanted: dict[int, list[str]] = {}
    for place, run in enumerate(whole.program.runs):
        names = [
            owners[memory]
            for memory in run.step.writes
            # What is copied later is no write to the bucket.
            if owners.get(memory) in bucket_of
            and (run.step.op == "copy_" or memory not in run.writes)
        ]
        if names:
            wanted[place] = names
    places: dict[int, tuple[int, int]] = {}
    for here, place, turn, times in whole.steps(wanted):
        for name in wanted[place]:
            number = bucket_of[whole.name(name, turn, times)]
            low, _ = places.get(number, (here, here))
            places[number] = (low, here)
    found, start = [], -1
    for number, bucket in enumerate(buckets):
        if number in places:
            low, high = places[number]
            start = max(start, high)
            found.append((bucket, low, start))
    return found
