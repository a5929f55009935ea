"""Lowering of routed experts: rows stay sorted from one grouped product to the next.

A grouped product makes rows sorted by the ids that are here, a value that is one gather away from
what the graph means. Calls that treat rows alike take such rows as they are; whatever else uses
them gets them restored. Nothing depends on which happens: it is a matter of gathers saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from autopar.graph.ir import Node, TensorSpec
from autopar.runtime.special.routing import order_rows, restore_rows, sort_rows
from autopar.sharding.rule import OpRule


@dataclass(frozen=True, slots=True)
class Order:
    """Local ids and what sorts them: the order, its inverse and the ends of groups."""

    ids: fx.Node
    order: fx.Node
    back: fx.Node
    ends: fx.Node


class SortedRows:
    """Which local values hold sorted rows.

    Args:
        call: Writes a call of a function and returns its node.
    """

    def __init__(self, call: Callable[..., fx.Node]) -> None:
        self._call = call
        self._orders: dict[tuple[fx.Node, int], Order] = {}
        self._of: dict[str, Order] = {}
        self._restored: dict[str, fx.Node] = {}

    def of(self, name: str) -> Order | None:
        """The order that the rows of a value are sorted by, None if they are not."""
        return self._of.get(name)

    def mark(self, name: str, order: Order) -> None:
        """Note that the local value of `name` holds rows sorted by `order`."""
        self._of[name] = order

    def order(self, ids: fx.Node, groups: int) -> Order:
        """What sorts local ids of `groups` groups, worked out once."""
        key = (ids, groups)
        if key not in self._orders:
            made = self._call(order_rows, (ids, groups))
            parts = [self._call(operator.getitem, (made, place)) for place in range(3)]
            self._orders[key] = Order(ids, *parts)
        return self._orders[key]

    def sort(self, rows: fx.Node, order: Order, repeat: int) -> fx.Node:
        """Rows by `order`, `repeat` copies of each."""
        return self._call(sort_rows, (rows, order.order, order.back, repeat))

    def restored(self, name: str, local: fx.Node) -> fx.Node:
        """The local value of `name` in the order that the graph means."""
        order = self._of.get(name)
        if order is None:
            return local
        if name not in self._restored:
            made = self._call(restore_rows, (local, order.order, order.back))
            self._restored[name] = made
        return self._restored[name]

    def shared(
        self, node: Node, rule: OpRule | None, spec: Callable[[str], TensorSpec]
    ) -> Order | None:
        """The order by which `node` may take its operands sorted, and makes sorted results.

        It may if all rows that it takes are sorted by one order, and its rule says that it treats
        rows alike: their letter can be split as it is, so that no row meets another, or has to
        know its place.
        """
        if rule is None or rule.special or not self._of:
            return None
        sorted_slots = {slot for slot, name in enumerate(node.operands) if name in self._of}
        orders = [self._of[node.operands[slot]] for slot in sorted_slots]
        if not orders or any(order is not orders[0] for order in orders):
            return None
        for letter in rule.letters:
            taken = [(spec(node.operands[p.slot]), p) for p in letter.operands]
            made = [(node.outputs[p.slot].spec, p) for p in letter.outputs]
            whole = all(p.dim == 0 and s.shape[0] == letter.size for s, p in (*taken, *made))
            everywhere = {p.slot for _, p in taken} == sorted_slots and len(made) == len(
                node.outputs
            )
            if whole and everywhere and letter.split and not letter.special:
                return orders[0]
        return None
