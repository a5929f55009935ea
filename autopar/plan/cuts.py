"""Where to cut a list of ops into parts of like cost: exact, by dynamic programming.

Two steps. The least possible cost of the largest part is found by bisection (whether a bound can
be kept is decided by filling parts greedily). Then, among all cuts whose parts keep that bound with
a little slack, those of the fewest crossing bytes are found, the most even ones among equals.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from autopar.graph.blocks import find_blocks
from autopar.graph.ir import Graph

BORDER_SLACK = 1.5
"""Cuts stay on block borders as long as the largest part grows by no more than this."""
SLACK = 1.05
"""How much the largest part may grow to send fewer bytes."""


def borders(graph: Graph, staged: Sequence[int]) -> list[int]:
    """Places in `staged` at which a copy of a repeated block begins or has just ended.

    Args:
        graph: The graph.
        staged: Indexes of the nodes that are to be cut.
    """
    place_of = {index: place for place, index in enumerate(staged)}
    spans = []
    for block in find_blocks(graph):
        for indexes in block.nodes:
            places = [place_of[index] for index in indexes if index in place_of]
            if places:
                spans.append((min(places), max(places) + 1))
    found = {edge for span in spans for edge in span}
    inside = {place for low, high in spans for place in range(low + 1, high) if place in found}
    return sorted(place for place in found - inside if 0 < place < len(staged))


def least_bound(prefix: Sequence[int], allowed: Sequence[int], parts: int) -> int:
    """Least cost of the largest of `parts` parts.

    Args:
        prefix: ``prefix[i]`` is the cost of the first i ops.
        allowed: Places at which cuts may be, ascending; at least ``parts - 1``.
        parts: Number of parts.
    """
    points = [*allowed, len(prefix) - 1]
    sums = [prefix[place] for place in points]

    def fits(bound: int) -> bool:
        done, at = 0, 0
        for _ in range(parts):
            reach = bisect_right(sums, done + bound, lo=at)
            if reach == len(sums):
                return True
            if reach == at:
                return False
            done, at = sums[reach - 1], reach
        return False

    low, high = 0, prefix[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def balance(
    costs: Sequence[int],
    crossing: Sequence[int],
    allowed: Sequence[int],
    preferred: Sequence[int],
    parts: int,
) -> tuple[int, ...]:
    """Cut ``costs`` into `parts` non-empty parts.

    Args:
        costs: Cost of every op.
        crossing: Bytes that pass a cut at each place.
        allowed: Places at which cuts may be, ascending, from 1; at least ``parts - 1``.
        preferred: Places at which they should be.
        parts: Number of parts, at least 2.

    Returns:
        The places, ascending: those of the fewest bytes, then of the least sum of squared costs,
        then the first, among all that keep the bound of the module docstring.
    """
    prefix = [0, *accumulate(costs)]
    bound = least_bound(prefix, allowed, parts)
    usable = set(allowed)
    good = [place for place in preferred if place in usable]
    points = list(allowed)
    if len(good) >= parts - 1:
        tight = least_bound(prefix, good, parts)
        if tight <= BORDER_SLACK * bound:
            points, bound = good, tight
    return _cheapest(prefix, crossing, points, parts, int(bound * SLACK))


def _cheapest(
    prefix: Sequence[int],
    crossing: Sequence[int],
    points: Sequence[int],
    parts: int,
    limit: int,
) -> tuple[int, ...]:
    """The cuts of least (bytes, sum of squares) among `points` with parts within `limit`."""
    total = prefix[-1]
    sums = [prefix[place] for place in points]
    # best[j]: of all ways to end the k-th part at points[j].
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    for number in range(1, parts):
        left = parts - number
        first = bisect_left(sums, total - left * limit)
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for j in range(max(first, number - 1), bisect_right(sums, number * limit)):
            place = points[j]
            found: list[tuple[int, int, tuple[int, ...]]]
            if number == 1:
                found = [(0, sums[j] ** 2, ())] if sums[j] <= limit else []
            else:
                low = bisect_left(sums, sums[j] - limit)
                found = [
                    (best[i][0], best[i][1] + (sums[j] - sums[i]) ** 2, (*best[i][2], points[i]))
                    for i in range(low, j)
                    if i in best
                ]
            if found:
                sent, squares, chosen = min(found)
                following[j] = (sent + crossing[place], squares, chosen)
        best = following
    ends = [
        (sent, squares + (total - sums[j]) ** 2, (*chosen, points[j]))
        for j, (sent, squares, chosen) in best.items()
        if total - sums[j] <= limit
    ]
    assert ends, "a bound that can be kept has cuts"
    return min(ends)[2]
