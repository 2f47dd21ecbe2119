"""Ps tasks that run another version of psync than their backups, or round another way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, running
from psync.errors import ConfigurationError, VersionMismatch
from psync.net.platform import Platform
from psync.testing.seams import unlike
from replica_training import SMALL, ColumnsTraining, check, declared, run

pytestmark = pytest.mark.virtual_time


class MixedCluster(MemoryCluster):
    """A cluster with one ps that is unlike the others."""

    def __init__(self, num_ps: int, name: str, **says: str) -> None:
        super().__init__(num_ps)
        self.name = name
        self.says = says

    def platform(self, secret: Any = None, host: str = "") -> Platform:
        platform = super().platform(secret, host)
        return unlike(platform, **self.says) if host == self.name else platform


OTHER_NUMERICS = {"numerics": "0123456789abcdef"}


@pytest.mark.promise("backups.other-version-refused")
async def test_another_version_of_psync_ends_the_program_with_an_error_that_says_what_to_do() -> (
    None
):
    async with running(MixedCluster(2, "ps-1", release="0.0.9")) as cluster:
        with pytest.raises(VersionMismatch, match="cannot back up") as caught:
            async with psync.ClusterCoordinator(cluster.replica_strategy()):
                pass
        assert "/job:ps/task:0" in caught.value.message
        assert "/job:ps/task:1" in caught.value.message
        assert "0.0.9" in caught.value.message
        assert psync.__version__ in caught.value.message
        assert "save a checkpoint" in str(caught.value.hint)


@pytest.mark.promise("backups.other-arithmetic-reported")
async def test_what_rounds_another_way_is_paired_counted_and_logged_once(caplog: Any) -> None:
    async with running(MixedCluster(2, "ps-1", **OTHER_NUMERICS)) as cluster:
        async with psync.ClusterCoordinator(cluster.replica_strategy()) as coordinator:
            variables = declared(coordinator)
            await run(coordinator, 3, *variables)
            for name in ("ps-0", "ps-1"):
                assert cluster.ps(name).statistics()["backup"]["unequal"] == 1
                assert any("last bits may differ" in line for line in cluster.ps(name).describe())
            told = [
                each for each in caplog.messages if "do not compute bit-identical results" in each
            ]
            assert len(told) == 2  # one a pairing
            await cluster.kill("ps-1")
            await anext(coordinator.events())
            await check(variables, 3)


@pytest.mark.promise("backups.other-arithmetic-refused")
@pytest.mark.parametrize("num_ps", [2, 3])
async def test_a_deterministic_group_is_refused_where_backups_round_another_way(
    num_ps: int,
) -> None:
    async with running(MixedCluster(num_ps, f"ps-{num_ps - 1}", **OTHER_NUMERICS)) as cluster:
        async with psync.ClusterCoordinator(cluster.replica_strategy()) as coordinator:
            training = ColumnsTraining(coordinator, SMALL, deterministic=True)
            training.schedule(2)
            with pytest.raises(ConfigurationError, match="deterministic=True, but /job:ps/task:"):
                await coordinator.join()


async def test_a_deterministic_group_gets_no_backup_that_rounds_another_way() -> None:
    cluster = MixedCluster(2, "nobody", **OTHER_NUMERICS)
    async with running(cluster):
        async with psync.ClusterCoordinator(cluster.replica_strategy()) as coordinator:
            training = ColumnsTraining(coordinator, SMALL, deterministic=True)
            training.schedule(2)
            await coordinator.join()
            await cluster.kill("ps-1")
            await anext(coordinator.events())
            cluster.name = "ps-1"
            await cluster.revive("ps-1")
            training.schedule(2)
            await coordinator.join()
            await training.check()
            assert cluster.ps("ps-0").statistics()["backup"]["state"] == "alone"
            cluster.name = "nobody"
            await cluster.stop("ps-1")
            await cluster.start("ps-1")
            await coordinator.backed_up()
            assert np.isfinite(await training.v.read()).all()
