"""Options that several commands share are the same in each of them."""

from __future__ import annotations

import pytest

from psync.cli.main import main


@pytest.mark.parametrize(
    "command", [["task"], ["join", "127.0.0.1:1"], ["run", "train.py"]], ids=lambda each: each[0]
)
def test_a_level_that_is_none_is_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--log-level", "loud"]) == 2
    said = capsys.readouterr().err
    assert "'loud' is not one of 'debug', 'info', 'warning', 'error', 'critical'" in said
    assert said.count("\n") == 1
