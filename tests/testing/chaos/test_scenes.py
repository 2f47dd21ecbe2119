"""Scenes wait for what they need, and say so if it does not come; tests/processes plays them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from psync.testing.chaos import scenes
from psync.testing.chaos.journal import Journal
from psync.testing.chaos.program import Settings
from psync.testing.chaos.scenes import SCENES, NotPlayed, Stage
from psync.testing.sabotage import Failpoints, MessageLosses


def test_all_that_a_scene_asks_for_exists(tmp_path: Path) -> None:
    for scene in SCENES.values():
        Settings(str(tmp_path), **scene.settings)
        Failpoints(scene.failpoints)
        losses = scene.losses_in(tmp_path)
        MessageLosses(losses or {})
        assert (losses is not None and "while" in losses) is not scene.loses_always


async def test_what_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "PATIENCE_S", 0.0)
    with pytest.raises(NotPlayed, match="until the moon rises"):
        await Stage(0, tmp_path).until("the moon rises", lambda: False)
    with pytest.raises(NotPlayed, match="worker-7 is not there"):
        Stage(0, tmp_path).send("worker-7", signal.SIGKILL)


async def test_a_stage_sees_what_program_and_tasks_have_said(tmp_path: Path) -> None:
    stage = Stage(0, tmp_path)
    assert (stage.said("life"), stage.late("ps-0", "lost")) == ([], 0)
    journal = Journal(tmp_path)
    for number in (1, 2):
        journal.say("life", restored=f"run/ckpt-{number}")
        journal.say("scheduled", first=0, stop=number)
    journal.close()
    assert [line["stop"] for line in stage.said("scheduled")] == [1, 2]
    assert "went on from ckpt-2" in await SCENES["torn"].play(stage)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "ps-0.notes").write_text(
        "met Push\nlost Push late\nlost Assign late\nlost Push reply\nserved Push late\n"
    )
    assert (stage.late("ps-0", "lost"), stage.late("ps-0", "served")) == (2, 1)
