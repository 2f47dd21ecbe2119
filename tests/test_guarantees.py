"""GUARANTEES.md: every promise has a test, and every mark names a promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contract import internals_of, is_contract
from promises import ROOT, by_promise, promises

PROMISES = 127
"""Never fewer than before: a promise may be split or added, and none is dropped."""


def test_every_promise_has_a_test_and_every_mark_a_promise() -> None:
    ids = promises()
    assert len(ids) == len(set(ids)) >= PROMISES
    tests = by_promise()
    assert set(tests) == set(ids), "marks that name no promise"
    assert [name for name, named in tests.items() if not named] == [], "promises without a test"


ELSEWHERE = {
    "updates.model-state-merged-once": "tests/integrations/test_merging.py",
    "updates.model-state-in-range": "tests/integrations/test_merging.py",
    "input.status-refused-or-shown": "tests/status/dashboard/test_view.py",
}
"""Promises on parts that no other part stands on, shown by tests of these parts."""


def test_every_promise_is_shown_by_the_contract_or_by_real_processes() -> None:
    """Tests that know the inside may show it, too: these change with it."""
    for name, tests in by_promise().items():
        files = {test.partition("::")[0] for test in tests}
        shown = [file for file in files if file.startswith("tests/processes/")]
        shown += [file for file in files if is_contract(ROOT / file)]
        assert shown or ELSEWHERE.get(name) in files, f"{name}: no test of the contract"
        assert not (shown and name in ELSEWHERE)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from psync.wire.messages import Pull\nimport psync\nfrom psync import Variable", set()),
        ("from psync.testing import sabotage, seams", set()),
        ("from psync.store.store import ShardStore", {"psync.store.store"}),
        ("from psync.ps import admission", {"psync.ps.admission"}),
        ("import psync.net.peer as peer", {"psync.net.peer"}),
        ("from inside import store_of", {"psync.store.store"}),
        ("patch('psync.client.plan.SIZE', 1)", {"psync.client.plan"}),
        ("strategy._runtime.ps", {"psync's _runtime"}),
        ("self._own, pair._replace(a=1), page._repr_html_()", set()),
    ],
)
def test_what_a_test_of_the_contract_may_use(text: str, found: set[str], tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(text)
    assert found <= set(internals_of(file)) if found else not internals_of(file)


def test_every_entry_of_the_page_is_a_promise() -> None:
    entries, _, _ = (ROOT / "GUARANTEES.md").read_text().partition("\n## Limits\n")
    rows = re.findall(r"^(?:- |\| `).*", entries, re.MULTILINE)
    assert len(rows) == len(promises())
