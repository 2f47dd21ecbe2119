"""`psync join`: what it is told. Whole clusters: tests/processes/test_joining.py."""

from __future__ import annotations

import pytest

from psync.cli.main import main


def test_what_cannot_be_used_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join"]) == 2
    assert "Missing argument 'HOST:PORT'" in capsys.readouterr().err
