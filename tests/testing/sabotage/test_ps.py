"""A ps whose parts are sabotaged, and the backups in its process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from inside import points_of
from ps_cluster import PsCluster, push
from psync.net.platform import Platform
from psync.ps_task import PsTask
from psync.testing import MemoryNetwork
from psync.testing.sabotage import Failpoints, SabotagedParts
from psync.testing.sabotage.apply_log import read_log


async def test_a_place_that_is_armed_is_not_armed_in_a_backup_in_the_same_process() -> None:
    parts = SabotagedParts(Failpoints("ps.push.applied=error"))
    task = parts.of(PsTask)(Platform(MemoryNetwork(), parts=parts), 0, "ps0:1")
    backup = task._make_backup(1)
    assert points_of(task).armed("ps.push.applied")
    assert not points_of(backup).armed("ps.push.applied")
    await backup.close()
    await task.close()


async def test_it_writes_down_what_it_serves_and_whose_updates_it_applies(tmp_path: Path) -> None:
    class Logged(PsCluster):
        def platform(self, *args: object, **options: object) -> Platform:
            made = super().platform(*args, **options)  # type: ignore[arg-type]
            return dataclasses.replace(made, parts=SabotagedParts(apply_log=str(tmp_path)))

    async with Logged() as cluster:
        w = await cluster.create("w", np.zeros(2, np.float32))
        await push(cluster.client(), (w,), (1.0,), closure=3)
    (path,) = tmp_path.glob("ps-0.*.applies")
    records = [(name, arguments) for name, arguments, _ in read_log(path)]
    assert [name for name, _ in records if name in ("begin", "serves", "create", "applied")] == [
        "begin", "begin", "serves", "create", "applied",
    ]  # fmt: skip
    assert records[-1][1][3:6] == (3, 0, "Push")
