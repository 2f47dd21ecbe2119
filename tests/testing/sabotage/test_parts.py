"""Which parts a task is built of; and that one without sabotage knows nothing of it."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from law import MODULES, imports_of
from psync.checkpoints.files import Writer
from psync.net.environment import parts_of
from psync.net.platform import Parts
from psync.net.serving import RequestServer
from psync.ps.updates import PsUpdates
from psync.store.commit_log import CommitLog
from psync.store.ledger import Ledger
from psync.store.store import ShardStore
from psync.store.update_gate import UpdateGate
from psync.sync.steps import SyncSteps
from psync.testing.sabotage import Failpoints, MessageLosses, SabotagedParts
from psync.testing.sabotage.parts import WITHOUT
from psync.testing.sabotage.switches import NAMES

PRODUCTION = [name for name in MODULES if name.split(".")[0] != "testing"]


def test_without_a_variable_a_part_is_the_class_itself() -> None:
    assert type(parts_of({"PSYNC_SECRET": "x"})) is Parts
    assert Parts().of(Ledger) is Ledger


@pytest.mark.parametrize("cls", [CommitLog, Ledger, RequestServer, ShardStore, SyncSteps])
def test_what_nobody_asks_for_is_not_replaced(cls: type) -> None:
    assert SabotagedParts().of(cls) is cls


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_switch_replaces_one_class_and_leaves_the_others(name: str) -> None:
    parts = parts_of({"PSYNC_TESTING_WITHOUT": name})
    replaced = {cls for cls, weak in set(WITHOUT.values()) if issubclass(parts.of(cls), weak)}
    if name == "staged_commit":
        assert replaced == set()
    else:
        assert replaced == {WITHOUT[name][0]}
    assert {Writer, UpdateGate} < {cls for cls, _ in WITHOUT.values()}


def test_a_class_is_made_once() -> None:
    parts = SabotagedParts(without=frozenset({"dedup"}))
    assert parts.of(Ledger) is parts.of(Ledger)
    assert parts.of(Ledger) is not SabotagedParts(without=frozenset({"dedup"})).of(Ledger)


def test_losses_and_the_log_come_from_the_environment() -> None:
    parts = parts_of({"PSYNC_TESTING_LOSS": '{"seed": 1}', "PSYNC_TESTING_APPLY_LOG": "/tmp"})
    for cls in (RequestServer, ShardStore, PsUpdates):
        assert parts.of(cls) is not cls


def test_a_backup_in_the_same_process_has_the_rest_but_no_failpoint_that_is_armed() -> None:
    losses = MessageLosses({})
    parts = SabotagedParts(
        Failpoints("ps.push.applied=error"), without=frozenset({"fencing"}), losses=losses,
        apply_log="there",
    ).of_backup()  # fmt: skip
    assert not parts.failpoints.armed("ps.push.applied")
    assert parts.of(Ledger) is not Ledger
    assert parts.of(RequestServer).losses is losses  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("module", PRODUCTION)
def test_production_knows_nothing_of_sabotage(module: str) -> None:
    text = MODULES[module].read_text()
    assert "failpoints" not in text.lower().replace("psync_failpoints", "")
    assert all("psync.testing.sabotage" not in name for _, name in imports_of(module))
    assert not [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr == "__class__"
        and isinstance(node.ctx, ast.Store)
    ]
