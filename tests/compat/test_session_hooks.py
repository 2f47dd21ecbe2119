"""Hooks of training sessions."""

from __future__ import annotations

import pytest

from psync.compat.session_hooks import SyncReplicasHook


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
