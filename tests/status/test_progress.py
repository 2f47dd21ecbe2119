"""What a fit shows: nothing, lines, or a bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import training
from psync.errors import ConfigurationError
from psync.status import progress
from psync.status.progress import Progress, kind_of, showing, size_of


def one_epoch(show: Any) -> None:
    show.begin("epoch 1/3", 20)
    show.at(10)
    show.end(values={"loss": 0.123456, "accuracy": 1.0})
    show.close()


def test_lines_say_what_came_of_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    one_epoch(Progress("lines"))
    assert capsys.readouterr().out.startswith("epoch 1/3: 20 steps in 0.")


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    one_epoch(Progress(None))
    assert capsys.readouterr().out == ""


def test_a_bar_leaves_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    one_epoch(Progress("bar"))
    assert capsys.readouterr().out.endswith(" s  loss 0.1235  accuracy 1\n")


def test_only_a_terminal_gets_a_bar_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {False: None, True: "lines", "auto": "lines", "lines": "lines", "bar": "bar"}
    assert {verbose: kind_of(verbose) for verbose in kinds} == kinds
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert (kind_of("auto"), kind_of("lines")) == ("bar", "lines")


# Bytes.


def test_work_that_takes_long_gets_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with showing("lines", "saving there", 3 << 20) as show:
        show(0)
        show(1536 << 10)
    assert capsys.readouterr().out.splitlines() == [
        "saving there: 0 B of 3.0 MiB",
        "saving there: 1.5 MiB of 3.0 MiB",
        "saving there: 3.0 MiB in 0.0 s",
    ]


def test_work_that_takes_no_time_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with showing("auto", "saving there", 5 << 40) as show:
        show(5 << 40)
    assert capsys.readouterr().out == "saving there: 5.0 TiB in 0.0 s\n"


def test_work_of_many_pieces_counts_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with showing("lines", "epoch 1/2", 2000, "shards") as show:
        show(1500)
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/2: 1,500 of 2,000 shards", "epoch 1/2: 2,000 shards in 0.0 s",
    ]  # fmt: skip
    with showing("bar", "epoch [1/2]", 2000, "shards") as show:
        show(1500)
    assert capsys.readouterr().out.endswith("epoch [1/2]: 2,000 shards in 0.0 s\n")


def test_work_that_fails_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="full"), showing("lines", "saving there", 10):
        raise OSError("full")
    assert capsys.readouterr().out == ""


def test_a_bar_of_bytes_leaves_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with showing("bar", "saving [there]", 100) as show:
        show(50)
    assert capsys.readouterr().out.endswith("saving [there]: 100 B in 0.0 s\n")


def test_what_is_no_kind_of_output_is_refused() -> None:
    for begin in (lambda: kind_of("loud"), lambda: showing("loud", "", 1).__enter__()):
        with pytest.raises(ConfigurationError, match="verbose: expected"):
            begin()


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    (tmp_path / "b").write_bytes(bytes(5))
    (tmp_path / "gone").symlink_to("nowhere")
    assert size_of(tmp_path) == 15
    assert size_of(tmp_path / "nowhere") == 0


async def test_a_save_and_a_restore_say_how_much_they_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(num_ps=2) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros((4, 1024), np.float32), name="w")
        manager = psync.CheckpointManager(psync.Checkpoint(w=w), tmp_path)
        path = await manager.save(verbose="lines")
        assert capsys.readouterr().out.startswith(f"saving {tmp_path}: 16.0 KiB in ")
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        assert await manager.restore_or_initialize(verbose="lines") == path
        *_, all_of_it, end = capsys.readouterr().out.splitlines()
        assert all_of_it == f"restoring {path}: 16.0 KiB of 16.0 KiB"
        assert end.startswith(f"restoring {path}: 16.0 KiB in ")
        await manager.save()
        await manager.restore_or_initialize()
        assert capsys.readouterr().out == ""
        with pytest.raises(ConfigurationError, match="verbose: expected"):
            await manager.save(verbose="loud")
