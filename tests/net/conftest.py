"""Fixtures of the tests of connections."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from endpoints import MADE


@pytest.fixture
async def closed_at_the_end() -> AsyncIterator[None]:
    """Close the endpoints that a test has made, the latest first."""
    MADE.clear()
    yield
    for endpoint in reversed(list(MADE)):
        await endpoint.close()
