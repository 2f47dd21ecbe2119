"""That TensorBoard itself reads what ``callbacks.TensorBoard`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from psync import callbacks

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

pytestmark = pytest.mark.filterwarnings("default")  # those of its own dependencies


def test_it_reads_epochs_and_batches(tmp_path: Path) -> None:
    board = callbacks.TensorBoard(tmp_path, "batch")
    board.on_train_begin()
    for epoch, loss in enumerate((0.5, 0.25)):
        board.on_train_batch_end(0, {"loss": loss + 0.125})
        board.on_train_batch_end(1, {"loss": loss - 0.125})
        board.on_epoch_end(epoch, {"loss": loss, "val_loss": 2 * loss})
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()  # while training goes on
    assert set(events.Tags()["scalars"]) == {
        "batch_loss", "epoch_loss/train", "epoch_loss/validation",
    }  # fmt: skip
    batches = [(each.step, each.value) for each in events.Scalars("batch_loss")]
    assert batches == [(0, 0.625), (1, 0.375), (2, 0.375), (3, 0.125)]
    epochs = [(each.step, each.value) for each in events.Scalars("epoch_loss/validation")]
    assert epochs == [(0, 1.0), (1, 0.5)]
    board.on_train_end({})
