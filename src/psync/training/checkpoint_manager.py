"""CheckpointManager: numbered checkpoints of one program, pruned, and the source of rollbacks.

A ps that is brought back reads files by their paths, while the program may go on saving. It reads
the newest, which is never removed; and what was handed out for recovery during a ``save`` is not
removed by that ``save``. A checkpoint that vanishes nevertheless costs another try, with the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from psync.api.cluster_coordinator import coordinator_of
from psync.api.reads import scope_of
from psync.api.scopes import running_scopes
from psync.checkpoints.files import (
    SavedSnapshots,
    checkpoints_in,
    mark_last,
    remove,
    remove_leftovers,
    stored_snapshots,
    unmark_last,
    why_not,
)
from psync.coordinator import Coordinator
from psync.errors import CheckpointError
from psync.specs import checked_integer, checked_kind
from psync.status.html_tables import table
from psync.training.checkpoint import PREFIX, Checkpoint, coordinator_for, in_thread, own_directory

logger = logging.getLogger(__name__)


class CheckpointManager:
    """The numbered checkpoints of one program in one directory, with old ones removed.

    When a ps is lost, the program rolls back to the newest checkpoint; see ``ClusterCoordinator``.
    That is the last one it saved. Before the first save, it is the one that
    ``restore_or_initialize`` found, if the program and the number of ps tasks and shards are the
    same. With several managers, the one that saved or restored last is used.

    While a coordinator is running, this process owns the directory, from the time the manager is
    created, or first used, under the coordinator. A manager of another program then raises an error
    that names this process. Reading is always possible: ``psync.latest_checkpoint(directory)``,
    ``Checkpoint.restore``.

    Args:
        checkpoint: Objects to save.
        directory: Directory of the checkpoints, created if missing. One program at a time may use
            it.
        max_to_keep: Number of newest checkpoints to keep; None: no limit.
        keep_every_n_steps: Checkpoints whose number is a multiple of this are never removed.

    Raises:
        ConfigurationError: An argument is out of range, or another program uses the directory.

    Source: ``tf.train.CheckpointManager``.
    """

    __psync_capture_error__ = "checkpoints are saved by the program, not by steps"
    __psync_capture_hint__ = "call it in the program, outside of steps"

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_every_n_steps: int | None = None,
    ) -> None:
        hint = "CheckpointManager(psync.Checkpoint(model=model), directory)"
        checked_kind("checkpoint manager: expected a Checkpoint", checkpoint, Checkpoint, hint=hint)
        self._checkpoint = checkpoint
        self.directory = Path(directory)
        self._max_to_keep = _positive("max_to_keep", max_to_keep)
        self._keep_every = _positive("keep_every_n_steps", keep_every_n_steps)
        self._snapshots = SavedSnapshots("")  # of the checkpoints that this program has saved
        self._under_way = 0  # saves
        for coordinator in _coordinators():
            coordinator.owned.add(own_directory(self.directory))

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._checkpoint!r} in {str(self.directory)!r}>"

    async def _own(self) -> None:
        """Let no other program save there while the coordinator runs."""
        for coordinator in _coordinators():
            coordinator.owned.add(await in_thread(own_directory, self.directory))

    def _repr_html_(self) -> str:
        rows = [(number, str(path)) for number, path in checkpoints_in(self.directory, PREFIX)]
        return table(f"Checkpoints in {self.directory}", ("number", "path"), rows)

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first.

        Raises:
            CheckpointError: The directory cannot be read.
        """
        return [path for _, path in checkpoints_in(self.directory, PREFIX)]

    @property
    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None; raises the errors of ``checkpoints``."""
        return latest_checkpoint(self.directory)

    async def save(
        self,
        checkpoint_number: int | None = None,
        *,
        last: bool = False,
        verbose: bool | str = False,
    ) -> Path:
        """Save, then remove checkpoints that need not be kept; see ``Checkpoint.save``.

        Args:
            checkpoint_number: Number from 0, such as the global step. Default: the highest plus
                one.
            last: Whether this is the last checkpoint; see ``finish``.
            verbose: See ``Checkpoint.save``.

        Returns:
            The path of the new checkpoint.

        Raises:
            CheckpointError: See ``Checkpoint.save``. Also raised if an old checkpoint cannot be
                removed or the last one cannot be marked; the new one is complete in these cases.
            ConfigurationError, UsageError, ParameterServerLost: See ``Checkpoint.save``.

        Cancellation: See ``Checkpoint.save``; old checkpoints may remain.
        """
        await self._own()
        asked = self._snapshots.asked
        self._under_way += 1
        try:
            path, coordinator, snapshots = await self._checkpoint._saved(
                self.directory, checkpoint_number, verbose
            )
        finally:
            self._under_way -= 1
        if coordinator is not None:
            self._offer(path, coordinator)
            coordinator.recovery.saved(snapshots)
        # Not after an await: a recovery that asks from now on is given ``path``, which stays.
        in_use = self._snapshots.handed if self._snapshots.asked != asked else None
        if self._max_to_keep is not None:
            found = await asyncio.to_thread(checkpoints_in, self.directory, PREFIX)
            for old in superseded(found, self._max_to_keep, self._keep_every, (path, in_use)):
                await asyncio.to_thread(remove, old)
        if not self._under_way:
            number = int(path.name.rpartition("-")[2])
            await asyncio.to_thread(remove_leftovers, self.directory, PREFIX, number)
        if last:
            await self.finish()
        return path

    async def finish(self) -> Path | None:
        """Mark the newest checkpoint as the last, after which a ``SidecarEvaluator`` stops.

        ``restore_or_initialize`` removes the mark, because the program continues.

        Returns:
            The path of the newest checkpoint, or None if there is none and nothing was marked.

        Raises:
            CheckpointError: The disk fails or is full.

        Cancellation: The mark may have been written.
        """
        newest = await asyncio.to_thread(latest_checkpoint, self.directory)
        if newest is not None:
            await asyncio.to_thread(mark_last, newest)
        return newest

    async def restore_or_initialize(self, *, verbose: bool | str = False) -> Path | None:
        """Restore the newest checkpoint; if there is none, all objects keep their declared values.

        Args:
            verbose: See ``Checkpoint.save``.

        Returns:
            Its path, or None.

        Raises:
            CheckpointError, UsageError, ParameterServerLost: See ``Checkpoint.restore``.
            ConfigurationError: Another program uses the directory.

        Cancellation: See ``Checkpoint.restore``.
        """
        await self._own()
        latest = await asyncio.to_thread(latest_checkpoint, self.directory)
        if latest is not None:

            async def restore() -> None:
                await self._checkpoint.restore(latest, verbose=verbose)
                await asyncio.to_thread(unmark_last, latest)
                await self._offer_restored(latest)

            await self._checkpoint._as_first_state(restore)
        return latest

    def _offer(self, path: Path, coordinator: Coordinator) -> None:
        """Let the coordinator go back to a checkpoint from now on."""
        if self._snapshots.origin != coordinator.runtime.origin:
            self._snapshots = SavedSnapshots(coordinator.runtime.origin)
        self._snapshots.add(path)
        coordinator.recovery.source = self._snapshots

    async def _offer_restored(self, path: Path) -> None:
        """As ``_offer``, if the snapshots of an earlier program fit this one."""
        contents = self._checkpoint._contents()
        coordinator = await coordinator_for(contents)
        if coordinator is None or not contents.handles:
            return
        scope = scope_of(next(iter(contents.handles.values())))
        specs = [variable.spec for variable in scope._variables] if scope is not None else []
        optimizers = {each.number: each._config for each in contents.optimizers.values()}

        def judge() -> str | None:
            try:
                return why_not(
                    stored_snapshots(path), len(coordinator.links.ps.links),
                    [shard for spec in specs for shard in spec.shards], optimizers,
                )  # fmt: skip
            except CheckpointError as exc:
                return exc.message

        reason = await asyncio.to_thread(judge)
        if reason is None:
            self._offer(path, coordinator)
        else:
            logger.info("before the first save a lost ps cannot be recovered: %s", reason)


def superseded(
    found: Sequence[tuple[int, Path]],
    max_to_keep: int,
    keep_every: int | None,
    in_use: Collection[Path | None],
) -> list[Path]:
    """Return which checkpoints are to be removed.

    Args:
        found: Number and path of all, the oldest first.
        max_to_keep: How many of the newest stay, at least 1.
        keep_every: Those whose number is a multiple of this stay; None: no others.
        in_use: These stay.
    """
    return [
        path
        for number, path in found[:-max_to_keep]
        if path not in in_use and (keep_every is None or number % keep_every)
    ]


def _positive(name: str, value: object) -> int | None:
    expected = f"checkpoint manager: expected {name} above 0, or None"
    return None if value is None else checked_integer(expected, value, 1)


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a directory, or None.

    A missing directory counts as empty.

    Raises:
        CheckpointError: The directory cannot be read.

    Source: ``tf.train.latest_checkpoint``.
    """
    found = checkpoints_in(Path(directory), PREFIX)
    return found[-1][1] if found else None


def _coordinators() -> list[Coordinator]:
    """Return the coordinators that run in this process."""
    found = [coordinator_of(scope._origin) for scope in running_scopes()]
    return [coordinator for coordinator in found if coordinator is not None]
