"""Which parts a task is built of; and that one without sabotage knows nothing of it."""

from __future__ import annotations

import re
import subprocess
import sys

from law import MODULES, imports_in
from psync.checkpoints.files import Writer
from psync.net.connection import Connection
from psync.net.environment import parts_of
from psync.ps.admission import UpdateGate
from psync.ps.updates import PsUpdates
from psync.store.ledger import Ledger
from psync.store.store import ShardStore
from psync.sync.steps import SyncSteps
from psync.testing.sabotage import Failpoints, MessageLosses, SabotagedParts
from psync.testing.sabotage.parts import WITHOUT
from psync.testing.sabotage.switches import NAMES


def test_each_switch_replaces_one_class_and_leaves_the_others() -> None:
    weakened = set(WITHOUT.values())
    assert {Writer, UpdateGate} < {cls for cls, _ in weakened}
    for cls in (Ledger, Connection, ShardStore, SyncSteps):
        assert SabotagedParts().of(cls) is cls
    replaced = {}
    for name in NAMES:
        parts = parts_of({"PSYNC_TESTING_WITHOUT": name})
        replaced[name] = {cls for cls, weak in weakened if issubclass(parts.of(cls), weak)}
    assert replaced == {name: {strong} for name, (strong, _) in WITHOUT.items()}


def test_losses_and_the_log_come_from_the_environment() -> None:
    parts = parts_of({"PSYNC_TESTING_LOSS": '{"seed": 1}', "PSYNC_TESTING_APPLY_LOG": "/tmp"})
    for cls in (Connection, ShardStore, PsUpdates):
        assert parts.of(cls) is not cls


def test_a_backup_in_the_same_process_has_the_rest_but_no_failpoint_that_is_armed() -> None:
    losses = MessageLosses({})
    parts = SabotagedParts(
        Failpoints("ps.push.applied=error"), without=frozenset({"fencing"}), losses=losses,
        apply_log="there",
    ).of_backup()  # fmt: skip
    assert not parts.failpoints.armed("ps.push.applied")
    assert parts.of(Ledger) is not Ledger
    assert parts.of(Connection).losses is losses  # type: ignore[attr-defined]
    assert parts.of(ShardStore).apply_log == "there"  # type: ignore[attr-defined]


def test_a_task_that_nothing_is_asked_of_loads_nothing_of_it() -> None:
    program = """
import asyncio, sys
import psync

async def main():
    async with psync.LocalCluster(1, 1, processes=False) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(0.0, name="w")
            coordinator.schedule(w.assign_add, (1.0,))
            await coordinator.join()

asyncio.run(main())
from psync.net.environment import parts_of
parts_of({})
print(sorted(name for name in sys.modules if "sabotage" in name))
parts_of({"PSYNC_FAILPOINTS": ""})
print("psync.testing.sabotage" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == ["[]", "True"]


def test_production_knows_nothing_of_sabotage() -> None:
    breaches = []
    for module, path in MODULES.items():
        if module.split(".")[0] == "testing":
            continue
        text = path.read_text()
        if "failpoints" in text.lower().replace("psync_failpoints", ""):
            breaches.append(f"{path}: names failpoints")
        if any("psync.testing.sabotage" in name for _, name in imports_in(path)):
            breaches.append(f"{path}: imports sabotage")
        if re.search(r"\.__class__ = ", text):
            breaches.append(f"{path}: changes an object's class")
    assert not breaches, "\n".join(breaches)
