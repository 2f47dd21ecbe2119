"""The journal of a chaotic run: lines that no kill takes back."""

from __future__ import annotations

from pathlib import Path

from psync.testing.chaos.evidence import NAME, Journal, read_journal


def test_lines_of_all_lives_come_in_order(tmp_path: Path) -> None:
    for life in range(2):
        journal = Journal(tmp_path)
        journal.say("life", number=life)
        journal.close()
    assert read_journal(tmp_path) == [{"kind": "life", "number": 0}, {"kind": "life", "number": 1}]


def test_a_line_that_was_cut_off_is_none_and_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"kind": "done"}\n{"kind": "do')
    assert read_journal(tmp_path) == [{"kind": "done"}]
    journal = Journal(tmp_path)
    journal.say("life")
    journal.close()
    assert read_journal(tmp_path) == [{"kind": "done"}, {"kind": "life"}]
