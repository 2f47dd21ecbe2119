"""What of a cut gets into which file: by the ps tasks, or through the program."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

import psync
from local_training import in_step, training
from psync.checkpoints.files import Reader, stored_snapshots
from psync.cli.checkpoint_reports import differences, inspection
from psync.errors import CheckpointCorrupt, CheckpointError
from psync.ps import frozen_snapshots
from psync.store.snapshot_state import SnapshotState
from psync.training import saved_arrays

TABLE = np.arange(14, dtype=np.float32).reshape(7, 2)
ONES = np.ones((7, 2), np.float32)
COUNT = psync.VariableSynchronization.ON_READ, psync.VariableAggregation.SUM
FILES = {
    f"ps-{ps:05d}-of-00002.{suffix}" for ps in range(2) for suffix in ("safetensors", "json")
}  # fmt: skip


class Program:
    """A strategy's variables of several kinds, two of which are saved, and how they are trained."""

    def __init__(self, strategy: psync.ParameterServerStrategy) -> None:
        with strategy.scope():
            self.w = psync.Variable(TABLE, name="w")
            self.half = psync.Variable(np.full(3, 1.5, ml_dtypes.bfloat16), name="half")
            self.count = psync.Variable(
                np.int64(0), name="count", synchronization=COUNT[0], aggregation=COUNT[1]
            )
            self.other = psync.Variable(np.float64(2), name="other")
        self.adam = psync.optimizers.Adam(0.1)
        self.momentum = psync.optimizers.SGD(0.5, momentum=0.5)
        self.checkpoint = psync.Checkpoint(
            w=self.w, half=self.half, count=self.count, adam=self.adam
        )

    async def train(self, coordinator: psync.ClusterCoordinator, steps: int = 1) -> None:
        w, count, other = self.w, self.count, self.other
        adam, momentum = self.adam, self.momentum

        async def step() -> None:
            await adam.apply_gradients([(ONES, w)])
            await momentum.apply_gradients([(np.float64(1), other)])
            await count.assign_add(2)

        for _ in range(steps):
            await in_step(coordinator, step)


