"""The candidates for the stages of a point, and what each of them can keep."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.buckets import LIMIT_BYTES
from autopar.cost_models.device import Device
from autopar.cost_models.evaluate import update_bandwidth
from autopar.schedules.make import SCHEDULES
from autopar.schedules.steady import fullest, most_live
from autopar.search.alike import Grid, grid_of, unit_kinds
from autopar.search.chains import main_units
from autopar.search.exchange import Exchange, Exchanged
from autopar.search.problem import Problem
from autopar.search.seconds import kernel_seconds
from autopar.search.space import Point
from autopar.search.stage_cut import LONG, Cut, Filled, Intervals, fill_all, least_bottleneck
from autopar.search.states import held_bytes, ranges
from autopar.search.tables import UnitTable
from autopar.search.uneven import shares

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Edges = tuple[tuple[int, int], ...]


MANY_UNITS = 40
"""Of more units than this, stages that are too long to be worth a look are left out."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Candidates for the stages of a point.

    Attributes:
        each: For every stage the candidates as they are on its device.
        filled: For every stage what each of them can keep there.
        room_bytes: Of every stage, for all memory.
        under_way: See `Candidates.live`.
        waiting: See `Candidates.live`.
    """

    each: list[Intervals]
    filled: list[Filled]
    room_bytes: Floats
    under_way: Floats
    waiting: Floats

    @property
    def intervals(self) -> Intervals:
        """The candidates, as far as they do not depend on the device."""
        return self.each[0]

    def possible(self) -> bool:
        """Whether there is memory for some cut, however slow."""
        costs = [
            np.where(mine.static + live * mine.leanest()[0] <= room, 0.0, np.inf)
            for mine, live, room in zip(self.each, self.under_way, self.room_bytes, strict=True)
        ]
        return math.isfinite(least_bottleneck(self.intervals, costs)[0])


_NOTHING = Filled(
    forward_s=np.zeros(0), backward_s=np.zeros(0), alone_s=np.zeros(0), ending_s=np.zeros(0),
    low=np.zeros(0, np.int64), high=np.zeros(0, np.int64), upgraded=np.zeros(0),
)  # fmt: skip


@dataclass(slots=True)
class Candidates:
    """Candidates for the stages of the points of a problem; remembers what points share.

    Attributes:
        problem: The problem.
        exchange: What moves over the data axis.
        main: See `main_units`.
        given_bytes: Of inputs, constants and buffers.
    """

    problem: Problem
    exchange: Exchange = field(init=False)
    main: NDArray[np.bool_] = field(init=False)
    given_bytes: int = field(init=False)
    _under_way: dict[object, list[float]] = field(default_factory=dict)
    _chains: dict[object, tuple[tuple[Floats, Floats], Floats, Ints]] = field(default_factory=dict)
    _unit_kinds: dict[int, Ints] = field(default_factory=dict)
    _grids: dict[object, Grid] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.exchange = Exchange(self.problem)
        self.main = main_units(self.problem.units, self.problem.loss)
        self.given_bytes = sum(
            item.value.spec.size_bytes
            for item in self.problem.graph.inputs
            if item.kind in ("input", "constant", "buffer")
        )

    def sharing(self) -> float:
        """Least factor on seconds because of ranks that share cores and wait."""
        node = self.problem.cluster.hardware(0).node
        return min(1.0, node.cores / node.devices) if node.cores > 0 else 1.0

    def room(self, device: Device) -> float:
        """Memory on a device for what is divided: inputs and buffers lie whole on every rank."""
        return self.problem.room_bytes(device) - self.given_bytes

    def devices(self, point: Point, *, anywhere: bool = False) -> tuple[Device, ...]:
        """The different devices of a point."""
        problem = self.problem
        if problem.cluster.is_uniform:
            return (problem.device,)
        groups = tuple(group.hardware for group in problem.cluster.groups)
        found = groups if anywhere else problem.devices(point)
        return tuple({device.name: device for device in found}.values())

    def fastest_table(self, point: Point, devices: tuple[Device, ...]) -> UnitTable | None:
        """The table of a point of which every part is on the device that is fastest at it."""
        tables = [self.problem.table(point, device) for device in devices]
        known = [table for table in tables if table is not None]
        if len(known) < 2:
            return known[0] if known else None
        least = np.minimum.reduce([table.seconds for table in known])
        return replace(known[0], seconds=least)

    def intervals(
        self,
        point: Point,
        table: UnitTable,
        longest: int | None = None,
        *,
        lightest: bool = False,
        only: Edges | None = None,
    ) -> Intervals:
        """All stages that a point may have.

        Args:
            point: The point.
            table: Its table.
            longest: Most units of a stage.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
            only: First unit of every stage, and the unit behind its last, if they are known.
        """
        grid = self._grid(point, table, longest, only)
        each = self._sums(
            point, table, grid.start[grid.first], grid.stop[grid.first], lightest=lightest
        )
        return each.spread(grid.start, grid.stop, grid.kind)

    def _grid(
        self, point: Point, table: UnitTable, longest: int | None, only: Edges | None
    ) -> Grid:
        count, edges = self.problem.units.count, self.problem.edges
        if edges is not None and point.num_stages > 1 and only is None:
            only = tuple(pairwise((0, *edges, count)))
        if only is not None or (point.pipeline == 1 and point.chunks == 1):
            start, stop = np.array(only or [(0, count)], np.int64).T
            everyone = np.arange(len(start))
            return Grid(start, stop, everyone, everyone)
        if id(table) not in self._unit_kinds:
            blocks = np.array(self.problem.units.block)
            self._unit_kinds[id(table)] = unit_kinds(table, blocks, self.problem.parameters)
        kinds = self._unit_kinds[id(table)]
        key = (kinds.tobytes(), longest)
        if key not in self._grids:
            start, stop = np.triu_indices(count + 1, 1)
            if longest is not None:
                near = stop - start <= longest
                start, stop = start[near], stop[near]
            self._grids[key] = grid_of(kinds, start, stop)
        return self._grids[key]

    def _sums(
        self, point: Point, table: UnitTable, start: Ints, stop: Ints, *, lightest: bool
    ) -> Intervals:
        """Sums over some intervals."""
        problem = self.problem
        count, block = problem.units.count, np.array(problem.units.block)
        inside = ranges((block >= 0).astype(np.float64), start, stop)
        same = np.zeros(len(start))
        for number in sorted({n for n in problem.units.block if n >= 0}):
            same = np.maximum(same, ranges((block == number).astype(np.float64), start, stop))
        parameters = problem.parameters
        each = parameters.bytes_of(table)
        held, trained, state = (parameters.sums(values, start, stop) for values in each)
        if lightest:
            point = replace(point, zero=3)
        parts = self.exchange.exchanged(point, each[1] if not lightest else np.zeros_like(each[1]))
        moved = Exchanged(
            *(
                parameters.sums(values, start, stop)
                for values in (parts.scattered, parts.gathered, parts.summed, parts.returned)
            )
        )
        # A bucket has at most one member that fills it.
        big = (each[1] >= LIMIT_BYTES).astype(np.float64) * (point.data > 1 and not lightest)
        full = parameters.sums(self.exchange.alone(point, big), start, stop)
        speed = problem.software.speed
        updated = trained / (point.data if point.zero else 1)
        # Of one microbatch, gradients come as what forward has saved goes.
        late = trained / (point.data if point.zero >= 2 else 1) * (point.microbatches == 1)
        bandwidth = max(map(update_bandwidth, self.devices(point)))
        update_s = updated * speed.update_passes / bandwidth
        waiting = layer_waiting = None
        if SCHEDULES[point.schedule].splits_backward:
            waiting = ranges(table.late_bytes, start, stop)
            layer_waiting = ranges(table.late_bytes * (block >= 0), start, stop)
        sums, saved = moved.put(ranges(table.seconds, start, stop)), table.saved_bytes
        layer_sums, layer_saved = self._layers(table, block >= 0, start, stop)
        return Intervals(
            start=start,
            stop=stop,
            sums=sums,
            saved=ranges(saved, start, stop),
            working=table.working_bytes[:, stop - 1] if point.schedule == "1f1b" else None,
            layers=inside,
            layer_sums=layer_sums,
            layer_saved=layer_saved,
            late=waiting,
            layer_late=layer_waiting,
            alike=same == inside,
            static=held_bytes(held, trained, state, point.zero, point.data) - late,
            tail_s=update_s + moved.returned,
            sync_s=moved.summed,
            edge_bytes=table.edge_bytes[start],
            full_buckets=full,
            num_units=count,
        )

    def _layers(
        self, table: UnitTable, layer: NDArray[np.bool_], start: Ints, stop: Ints
    ) -> tuple[Floats, Floats] | tuple[None, None]:
        """Sums over the layers of intervals; None if other units are the same under all options."""
        others = table.seconds[..., ~layer], table.saved_bytes[:, ~layer]
        if all((values == values[:1]).all() for values in others):
            return None, None
        return (
            ranges(table.seconds * layer, start, stop),
            ranges(table.saved_bytes * layer, start, stop),
        )

    def uneven(self, point: Point) -> bool:
        """Whether the ranks of a point have chunks that were cut as asked.

        They need not be alike, so that a rank's memory is not divided evenly among them.
        """
        return point.chunks > 1 and self.problem.edges is not None

    def plainest(self, point: Point, *, lightest: bool = False) -> tuple[Stages, Cut] | None:
        """The stages of an uneven point if nothing is computed again: a bound of all its plans.

        Args:
            point: The point; None for any that is not uneven.
            lightest: See `stages`.
        """
        if not self.uneven(point):
            return None
        stages = self.stages(point, None, relaxed=False, lightest=lightest)
        if stages is None:
            return None
        speed, last = self.problem.software.speed, len(self.problem.policies) - 1
        filled, none = [], np.zeros(point.num_stages)
        for mine in stages.each:
            forward, backward = mine.plain(speed)
            filled.append(
                Filled(
                    forward_s=np.where(np.isfinite(stages.room_bytes), forward, np.inf),
                    backward_s=backward, alone_s=mine.alone(speed), ending_s=mine.ending(speed),
                    low=none.astype(np.int64) + last, high=none.astype(np.int64) + last,
                    upgraded=none,
                )
            )  # fmt: skip
        cut = Cut(chosen=tuple(range(point.num_stages)), value=0.0)
        return replace(stages, filled=filled), cut

    def _uneven(
        self, point: Point, each: list[Intervals], over: tuple[float, ...] | None
    ) -> Stages:
        """`stages` of an uneven point, of intervals of which number s is stage s."""
        devices = self.problem.devices(point)
        room = np.array([self.room(device) for device in devices]) - np.array(over or 0.0)
        given = shares(point, each, room)
        filled = []
        for stage, mine in enumerate(each):
            at = slice(stage, stage + 1)
            filled += fill_all(
                mine, self.problem.software.speed, given.under_way[at], given.room_bytes[at],
                relaxed=False, looked_at=np.eye(len(each), dtype=bool)[at],
                waiting=given.waiting[at],
            )  # fmt: skip
        return Stages(each, filled, given.room_bytes, given.under_way, given.waiting)

    def longest(self, point: Point) -> int | None:
        """Most units of a stage that is worth a look."""
        if point.num_stages == 1 or self.problem.units.count <= MANY_UNITS:
            return None
        if self.problem.edges is not None:
            return None
        if not self.problem.cluster.is_uniform:  # the fastest devices may have most of the model
            return None
        return max(8, math.ceil(LONG * self.problem.units.count / point.num_stages))

    def stages(
        self,
        point: Point,
        over: tuple[float, ...] | None,
        *,
        relaxed: bool,
        lightest: bool = False,
        limit: float = math.inf,
        only: Edges | None = None,
    ) -> Stages | None:
        """Candidates with what fits; None if the model cannot be placed so.

        Args:
            point: The point.
            over: Bytes of each pipeline rank that are not in static and saved memory.
            relaxed: See `fill_all`.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
            limit: Seconds of a step; candidates of slower ones need not be found.
            only: The stages, if they are known: candidate s is for stage s alone.
        """
        problem = self.problem
        devices = problem.devices(point)
        places = np.array(point.stage_ranks)
        splits = SCHEDULES[point.schedule].splits_backward
        room = np.array([self.room(device) for device in devices])[places] / point.chunks
        beyond = np.array(over or (0.0,) * len(devices))[places] / point.chunks
        by_device: dict[str, Intervals] = {}
        filled: list[Filled] = [_NOTHING] * point.num_stages
        for device in {device.name: device for device in devices}.values():
            table = problem.table(point, device, weight=splits)
            if table is None:
                return None
            under_way, waiting = self.live(point, table)
            intervals = self.intervals(
                point, table, self.longest(point), lightest=lightest, only=only
            )
            by_device[device.name] = intervals
            if self.uneven(point):
                continue
            kinds, kind = intervals.kinds()
            mine = np.flatnonzero([devices[rank].name == device.name for rank in places])
            looked_at = self._window(point, intervals, mine, limit)
            if only is not None:
                looked_at = np.eye(len(only), dtype=bool)[mine]
            rows = np.arange(len(mine))
            if looked_at is None:  # chunks of a rank are alike
                keys = np.stack([under_way[mine], waiting[mine], room[mine], beyond[mine]])
                _, mine_of, rows = np.unique(keys, axis=1, return_index=True, return_inverse=True)
            else:
                mine_of = rows
            made = fill_all(
                kinds, problem.software.speed, under_way[mine][mine_of], room[mine][mine_of],
                relaxed=relaxed, kind=kind if only is None else None, looked_at=looked_at,
                over_bytes=beyond[mine][mine_of], waiting=waiting[mine][mine_of],
            )  # fmt: skip
            for stage, row in zip(mine.tolist(), rows.ravel().tolist(), strict=True):
                filled[stage] = made[row]
        each = [by_device[devices[rank].name] for rank in places]
        if self.uneven(point):
            return self._uneven(point, each, over)
        return Stages(each, filled, room - beyond, under_way, waiting)

    def _window(
        self, point: Point, intervals: Intervals, stages: Ints, limit: float
    ) -> NDArray[np.bool_] | None:
        """Which candidates a stage of a 1F1B step below a limit may be.

        No rank may work longer than the step, so that neither the stages before nor those behind
        may have to hold too much.
        """
        if math.isinf(limit) or point.schedule != "1f1b" or point.pipeline == 1:
            return None
        most = limit / self.sharing() / point.microbatches * (1 + 1e-9)
        (forward, backward), behind, _ = self.fastest(point)
        before, behind = (forward + backward)[intervals.start], behind[intervals.stop]
        speed = self.problem.software.speed
        plain, last = sum(intervals.plain(speed)), intervals.plain(speed)[1]
        own = plain - (last - intervals.alone(speed)) / point.microbatches <= most
        number = stages[:, None]
        return own & (before <= number * most) & (behind <= (point.pipeline - 1 - number) * most)

    def live(self, point: Point, table: UnitTable) -> tuple[Floats, Floats]:
        """Microbatches of every stage, a chunk's share, at a time when its rank holds much.

        Args:
            point: The point.
            table: Its table.

        Returns:
            How many have their saved memory, and how many wait for the backward of weights.
        """
        under_way = np.array(self.under_way(point))
        if not SCHEDULES[point.schedule].splits_backward:
            return under_way, np.zeros(len(under_way))
        # Memory of one that waits over that of one before, where some is computed again.
        some = len(self.problem.policies) // 2
        saved, late = table.saved_bytes[some].sum(), table.late_bytes[some].sum()
        ratio = float(late / saved) if saved else 1.0
        times = fullest(point.schedule, point.pipeline, point.microbatches, point.chunks)
        each = np.array([max(rank, key=lambda n: n[0] + ratio * n[1]) for rank in times])
        early, waiting = each[np.array(point.stage_ranks)].T / point.chunks
        return early, waiting

    def under_way(self, point: Point) -> list[float]:
        """For every stage the microbatches whose saved memory is live at once, a chunk's share."""
        key = (point.pipeline, point.microbatches, point.schedule, point.chunks)
        if key not in self._under_way:
            self._under_way[key] = self._live(point)
        return self._under_way[key]

    def _live(self, point: Point) -> list[float]:
        ranks, count = point.pipeline, point.microbatches
        if point.schedule == "1f1b":
            return [float(min(ranks - stage, count)) for stage in range(ranks)]
        most = most_live(point.schedule, ranks, count, point.chunks)
        return [most[rank] / point.chunks for rank in point.stage_ranks]

    def fastest(self, point: Point) -> tuple[tuple[Floats, Floats], Floats, Ints]:
        """What units take before others, and with those behind them, and how many are aside."""
        devices = self.devices(point)
        key = (self.problem.alike(point), tuple(device.name for device in devices))
        if key not in self._chains:
            table = self.fastest_table(point, devices)
            assert table is not None
            parts = table.seconds[-1] * self.main
            zero = np.zeros((*parts.shape[:-1], 1))
            prefix = np.concatenate((zero, np.cumsum(parts, axis=-1)), axis=-1)
            rest = np.maximum(prefix[..., -1:] - prefix, 0.0)
            speed = self.problem.software.speed
            before, after = (
                (kernel_seconds(sums[0], speed), kernel_seconds(sums[1] + sums[2], speed))
                for sums in (prefix, rest)
            )
            side = np.concatenate(([0], np.cumsum(~self.main)))
            self._chains[key] = (before, after[0] + after[1], side)
        return self._chains[key]
