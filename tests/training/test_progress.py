"""What a fit shows: nothing, lines, or a bar."""

from __future__ import annotations

from typing import Any

import pytest

from psync.training.progress import Bar, Lines, Progress, progress_of


def one_epoch(show: Any) -> None:
    show.begin(0, 3, 20)
    show.at(10)
    show.end(1.25, {"loss": 0.123456, "accuracy": 1.0})
    show.close()


def test_lines_say_what_came_of_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    one_epoch(Lines())
    assert capsys.readouterr().out == ("epoch 1/3: 20 steps in 1.2 s  loss 0.1235  accuracy 1\n")


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    one_epoch(Progress())
    assert capsys.readouterr().out == ""


def test_a_bar_leaves_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    one_epoch(Bar())
    assert "epoch 1/3: 20 steps in 1.2 s  loss 0.1235  accuracy 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verbose", "kind"),
    [(False, Progress), (True, Lines), ("auto", Lines), ("lines", Lines), ("bar", Bar)],
)
def test_where_there_is_no_terminal_there_is_no_bar_unless_asked_for(
    verbose: bool | str, kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    show = progress_of(verbose)
    show.close()
    assert type(show) is kind


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show = progress_of("auto")
    show.close()
    assert isinstance(show, Bar)
