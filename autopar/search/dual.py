"""Lower bounds of a pairwise cost network by message passing, and states that cannot be optimal.

A reparametrisation moves costs between variables and edges without changing the value of any
assignment:

    theta_i(x)     = unary_i(x) + sum over edges e of m_e,i(x)                     `_Passing.theta`
    theta_e(x, y)  = costs_e(x, y) - m_e,i(x) - m_e,j(y)                           `_Passing.costs`

Then ``constant + sum of min theta_i + sum of min theta_e`` is a lower bound, whatever the messages
(`_Passing.bound`). Sequential reweighted message passing (Kolmogorov, "A new look at reweighted
message passing", IEEE TPAMI 37, 2015) raises it: variables are visited in order and then in
reverse; each collects the minima of the edges to those before it (`_collect`) and gives equal
shares of what it has to the edges to those behind it (`_give`).

Trees that hang on the rest are folded into it beforehand (`_fold`), which is exact, so that the
bound of a network without cycles is its optimum. A state whose own bound (`margins`, from the
same reparametrisation) exceeds the value of a known assignment is in no better one; `dual` drops
it between sweeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.search.network import Assignment, Edge, Network, supported

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    States = NDArray[np.intp]

TOLERANCE = 1e-9
"""Relative difference that counts as none."""
_STALLED = 1e-6
"""Relative rise of the bound by a sweep below which more of them do not pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dual:
    """What message passing found.

    Attributes:
        bound: No assignment costs less; infinite if none is allowed.
        assignment: The best one met; empty if none.
        value: What it costs.
        states: For each variable the states that a better assignment can have.
        margins: For each of these a bound of the assignments that have it.
        sweeps: How often all variables were visited, there and back.
    """

    bound: float
    assignment: Assignment
    value: float
    states: tuple[States, ...]
    margins: tuple[Floats, ...]
    sweeps: int

    @property
    def closed(self) -> bool:
        """Whether the best assignment met is the best there is."""
        return self.bound >= self.value - _slack(self.value)


def dual(
    network: Network,
    *,
    sweeps: int = 50,
    upper: float | None = None,
    start: Assignment = (),
    enough: Callable[[Network], bool] = lambda network: False,
) -> Dual:
    """A lower bound, a good assignment, and the states that matter.

    Args:
        network: The network.
        sweeps: Most sweeps.
        upper: Value of a known assignment; states that no better one has are dropped.
        start: An assignment to begin with.
        enough: Asked after every sweep, with the network of states that are left, whether to stop.
    """
    states = supported(network)
    if states is None:
        return Dual(bound=math.inf, assignment=(), value=math.inf, states=(), margins=(), sweeps=0)
    return _Dual(network, states, upper, start).run(sweeps, enough)


class _Dual:
    """The sweeps; `states` are those of `network` that are left."""

    def __init__(
        self, network: Network, states: list[States], upper: float | None, start: Assignment
    ) -> None:
        self.network, self.states = network, states
        self.best: Assignment = start
        self.value = network.value(start) if start else math.inf
        self.limit = min(self.value, math.inf if upper is None else upper)
        self.bound = -math.inf
        self.passing = _Passing(network.kept(states))

    def run(self, sweeps: int, enough: Callable[[Network], bool]) -> Dual:
        done = 0
        margins = self.passing.margins()
        while done < sweeps:
            before = self.bound
            self.offer(self.passing.sweep())
            done += 1
            margins = self.passing.margins()
            self.bound = max(self.bound, self.passing.bound())
            slack = _slack(self.limit)
            if self.bound >= self.limit - slack:
                break
            margins, dropped = self.fix(margins)
            if not all(map(len, self.states)) or enough(self.passing.network):
                break
            if not dropped and self.bound - before <= _STALLED * abs(self.bound):
                break
        return Dual(
            bound=min(self.bound, self.limit),
            assignment=self.best,
            value=self.value,
            states=tuple(self.states),
            margins=tuple(margins),
            sweeps=done,
        )

    def offer(self, local: Assignment) -> None:
        """Improve an assignment of the states left and keep it if it is the best."""
        if not local:
            return
        local = descend(self.passing.network, local)
        found = tuple(int(keep[state]) for keep, state in zip(self.states, local, strict=True))
        value = self.network.value(found)
        if value < self.value:
            self.best, self.value = found, value
            self.limit = min(self.limit, value)

    def fix(self, margins: list[Floats]) -> tuple[list[Floats], bool]:
        """Drop states whose bound exceeds what is known; whether there were many."""
        if not math.isfinite(self.limit):
            return margins, False
        slack = _slack(self.limit)
        keep = [np.flatnonzero(costs <= self.limit + slack) for costs in margins]
        left = sum(map(len, keep))
        total = sum(map(len, self.states))
        if left == total:
            return margins, False
        if not all(map(len, keep)):  # nothing is better than what is known
            self.bound = max(self.bound, self.limit)
            return margins, False
        self.passing = self.passing.kept(keep)
        self.states = [own[part] for own, part in zip(self.states, keep, strict=True)]
        margins = [costs[part] for costs, part in zip(margins, keep, strict=True)]
        return margins, left < 0.99 * total


