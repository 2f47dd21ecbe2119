"""Replays of what ps tasks have applied: planted faults are found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from psync.ps.updates import PsUpdate
from psync.specs import ShardSpec
from psync.store.store import ShardStore
from psync.testing.chaos.replay import check, replay, store_of
from psync.testing.sabotage.apply_log import ApplyLog, LoggedStore, contents, digest

SPEC = ShardSpec("w", 0, 0, 0, (3,), "float32", 0)


class Ps:
    """A store whose changes are written down."""

    def __init__(self, directory: Path) -> None:
        self.log, self.store = ApplyLog(str(directory)), LoggedStore("here")
        self.log.adopt(self.store)
        self.store.create(SPEC, fill=np.float32(0))

    def add(self, number: float, closure: int = -1, ordinal: int = 0) -> None:
        for _ in self.store.assign(SPEC.key, "add", np.full(3, number, np.float32)):
            pass
        message = SimpleNamespace(sequence=1, closure=closure, ordinal=ordinal)
        update: Any = SimpleNamespace(
            message=message, client=("w", 1), store=self.store,
            known=SimpleNamespace(keys=(SPEC.key,), is_push=False),
        )  # fmt: skip
        assert set(vars(update)) <= {*PsUpdate.__slots__}
        self.log.applied(update)

    def values(self) -> np.ndarray:
        return np.frombuffer(b"".join(self.store.read(SPEC.key)), np.float32)


@pytest.fixture
def ps(tmp_path: Path) -> Iterator[Ps]:
    made = Ps(tmp_path)
    yield made
    made.log.close()


def test_what_was_applied_makes_what_was_pulled(ps: Ps, tmp_path: Path) -> None:
    ps.add(2.0, closure=5)
    ps.log.cut(ps.store)
    ps.add(3.0, closure=5, ordinal=1)
    faults, text = check(tmp_path, {"w": ps.values()})
    assert faults == []
    assert "2 updates in 1 logs replayed: 1 shards" in text


def test_a_value_that_nothing_has_made_is_found(ps: Ps, tmp_path: Path) -> None:
    ps.add(2.0)
    (fault,), _ = check(tmp_path, {"w": np.nextafter(ps.values(), np.float32(9))})
    assert "not what the log makes of it, bit for bit" in fault


def test_a_call_that_was_applied_twice_is_found(ps: Ps, tmp_path: Path) -> None:
    ps.add(2.0, closure=5)
    ps.add(2.0, closure=5)
    (fault,), _ = check(tmp_path, {"w": ps.values()})
    assert "closure 5, call 0 was applied" in fault


def test_going_back_to_what_nobody_has_frozen_is_found(ps: Ps, tmp_path: Path) -> None:
    ps.log.cut(ps.store)
    frozen = store_of(contents(ps.store), LoggedStore)
    ps.add(2.0)
    ps.log.adopt(frozen)
    assert check(tmp_path, {"w": np.zeros(3, np.float32)})[0] == []
    other = store_of(contents(ps.store), LoggedStore)
    ps.log.adopt(other)
    (fault,), _ = check(tmp_path, {"w": np.full(3, 2, np.float32)})
    assert "a snapshot that nobody had frozen" in fault


def test_a_change_that_is_not_in_the_log_is_found_at_the_next_cut(ps: Ps, tmp_path: Path) -> None:
    for _ in ShardStore.assign_checked(ps.store, SPEC.key, "add", np.ones(3, np.float32)):
        pass
    ps.log.cut(ps.store)
    replayed = replay(tmp_path / f"ps-0.{os.getpid()}.applies")
    assert "what was frozen after 0 updates is not what was applied" in replayed.faults[0]
    assert digest(replayed.store) != digest(ps.store)


def test_after_going_back_a_closure_is_applied_again(ps: Ps, tmp_path: Path) -> None:
    ps.log.cut(ps.store)
    frozen = store_of(contents(ps.store), LoggedStore)
    ps.add(2.0, closure=5)
    ps.log.adopt(frozen)
    ps.store = frozen
    ps.add(2.0, closure=5)
    assert check(tmp_path, {"w": ps.values()})[0] == []


class Backup(Ps):
    """As a backup: it begins with the snapshot that a ps has frozen, in a file of its own."""

    def __init__(self, directory: Path, of: Ps) -> None:
        of.log.cut(of.store)
        self.log, self.store = ApplyLog(str(directory)), store_of(contents(of.store), LoggedStore)
        self.log.adopt(self.store)


@pytest.fixture
def backed_up(ps: Ps, tmp_path: Path) -> Iterator[tuple[Ps, Backup]]:
    """A ps that has applied something before it got a backup, and the backup."""
    ps.log.serves()
    ps.add(1.0)
    backup = Backup(tmp_path, ps)
    for number in (2.0, 3.0):
        ps.add(number, closure=int(number))
        backup.add(number, closure=int(number))
    yield ps, backup
    backup.log.close()


def test_the_backup_that_came_to_serve_is_what_was_pulled(
    backed_up: tuple[Ps, Backup], tmp_path: Path
) -> None:
    ps, backup = backed_up
    assert check(tmp_path, {"w": ps.values()})[0] == []  # whichever wrote last
    backup.add(4.0, closure=4)  # that the lost one had not applied yet
    backup.log.serves(promoted=True)
    backup.add(5.0, closure=5)
    faults, text = check(tmp_path, {"w": backup.values()})
    assert faults == []
    assert "1 backups that came to serve" in text
    assert len(check(tmp_path, {"w": ps.values()})[0]) == 1


def test_a_backup_that_came_to_serve_and_lacks_an_update_is_found(
    backed_up: tuple[Ps, Backup], tmp_path: Path
) -> None:
    ps, backup = backed_up
    ps.add(4.0, closure=4)
    backup.log.serves(promoted=True)
    backup.add(5.0, closure=5)
    (fault,), _ = check(tmp_path, {"w": backup.values()})
    assert "lacks something that had been applied by whom it followed" in fault
