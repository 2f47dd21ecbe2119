"""Hooks of training sessions."""

from __future__ import annotations

import pytest

from psync.compat.session_hooks import SessionHook, SyncReplicasHook


async def test_a_hook_does_nothing_by_itself() -> None:
    hook = SessionHook()
    hook.begin()
    await hook.after_create_session(None)
    await hook.after_run(None, 1)
    await hook.end(None)


@pytest.mark.parametrize("is_chief", [True, False])
async def test_the_chief_alone_puts_the_initial_tokens(is_chief: bool) -> None:
    put = []

    async def put_tokens() -> None:
        put.append("tokens")

    hook = SyncReplicasHook(put_tokens, is_chief)
    hook.begin()
    assert put == []
    await hook.after_create_session(None)
    assert put == ["tokens"] * is_chief
