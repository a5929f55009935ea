"""Parts of a plan beside its splits: pipeline, ZeRO, and how the file's text becomes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import PlanError, meant
from autopar.schedules.make import SCHEDULES
from autopar.sharding.mesh import MICROBATCH
from autopar.units import counted

MAX_ZERO = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How the graph is cut into stages and in which order microbatches run through them.

    Attributes:
        axis: Mesh axis that holds the stages; a mesh without it has one pipeline rank.
        schedule: Name of the schedule.
        microbatches: Parts that the batch is computed in, one after another.
        chunks: Stages per pipeline rank.
        update_every: Microbatches of an update, for ``pipedream_2bw``; 0 for what the schedule
            does by itself.
        vertical_sync: Whether ``pipedream`` uses one version of the parameters in all stages for
            one microbatch.
        cuts: Op keys: the first op of stage 1, of stage 2, and so on. Equal neighbours leave the
            stage between them without ops.
    """

    axis: str = "pp"
    schedule: str = "1f1b"
    microbatches: int = 1
    chunks: int = 1
    update_every: int = 0
    vertical_sync: bool = False
    cuts: tuple[str, ...] = ()

    def ranks(self, axes: tuple[tuple[str, int], ...]) -> int:
        """Number of pipeline ranks on a mesh of `axes`."""
        return dict(axes).get(self.axis, 1)

    def stages(self, axes: tuple[tuple[str, int], ...]) -> int:
        """Number of stages on a mesh of `axes`."""
        return self.ranks(axes) * self.chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPlan:
    """What data-parallel ranks hold once instead of each (ZeRO, arXiv 1910.02054).

    Attributes:
        stage: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as well.
        axes: Data axes of the mesh over which it is divided.
    """

    stage: int = 0
    axes: tuple[str, ...] = ()


MOST_ACTIONS = 2**20
"""Stages times microbatches of a step: more than any cluster has, and few enough to simulate."""
Problem = tuple[str, str, str | None, str | None]
"""Field, what is wrong with it, what would be right, what to do."""


def check_pipeline(pipeline: PipelinePlan, axes: tuple[tuple[str, int], ...], where: str) -> None:
    """Refuse a pipeline that no graph could run.

    Args:
        pipeline: The pipeline.
        axes: Axes of the mesh.
        where: What the fields belong to, for errors: each is named as ``<where><field>``.

    Raises:
        PlanError: Names the field.
    """
    for field, what, expected, fix in pipeline_problems(pipeline, axes):
        place = field if field == "mesh" else f"{where}{field}"
        raise PlanError(what, expected=expected, fix=fix, where=place)


def pipeline_problems(
    pipeline: PipelinePlan, axes: tuple[tuple[str, int], ...]
) -> Iterator[Problem]:
    """Everything for which no graph could run a pipeline.

    Args:
        pipeline: The pipeline.
        axes: Axes of the mesh.
    """
    names = [name for name, _ in axes]
    if pipeline.axis != "pp" and pipeline.axis not in names:
        what = f"the pipeline runs over axis {pipeline.axis!r}, which the mesh lacks"
        yield "axis", what, "one of " + ", ".join(names), meant(pipeline.axis, names)
    count, stages = pipeline.microbatches, pipeline.stages(axes)
    if count < 1:
        yield "microbatches", f"{count} microbatches", "a whole number from 1", None
    if count > 1 and MICROBATCH in names:
        what = f"a mesh axis is called {MICROBATCH!r}, which is the name of the axis in time"
        yield "mesh", what, "another name for the mesh axis", None
    if count * stages > MOST_ACTIONS:
        what = f"{counted(count, 'microbatch')} through {counted(stages, 'stage')}"
        yield "microbatches", what, f"a product of at most {MOST_ACTIONS:,}", None
    yield from _schedule_problems(pipeline)
    yield from _update_problems(pipeline, pipeline.ranks(axes))
    if pipeline.cuts and len(pipeline.cuts) != stages - 1:
        what = (
            f"{counted(len(pipeline.cuts), 'cut')} for "
            f"{counted(len(pipeline.cuts) + 1, 'stage')}, but the pipeline has "
            f"{counted(pipeline.ranks(axes), 'rank')} with {counted(pipeline.chunks, 'stage')} each"
        )
        yield "cuts", what, "no cut" if stages == 1 else counted(stages - 1, "cut"), None


def default_chunks(schedule: str) -> int:
    """Stages per pipeline rank of a schedule when none are asked for; 1 for an unknown one."""
    kind = SCHEDULES.get(schedule)
    if kind is None:
        return 1
    return 2 if kind.chunks is None else kind.chunks


