"""Bundles: small shards of one ps that are pushed together, and lie in common blocks.

A shard of a few KiB costs more to look up than to update. So those that one push has side by side,
of one dtype, are bundled by the first such push: their values lie in one common block, and those of
each slot of its optimizer in another. A push of all of them is then one call of the rule, and a
pull one view. Nothing else knows of it: each shard is read, assigned, saved and adopted by itself.

A shard is in one bundle at most, so bundles never keep more memory than their shards once had. A
push of some of a bundle's shards goes shard by shard; where that happens again and again and none
has all of them, the bundle gives way to one of what is pushed now.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from psync.numerics.common_blocks import CommonBlock, Window
from psync.numerics.memory import BLOCK_BYTES, BLOCK_ELEMENTS, BlockArray, BlockPool, private
from psync.store.rows import RowTable
from psync.store.shard import Shard
from psync.store.shards import Key, Optimizer

SMALL_SHARD_BYTES = 64 << 10
"""What is larger is not bundled: to update it takes longer than to look it up."""

PATIENCE = 8
"""Pushes in a row of some of a bundle's shards after which it gives way."""


def runs_of(sizes: Sequence[int]) -> list[slice]:
    """Return which of a set's shards could be bundled if nothing else speaks against it.

    Args:
        sizes: Bytes of each.

    Returns:
        All shards, in order: runs of small ones, and others alone.
    """
    runs: list[slice] = []
    nbytes = BLOCK_BYTES  # of the run that could go on
    for place, size in enumerate(sizes):
        small = 0 < size <= SMALL_SHARD_BYTES
        if small and nbytes + size <= BLOCK_BYTES:
            runs[-1] = slice(runs[-1].start, place + 1)
            nbytes += size
        else:
            runs.append(slice(place, place + 1))
            nbytes = size if small else BLOCK_BYTES
    return runs


class Bundle:
    """Shards that lie side by side.

    Args:
        shards: Idle ones of one dtype, each in one block, at most BLOCK_BYTES in all.
        pool: Where their memory comes from, and their blocks go.

    Attributes:
        keys: Of the shards.
        shards: The same.
        values: Of all shards.
        passed_over: Pushes of some of the shards since the last one of all.
    """

    def __init__(self, shards: Sequence[Shard], pool: BlockPool) -> None:
        self.keys = tuple(shard.spec.key for shard in shards)
        self.shards = shards
        self.values = _common([shard.values for shard in shards], pool.take, pool)
        self.passed_over = 0
        self._places = {key: place for place, key in enumerate(self.keys)}
        self._bounds = list(itertools.accumulate((s.values.size for s in shards), initial=0))
        self._slots: dict[int, list[CommonBlock]] = {}  # by optimizer

    @property
    def is_whole(self) -> bool:
        """Whether all of its shards still lie in it."""
        return not self.values.is_left

    def is_at(self, start: int, keys: Sequence[Key]) -> bool:
        """Return whether the next ones from ``start`` on are all of its shards, in its order."""
        return self.is_whole and keys[start : start + len(self.keys)] == self.keys

    def alike(self, start: int, keys: Sequence[Key]) -> slice:
        """Return which of its shards are, in its order, the next ones from ``start`` on."""
        if self.is_at(start, keys):
            return slice(0, len(self.keys))
        first = end = self._places[keys[start]]
        for key, own in zip(keys[start:], self.keys[first:], strict=False):
            if key != own:
                break
            end += 1
        return slice(first, end)

    def export(self, part: slice) -> memoryview:
        """Return the values of some of its shards, as ``BlockArray.export``."""
        return self.values.export(self._bounds[part.start], self._bounds[part.stop])

    def slots(
        self,
        optimizer_id: int,
        slots_of: Callable[[Shard, int], Sequence[BlockArray]],
        pool: BlockPool,
    ) -> list[CommonBlock]:
        """Return the common block of each of an optimizer's slots.

        Args:
            optimizer_id: Of the optimizer.
            slots_of: Returns the slots of a shard, in the rule's order.
            pool: Where blocks go that are replaced by common ones.
        """
        made = self._slots.get(optimizer_id)
        if made is None or any(slot.is_left for slot in made):
            each = zip(*(slots_of(shard, optimizer_id) for shard in self.shards), strict=True)
            made = [_common(arrays, private, pool) for arrays in each]
            self._slots[optimizer_id] = made
        return made

    def forget_slots(self, optimizer_id: int) -> None:
        """The shards have other slots of an optimizer now."""
        self._slots.pop(optimizer_id, None)

    def dissolve(self, pool: BlockPool) -> None:
        """Give each shard blocks of its own."""
        for shard in self.shards:
            for array in (shard.values, *shard.slots.values()):
                # Rows of a table have their own layout, which it has left for.
                if type(array) is BlockArray and isinstance(array.block(0), Window):
                    own = array.apart(0, pool)
                    own.array[:] = array.block(0).array
                    array.commit(0, own, pool)
        for common in (self.values, *itertools.chain.from_iterable(self._slots.values())):
            common.block.retire(pool)


