"""What a task is given, and what it gets if nothing is said."""

from __future__ import annotations

import dataclasses

import pytest

from psync.net.platform import GivenUp, Platform
from psync.net.secret import Secret
from psync.net.transport import SocketNetwork
from psync.wire.limits import Limits


def test_the_defaults_are_the_machines() -> None:
    platform = Platform(SocketNetwork())
    assert platform.secret is None
    assert platform.limits == Limits()
    assert len(platform.random_bytes(32)) == 32
    assert platform.random_bytes(32) != platform.random_bytes(32)
    assert 0.0 <= platform.uniform() < 1.0
    assert platform.threads


def test_a_task_that_starts_later_has_a_higher_incarnation() -> None:
    first, second = Platform(SocketNetwork()), Platform(SocketNetwork())
    assert 0 < first.new_incarnation() <= second.new_incarnation() < 2**63


def test_a_platform_does_not_change_and_does_not_show_its_secret() -> None:
    platform = Platform(SocketNetwork(), Secret(b"very secret, and long enough"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        platform.secret = None  # type: ignore[misc]
    assert "very secret" not in repr(platform)


def test_who_listens_hears_of_all_tasks_that_are_given_up_until_it_stops() -> None:
    given_up, heard = GivenUp(), []
    given_up.note("a:1", "exited")
    end = given_up.listen(lambda *each: heard.append(each))
    given_up.note("b:1", "was killed")
    end()
    given_up.note("c:1", "exited")
    assert heard == [("a:1", "exited"), ("b:1", "was killed")]
    assert [given_up.reason(address) for address in ("c:1", "d:1")] == ["exited", None]
