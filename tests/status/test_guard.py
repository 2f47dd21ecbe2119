"""Who may look."""

from __future__ import annotations

import pytest

from psync.status.guard import HEADERS, bearer_of, is_allowed_host, is_token


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8787", "LOCALHOST:1", "127.0.0.1:8787", "10.1.2.3", "[::1]:8787",
     "[::1]", "::1", "jupyter.example.com", "jupyter.example.com:443"],
)  # fmt: skip
def test_hosts_that_are_ours(host: str) -> None:
    assert is_allowed_host(host, ["jupyter.example.com"])


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example.com", "evil.example.com:8787", "localhost.evil.com",
     "127.0.0.1.nip.io", "jupyter.example.com", "localhost:x"],
)  # fmt: skip
def test_hosts_that_are_not(host: str | None) -> None:
    assert not is_allowed_host(host)


def test_tokens() -> None:
    assert is_token("abc", "abc")
    for wrong in (None, "", "ab", "abcd", "äbc", "\udcff", "\ud800"):
        assert not is_token(wrong, "abc")


def test_bearers() -> None:
    assert bearer_of("Bearer abc") == bearer_of("bearer  abc ") == "abc"
    assert bearer_of(None) is bearer_of("") is bearer_of("Basic abc") is None


def test_nothing_from_elsewhere_is_loaded() -> None:
    assert "default-src 'self'" in HEADERS["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in HEADERS["Content-Security-Policy"]
