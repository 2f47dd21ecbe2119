"""Numbers that only grow, whatever the clocks say."""

from __future__ import annotations

import pytest

from psync.errors import FencedError
from psync.ps.succession import RANGE, CoordinatorGrants


def test_who_was_granted_one_is_not_granted_a_higher_one_once_another_has_come() -> None:
    grants = CoordinatorGrants()
    first = grants.grant(1000, 0, 0)
    second = grants.grant(1000, 0, 0)
    with pytest.raises(FencedError, match=f"{second}.* has come after this one .{first}."):
        grants.grant(1 << 60, first, second)
    assert grants.grant(1000, second, second + 5) == second + 5 + RANGE
