"""Plugins on real processes: every task loads them, and what a task lacks is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import own_rules
import psync
from own_rules import check_bits, declared, train
from psync import FailoverEvent
from psync.errors import ConfigurationError, RuleError
from real_training import training
from tasks_by_hand import SERVE, by_hand

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PLUGIN = "own_rules_plugin"


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_rules.forgetting():
        sys.modules.pop(PLUGIN, None)
        yield


def strategy_of(cluster: psync.LocalCluster) -> psync.ParameterServerStrategy:
    two = psync.FixedShardsPartitioner(2)
    return psync.ParameterServerStrategy(cluster.resolver, two, ps_recovery="backup")


@pytest.mark.smoke
async def test_training_goes_on_to_the_same_bits_when_a_ps_is_killed_and_after_a_checkpoint(
    tmp_path: Path,
) -> None:
    async with psync.LocalCluster(2, 1, plugins=[PLUGIN]) as cluster:
        strategy = strategy_of(cluster)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            w, optimizer = declared(strategy.scope())
            for number in range(40):
                if number == 20:
                    await coordinator.backed_up()
                    os.kill(cluster.tasks["ps-0"].pid, signal.SIGKILL)
                coordinator.schedule(train, args=(w, optimizer, number))
                await coordinator.join()
            assert isinstance(await anext(coordinator.events()), FailoverEvent)
            await check_bits(w, optimizer, 40)
            checkpoint = psync.Checkpoint(w=w, optimizer=optimizer)
            path = await checkpoint.save(str(tmp_path / "ckpt"))
    async with training(1, 1, plugins=[PLUGIN]) as (_, strategy, coordinator):
        w, optimizer = declared(strategy.scope())
        await psync.Checkpoint(w=w, optimizer=optimizer).restore(path)
        await check_bits(w, optimizer, 40)
        for number in range(40, 45):
            coordinator.schedule(train, args=(w, optimizer, number))
            await coordinator.join()
        await check_bits(w, optimizer, 45)
        coordinator.schedule(
            optimizer.apply_gradients, args=([(np.full(w.shape, 1e9, np.float32), w)],)
        )
        with pytest.raises(RuleError, match=r"\"tests.momentum\" for \"w/part_0\" raised"):
            await coordinator.join()


async def test_ps_tasks_that_lack_a_rule_are_named() -> None:
    async with psync.LocalCluster(2, 1) as cluster:
        own_rules.register()  # here, and nowhere else
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        optimizer = psync.optimizers.Optimizer(own_rules.rule(), name="mine")
        expected = (
            "optimizer 'mine': the rule 'tests.momentum' is unknown to /job:ps/task:0, "
            "/job:ps/task:1"
        )
        with pytest.raises(ConfigurationError, match=expected) as caught:
            async with psync.ClusterCoordinator(strategy):
                pass
        assert "--plugin MODULE" in str(caught.value.hint)
        del optimizer, caught
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy):
            with pytest.raises(ConfigurationError, match=expected):
                psync.optimizers.Optimizer(own_rules.rule(), name="mine")
            with pytest.raises(ConfigurationError, match="the schedule 'Halving' is unknown to"):
                psync.optimizers.SGD(own_rules.Halving(0.5))


def test_a_task_that_cannot_import_a_plugin_says_so_and_exits() -> None:
    with by_hand() as cluster:
        run = cluster.run("ps", 0, (*SERVE, "--plugin", "psync_nothing.rules"))
    assert run.code == 2, run
    reason, hint = run.err.splitlines()
    assert reason.startswith(
        "psync: error: plugin 'psync_nothing.rules' cannot be imported on /job"
    )
    assert hint.startswith(f"hint: {sys.executable} looks for modules in ''")


SCRIPT = """
import numpy as np

import psync
from mine import Doubling


async def main():
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(3, np.float32), name="w")
        optimizer = psync.optimizers.Optimizer(Doubling(0.5))

        async def step():
            await optimizer.apply_gradients([(np.ones(3, np.float32), w)])

        for _ in range(4):
            coordinator.schedule(step)
        await coordinator.join()
        print("w", await w.read())


psync.run(main)
"""

RULE = """
import psync


@psync.rules.register
class Doubling(psync.rules.UpdateRule):
    name = "tests.doubling"

    def update(self, value, slots, gradient, step):
        return value - 2 * step.learning_rate * gradient
"""


@pytest.mark.parametrize("beside", ["script", "here"])
def test_psync_run_finds_a_plugin_beside_the_script_and_where_it_was_started(
    tmp_path: Path, beside: str
) -> None:
    for name in ("script", "here"):
        (tmp_path / name).mkdir()
    script = tmp_path / "script" / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / beside / "mine.py").write_text(RULE)
    run = subprocess.run(
        [sys.executable, "-m", "psync", "run", script, "--ps", "2", "--plugin", "mine"],
        cwd=tmp_path / "here", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "w [-4. -4. -4.]\n"), run.stderr
