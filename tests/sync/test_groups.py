"""What a ps knows of synchronous groups: the first definition counts."""

from __future__ import annotations

import dataclasses

import pytest

from psync.errors import ConfigurationError, RemoteProtocolError, UsageError
from psync.numerics.rules import SGD
from psync.store.step_norms import GRADIENTS
from psync.store.store import ShardStore
from psync.sync.groups import GroupTable
from sync_tools import GROUP, config

TASK = "/job:ps/task:1"
CONFIG = dataclasses.replace(config(2), optimizer=SGD(0.5).to_config())


@pytest.fixture
def table() -> GroupTable:
    return GroupTable(ShardStore(TASK), TASK)


def test_a_group_is_defined_with_its_optimizer_and_then_known(table: GroupTable) -> None:
    raw = CONFIG.to_config()
    for again in (raw, dict(raw), None, raw | {"averages": []}):  # as it comes from the wire
        assert table.define(GROUP, again) == CONFIG
    assert table.raw_config(GROUP) == raw
    assert table.store.rule(GROUP).to_config() == CONFIG.optimizer
    assert table.has_one_group
    table.define(GROUP + 1, raw)
    assert not table.has_one_group


def test_what_is_not_known_must_be_defined(table: GroupTable) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{TASK}: synchronous group 7 is not defined"):
        table.define(GROUP, None)
    with pytest.raises(UsageError, match="optimizer 7 is not defined"):
        table.norms(GROUP)


def test_a_group_is_not_defined_as_something_else(table: GroupTable) -> None:
    table.define(GROUP, CONFIG.to_config())
    with pytest.raises(ConfigurationError, match="a different configuration than at first"):
        table.define(GROUP, dataclasses.replace(CONFIG, strict=True).to_config())


def test_the_norms_of_a_group_are_those_that_its_rule_needs(table: GroupTable) -> None:
    clipping = SGD(0.5).to_config() | {"global_clipnorm": 1.0}
    table.define(GROUP, dataclasses.replace(CONFIG, optimizer=clipping).to_config())
    assert table.norms(GROUP).passes_together(spread=False) == [GRADIENTS]