def _schedule_problems(pipeline: PipelinePlan) -> Iterator[Problem]:
    name, kind = pipeline.schedule, SCHEDULES.get(pipeline.schedule)
    if kind is None:
        what = f"unknown schedule {name!r}"
        yield "schedule", what, "one of " + ", ".join(SCHEDULES), meant(name, SCHEDULES)
        return
    if pipeline.chunks < 2 if kind.chunks is None else pipeline.chunks != kind.chunks:
        what = (
            f"schedule {name} with {counted(pipeline.chunks, 'chunk')} (stages per pipeline rank)"
        )
        expected = "2 or more" if kind.chunks is None else str(kind.chunks)
        fix = "1f1b has one chunk per rank, interleaved_1f1b any number from 2"
        yield "chunks", what, expected, fix
    if pipeline.vertical_sync and not kind.vertical_sync:
        what = f"vertical_sync is set with schedule {name}"
        expected = "schedule pipedream: others use weights of one version everywhere"
        yield "vertical_sync", what, expected, None


def _update_problems(pipeline: PipelinePlan, ranks: int) -> Iterator[Problem]:
    """An `update_every` that the schedule cannot keep."""
    every, count, name = pipeline.update_every, pipeline.microbatches, pipeline.schedule
    if every == 0 or count < 1:
        return
    if name == "pipedream_2bw":
        good = every > 0 and count % every == 0 and every >= min(ranks, count)
        expected = f"a divisor of {counted(count, 'microbatch')}, not below {min(ranks, count)}"
    else:
        only = 1 if name == "pipedream" else count
        good, expected = every == only, f"{only} or 0; pipedream_2bw takes other numbers"
    if not good:
        what = f"schedule {name} with an update every {every} of {counted(count, 'microbatch')}"
        yield "update_every", what, expected, None


def check_zero(
    zero: ZeroPlan,
    pipeline: PipelinePlan,
    data_axes: tuple[str, ...],
    storage: tuple[str, ...],
    where: str,
) -> None:
    """Refuse a ZeRO that cannot be carried out.

    Args:
        zero: The ZeRO.
        pipeline: The pipeline beside it.
        data_axes: Axes along which only the batch or the sequence is split.
        storage: Axes along which parameters are stored split already.
        where: Name of the field for errors.

    Raises:
        PlanError: If the stage is none, or an axis holds no data, or another part excludes it.
    """
    for field, what, expected, fix in zero_problems(zero, pipeline, data_axes, storage):
        raise PlanError(what, expected=expected, fix=fix, where=f"{where}.{field}")


def zero_problems(
    zero: ZeroPlan,
    pipeline: PipelinePlan,
    data_axes: tuple[str, ...],
    storage: tuple[str, ...],
) -> Iterator[Problem]:
    """Everything for which a ZeRO cannot be carried out; see `check_zero`."""
    if not 0 <= zero.stage <= MAX_ZERO:
        yield "stage", f"ZeRO stage {zero.stage}", "0, 1, 2 or 3", None
        return
    if not zero.stage:
        if zero.axes:
            what = f"ZeRO stage 0 divides nothing over {', '.join(zero.axes)}"
            yield "axes", what, "a stage from 1, or no axes", None
        return
    if not zero.axes:
        what = f"ZeRO stage {zero.stage} has no data axis to divide over"
        yield "axes", what, "a mesh axis that splits the batch, such as dp=2", None
    for axis in dict.fromkeys(zero.axes):
        known = "data axes, each once: " + (", ".join(data_axes) or "the mesh has none")
        if axis not in data_axes:
            what = f"ZeRO divides over axis {axis!r}, along which not only data is split"
            yield "axes", what, known, meant(axis, data_axes)
        elif zero.axes.count(axis) > 1:
            yield "axes", f"ZeRO divides over axis {axis!r} twice", known, None
        elif axis in storage:
            what = f"parameters are stored split over axis {axis!r} already (fsdp)"
            yield "axes", what, "fsdp or ZeRO, not both over one axis", None
    kind = SCHEDULES.get(pipeline.schedule)
    if zero.stage > 1 and kind is not None and kind.asynchronous:
        what = (
            f"ZeRO stage {zero.stage} with schedule {pipeline.schedule}: every rank must keep "
            "whole versions of its parameters for the microbatches under way"
        )
        expected = "ZeRO stage 0 or 1, or a schedule that updates once a step"
        yield "stage", what, expected, None