def streamed(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setenv("PSYNC_CHECKPOINT_STREAM", "1" if yes else "0")


@pytest.mark.parametrize("stream", [False, True])
async def test_each_ps_has_its_file_and_the_rest_is_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    streamed(monkeypatch, stream)
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        program = Program(strategy)
        await program.train(coordinator)
        path = await program.checkpoint.save(tmp_path)
        written = [ps["snapshot"]["written_bytes"] for ps in await coordinator.ps_statistics()]
    assert all(written) is not stream
    assert {found.name for found in path.iterdir()} == {
        *FILES, "data-00000.safetensors", "manifest.json", "COMMIT",
    }  # fmt: skip
    reader = Reader(path)
    assert list(reader.manifest.tensors) == ["w", "half", "count", *(
        f"adam/{slot}/{name}" for name in ("w", "half") for slot in "mv"), "adam/m/other",
        "adam/v/other"]  # fmt: skip
    np.testing.assert_allclose(
        reader.read(reader.manifest.tensors["w"], 0, 7), TABLE - 0.1, atol=1e-5
    )
    with safetensors.safe_open(path / "data-00000.safetensors", "numpy") as file:
        computed = sorted(file.keys())
    assert computed[-1] == "count@0"  # beside slots of variables that were never pushed
    with safetensors.safe_open(path / "ps-00000-of-00002.safetensors", "numpy") as file:
        names = sorted(file.keys())
        assert file.get_tensor("w@0").shape == (4, 2)
    assert "~/count/value@0" in names
    assert not any(name.startswith("~") for name in reader.manifest.tensors)


async def test_what_goes_through_the_program_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(2, 1, psync.FixedShardsPartitioner(3)) as (strategy, coordinator):
        program = Program(strategy)
        await program.train(coordinator)
        paths = []
        for stream in (False, True):
            streamed(monkeypatch, stream)
            paths.append(await program.checkpoint.save(tmp_path))
    assert differences(*paths) == []
    for name in FILES:
        if name.endswith(".safetensors"):
            assert (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes()
    one, other = map(stored_snapshots, paths)
    assert [snapshot.places for snapshot in one] == [snapshot.places for snapshot in other]


async def test_a_ps_that_does_not_see_the_directory_sends_its_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def only_the_second(path: Path, text: str) -> bool:
        seen.append(path)
        return len(seen) == 2

    monkeypatch.setattr(frozen_snapshots, "has_text", only_the_second)
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        program = Program(strategy)
        await program.train(coordinator)
        path = await program.checkpoint.save(tmp_path)
        written = [ps["snapshot"]["written_bytes"] > 0 for ps in await coordinator.ps_statistics()]
    assert sorted(written) == [False, True]
    assert FILES < {found.name for found in path.iterdir()}
    assert inspection(path)


async def test_ps_tasks_find_out_at_each_save_whether_they_see_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be mounted, or a ps may start on another machine, in between."""
    written, paths = [], []
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        program = Program(strategy)
        await program.train(coordinator)
        for sees in (True, False, True):
            with monkeypatch.context() as patched:
                if not sees:
                    patched.setattr(frozen_snapshots, "has_text", lambda path, text: False)
                paths.append(await program.checkpoint.save(tmp_path))
            statistics = await coordinator.ps_statistics()
            written.append(sum(ps["snapshot"]["written_bytes"] for ps in statistics))
    assert written[0] > 0
    assert written == [written[0], written[0], 2 * written[0]]
    assert all(inspection(path) for path in paths)
    assert differences(paths[0], paths[1]) == []


async def test_snapshots_hold_what_was_not_asked_for_and_inspection_finds_damage_in_it(
    tmp_path: Path,
) -> None:
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
        program = Program(strategy)
        await program.train(coordinator)
        path = await psync.Checkpoint(half=program.half).save(tmp_path)
    states = [
        SnapshotState.from_bytes(snapshot.state, "here") for snapshot in stored_snapshots(path)
    ]
    held = {(spec.variable, spec.index) for state in states for spec in state.shards}
    assert held == {("w", 0), ("w", 1), ("half", 0), ("half", 1), ("count", 0), ("other", 0)}
    assert [state.iterations for state in states] == [1, 1]
    lines = inspection(path)
    assert lines[0].startswith("half  bfloat16[3]")
    assert lines[1].startswith("ps-00000-of-00002.safetensors  all that a ps held")
    assert not any("~" in line for line in lines)
    data = path / "ps-00000-of-00002.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"ps-00000-of-00002\.safetensors.*checksum"):
        inspection(path)


async def test_slots_before_the_first_push_are_what_they_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_arrays, "BLOCK_ELEMENTS", 4)  # so that there are several parts
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(TABLE, name="w")
        adagrad = psync.optimizers.Adagrad(0.1, initial_accumulator_value=0.25)
        checkpoint = psync.Checkpoint(w=w, adagrad=adagrad)
        path = await checkpoint.save(tmp_path)
        values = await checkpoint.read(path, slots=True)
        assert values["adagrad"]["step"] == 0
        (slot,) = (name for name in values["adagrad"] if name != "step")
        np.testing.assert_array_equal(
            values["adagrad"][slot]["w"], np.full((7, 2), 0.25, np.float32)
        )
        await checkpoint.restore(path)


async def test_large_computed_parts_are_spread_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_arrays, "FILE_BYTES", 64)
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(TABLE, name="w")
        checkpoint = psync.Checkpoint(w=w, adam=psync.optimizers.Adam(0.1))
        path = await checkpoint.save(tmp_path)
        assert len(list(path.glob("data-*.safetensors"))) == 2
        await checkpoint.restore(path)
        np.testing.assert_array_equal(await w.read(), TABLE)


async def test_a_mean_of_integers_is_rounded(tmp_path: Path) -> None:
    async with training(1, 2) as (strategy, _):
        with strategy.scope():
            mean = psync.Variable(
                np.int32(0), name="mean", synchronization=COUNT[0],
                aggregation=psync.VariableAggregation.MEAN,
            )  # fmt: skip
        await mean.assign(7)
        checkpoint = psync.Checkpoint(mean=mean)
        path = await checkpoint.save(tmp_path)
        assert (await checkpoint.read(path))["mean"].dtype == np.int32
        await mean.assign(0)
        await checkpoint.restore(path)
        assert await mean.read() == 7


async def test_when_one_file_cannot_be_written_the_others_are_given_up(tmp_path: Path) -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise CheckpointError("full")

    with pytest.raises(CheckpointError, match="full"):
        await saved_arrays._together([waits(), fails(), waits()])
    assert ended == ["waits", "waits"]


async def test_an_older_checkpoint_is_read(tmp_path: Path) -> None:
    """One of the first version, which the program wrote alone."""
    path = Path(__file__).parent / "golden" / "checkpoints" / "before-images"
    assert json.loads((path / "manifest.json").read_bytes()).get("images") is None
    async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros((7, 2), np.float32), name="w")
            half = psync.Variable(np.zeros(3, ml_dtypes.bfloat16), name="half")
            loss = psync.metrics.Mean("loss")
        adam, progress = psync.optimizers.Adam(0.1), psync.SavedState(epoch=0)
        await adam.set_learning_rate(0.5)  # of which it says nothing
        model: dict[str, Any] = {"w": w, "half": half}
        checkpoint = psync.Checkpoint(model=model, adam=adam, loss=loss, progress=progress)
        restored = await checkpoint.restore(path)
        assert (restored.missing, restored.extra) == ((), ())
        np.testing.assert_allclose(await w.read(), TABLE - 0.2, atol=1e-5)
        assert (await half.read()).tolist() == [1.5] * 3
        slot = adam.get_slot(w, "m")
        assert slot is not None
        np.testing.assert_allclose(await slot.read(), 0.19, atol=1e-6)
        assert (await adam.iterations.read(), progress.epoch) == (2, 4)
        assert await loss.result() == 2.5
        assert adam.learning_rate == 0.5


async def test_a_checkpoint_with_snapshots_of_an_earlier_version_is_read() -> None:
    """Two steps of Adam, saved before its files were called snapshots anywhere but on disk."""
    path = Path(__file__).parent / "golden" / "checkpoints" / "with-images"
    stored = stored_snapshots(path)
    states = [SnapshotState.from_bytes(each.state, str(each.file)) for each in stored]
    assert [spec.shape for state in states for spec in state.shards] == [(4, 2), (3, 2)]
    assert [len(state.ledger.senders) > 0 for state in states] == [True, True]
    async with training(3, 1, psync.FixedShardsPartitioner(3)) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros((7, 2), np.float32), name="w")
        adam = psync.optimizers.Adam(0.1)
        restored = await psync.Checkpoint(w=w, adam=adam).restore(path)
        assert (restored.missing, restored.extra) == ((), ())
        started = np.arange(14, dtype=np.float32).reshape(7, 2)
        np.testing.assert_allclose(await w.read(), started - 0.2, atol=1e-5)
        assert await adam.iterations.read() == 2


# Threads.


async def test_who_is_cancelled_again_and_again_waits_until_a_thread_has_ended() -> None:
    """One that fails meanwhile is heard by nobody; its files would be closed under it else."""
    heard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: heard.append(said["message"]))
    may_end, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait()
        has_ended.set()
        raise CheckpointError("the disk is full")

    waits = asyncio.create_task(saved_arrays.in_thread(work))
    for _ in range(3):
        await asyncio.sleep(0)
        waits.cancel()
    await asyncio.sleep(0)
    is_over = waits.done()
    may_end.set()
    assert not is_over
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert has_ended.is_set()
    del waits
    gc.collect()
    assert not heard


async def test_what_a_thread_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await saved_arrays.in_thread(lambda: 1 // 0)
    assert await saved_arrays.in_thread(len, "ab") == 2
