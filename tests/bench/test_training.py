"""A timed run on a small cluster, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from psync import LocalCluster
from psync.bench.checks import check
from psync.bench.modes import Mode
from psync.bench.training import Job, Run, train
from psync.bench.virtual_runs import DrawnPace

pytest.importorskip("sklearn")
pytestmark = pytest.mark.virtual_time


async def trained(
    mode: Mode, table: list[list[float]], *, patience_s: float = 1.0, limit_s: float = 100.0,
    duration_s: float | None = None,
) -> Run:  # fmt: skip
    """A checked run; ``table`` has the seconds of each gradient, a row for each step."""
    pace = DrawnPace(np.array(table), patience_s)
    steps: dict[str, float] = {"steps": len(table)}
    amount = steps if duration_s is None else {"duration_s": duration_s}
    job = Job(pace, 8, 0, mode.synchronous, **amount)
    async with LocalCluster(1, mode.num_workers, processes=False) as cluster:
        run = await train(cluster, mode, lambda _: job, seed=0, watch_s=0.5, limit_s=limit_s)
    check(run)
    return run


@pytest.mark.parametrize(
    ("mode", "table", "ended"),
    [
        pytest.param(
            Mode(2), [[1.0, 2.0]] * 4, [[1, 2, 3, 4], [2, 4, 6, 8]], id="not when asynchronous"
        ),
        pytest.param(
            Mode(2, bound=1), [[1.0, 3.0]] * 4, [[1, 3, 6, 9], [3, 6, 9, 12]], id="up to a bound"
        ),
        pytest.param(
            Mode(3, backups=0), [[1.0, 1.0, 1.0], [1.0, 4.0, 2.0]], [[1, 5]] * 3, id="in each step"
        ),
    ],
)
async def test_workers_wait_for_the_slowest(
    mode: Mode, table: list[list[float]], ended: list[list[int]]
) -> None:
    run = await trained(mode, table)
    assert [[round(push.ended) for push in own] for own in run.pushes] == ended
    assert run.global_step == (len(table) if mode.synchronous else 8)
    assert not run.all("stale")


@pytest.mark.parametrize(
    ("table", "patience_s", "ended", "seconds"),
    [
        pytest.param(
            [[1.0, 4.0, 1.0], [1.0, 1.0, 1.0]], 1.0, (0.0, 1.2), 2.2, id="and given up"
        ),
        pytest.param(
            [[1.0, 2.5, 1.0]] + [[1.0, 1.0, 1.0]] * 3, np.inf, (2.4, 2.6), np.inf,
            id="and computed to its end",
        ),
    ],
)  # fmt: skip
async def test_with_a_backup_a_late_gradient_is_dropped(
    table: list[list[float]], patience_s: float, ended: tuple[float, float], seconds: float
) -> None:
    run = await trained(Mode(3, backups=1), table, patience_s=patience_s)
    late = run.pushes[1][0]
    assert late.outcome == "stale"
    assert late.seconds == table[0][1]
    assert ended[0] < late.ended < ended[1]
    assert run.seconds < seconds
