"""The tables that ``autopar validate`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from autopar.cost_models.published.log import last_fit
from autopar.cost_models.published.stats import LARGE_SET
from autopar.units import counted, format_bytes

if TYPE_CHECKING:
    from autopar.cost_models.published.predict import Validation
    from autopar.cost_models.published.stats import Stats

_HEAD = f"{'':30} {'n':>5} {'mean':>7} {'median':>7} {'p90':>7} {'max':>7} {'bias':>7}"
WORST = 5
"""How many of the largest errors are shown."""


def lines(result: Validation, *, by_group: bool, shipped: bool) -> Iterator[str]:
    """Errors over all and by source, rankings, assumptions and skipped rows.

    Args:
        result: The comparisons.
        by_group: Whether to print every source apart.
        shipped: Whether the rows are those on which constants were fitted.
    """
    yield "Errors: predicted against measured (published), as shares of what was measured"
    yield from _in_sample() if shipped else ()
    if not result.comparisons:
        yield "no row could be priced" if result.skipped else "there are no rows"
    yield ""
    yield _HEAD
    yield from _table(result.overall())
    if by_group:
        for name, found in result.groups().items():
            yield name
            yield from _table(found)
    yield ""
    yield from _rankings(result)
    yield ""
    yield from _worst(result)
    assumed = Counter(text for item in result.comparisons for text in item.assumed)
    if assumed:
        yield ""
        yield "Assumed, where the row does not say (numbers of predictions):"
        for text, count in assumed.most_common():
            yield f"  {count:5}  {text}"
    if result.skipped:
        yield ""
        yield f"{counted(len(result.skipped), 'row')} skipped:"
        reasons: dict[str, list[str]] = {}
        for row, reason in result.skipped:
            reasons.setdefault(reason, []).append(row.id)
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            yield f"  {len(names):5}  {reason}: {shown}"


def _in_sample() -> Iterator[str]:
    """That constants know these rows, and the errors of rows that they did not know."""
    last = last_fit()
    folds = [v for k, v in last["mean_abs_error"].items() if k.startswith("family folds")]
    yield (
        f"Constants of devices and software were fitted on {last['rows']} of these rows"
        f" ({last['when'][:10]}), so their step times are in-sample."
    )
    yield (
        "Held out by families of models and clusters, the mean error of step times is "
        + ", ".join(f"{value:.1%}" for value in folds)
        + " (three splits)."
    )


def _table(found: Mapping[str, Stats]) -> Iterator[str]:
    for quantity, item in found.items():
        shares = (
            item.mean_abs_error, item.median_abs_error, item.p90_abs_error, item.max_abs_error,
        )  # fmt: skip
        numbers = " ".join(f"{share:7.1%}" for share in shares)
        yield f"  {quantity:28} {item.n:5} {numbers} {item.bias:+7.1%}"


def _worst(result: Validation) -> Iterator[str]:
    """The largest errors of what counts, number by number."""
    counted = [item for item in result.comparisons if item.counts]
    counted.sort(key=lambda item: -abs(item.predicted / item.measured - 1))
    if not counted:
        return
    yield "Largest errors of what counts:"
    yield f"  {'quantity':22} {'measured':>10} {'predicted':>10} {'error':>7}"
    for item in counted[:WORST]:
        seconds = item.quantity.endswith("_s")
        measured, predicted = (
            f"{value:.4g} s" if seconds else format_bytes(value)
            for value in (item.measured, item.predicted)
        )
        yield (
            f"  {item.quantity:22} {measured:>10} {predicted:>10}"
            f" {item.predicted / item.measured - 1:+7.1%}  {item.row.id}"
        )


def _rankings(result: Validation) -> Iterator[str]:
    found = result.rankings()
    if not found:
        return
    large = [item for item in found.values() if item.plans >= LARGE_SET]
    yield f"Order of plans of one job on one cluster: {len(found)} sets of at least 3 plans"
    if large:
        top = sum(item.best_in_top_3 for item in large) / len(large)
        regret = sum(item.regret for item in large) / len(large)
        yield (
            f"  {len(large)} sets of at least {LARGE_SET}: measured best among the predicted top 3 "
            f"in {top:.0%}, mean regret of the predicted best {regret:.1%}"
        )
    yield f"  {'plans':>5} {'spearman':>8} {'top 3':>6} {'regret':>7} {'spread':>7}"
    for name, item in found.items():
        order = "-" if item.spearman is None else f"{item.spearman:.2f}"
        top_3 = "yes" if item.best_in_top_3 else "no"
        yield (
            f"  {item.plans:5} {order:>8} {top_3:>6} {item.regret:7.1%} {item.spread:6.2f}x  {name}"
        )
