"""Scenes wait for what they need, and say so if it does not come; tests/processes plays them."""

from __future__ import annotations

from pathlib import Path

from psync.testing.chaos.journal import Journal
from psync.testing.chaos.scenes import SCENES, Stage


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
