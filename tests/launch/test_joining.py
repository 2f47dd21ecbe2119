"""Joining: what a worker is told at the door. Whole clusters: tests/processes/test_joining.py."""

from __future__ import annotations

import asyncio

import pytest

from psync.errors import ConfigurationError, ConnectFailed
from psync.launch.door import FIRST_JOINED, Door
from psync.launch.joining import Membership, joining
from psync.net.platform import Platform
from psync.net.secret import Secret
from psync.net.workforce import Workforce
from psync.testing import MemoryNetwork


def platform() -> Platform:
    return Platform(MemoryNetwork(), Secret(b"a secret of the whole cluster"))


@pytest.mark.virtual_time
async def test_a_member_comes_back_to_a_new_chief_under_its_index() -> None:
    shared, added = platform(), dict[str, str]()
    member = Membership(shared, "chief:1", "b:1")
    async with Door(shared, "chief:1", Workforce(), {}):
        await member.begin()
        assert member.index == FIRST_JOINED
    keeping = asyncio.ensure_future(member.keep())
    await asyncio.sleep(30)
    async with Door(shared, "chief:1", Workforce(), added):
        await asyncio.sleep(30)
        assert added == {f"/job:worker/task:{FIRST_JOINED}": "b:1"}
        await member.end()
        assert added == {}
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.virtual_time
async def test_one_whose_index_was_given_away_is_told_to_start_again() -> None:
    shared = platform()
    member, other = Membership(shared, "chief:1", "b:1"), Membership(shared, "chief:1", "c:1")
    async with Door(shared, "chief:1", Workforce(), {}):
        await member.begin()
    async with Door(shared, "chief:1", Workforce(), {}):
        await other.begin()
        with pytest.raises(ConfigurationError, match="its index"):
            await member.keep()
        await other.end()
    await member.end()


async def test_where_nobody_answers_the_hint_says_what_a_chief_needs() -> None:
    member = Membership(platform(), "chief:1", "b:1")
    with pytest.raises(ConnectFailed) as caught:
        await member.begin()
    assert "only if it ends in psync.run(main)" in str(caught.value.hint)
    await member.end()


@pytest.mark.parametrize(
    ("chief", "secret", "text"),
    [
        ("a", "x" * 32, "expected a port from 0 to 65535"),
        ("a:0", "x" * 32, "expected host:port of the chief, got 'a:0'"),
        ("a:1", "", "PSYNC_SECRET: expected at least 16 bytes"),
        ("a:1", None, "no secret is set, and joining requires the cluster's secret"),
    ],
)
async def test_what_cannot_be_used_is_an_error_before_anything_is_tried(
    monkeypatch: pytest.MonkeyPatch, chief: str, secret: str | None, text: str
) -> None:
    monkeypatch.delenv("PSYNC_SECRET_FILE", raising=False)
    monkeypatch.delenv("PSYNC_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("PSYNC_SECRET", secret)
    with pytest.raises(ConfigurationError) as caught:
        async with joining(chief):
            pass
    assert text in str(caught.value)
