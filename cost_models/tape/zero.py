"""Memory that buckets of ZeRO take while a program runs (`autopar.runtime.programs.zero`).

Stage 1 reduces a bucket as soon as the last backward of an update has written it. Stage 2 makes a
bucket's gradients inside the backward program and scatters their sum when the last of them is
written, one bucket under way. Stage 3 gathers a bucket of parameters one bucket ahead of its first
use and drops it after its last one; backward gathers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost_models.buckets import Bucket
from autopar.cost_models.tape.program import Programs, Run
from autopar.cost_models.tape.tensors import Memory


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
    """
    runs = programs.parts[kind].runs
    change = [0] * (len(runs) + 2)

    def live(first: int, last: int, size: int) -> None:
        change[first] += size
        change[last + 1] -= size

    gathered = [bucket for bucket in buckets if bucket.zero == 3]
    for first, last, size in _gathered(runs, gathered):
        live(first, last, size)
    mine = [bucket for bucket in buckets if bucket.made_by == kind]
    spans = _written(runs, mine, programs.owners)
    for place, (bucket, low, high) in enumerate(spans):
        rows = exchanges_rows and bucket.group > 1
        size = bucket.size_bytes if rows else bucket.shard_bytes
        if bucket.zero == 1:
            live(high + 1, len(runs), size)
            continue
        # The one before is waited for when the next one starts.
        end = spans[place + 1][2] if place + 1 < len(spans) else len(runs)
        live(low, end, bucket.size_bytes)
        live(min(high + 1, end), end, size)
    found, total = [], 0
    for place in range(len(runs) + 1):
        total += change[place]
        found.append(total)
    return found


def _gathered(runs: Sequence[Run], buckets: Sequence[Bucket]) -> list[tuple[int, int, int]]:
    """First and last step at which each bucket of parameters is there, and its bytes."""
    bucket_of = {item.name: n for n, bucket in enumerate(buckets) for item in bucket.members}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, run in enumerate(runs):
        for memory in run.reads:
            number = bucket_of.get(memory.name) if memory.kind == "parameter" else None
            if number is not None:
                first.setdefault(number, place)
                last[number] = place
    order = sorted(first, key=first.__getitem__)
    ahead = [0, *(first[number] for number in order[:-1])] if order else []
    return [
        (start, last[number], buckets[number].size_bytes)
        for number, start in zip(order, ahead, strict=True)
    ]


def _written(
    runs: Sequence[Run], buckets: Sequence[Bucket], owners: Mapping[Memory, str]
) -> list[tuple[Bucket, int, int]]:
    """First and last step that writes to each bucket; reductions start in their order."""
    bucket_of = {item.name: n for n, bucket in enumerate(buckets) for item in bucket.members}
    places: dict[int, tuple[int, int]] = {}
    for place, run in enumerate(runs):
        for memory in run.step.writes:
            number = bucket_of.get(owners.get(memory, ""))
            # What is copied later is no write to the bucket.
            if number is None or (run.step.op != "copy_" and memory in run.writes):
                continue
            low, _ = places.get(number, (place, place))
            places[number] = (low, place)
    found, start = [], -1
    for number, bucket in enumerate(buckets):
        if number in places:
            low, high = places[number]
            start = max(start, high)
            found.append((bucket, low, start))
    return found
