"""What is said of schedules that were not made, against schedules that are made."""

from __future__ import annotations

import pytest

from autopar.schedules.actions import BACKWARDS
from autopar.schedules.make import make_schedule
from autopar.schedules.steady import (
    counted_fullest,
    fullest,
    least_live,
    moments,
    most_live,
    stage_ranks,
)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_h1", 1),
     ("zbv", 2)],
)  # fmt: skip
def test_ranks_and_live_microbatches(name: str, chunks: int) -> None:
    for ranks in (1, 2, 3, 4, 7):
        for microbatches in (*range(1, 20), 33, 40, 57):
            whole = make_schedule(name, ranks, microbatches, chunks=chunks)
            assert stage_ranks(name, ranks, chunks) == whole.stage_ranks
            most = []
            for actions in whole.actions:
                steps = [
                    1 if action.kind == "F" else -(action.kind in BACKWARDS - {"I"})
                    for action in actions
                ]
                most.append(max(sum(steps[: end + 1]) for end in range(len(steps))))
            assert most_live(name, ranks, microbatches, chunks) == tuple(most), (
                ranks,
                microbatches,
            )
            assert least_live(name, ranks, microbatches, chunks) == min(most)


@pytest.mark.parametrize(("name", "chunks"), [("zb_h1", 1), ("zbv", 2)])
def test_fullest_times_of_ranks(name: str, chunks: int) -> None:
    for ranks in (2, 3, 4, 7):
        for microbatches in (*range(1, 18), 33):
            counted = counted_fullest(name, ranks, microbatches, chunks)
            assert fullest(name, ranks, microbatches, chunks) == counted
            for times, most in zip(
                counted, most_live(name, ranks, microbatches, chunks), strict=True
            ):
                assert max(early + late for early, late in times) <= most


@pytest.mark.parametrize(
    ("name", "chunks"), [("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zbv", 2)]
)
def test_moments_of_many_microbatches_are_those_of_a_few(name: str, chunks: int) -> None:
    """What is left out repeats what is there; the most of all chunks is that of the rank."""
    for ranks in (2, 3):
        few, many = (moments(name, ranks, count * ranks, chunks) for count in (chunks + 4, 12))
        assert few == many
        schedule = make_schedule(name, ranks, 12 * ranks, chunks=chunks)
        for rank, actions in enumerate(schedule.actions):
            live = dict.fromkeys((s for s, at in enumerate(schedule.stage_ranks) if at == rank), 0)
            seen = set()
            for action in actions:
                if action.kind in ("F", "B", "I"):
                    live[action.stage] += 1 if action.kind == "F" else -1
                    seen.add(tuple(live.values()))
            assert {early for early, _ in few[rank]} == seen