def _slack(value: float) -> float:
    return TOLERANCE * max(abs(value), TOLERANCE) if math.isfinite(value) else 0.0


class _Passing:
    """A reparametrisation of a network, held as costs of variables and edges.

    Args:
        network: States of it all have a partner along every edge.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.theta = [costs.copy() for costs in network.unary]
        self.costs = [edge.costs.copy() for edge in network.edges]
        self.ends = [(edge.first, edge.second) for edge in network.edges]
        self.leaves, self.order = _fold_order(network)
        self._arrange()

    def _arrange(self) -> None:
        place = {variable: number for number, variable in enumerate(self.order)}
        self.before: dict[int, list[int]] = {variable: [] for variable in self.order}
        self.behind: dict[int, list[int]] = {variable: [] for variable in self.order}
        for number, (first, second) in enumerate(self.ends):
            if first not in place or second not in place:
                continue
            early, late = sorted((first, second), key=place.__getitem__)
            self.behind[early].append(number)
            self.before[late].append(number)

    def kept(self, keep: Sequence[States]) -> _Passing:
        """The same with some states only; what is left without a partner is gone, too."""
        other = object.__new__(_Passing)
        other.network = self.network.kept(keep)
        other.theta = [costs[part] for costs, part in zip(self.theta, keep, strict=True)]
        other.costs = [
            costs[np.ix_(keep[first], keep[second])]
            for costs, (first, second) in zip(self.costs, self.ends, strict=True)
        ]
        other.ends, other.leaves, other.order = self.ends, self.leaves, self.order
        other.before, other.behind = self.before, self.behind
        return other

    # Messages

    def _collect(self, number: int, variable: int) -> None:
        """Move the minima of an edge to one of its ends."""
        costs = self.costs[number]
        first = self.ends[number][0] == variable
        minima = costs.min(axis=1 if first else 0)
        known = np.where(np.isfinite(minima), minima, 0.0)
        self.theta[variable] = self.theta[variable] + minima
        costs -= known[:, None] if first else known[None, :]

    def _give(self, number: int, variable: int, share: Floats) -> None:
        """Move finite costs of a variable to an edge."""
        first = self.ends[number][0] == variable
        self.costs[number] += share[:, None] if first else share[None, :]

    def sweep(self) -> Assignment:
        """Visit all variables and back.

        Returns:
            An assignment of finite value that was read off on the way, or none.
        """
        for leaf, number, neighbour in self.leaves:
            allowed = np.isfinite(self.theta[leaf])
            self._give(number, leaf, np.where(allowed, self.theta[leaf], 0.0))
            self.theta[leaf] = np.where(allowed, 0.0, np.inf)
            self._collect(number, neighbour)
        found: dict[int, int] = {}
        self._pass(self.order, self.before, self.behind, found)
        other: dict[int, int] = {}
        self._pass(self.order[::-1], self.behind, self.before, other)
        known = [self._unfolded(item) for item in (found, other)]
        return min(
            (item for item in known if math.isfinite(self.network.value(item))),
            key=self.network.value,
            default=(),
        )

    def _pass(
        self,
        order: Sequence[int],
        before: dict[int, list[int]],
        behind: dict[int, list[int]],
        found: dict[int, int],
    ) -> None:
        for variable in order:
            near, far = before[variable], behind[variable]
            found[variable] = self._best(variable, near, found)
            for number in near:
                self._collect(number, variable)
            if far:
                allowed = np.isfinite(self.theta[variable])
                parts = max(len(near), len(far))
                share = np.where(allowed, self.theta[variable], 0.0) / parts
                for number in far:
                    self._give(number, variable, share)
                rest = share * (parts - len(far))
                self.theta[variable] = np.where(allowed, rest, np.inf)

    def _best(self, variable: int, near: Sequence[int], found: dict[int, int]) -> int:
        """The best state where those before are chosen and those behind speak by messages."""
        costs = self.theta[variable]
        for number in near:
            first, second = self.ends[number]
            pairs = self.costs[number]
            costs = costs + (pairs[:, found[second]] if first == variable else pairs[found[first]])
        return int(np.argmin(costs))

    def _unfolded(self, found: dict[int, int]) -> Assignment:
        """The assignment with the trees that were folded."""
        for leaf, number, neighbour in reversed(self.leaves):
            pairs = self.costs[number]
            first = self.ends[number][0] == leaf
            row = pairs[:, found[neighbour]] if first else pairs[found[neighbour]]
            found[leaf] = int(np.argmin(row + self.theta[leaf]))
        return tuple(found[variable] for variable in range(len(self.theta)))

    # What they say

    def bound(self) -> float:
        """The lower bound."""
        total = self.network.constant
        for costs in (*self.theta, *self.costs):
            total += float(costs.min())
        return total

    def margins(self) -> list[Floats]:
        """For every state a lower bound of the assignments that have it."""
        lowest = [float(costs.min()) for costs in self.costs]
        total = self.bound()
        if not math.isfinite(total):
            return [np.full(len(costs), np.inf) for costs in self.theta]
        found = [costs + (total - float(costs.min())) for costs in self.theta]
        for number, (first, second) in enumerate(self.ends):
            costs = self.costs[number]
            found[first] += costs.min(axis=1) - lowest[number]
            found[second] += costs.min(axis=0) - lowest[number]
        # What hangs on a tree costs at least what the state it hangs on does.
        for leaf, number, neighbour in reversed(self.leaves):
            pairs = self.costs[number]
            if self.ends[number][0] != leaf:
                pairs = pairs.T
            least = pairs.min(axis=0)
            pairs = pairs - np.where(np.isfinite(least), least, 0.0)
            apart = self.theta[leaf] - float(self.theta[leaf].min())
            through = apart + (pairs + found[neighbour]).min(axis=1)
            found[leaf] = np.maximum(found[leaf], through)
        return found


def _fold_order(network: Network) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Variables that hang on one other, as (variable, edge, other), and those that are left."""
    around: list[dict[int, int]] = [{} for _ in network.unary]
    for number, edge in enumerate(network.edges):
        around[edge.first][edge.second] = number
        around[edge.second][edge.first] = number
    leaves: list[tuple[int, int, int]] = []
    gone = [False] * len(around)
    queue = [variable for variable, near in enumerate(around) if len(near) == 1]
    while queue:
        variable = queue.pop()
        if gone[variable] or len(around[variable]) != 1:
            continue
        ((other, number),) = around[variable].items()
        leaves.append((variable, number, other))
        gone[variable] = True
        around[variable].clear()
        del around[other][variable]
        if len(around[other]) == 1:
            queue.append(other)
    return leaves, [variable for variable, flag in enumerate(gone) if not flag]