def _common(
    arrays: Sequence[BlockArray], source: Callable[[int], np.ndarray], pool: BlockPool
) -> CommonBlock:
    return CommonBlock(arrays, source(sum(array.nbytes for array in arrays)), pool)


class BundleTable(RowTable):
    """A table of shards of which small ones are bundled. Single owner; never blocks.

    Args:
        task: Name of the ps, for messages: ``/job:ps/task:1``.
        pool: Where replaced blocks go and fresh ones come from.
    """

    def __init__(self, task: str, pool: BlockPool | None = None) -> None:
        super().__init__(task, pool)
        self._bundles: dict[Key, Bundle] = {}  # by each of its shards

    def release(self) -> tuple[list[Shard], dict[int, Optimizer]]:
        """As that of any table; what is bundled elsewhere is bundled anew."""
        self._bundles.clear()
        return super().release()

    def take_up_optimizer(self, optimizer_id: int, optimizer: Optimizer) -> None:
        """As that of any table; its slots, which shards get as well, are bundled anew."""
        for bundle in self._bundles.values():
            bundle.forget_slots(optimizer_id)
        super().take_up_optimizer(optimizer_id, optimizer)

    def read_together(self, keys: Sequence[Key]) -> list[memoryview]:
        """Return the bytes of shards as ``read`` does, in order, in as few views as can be.

        Raises:
            UnknownVariableError: If a shard is not here.
            BusyError: If an update of one of them is under way.
        """
        views: list[memoryview] = []
        at = 0
        while at < len(keys):
            bundle = self._bundles.get(keys[at])
            if bundle is None or not bundle.is_whole:
                views += self.read(keys[at])
                at += 1
                continue
            part = bundle.alike(at, keys)
            self._check_idle(bundle.shards[part])
            views.append(bundle.export(part))
            at += part.stop - part.start
        return views

    def check_idle(self, keys: Sequence[Key]) -> None:
        """Raise BusyError if an update of one of these shards is under way."""
        for key in keys:
            self._idle(key)

    def _bundled(self, keys: tuple[Key, ...]) -> Iterator[tuple[int, int, Bundle | None]]:
        """Yield (first, end, bundle) for all shards that are pushed, in order; bundle them.

        Without a bundle they are to be updated one by one. All must be idle.

        Raises:
            BusyError: If an update of one of them is under way.
        """
        at = 0
        while at < len(keys):
            bundle = self._bundles.get(keys[at])
            if bundle is not None and bundle.is_at(at, keys):
                self._check_idle(bundle.shards)
                end = at + len(bundle.keys)
            else:
                shards = self._run_from(at, keys)
                end = at + len(shards)
                bundle = self._bundle(shards) if len(shards) > 1 else None
            if bundle is not None:
                bundle.passed_over = 0
            yield at, end, bundle
            at = end

    def _run_from(self, start: int, keys: Sequence[Key]) -> list[Shard]:
        """Return the shards from ``start`` on that could be bundled; at least one."""
        run, seen = [self._idle(keys[start])], {keys[start]}
        dtype, nbytes = run[0].values.dtype, run[0].nbytes
        most = min(BLOCK_BYTES, BLOCK_ELEMENTS * dtype.itemsize)
        if not _can_be_bundled(run[0]):
            return run
        for key in keys[start + 1 :]:
            if key in seen:  # two updates of one shard are no common one
                break
            seen.add(key)
            shard = self._idle(key)
            nbytes += shard.nbytes
            if nbytes > most or shard.values.dtype != dtype or not _can_be_bundled(shard):
                break
            run.append(shard)
        return run

    def _bundle(self, shards: Sequence[Shard]) -> Bundle | None:
        """Bundle shards; None: some of them are bundled with others, for now."""
        others = {id(b): b for s in shards if (b := self._bundles.get(s.spec.key)) is not None}
        for other in others.values():
            other.passed_over += 1
        if any(b.is_whole and b.passed_over < PATIENCE for b in others.values()):
            return None
        for other in others.values():
            other.dissolve(self._pool)
            for key in other.keys:
                del self._bundles[key]
        made = Bundle(shards, self._pool)
        self._bundles.update(dict.fromkeys(made.keys, made))
        return made

    def _check_idle(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.busy:
                self._idle(shard.spec.key)  # says so


def _can_be_bundled(shard: Shard) -> bool:
    # Rows of a table have their own layout.
    return 0 < shard.nbytes <= SMALL_SHARD_BYTES and type(shard.values) is BlockArray
