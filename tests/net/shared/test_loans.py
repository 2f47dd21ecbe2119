"""A loan: what lies side by side is one extent, and who waits for its end is told."""

from __future__ import annotations

import asyncio

from psync.net.shared.loans import Loan
from psync.wire.lent import Extent


def test_neighbours_are_one_extent() -> None:
    loan = Loan([], [], 9)
    for extent in (Extent(1, 0, 2), Extent(1, 2, 3), Extent(2, 5, 1), Extent(2, 0, 3)):
        loan.add(extent)
    assert loan.extents == [Extent(1, 0, 5), Extent(2, 5, 1), Extent(2, 0, 3)]


def test_a_copy_is_made_in_parts_and_the_last_is_said() -> None:
    memory = bytearray(5)
    loan = Loan([], [], 5, 5, [memoryview(memory)], [memoryview(b"ab"), memoryview(b"cde")])
    copy = loan.copying()
    assert copy()
    assert memory == b"abcde"


async def test_who_waits_is_told_once_and_may_have_given_up() -> None:
    loan = Loan([], [], 1)
    loan.waiters += [asyncio.get_running_loop().create_future() for _ in range(2)]
    loan.waiters[0].cancel()
    loan.over()
    assert loan.waiters[1].done()
