"""The order of queued closures: as scheduled, whenever they come."""

from __future__ import annotations

from psync.closures.closure import Closure
from psync.closures.dispatcher import ClosureOrder


def taken(order: ClosureOrder) -> list[int]:
    """The ids of all that are queued, from the first on; none is left."""
    ids = []
    while order.closures:
        closure = order.first()
        order.discard(closure)
        ids.append(closure.id)
    return ids


def order_of(fresh: list[int], late: list[int]) -> ClosureOrder:
    order = ClosureOrder()
    for closure_id in fresh:
        order.add(Closure(closure_id))
    for closure_id in late:
        order.add(Closure(closure_id))
    return order


def test_closures_come_in_the_order_in_which_they_were_added() -> None:
    order = order_of([1, 2, 5], [])
    assert (len(order.closures), taken(order), len(order.closures)) == (3, [1, 2, 5], 0)


def test_closures_that_come_late_have_kept_their_places() -> None:
    assert taken(order_of([4, 6], [5, 1, 7])) == [1, 4, 5, 6, 7]


def test_closures_that_come_late_alone_are_ordered_too() -> None:
    assert taken(order_of([], [3, 2])) == [2, 3]


def test_what_was_taken_out_is_passed_over_wherever_it_stood() -> None:
    order = ClosureOrder()
    fresh, late = Closure(1), Closure(0)
    order.add(fresh)
    order.add(Closure(2))
    order.add(late)
    order.discard(fresh)
    order.discard(late)
    assert order.first().id == 2


def test_a_closure_may_come_back_after_it_was_taken_out() -> None:
    order = ClosureOrder()
    closure = Closure(1)
    order.add(closure)
    order.add(Closure(2))
    order.discard(closure)
    order.add(closure)
    assert taken(order) == [1, 2]
