"""The one door: a schedule by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.registry import Registry
from autopar.schedules.actions import Schedule
from autopar.schedules.gpipe import gpipe
from autopar.schedules.interleaved import interleaved
from autopar.schedules.one_f_one_b import one_f_one_b
from autopar.schedules.pipedream import pipedream
from autopar.schedules.pipedream_2bw import pipedream_2bw
from autopar.schedules.zb_h1 import zb_h1
from autopar.schedules.zbv import zbv


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a generator is asked for; the fields are those of `make_schedule`."""

    num_ranks: int
    num_microbatches: int
    chunks: int
    update_every: int
    vertical_sync: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A way to schedule a pipeline.

    Attributes:
        summary: What it is, in a line.
        generate: Makes it.
        chunks: Stages per rank; None for any number from 2.
        splits_backward: Whether it has ``I`` and ``W`` in place of ``B``.
        default_update_every: Microbatches of an update when none are asked for, from the numbers
            of ranks and microbatches; None where a step is always one update.
        vertical_sync: Whether it can have vertical sync.
    """

    summary: str
    generate: Callable[[Request], Schedule]
    chunks: int | None = 1
    splits_backward: bool = False
    default_update_every: Callable[[int, int], int] | None = None
    vertical_sync: bool = False

    @property
    def asynchronous(self) -> bool:
        """Whether it trains with weights that are some updates old."""
        return self.default_update_every is not None


def _smallest_divisor(num_ranks: int, num_microbatches: int) -> int:
    """The smallest divisor of `num_microbatches` that is not below `num_ranks`."""
    sizes = range(num_ranks, num_microbatches)
    return next((n for n in sizes if num_microbatches % n == 0), num_microbatches)


SCHEDULES = Registry[ScheduleKind]("pipeline schedule", error=PlanError)
SCHEDULES.add(
    "gpipe",
    ScheduleKind(
        summary="all forwards, then all backwards",
        generate=lambda r: gpipe(r.num_ranks, r.num_microbatches),
    ),
)
SCHEDULES.add(
    "1f1b",
    ScheduleKind(
        summary="one forward, one backward",
        generate=lambda r: one_f_one_b(r.num_ranks, r.num_microbatches),
    ),
)
SCHEDULES.add(
    "interleaved_1f1b",
    ScheduleKind(
        summary="1F1B with several chunks per rank",
        generate=lambda r: interleaved(r.num_ranks, r.num_microbatches, r.chunks),
        chunks=None,
    ),
)
SCHEDULES.add(
    "zb_h1",
    ScheduleKind(
        summary="zero bubble H1: 1F1B with late weight gradients",
        generate=lambda r: zb_h1(r.num_ranks, r.num_microbatches),
        splits_backward=True,
    ),
)
SCHEDULES.add(
    "zbv",
    ScheduleKind(
        summary="zero bubble V: two chunks per rank, down and up again",
        generate=lambda r: zbv(r.num_ranks, r.num_microbatches),
        chunks=2,
        splits_backward=True,
    ),
)
SCHEDULES.add(
    "pipedream",
    ScheduleKind(
        summary="asynchronous 1F1B, an update after every microbatch, stashed weights",
        generate=lambda r: pipedream(
            r.num_ranks, r.num_microbatches, vertical_sync=r.vertical_sync
        ),
        default_update_every=lambda ranks, microbatches: 1,
        vertical_sync=True,
    ),
)
SCHEDULES.add(
    "pipedream_2bw",
    ScheduleKind(
        summary="asynchronous 1F1B with two versions of the weights",
        generate=lambda r: pipedream_2bw(r.num_ranks, r.num_microbatches, r.update_every),
        default_update_every=_smallest_divisor,
    ),
)


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    chunks: int = 1,
    update_every: int | None = None,
    vertical_sync: bool = False,
) -> Schedule:
    """The schedule called `name`, without messages.

    Args:
        name: A name of `SCHEDULES`.
        num_ranks: Pipeline ranks p.
        num_microbatches: Microbatches of a step m.
        chunks: Stages per rank v; 2 for ``zbv``, 2 or more for ``interleaved_1f1b``.
        update_every: Microbatches of an update, for ``pipedream_2bw``: a divisor of m, not below
            p unless it is m. By default the smallest such.
        vertical_sync: For ``pipedream``: all stages use weights as old as the first stage's.

    Raises:
        PlanError: If the name is unknown or the numbers do not fit it.
    """
    kind = SCHEDULES[name]
    for value, what in ((num_ranks, "pipeline ranks"), (num_microbatches, "microbatches")):
        if value < 1:
            raise PlanError(f"schedule {name} for {value} {what}", expected="1 or more")
    if (kind.chunks is None and chunks < 2) or kind.chunks not in (None, chunks):
        raise PlanError(
            f"schedule {name} with {chunks} chunks per rank",
            expected="2 chunks per rank or more" if kind.chunks is None else f"{kind.chunks}",
            fix="1f1b has one chunk per rank" if chunks == 1 else "interleaved_1f1b has any number",
        )
    if vertical_sync and not kind.vertical_sync:
        raise PlanError(
            f"schedule {name} with vertical sync",
            expected="vertical sync with pipedream only: other schedules use weights of one"
            " version everywhere",
        )
    return kind.generate(
        Request(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            chunks=chunks,
            update_every=_update_every(name, num_ranks, num_microbatches, update_every),
            vertical_sync=vertical_sync,
        )
    )


def _update_every(name: str, num_ranks: int, num_microbatches: int, asked: int | None) -> int:
    default = SCHEDULES[name].default_update_every
    if default is None:
        if asked not in (None, num_microbatches):
            raise PlanError(
                f"schedule {name} with an update every {asked} microbatches",
                expected=f"one update for all {num_microbatches} microbatches of a step",
                fix="give each step fewer microbatches",
            )
        return num_microbatches
    if asked is None:
        return default(num_ranks, num_microbatches)
    if name == "pipedream" and asked != 1:
        raise PlanError(
            f"schedule pipedream with an update every {asked} microbatches",
            expected="an update after every microbatch",
            fix="pipedream_2bw updates after any number of them",
        )
    if asked < 1 or num_microbatches % asked:
        raise PlanError(
            f"schedule {name} with an update every {asked} of {num_microbatches} microbatches",
            expected="a divisor of the number of microbatches",
        )
    if name == "pipedream_2bw" and asked < min(num_ranks, num_microbatches):
        raise PlanError(
            f"schedule pipedream_2bw with an update every {asked} microbatches on"
            f" {num_ranks} ranks",
            expected=f"{num_ranks} microbatches per update or more: with fewer, two versions of"
            " the weights are not enough (arXiv 2006.09503, section 3.1)",
        )
    return asked