def descend(network: Network, assignment: Assignment, rounds: int = 20) -> Assignment:
    """Improve an assignment, one variable or the two of an edge at a time, until nothing helps.

    Args:
        network: The network.
        assignment: Where to start, of finite value.
        rounds: Most rounds over all variables and edges.
    """
    chosen = list(assignment)
    touching: list[list[Edge]] = [[] for _ in network.unary]
    for edge in network.edges:
        touching[edge.first].append(edge)
        touching[edge.second].append(edge)

    def costs_of(variable: int, without: Edge | None = None) -> Floats:
        costs = network.unary[variable]
        for edge in touching[variable]:
            if edge is without:
                continue
            if edge.first == variable:
                costs = costs + edge.costs[:, chosen[edge.second]]
            else:
                costs = costs + edge.costs[chosen[edge.first]]
        return costs

    for _ in range(rounds):
        changed = False
        for variable in range(len(chosen)):
            costs = costs_of(variable)
            best = int(np.argmin(costs))
            if _better(costs[best], costs[chosen[variable]]):
                chosen[variable], changed = best, True
        for edge in network.edges if not changed else ():
            first, second = costs_of(edge.first, edge), costs_of(edge.second, edge)
            total = first[:, None] + second[None, :] + edge.costs
            row, column = divmod(int(np.argmin(total)), total.shape[1])
            if _better(total[row, column], total[chosen[edge.first], chosen[edge.second]]):
                chosen[edge.first], chosen[edge.second], changed = row, column, True
        if not changed:
            break
    return tuple(chosen)


def _better(new: float, old: float) -> bool:
    return bool(new < old - _slack(old)) if math.isfinite(old) else bool(new < old)
