"""The apply log: everything that a ps has applied, in order, for tests.

``PSYNC_TESTING_APPLY_LOG=DIRECTORY`` lets each ps, and each backup, append to a file of its own
there, ``ps-0.PID.applies`` (``ps-0.PID.1.applies`` for the next one in that process), every
call that changes its store, with all operands; before the answer leaves. So whatever was answered
is in the log, and one process that makes the same calls on an empty store gets the same bits. A
record is one write to a file that is appended to: the kernel has it, whatever becomes of the task.

    record               says
    a method's name      the store did this, with these arguments
    begin                the store is new, and empty: a new coordinator is served
    snapshot                the store is another one: this is all that is in it
    adopted              a new coordinator has let it keep this from before; all that is in it
    cut                  this was all that was in it when it was frozen (a digest)
    applied              whose update the calls before it were: client, sequence, closure, ordinal
    serves               the store is served from now on: when, and whether as a backup's until now

Without the variable a ps has a plain store.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import msgpack

from psync.errors import ConfigurationError
from psync.numerics.sums import MeanGradient
from psync.ps.updates import PsUpdate, PsUpdates
from psync.specs import ShardSpec, dtype_name
from psync.store.ledger import Ticket
from psync.store.rows import RowMean, RowValues
from psync.store.shards import Optimizer
from psync.store.snapshot import Frozen
from psync.store.store import Means, Plan, ShardStore
from psync.store.work import Shard
from psync.sync.ps_services import PsServices
from psync.wire.tensors import array_from_bytes, to_bytes_view

VARIABLE = "PSYNC_TESTING_APPLY_LOG"

LOGGED = (
    "create", "copy", "define_optimizer", "set_learning_rate", "restore_count", "set_count",
    "hear_count", "begin_push", "begin_step", "apply_checked", "apply_at_once",
    "assign_checked", "average", "scatter", "apply_rows", "apply_row_mean",
    "load_slot",
)  # fmt: skip
"""Every method of a store that changes it."""

_LENGTH = struct.Struct("<I")


class ApplyLog:
    """The log of one ps, in one process.

    Args:
        directory: "": nothing is written.
        index: Of the ps.
    """

    def __init__(self, directory: str = "", index: int = 0) -> None:
        self.store: ShardStore | None = None  # the one that is served
        self._fd = -1
        if directory:
            self._fd = _new_file(directory, f"ps-{index}.{os.getpid()}")

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self._fd >= 0

    def write(self, name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Append a record."""
        record = msgpack.encode([name, _plain(arguments), _plain(dict(options))])
        os.write(self._fd, _LENGTH.pack(len(record)) + record)

    def adopt(self, store: ShardStore) -> None:
        """Write down what happens to a store from now on, which is empty or that of a snapshot."""
        if not self.is_on:
            return
        assert isinstance(store, LoggedStore), "what is built where there is a directory"
        store.log, self.store = self, store
        if store.keys():
            self.write("snapshot", (contents(store), digest(store)), {})
        else:
            self.write("begin", (), {})

    def applied(self, update: PsUpdate) -> None:
        """Write down whose update the store has just been changed by."""
        if self.is_on and update.store is self.store:
            message, (task, incarnation) = update.message, update.client
            identity = (task, incarnation, message.sequence, message.closure, message.ordinal)
            kind = "Push" if update.known.is_push else "Assign"
            self.write("applied", (*identity, kind, update.known.keys), {})

    def serves(self, *, promoted: bool = False) -> None:
        """Write down that the store is served from now on."""
        if self.is_on:
            self.write("serves", (time.time_ns(), promoted), {})

    def cut(self, store: ShardStore) -> None:
        """Write down that a store was frozen."""
        if isinstance(store, LoggedStore):
            store.settle()
            store.write("cut", (digest(store),), {})

    def close(self) -> None:
        """Write nothing more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _new_file(directory: str, name: str) -> int:
    """Open a file that nobody else writes, and return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    number = 0
    while True:
        path = Path(directory, f"{name}.{number}.applies" if number else f"{name}.applies")
        try:
            return os.open(path, flags, 0o600)
        except FileExistsError:
            number += 1
        except OSError as exc:
            raise ConfigurationError(f"{VARIABLE}: {path} cannot be written: {exc}") from exc


