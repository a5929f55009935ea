"""Parts of a plan beside its splits: pipeline, ZeRO, and how the file's text becomes them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from autopar.errors import PlanError
from autopar.schedules.make import SCHEDULES
from autopar.sharding.mesh import MICROBATCH

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


def check_pipeline(pipeline: PipelinePlan, axes: tuple[tuple[str, int], ...], where: str) -> None:
    """Refuse a pipeline that no graph could run.

    Args:
        pipeline: The pipeline.
        axes: Axes of the mesh.
        where: What the fields belong to, for errors: each is named as ``<where><field>``.

    Raises:
        PlanError: Names the field.
    """
    names = [name for name, _ in axes]
    if pipeline.axis != "pp" and pipeline.axis not in names:
        raise PlanError(
            f"the pipeline runs over axis {pipeline.axis!r}, which the mesh lacks",
            expected="one of " + ", ".join(names),
            where=f"{where}axis",
        )
    if pipeline.microbatches < 1:
        raise PlanError(
            f"{pipeline.microbatches} microbatches",
            expected="a whole number from 1",
            where=f"{where}microbatches",
        )
    if pipeline.microbatches > 1 and MICROBATCH in names:
        raise PlanError(
            f"a mesh axis is called {MICROBATCH!r}, which is the name of the axis in time",
            expected="another name for the mesh axis",
            where="mesh",
        )
    _check_schedule(pipeline, where)
    _check_updates(pipeline, pipeline.ranks(axes), where)
    stages = pipeline.stages(axes)
    if pipeline.cuts and len(pipeline.cuts) != stages - 1:
        many = "no cut" if stages == 1 else f"{stages - 1} cuts"
        raise PlanError(
            f"{len(pipeline.cuts)} cuts make {len(pipeline.cuts) + 1} stages, but the pipeline has "
            f"{pipeline.ranks(axes)} ranks with {pipeline.chunks} stages each",
            expected=many,
            where=f"{where}cuts",
        )


def default_chunks(schedule: str) -> int:
    """Stages per pipeline rank of a schedule when none are asked for; 1 for an unknown one."""
    kind = SCHEDULES.get(schedule)
    if kind is None:
        return 1
    return 2 if kind.chunks is None else kind.chunks


def _check_schedule(pipeline: PipelinePlan, where: str) -> None:
    name, kind = pipeline.schedule, SCHEDULES.get(pipeline.schedule)
    if kind is None:
        close = get_close_matches(name, list(SCHEDULES), 1)
        raise PlanError(
            f"unknown schedule {name!r}",
            expected="one of " + ", ".join(SCHEDULES),
            fix=f"did you mean {close[0]!r}?" if close else None,
            where=f"{where}schedule",
        )
    if pipeline.chunks < 2 if kind.chunks is None else pipeline.chunks != kind.chunks:
        raise PlanError(
            f"schedule {name} with {pipeline.chunks} chunks (stages per pipeline rank)",
            expected="2 or more" if kind.chunks is None else str(kind.chunks),
            fix="1f1b has one chunk per rank, interleaved_1f1b any number from 2",
            where=f"{where}chunks",
        )
    if pipeline.vertical_sync and not kind.vertical_sync:
        raise PlanError(
            f"vertical_sync is set with schedule {name}",
            expected="schedule pipedream: others use weights of one version everywhere",
            where=f"{where}vertical_sync",
        )


def _check_updates(pipeline: PipelinePlan, ranks: int, where: str) -> None:
    """Refuse an `update_every` that the schedule cannot keep."""
    every, count, name = pipeline.update_every, pipeline.microbatches, pipeline.schedule
    if every == 0:
        return
    if name == "pipedream_2bw":
        good = every > 0 and count % every == 0 and every >= min(ranks, count)
        expected = f"a divisor of {count} microbatches, not below {min(ranks, count)}"
    else:
        only = 1 if name == "pipedream" else count
        good, expected = every == only, f"{only} or 0; pipedream_2bw takes other numbers"
    if not good:
        raise PlanError(
            f"schedule {name} with an update every {every} of {count} microbatches",
            expected=expected,
            where=f"{where}update_every",
        )


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
    if not 0 <= zero.stage <= MAX_ZERO:
        raise PlanError(f"ZeRO stage {zero.stage}", expected="0, 1, 2 or 3", where=f"{where}.stage")
    if not zero.stage:
        if zero.axes:
            raise PlanError(
                f"ZeRO stage 0 divides nothing over {', '.join(zero.axes)}",
                expected="a stage from 1, or no axes",
                where=f"{where}.axes",
            )
        return
    axes = f"{where}.axes"
    if not zero.axes:
        raise PlanError(
            f"ZeRO stage {zero.stage} has no data axis to divide over",
            expected="a mesh axis that splits the batch, such as dp=2",
            where=axes,
        )
    for axis in zero.axes:
        if axis not in data_axes or zero.axes.count(axis) > 1:
            raise PlanError(
                f"ZeRO divides over axis {axis!r}, along which not only data is split"
                if axis not in data_axes
                else f"ZeRO divides over axis {axis!r} twice",
                expected="data axes, each once: " + (", ".join(data_axes) or "the mesh has none"),
                where=axes,
            )
        if axis in storage:
            raise PlanError(
                f"parameters are stored split over axis {axis!r} already (fsdp)",
                expected="fsdp or ZeRO, not both over one axis",
                where=axes,
            )
    if zero.stage > 1 and SCHEDULES[pipeline.schedule].asynchronous:
        raise PlanError(
            f"ZeRO stage {zero.stage} with schedule {pipeline.schedule}: every rank must keep "
            "whole versions of its parameters for the microbatches under way",
            expected="ZeRO stage 0 or 1, or a schedule that updates once a step",
            where=f"{where}.stage",
        )


def read_part(data: Any, kind: type, fail: Any, path: str) -> Any:
    """The dataclass `kind` that a JSON object stands for.

    Args:
        data: Parsed JSON.
        kind: `PipelinePlan` or `ZeroPlan`.
        fail: ``(path, got, expected) -> PlanError``.
        path: Path of the object in the file.

    Raises:
        PlanError: If a key is missing, unknown, or of the wrong type.
    """
    template = kind()
    names = [item.name for item in fields(kind)]
    if not isinstance(data, dict) or set(data) != set(names):
        raise fail(path, data, "an object with the keys " + ", ".join(names))
    values: dict[str, Any] = {}
    for name in names:
        wanted, got = type(getattr(template, name)), data[name]
        if wanted is tuple:
            if not isinstance(got, list) or not all(isinstance(item, str) for item in got):
                raise fail(f"{path}.{name}", got, "a list of strings")
            got = tuple(got)
        elif type(got) is not wanted:
            words = {int: "a whole number", bool: "true or false", str: "a string"}[wanted]
            raise fail(f"{path}.{name}", got, words)
        values[name] = got
    return kind(**values)


def part_lines(
    pipeline: PipelinePlan,
    zero: ZeroPlan,
    recompute: tuple[str, ...],
    axes: tuple[tuple[str, int], ...],
) -> list[str]:
    """Lines of a plan's summary about these parts; none for what is not used."""
    lines = []
    stages = pipeline.stages(axes)
    if stages > 1 or pipeline.microbatches > 1:
        per = f", {pipeline.chunks} stages per rank" if pipeline.chunks > 1 else ""
        every = f", update every {pipeline.update_every}" if pipeline.update_every else ""
        sync = ", vertical sync" if pipeline.vertical_sync else ""
        lines.append(
            f"pipeline  {_count(stages, 'stage')} over {pipeline.axis}{per}, "
            f"{_count(pipeline.microbatches, 'microbatch')}, schedule {pipeline.schedule}"
            f"{every}{sync}"
            if stages > 1
            else f"in time   {_count(pipeline.microbatches, 'microbatch')}, one after another"
        )
    if zero.stage:
        what = ("", "optimizer state", "optimizer state and gradients",
                "optimizer state, gradients and parameters")[zero.stage]  # fmt: skip
        lines.append(f"ZeRO-{zero.stage}    {what} divided over {', '.join(zero.axes)}")
    if recompute:
        shown = ", ".join(recompute[:4]) + (
            f" and {len(recompute) - 4} more patterns" if len(recompute) > 4 else ""
        )
        lines.append(f"recompute {shown}")
    return lines


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}" + ("" if number == 1 else plural)
