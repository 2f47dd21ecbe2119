"""Checkpoints to which a cluster in memory goes back, for tests of what happens then."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psync


async def keep_snapshots(coordinator: psync.ClusterCoordinator, folder: Path) -> None:
    """Save all variables of a program; it goes back to that when a ps is lost."""
    model = list(coordinator.strategy.variables)
    saved = psync.Checkpoint(model=model, nothing_else=psync.SavedState())
    await psync.CheckpointManager(saved, tempfile.mkdtemp(dir=folder)).save()
