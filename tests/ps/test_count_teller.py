"""Ps tasks tell each other how many pushes they have counted: soon, seldom, and only news."""

from __future__ import annotations

import pytest

from ps_by_hand import PsByHand
from psync.errors import FencedError, UsageError
from psync.numerics.rules import SGD
from psync.wire.messages import TellCounts

CONFIG = SGD(1.0).to_config()


class TestRefusals:
    """A ps at index 1 of two; the coordinator has incarnation 100."""

    @pytest.mark.parametrize(
        ("sender", "error"),
        [
            (("/job:ps/task:0", 99), FencedError),  # of an earlier program
            (("/job:ps/task:0", 101), FencedError),  # of another timeline
            (("/job:ps/task:1", 100), UsageError),  # itself
            (("/job:ps/task:2", 100), UsageError),
            (("/job:worker/task:0", 100), UsageError),
        ],
    )
    def test_only_other_ps_tasks_of_this_timeline_are_heard(
        self, sender: tuple[str, int], error: type[Exception]
    ) -> None:
        ps = PsByHand()
        with pytest.raises(error):
            ps.ask(sender, TellCounts([(1, CONFIG, 0, [(1, 5)])]))
        assert not ps.store.optimizers()

    @pytest.mark.parametrize(
        ("base", "row"), [(-1, [(1, 5)]), (0, [(1, -5)]), (0, [(2, 5)]), (0, [(1, 1 << 44)])]
    )
    def test_numbers_that_cannot_be_are_refused(
        self, base: int, row: list[tuple[int, int]]
    ) -> None:
        ps = PsByHand()
        with pytest.raises(UsageError, match="/job:ps/task:0 has counted"):
            ps.ask(("/job:ps/task:0", 100), TellCounts([(1, CONFIG, base, row)]))
        assert not ps.store.optimizers()
