"""GUARANTEES.md: every promise has a test, and every mark names a promise."""

from __future__ import annotations

import re

from promises import ROOT, by_promise, promises

PROMISES = 127
"""Never fewer than before: a promise may be split or added, and none is dropped."""


def test_every_promise_has_a_test_and_every_mark_a_promise() -> None:
    ids = promises()
    assert len(ids) == len(set(ids)) >= PROMISES
    tests = by_promise()
    assert set(tests) == set(ids), "marks that name no promise"
    assert [name for name, named in tests.items() if not named] == [], "promises without a test"


def test_every_entry_of_the_page_is_a_promise() -> None:
    entries, _, _ = (ROOT / "GUARANTEES.md").read_text().partition("\n## Limits\n")
    rows = re.findall(r"^(?:- |\| `).*", entries, re.MULTILINE)
    assert len(rows) == len(promises())
