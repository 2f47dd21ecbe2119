"""What a ps knows of synchronous groups: the first definition counts."""

from __future__ import annotations

import dataclasses

import pytest

from psync.errors import ConfigurationError, RemoteProtocolError, UsageError
from psync.numerics.rules import SGD
from psync.store.store import ShardStore
from psync.sync.groups import GroupTable
from sync_tools import GROUP, config

TASK = "/job:ps/task:1"
CONFIG = dataclasses.replace(config(2), optimizer=SGD(0.5).to_config())


@pytest.fixture
def table() -> GroupTable:
    return GroupTable(ShardStore(TASK), TASK)


def test_what_is_not_known_must_be_defined(table: GroupTable) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{TASK}: synchronous group 7 is not defined"):
        table.define(GROUP, None)
    with pytest.raises(UsageError, match="optimizer 7 is not defined"):
        table.norms(GROUP)


def test_a_group_is_not_defined_as_something_else(table: GroupTable) -> None:
    table.define(GROUP, CONFIG.to_config())
    with pytest.raises(ConfigurationError, match="a different configuration than at first"):
        table.define(GROUP, dataclasses.replace(CONFIG, strict=True).to_config())
