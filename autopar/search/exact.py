"""The exact strategy: best first by lower bounds, until none is below what was found.

Every point passes bounds that are each tighter and dearer than the one before
(`autopar.search.bounds`): from the largest microbatch; from its own table, over the ranks; of the
best cut with every stage as fast as its memory allows; the evaluated plan itself, and others of
the point as long as they may be better (`autopar.search.closing`). The point with
the least bound is looked at first, so that the bounds of all that were never looked at prove how
good the answer is.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.search.ahead import is_possible
from autopar.search.bounds import Bounds
from autopar.search.candidates import Stages
from autopar.search.closing import close
from autopar.search.polish import leanest, polished
from autopar.search.problem import Candidate, Outcome, Problem, Question
from autopar.search.refine import refine
from autopar.search.result import Certificate, Interruptible, SearchResult, others
from autopar.search.seconds import durations
from autopar.search.space import Point
from autopar.search.stage_cut import Cut, cheapest_sum, least_bottleneck, most_even
from autopar.search.starts import answer, first_bounds, is_expert, is_expert_group, starts

ROUNDS = 4
"""Times that a cut is looked for again with what evaluation says of memory."""
CLOSED, FEW_UNITS = 3000, 40
"""Plans, over the units of a model, that are evaluated to close what is left of a gap."""
SINGLE = 60
"""The same for models of more units: points of one stage only, as others have too many plans."""
TIE = 1e-9
"""Fraction of a step within which a plan that is more usual is as good."""
FEW = 4
"""With fewer microbatches per rank than this, what lies around them counts for a cut."""
SLACKS = (1.0, 1.01, 1.03)
"""How much the slowest stage may exceed the least possible for a smaller sum."""
PROBE, PAUSE = 0.98, 15
"""A plan that promises to be this much faster is priced before its turn, once in so many looks."""
TOLD = 24
"""Looks after which a second process is told what comes next."""
LEVELS = (
    "memory of the model", "memory of its shards", "memory of stages at best", "memory of stages",
    "memory, exactly",
)  # fmt: skip
"""What rules points out at each level."""


@dataclass(slots=True)
class _State:
    """A search under way."""

    problem: Problem
    bounds: Bounds
    open: list[tuple[float, int, int, Point]] = field(default_factory=list)
    best: Outcome | None = None
    found: list[Outcome] = field(default_factory=list)
    pruned: Counter[str] = field(default_factory=Counter)
    tried: set[Point] = field(default_factory=set)
    gap: float = 0.0
    below_s: float = math.inf  # plans that take as long are of no use
    floor: float = math.inf  # least bound of what was evaluated, or is not worth a look
    counter: int = 0
    many: bool = False  # units
    spare: int = 0  # plans that may be evaluated to close gaps
    deadline_s: float = math.inf
    looks: int = 0  # since a plan was priced out of order
    untold: int = 0
    tables: list[Question] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """Bound from which on a point is not worth a look."""
        best = self.best.step_s * (1 - self.gap) if self.best is not None else math.inf
        return min(best, self.below_s)

    def push(self, bound: float, level: int, point: Point) -> None:
        """Note a point whose bounds up to `level` are known."""
        if math.isinf(bound):
            self.pruned[LEVELS[level]] += 1
            return
        if bound >= self.limit:
            self.pruned["bound"] += 1
            self.floor = min(self.floor, bound)
            return
        heapq.heappush(self.open, (bound, level, self.counter, point))
        self.counter += 1

    def begin(self, points: list[tuple[float, Point]]) -> bool:
        """Evaluate some points; whether nobody has interrupted that."""
        with Interruptible(lambda: self.best is not None) as begun:
            for bound, point in points:
                if bound >= self.limit:
                    continue
                if self.best is None or time.monotonic() < self.deadline_s:
                    self.evaluate(bound, point)
        return not begun.interrupted

    def look(self, bound: float, level: int, point: Point) -> None:
        """Tighten the bound of a point, or evaluate it."""
        bounds = self.bounds
        self.looks += 1
        self.expect()
        if level == 0:
            found = max(bound, bounds.scaled(point, lightest=True, limit=self.limit))
            if found < self.limit:  # its own table takes its time
                found = max(found, bounds.cheap(point, lightest=True, limit=self.limit))
            if found < self.limit:  # no member may be worth a look at their cut
                found = self.least_of_members(point, found)
            self.push(found, 1, point)
        elif level == 1:
            found = max(bound, bounds.group(point, self.limit))
            members = tuple(self.problem.space.members(point))
            for member in members:
                twin = replace(member, data_outside=False)
                if member != twin in members and self.problem.orders_alike(member):
                    self.pruned["the other order of axes"] += 1
                elif member not in self.tried:
                    self.push(max(found, bounds.cheap(member, limit=self.limit)), 2, member)
        elif level == 2:
            found = max(bound, bounds.cut(point, self.limit))
            if found < PROBE * self.limit < math.inf and self.looks >= PAUSE:
                self.looks = 0
                self.evaluate(found, point)  # what there is to beat gets better early
            else:
                self.push(found, 3, point)
        elif level == 3:
            self.evaluate(bound, point)
        else:
            self.close(bound, point)

    def least_of_members(self, point: Point, known: float) -> float:
        """A bound that holds for every member of a group, given one that does."""
        least = math.inf
        for member in self.problem.space.members(point):
            least = min(least, self.bounds.cheap(member, limit=self.limit))
            if least <= known:
                return known
        return least

    def expect(self) -> None:
        """Tell a second process, if there is one, what will be asked next."""
        self.untold -= 1
        second = self.problem.second
        if second is None or self.untold > 0:
            return
        self.untold = TOLD
        asked = list[Question]()
        for _, level, _, point in heapq.nsmallest(2 * TOLD, self.open):
            if level == 0:
                asked += self.problem.questions((point,))
            elif level == 1 and point.schedule != "1f1b":
                asked.append(("group", point))
        second.ask((*asked, *self.tables))

    def evaluate(self, bound: float, point: Point) -> None:
        """Price the best plan of a point, and see how much better another one could be."""
        self.tried.add(point)
        outcome, _ = best_candidate(self.problem, self.bounds, point)
        plain = outcome is not None and _is_plain(self.problem, outcome)
        if outcome is not None:
            self.take(outcome)
        if self.bounds.uneven(point):  # its best plan is not known
            self.settle(outcome.step_s if outcome is not None and plain else bound)
        elif point.schedule != "1f1b" or (point.pipeline == 1 and plain):
            # There is no other plan, or none faster.
            self.settle(outcome.step_s if outcome is not None else math.inf)
        elif bound >= self.limit or self.spare <= 0 or (self.many and point.pipeline > 1):
            self.settle(bound)
        else:
            heapq.heappush(self.open, (bound, 4, self.counter, point))
            self.counter += 1

    def close(self, bound: float, point: Point) -> None:
        """Look at the other plans of a point, while there are not too many."""
        found = close(
            self.bounds, point, self.limit, self.spare,
            lambda: time.monotonic() > self.deadline_s,
        )  # fmt: skip
        self.spare -= found.spent
        if found.best is not None:
            self.take(found.best)
        self.settle(max(bound, found.bound_s))

    def price_experts(self, first: Mapping[Point, float]) -> None:
        """Price what experts would try as far as it may be faster, for all that a gap leaves open.

        Args:
            first: A bound for every group of points.
        """
        for least, group in sorted((least, group) for group, least in first.items()):
            for point in self.problem.space.members(group) if is_expert_group(group) else ():
                best = self.best
                if best is None or least >= best.step_s or time.monotonic() > self.deadline_s:
                    return
                if not is_expert(point) or point in self.tried:
                    continue
                if self.bounds.cheap(point, limit=best.step_s) >= best.step_s:
                    continue
                if self.bounds.cut(point, best.step_s) < best.step_s:
                    self.tried.add(point)
                    outcome, _ = best_candidate(self.problem, self.bounds, point)
                    if outcome is not None:
                        self.take(outcome)

    def take(self, outcome: Outcome) -> None:
        """Note a plan that fits."""
        self.found.append(outcome)
        if self.best is None or outcome.step_s < self.best.step_s:
            self.best = outcome

    def settle(self, bound: float) -> None:
        """Note the last bound of a point; infinite if it has no plan."""
        self.floor = min(self.floor, bound)
        if math.isinf(bound):
            self.pruned[LEVELS[4]] += 1

    def line(self, bound: float) -> str:
        """What is going on."""
        best = f"{self.best.step_s:.4g} s" if self.best is not None else "none yet"
        return f"best {best}, bound {bound:.4g} s, {len(self.open)} points left"


def search(
    problem: Problem,
    *,
    gap: float = 0.0,
    time_limit_s: float = math.inf,
    below_s: float = math.inf,
    op_level: bool = False,
    on_progress: Callable[[str], None] | None = None,
    ahead: bool = False,
) -> SearchResult:
    """Find the best plan.

    Args:
        problem: The problem.
        gap: Stop as soon as no plan can be faster by more than this fraction.
        time_limit_s: Stop after so many seconds, with what there is.
        below_s: Leave out what takes at least so many seconds; it may be found all the same.
        op_level: Improve the best plan op by op, too, which takes its time on large meshes.
        on_progress: Called with a line about what is going on.
        ahead: Let a second process, if there is a core for it, work out what will be needed.
    """
    bounds = Bounds(problem)
    with problem.ahead(partial(answer, bounds)) if ahead and is_possible() else nullcontext():
        return _search(problem, bounds, gap, time_limit_s, below_s, op_level, on_progress)


def _search(
    problem: Problem,
    bounds: Bounds,
    gap: float,
    time_limit_s: float,
    below_s: float,
    op_level: bool,
    on_progress: Callable[[str], None] | None,
) -> SearchResult:
    """See `search`."""
    begun = time.monotonic()
    many = problem.units.count > FEW_UNITS
    state = _State(
        problem,
        bounds,
        gap=gap,
        below_s=below_s,
        many=many and problem.edges is None,
        spare=SINGLE if many else CLOSED // problem.units.count,
        deadline_s=begun + time_limit_s,
    )
    first = first_bounds(state.bounds)
    complete = state.begin(starts(state.bounds, first))
    for group, bound in first.items():
        state.push(bound, 0, group)
    state.tables = problem.questions(point for _, _, _, point in sorted(state.open))
    while state.open and complete:
        bound, level, _, point = heapq.heappop(state.open)
        if bound >= state.limit or time.monotonic() - begun > time_limit_s:
            complete = bound >= state.limit
            state.push(bound, level, point)
            break
        try:
            state.look(bound, level, point)
            if on_progress is not None:
                on_progress(state.line(bound))
        except KeyboardInterrupt:  # the best so far is better than nothing
            if state.best is None:
                raise
            complete = False
            state.push(bound, level, point)
            break
    lowest = min(state.floor, state.open[0][0] if state.open else math.inf)
    useful = state.best is not None and state.best.step_s < below_s
    if useful and complete:
        with Interruptible(lambda: True) as pricing:
            state.price_experts(first)
        complete = not pricing.interrupted
        state.best = _most_usual(state)
    if state.best is not None and useful and op_level:
        with Interruptible(lambda: True) as refining:
            state.best = refine(problem, state.best, begun + time_limit_s)
        complete = complete and not refining.interrupted
    state.pruned["bound"] += len(state.open)
    return SearchResult(
        best=state.best,
        alternatives=others(problem.outcomes, state.best) if state.best is not None else (),
        certificate=Certificate(
            bound_s=min(lowest, state.best.step_s) if state.best is not None else lowest,
            space=describe_space(problem),
            points=sum(map(problem.space.num_members, first)),
            pruned=dict(state.pruned),
            evaluated=problem.evaluated,
            complete=complete,
        ),
        strategy="exact",
        seconds=time.monotonic() - begun,
    )


def _most_usual(state: _State) -> Outcome:
    """The best plan, or one with fewer features that is as fast."""
    assert state.best is not None
    slowest = state.best.step_s * (1 + TIE)
    near = [item for item in state.found if item.fits and item.step_s <= slowest]
    return min(near, key=lambda item: (_features(item.candidate.point), item.step_s))


def _features(point: Point) -> tuple[int, int, int]:
    """How unusual a point is: what it divides, how, and its ZeRO stage."""
    divided = (point.pipeline > 1) + (point.tensor > 1)
    how = (point.schedule != "1f1b") + (point.chunks > 2) + point.data_outside
    return divided, how + (point.role not in ("", "megatron", "megatron_sp")), point.zero


def describe_space(problem: Problem) -> str:
    """What the certificate covers, in words."""
    roles = ", ".join(problem.space.roles) or "none"
    if problem.edges is None:
        how = (
            "1f1b with every cut on borders of blocks, interleaved_1f1b, zb_h1, zbv with the most"
            " even cut"
        )
    else:
        how = "1f1b, interleaved_1f1b, zb_h1, zbv with the cuts asked for"
    text = (
        "meshes of pipeline, data and one tensor axis over all devices; tensor axis splits one of: "
        f"{roles}; ZeRO 0-3; all microbatches of at most {problem.space.samples:,} samples on a"
        f" rank; schedules {how}; per layer {', '.join(problem.options)} of recomputation"
    )
    if not problem.asked.pinned:
        text += ". The best of these is improved op by op"
    return as_asked(problem, text)


def as_asked(problem: Problem, space: str) -> str:
    """A space in words, with what constraints fix of it."""
    asked = problem.asked.text()
    return f"{space}; of these only what keeps {asked}" if asked else space


def best_candidate(
    problem: Problem, bounds: Bounds, point: Point
) -> tuple[Outcome | None, tuple[float, ...]]:
    """The best plan of a point, evaluated, None if none fits.

    Returns:
        It, and for every pipeline rank the bytes beyond static and saved memory.
    """
    best, over = _suggested(problem, bounds, point)
    # Chunks of a rank share its memory evenly, unless they were cut as asked.
    uneven = bounds.uneven(point)
    if best is None and (point.chunks == 1 or uneven):
        lean = leanest(problem, bounds, point)
        best = lean if lean is not None and (lean.fits or uneven) else None
    if best is not None and (
        point.schedule == "1f1b" or (uneven and not (best.fits and _is_plain(problem, best)))
    ):
        best = polished(problem, best)
    return best if best is not None and best.fits else None, over


def _suggested(
    problem: Problem, bounds: Bounds, point: Point
) -> tuple[Outcome | None, tuple[float, ...]]:
    """The best of the plans that sums over units suggest, and memory as `best_candidate` does."""
    # What other points have shown would make the one plan of a point depend on them.
    over = bounds.extra(point) if point.schedule == "1f1b" else (0.0,) * point.pipeline
    for _ in range(ROUNDS):
        known = _planned(bounds, point, over)
        if known is None:
            return None, over
        stages, cuts = known
        best: Outcome | None = None
        worst: Outcome | None = None
        for cut in cuts:
            outcome = problem.outcome(_candidate(point, stages, cut))
            if outcome is None:
                continue
            over = tuple(map(max, over, bounds.learn(outcome, stages, cut)))
            if outcome.fits and (best is None or outcome.step_s < best.step_s):
                best = outcome
            worst = worst or outcome
        if best is not None or worst is None:
            return best, over
    return None, over


def _is_plain(problem: Problem, outcome: Outcome) -> bool:
    """Whether all layers of a plan have the last option: with the same cut none is faster."""
    candidate = outcome.candidate
    return {*candidate.low, *candidate.high} == {len(problem.policies) - 1}


def even_candidate(problem: Problem, bounds: Bounds, point: Point, option: int) -> Candidate | None:
    """The most even cut with one option for all layers; None if the model cannot be placed so.

    Args:
        problem: The problem.
        bounds: Its bounds.
        point: The point.
        option: Number of the option.
    """
    table = problem.table(point, problem.devices(point)[0])
    if table is None:
        return None
    intervals = bounds.intervals(point, table, bounds.longest(point))
    forward, backward = durations(intervals.sums[option], problem.software.speed)
    cut = most_even(intervals, [forward + backward] * point.num_stages)
    if cut is None:
        return None
    same = (option,) * point.num_stages
    return Candidate(
        point=point,
        edges=tuple(int(intervals.start[k]) for k in cut.chosen[1:]),
        low=same,
        high=same,
        upgraded=(0,) * point.num_stages,
    )


def _planned(
    bounds: Bounds, point: Point, over: tuple[float, ...]
) -> tuple[Stages, list[Cut]] | None:
    """Cuts of a point to be priced, None if nothing fits."""
    if point.schedule != "1f1b":
        fixed = bounds.fixed(point, over)
        return None if fixed is None else (fixed[0], [fixed[1]])
    stages = bounds.stages(point, over, relaxed=False)
    return None if stages is None else (stages, _cuts(bounds, point, stages))


def _cuts(bounds: Bounds, point: Point, stages: Stages) -> list[Cut]:
    """The most even cut, and those of a smaller sum that are a little less even."""
    weights = [item.forward_s + item.backward_s for item in stages.filled]
    least, _ = least_bottleneck(stages.intervals, weights)
    if not math.isfinite(least):
        return []
    found: dict[tuple[int, ...], Cut] = {}
    tight = bounds.tight(point, stages) if point.microbatches < FEW * point.pipeline else None
    if tight is not None:
        found[tight.chosen] = tight
    for slack in SLACKS if point.pipeline > 1 else (1.0,):
        cut = cheapest_sum(stages.intervals, weights, weights, least * slack * (1 + 1e-12))
        if cut is not None:
            found.setdefault(cut.chosen, cut)
    return list(found.values())


def _candidate(point: Point, stages: Stages, cut: Cut) -> Candidate:
    chosen = list(enumerate(cut.chosen))
    return Candidate(
        point=point,
        edges=tuple(int(stages.intervals.start[k]) for _, k in chosen[1:]),
        low=tuple(int(stages.filled[s].low[k]) for s, k in chosen),
        high=tuple(int(stages.filled[s].high[k]) for s, k in chosen),
        upgraded=tuple(int(stages.filled[s].upgraded[k]) for s, k in chosen),
    )