class LoggedStore(ShardStore):
    """A store whose changes are written down, as long as it is the one that is served."""

    log: ApplyLog | None = None  # None: it is not served yet
    depth = 0  # calls of such methods by one another: only the outermost is written down
    adopts = False  # whether something was taken up that is not written down yet

    def write(self, name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Append a record, unless this store is not served yet, or any more."""
        if self.log is not None and self.log.store is self and self.log.is_on:
            self.log.write(name, arguments, options)

    def take_up(self, shard: Shard) -> None:
        """Take a shard that another table has released, as it is; its slots follow."""
        super().take_up(shard)
        self.adopts = True

    def take_up_optimizer(self, optimizer_id: int, optimizer: Optimizer) -> None:
        """Take an optimizer that another table has released, as it is, under a number."""
        super().take_up_optimizer(optimizer_id, optimizer)
        self.adopts = True

    def settle(self) -> None:
        """Write down what was taken up, before anything else happens to it."""
        if self.adopts:
            self.adopts = False
            self.write("adopted", (contents(self), digest(self)), {})


class LoggedUpdates(PsUpdates):
    """Updates of a store whose changes are written down: whose they are."""

    def _applied(self, update: PsUpdate, ticket: Ticket) -> None:
        super()._applied(update, ticket)
        if isinstance(self.store, LoggedStore) and self.store.log is not None:
            self.store.log.applied(update)


class LoggedServices(PsServices):
    """Services of such a store: when it is frozen."""

    def freeze(self) -> Frozen:
        """Hold what is served."""
        if isinstance(self.store, LoggedStore) and self.store.log is not None:
            self.store.log.cut(self.store)
        return super().freeze()


def _logging(name: str) -> Any:
    plain = getattr(ShardStore, name)

    @functools.wraps(plain)
    def method(self: LoggedStore, *arguments: Any, **options: Any) -> Any:
        self.settle()
        self.depth += 1
        try:
            result = plain(self, *arguments, **options)
        finally:
            self.depth -= 1
        if not self.depth:  # it was not refused
            self.write(name, arguments, options)
        return result

    return method


for _name in LOGGED:
    setattr(LoggedStore, _name, _logging(_name))


def read_log(path: Path | str) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield (name, arguments, options) of each record; a last one that is cut off is none."""
    data = Path(path).read_bytes()
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        name, arguments, options = msgpack.decode(data[at : at + length])
        at += length
        yield name, _made(arguments), _made(options)


def contents(store: ShardStore) -> dict[str, Any]:
    """Return all that is in a store, as plain data."""
    return {
        "shards": [_contents_of(shard) for shard in store.shards().values()],
        "optimizers": [
            _state_of(number, optimizer) for number, optimizer in store.optimizers.items()
        ],
    }


def _state_of(number: int, optimizer: Optimizer) -> list[Any]:
    rate = optimizer.rule.learning_rate.to_config()
    return [number, optimizer.config, rate, list(optimizer.count.state)]


def _contents_of(shard: Shard) -> list[Any]:
    return [
        shard.spec,
        b"".join(shard.values.export()),
        [[*at, b"".join(slot.export())] for at, slot in sorted(shard.slots.items())],
        shard.version,
        dict(shard.pushes),
    ]


def digest(store: ShardStore) -> int:
    """Return a checksum of all values and slots of a store.

    Slots that have no value yet count like those that are zero: when they are made shows nowhere.
    """
    found = 0
    for key, shard in sorted(store.shards().items()):
        found = zlib.crc32(repr((key, str(shard.spec))).encode(), found)
        for view in shard.values.export():
            found = zlib.crc32(view, found)
        for at, slot in sorted(shard.slots.items()):
            whole = b"".join(slot.export())
            if whole.strip(b"\0"):
                found = zlib.crc32(whole, zlib.crc32(repr(at).encode(), found))
    return found


def _plain(value: Any) -> Any:
    """Return a value as msgpack takes it."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        return {"array": [dtype_name(array.dtype), list(np.shape(value)), to_bytes_view(array)]}
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, RowValues | RowMean):
        return {type(value).__name__: _plain(tuple(value))}
    if isinstance(value, MeanGradient):
        return {"mean": _plain((value.gradients, value.weights, value.reduction, value.scale))}
    if isinstance(value, Means):
        return {"means": _plain((value.pushes, value.weights, value.reduction))}
    if isinstance(value, Plan):
        return {"plan": _plain((value.keys,))}
    if isinstance(value, ShardSpec):
        return {"spec": _plain(dataclasses.astuple(value))}
    if isinstance(value, Mapping):
        return {"map": [[_plain(key), _plain(of)] for key, of in value.items()]}
    return [_plain(each) for each in value]


_KINDS: dict[str, Any] = {
    "array": lambda dtype, shape, data: array_from_bytes(data, shape, dtype),
    "RowValues": RowValues,
    "RowMean": RowMean,
    "mean": lambda *given: ShardStore("").mean_of(*given),
    "means": Means,
    "plan": Plan,
    "spec": ShardSpec,
    "map": lambda *pairs: dict(pairs),
}


def _made(value: Any) -> Any:
    """Return what ``_plain`` was given, sequences as tuples."""
    if isinstance(value, list):
        return tuple(map(_made, value))
    if not isinstance(value, dict):
        return value
    ((kind, of),) = value.items()
    return _KINDS[kind](*_made(of))
