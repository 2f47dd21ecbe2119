"""docs/explanation/performance.md: its table of what travels is what a cluster in memory sends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from message_counts import WORKS, Case, Link, Traffic, count_everything, traffic_of
from psync.testing import run_virtual
from psync.testing.seams import fresh_process

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "performance.md"
HEADING = "| operation | between | messages | tensors | bytes beside them |"
CASES = [
    Case(p, w, n, backup)
    for p, w, n in ((1, 1, 6), (2, 1, 12), (2, 2, 6), (3, 1, 6), (3, 2, 12))
    for backup in (False, True)
    if p > 1 or not backup
]
AT_LEAST = 0.5  # of what the page says where it says "at most"


class Row(NamedTuple):
    operation: str
    between: str
    messages: str
    tensors: str
    others: str


def rows() -> list[Row]:
    """Those of the table; one that names no operation goes on with that of the row before."""
    _, _, after = PAGE.read_text().partition(HEADING)
    found: list[Row] = []
    for line in after.strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        row = Row(*(cell.strip() for cell in line.strip("|").split("|")))
        found.append(row if row.operation else row._replace(operation=found[-1].operation))
    return found


ROWS = rows()


def value_of(formula: str, letters: dict[str, int]) -> float:
    """Compute such as "p(94 + 3p)": factors stand side by side."""
    formula = formula.replace("−", "-").replace("≤", "").replace(",", "")
    formula = re.sub(r"\s", "", formula)
    assert re.fullmatch(r"[\d.a-z()+/-]+", formula), formula
    return float(eval(re.sub(r"(?<=[\w)])(?=[a-z(])", "*", formula), {}, letters))


def check(formula: str, letters: dict[str, int], measured: float, what: str) -> Iterator[str]:
    said = value_of(formula, letters)
    if "≤" in formula:
        fits = AT_LEAST * said <= measured <= said
    else:
        fits = measured == pytest.approx(said)
    if not fits:
        yield f"{what}: the page says {formula}, {said:g}; there are {measured:g}"


def test_a_formula_is_read_as_it_is_meant() -> None:
    letters = {"p": 3, "w": 2, "m": 60}
    assert value_of("p(94 + 3p)", letters) == 309
    assert value_of("2wm + m(p − 1)/p", letters) == 280
    assert value_of("(p − 1)(77 + 39w)", letters) == 310


def test_the_table_has_all_operations() -> None:
    assert {row.operation for row in ROWS} == {*WORKS, "empty closure"}


def differences(operation: str, case: Case) -> Iterator[str]:
    """Yield where a cluster sends something else than the page says."""
    measured, sizes = run_virtual(traffic_of, operation, case)
    letters = {**sizes, "p": case.p, "w": case.w, "n": case.n}
    left = dict(measured)
    for row in ROWS:
        if row.operation == operation and (case.backup or row.between != "ps, backup"):
            traffic = left.pop(Link(*row.between.split(", ")), Traffic())
            what = f"{operation}, {row.between}, {case}"
            yield from check(row.messages, letters, traffic.messages, f"messages of {what}")
            yield from check(row.tensors, letters, traffic.tensors, f"bytes of tensors of {what}")
            yield from check(row.others, letters, traffic.others, f"other bytes of {what}")
    yield from (f"{operation}, {case}: the page does not have {link}" for link in left)


@pytest.mark.parametrize("operation", [*WORKS, "empty closure"])
def test_what_travels_is_what_the_page_says(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for case in CASES:
        # In a fresh process numbers of optimizers are small, and take a byte.
        with fresh_process(), monkeypatch.context() as patch:
            count_everything(patch)
            found += differences(operation, case)
    assert not found, "\n".join(found)


def test_one_message_more_is_noticed() -> None:
    letters = {"p": 2}
    assert not [*check("2p", letters, 4, "messages"), *check("≤ 2p", letters, 3, "messages")]
    for formula, measured in (("2p", 5), ("2p", 3), ("≤ 2p", 4.1), ("≤ 2p", 1)):
        (found,) = check(formula, letters, measured, "messages")
        assert found.startswith("messages: the page says")
