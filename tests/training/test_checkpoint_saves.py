"""Saving: one instant of all ps tasks, who writes which file, and what remains of a failure."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

import psync
from inside import peers_of
from local_training import in_step, training
from memory_cluster import session_cluster
from psync.checkpoints.files import Reader, stored_snapshots
from psync.cli.checkpoint_reports import differences, inspection
from psync.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, UsageError
from psync.launch import cluster
from psync.net.platform import Platform
from psync.ps import snapshots as ps_snapshots
from psync.testing import MemoryNetwork
from psync.testing.sabotage import SabotagedParts, failpoints_of
from psync.training.checkpoint import TRIES

pytestmark = pytest.mark.virtual_time

SLOW = {"latency": (0.0, 0.003), "chunk": (1 << 12, 1 << 16)}


@pytest.fixture(autouse=True)
def with_failpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks of a cluster here have the same."""
    platform = functools.partial(Platform, parts=SabotagedParts())
    monkeypatch.setattr(cluster, "Platform", platform)


@contextlib.asynccontextmanager
async def slow_training(num_ps: int = 3, num_workers: int = 3) -> Any:
    """A cluster on whose network messages overtake each other."""
    network = MemoryNetwork(seed=5, **SLOW)
    async with psync.LocalCluster(num_ps, num_workers, processes=False, network=network) as cluster:
        strategy = psync.ParameterServerStrategy(
            cluster.resolver, psync.FixedShardsPartitioner(num_ps)
        )
        async with psync.ClusterCoordinator(strategy) as coordinator:
            yield strategy, coordinator


def fails() -> None:
    raise OSError(28, "No space left on device")


async def saved_while_training(tmp_path: Path, saves: int) -> list[dict[str, Any]]:
    """The values of checkpoints that were saved while all workers pushed."""
    async with slow_training() as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros((6, 50), np.float32), name="w")
            b = psync.Variable(np.float32(0), name="b")
            pushes = psync.Variable(
                np.int64(0), name="pushes", aggregation=psync.VariableAggregation.SUM,
                synchronization=psync.VariableSynchronization.ON_READ,
            )  # fmt: skip
        momentum = psync.optimizers.SGD(1.0, momentum=1.0)
        checkpoint = psync.Checkpoint(w=w, b=b, pushes=pushes, momentum=momentum)

        async def step() -> None:
            ones = np.full((6, 50), -1, np.float32)
            await momentum.apply_gradients([(ones, w), (np.float32(-1), b)])
            await pushes.assign_add(1)

        paths = []
        for _ in range(saves):
            values = [coordinator.schedule(step) for _ in range(30)]
            await values[9]
            paths.append(await checkpoint.save(tmp_path))
        await coordinator.join()
        assert await b.read() == 30 * saves * (30 * saves + 1) / 2
        return [await checkpoint.read(path, slots=True) for path in paths]


@pytest.mark.promise("checkpoints.one-instant")
async def test_a_push_is_in_it_wholly_or_not_at_all(tmp_path: Path) -> None:
    for values in await saved_while_training(tmp_path, 4):
        slots = values["momentum"]
        count = slots["momentum"]["b"]
        assert 1 <= count <= slots["step"]  # pushes may overtake each other on the way
        assert (slots["momentum"]["w"] == count).all()
        assert values["b"] == count * (count + 1) / 2
        assert (values["w"] == values["b"]).all()
        assert count - 3 <= values["pushes"] <= count  # each worker counts after it has pushed


async def test_the_snapshot_and_the_tensors_are_of_one_instant(tmp_path: Path) -> None:
    await saved_while_training(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    reader = Reader(path)
    steps = reader.manifest.states["momentum/step"]
    states = [snapshot.state for snapshot in stored_snapshots(path)]
    assert max(state.iterations for state in states) == steps
    assert {spec.ps for state in states for spec in state.shards} == {0, 1, 2}


async def test_objects_are_asked_at_that_instant_and_what_comes_later_does_not_show(
    tmp_path: Path,
) -> None:
    class Epochs:
        def __init__(self) -> None:
            self.done = [1]

        def checkpoint_state(self) -> Any:
            asyncio.get_running_loop().call_soon(self.done.append, 2)
            return {"done": self.done}

        def restore_checkpoint_state(self, state: Any) -> None:
            self.done = state["done"]

    epochs = Epochs()
    async with training():
        path = await psync.Checkpoint(epochs=epochs).save(tmp_path)
        assert epochs.done == [1, 2]
        await psync.Checkpoint(epochs=epochs).restore(path)
        assert epochs.done == [1]


async def test_what_an_object_knows_to_be_done_is_in_it(tmp_path: Path) -> None:
    """The program adds, and counts what was answered: never more than the checkpoint has."""
    async with slow_training() as (strategy, _):
        with strategy.scope():
            total = psync.Variable(np.int64(0), name="total")
        answered = psync.SavedState(count=0)
        checkpoint = psync.Checkpoint(total=total, answered=answered)

        async def add() -> None:
            while True:
                await total.assign_add(1)
                answered.count += 1

        adding = [asyncio.create_task(add()) for _ in range(20)]
        paths = [await checkpoint.save(tmp_path) for _ in range(8)]
        for task in adding:
            task.cancel()
        await asyncio.gather(*adding, return_exceptions=True)
        for path in paths:
            values = await checkpoint.read(path)
            assert values["answered"]["count"] <= values["total"]
        assert values["answered"]["count"] > 20


async def test_visits_are_done_if_their_updates_are_in_it(tmp_path: Path) -> None:
    async with slow_training() as (strategy, coordinator):
        with strategy.scope():
            seen = psync.Variable(np.zeros((900, 2), np.float32), name="seen")
        visits = coordinator.distribute_once(list(range(900)), 1)
        checkpoint = psync.Checkpoint(seen=seen, visits=visits)

        async def step(shard: int) -> None:
            await seen.scatter_add(
                psync.IndexedSlices(np.ones((1, 2), np.float32), np.array([shard]))
            )

        values = visits.schedule(step)
        paths = []
        for place in (3, 100, 300):
            await values[place]
            paths.append(await checkpoint.save(tmp_path))
        await coordinator.join()
        for path in paths:
            saved = await checkpoint.read(path)
            done = saved["visits"]["done"]
            assert 3 < len(done) < 900
            assert saved["seen"][done].all()


class TestFailure:
    @pytest.mark.parametrize(
        "place",
        [
            "checkpoint.ps.write", "checkpoint.file.written", "checkpoint.before_commit",
            "checkpoint.before_rename",
        ],
    )  # fmt: skip
    async def test_leaves_the_older_one_whole_and_nothing_of_the_new_one(
        self, tmp_path: Path, place: str
    ) -> None:
        async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, coordinator):
            with strategy.scope():
                w = psync.Variable(np.ones(4), name="w")
            manager = psync.CheckpointManager(psync.Checkpoint(w=w), tmp_path)
            first = await manager.save()
            await w.assign(np.zeros(4))
            failpoints_of(strategy.cluster_resolver.platform).arm(place, fails)
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                await manager.save()
            assert str(tmp_path) in caught.value.message
            assert list(tmp_path.glob("ckpt-*")) == [first]
            assert await in_step(coordinator, w.read) is not None  # the ps tasks go on
            assert (await manager.save()).name == "ckpt-00000002"
            await psync.Checkpoint(w=w).restore(first)
            assert (await w.read()).all()

    async def test_says_of_which_path_and_step_where_the_directory_has_become_a_file(
        self, tmp_path: Path
    ) -> None:
        run = tmp_path / "run"
        async with training(1, 1) as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.ones(4), name="w")
            sgd = psync.optimizers.SGD(1.0)
            checkpoint = psync.Checkpoint(w=w, optimizer=sgd)
            manager = psync.CheckpointManager(checkpoint, run)
            for _ in range(3):
                await sgd.apply_gradients([(np.ones(4), w)])
            first = await manager.save()
            run.rename(tmp_path / "moved")
            run.write_text("not a directory")
            with pytest.raises(CheckpointError) as caught:
                await manager.save()
            assert caught.value.message == (
                f"saving a checkpoint of step 3: looking for checkpoints in {run}: Not a directory"
            )
            with pytest.raises(CheckpointError) as caught:
                await manager.save(7)
            assert caught.value.message == (
                f"saving checkpoint 7 of step 3: making {run}/ckpt-00000007.tmp: Not a directory"
            )
            assert isinstance(caught.value.__cause__, NotADirectoryError)
            where = rf"looking for checkpoints in {run}: Not a directory"
            for awaited in (manager.restore_or_initialize, manager.finish):
                with pytest.raises(CheckpointError, match=where):
                    await awaited()
            with pytest.raises(CheckpointError, match=where):
                _ = manager.checkpoints
            with pytest.raises(CheckpointNotFound, match=str(first)):
                await checkpoint.restore(first)

    @pytest.mark.parametrize("always", [False, True])
    async def test_if_a_ps_is_cut_off_another_cut_is_taken(
        self, tmp_path: Path, always: bool
    ) -> None:
        """What it held is gone; so is what was written."""
        async with training(2, 1, psync.FixedShardsPartitioner(2)) as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.ones(4), name="w")
            checkpoint = psync.Checkpoint(w=w)
            coordinator = psync.training.checkpoint.coordinator_of(strategy._origin)
            assert coordinator is not None

            failpoints = failpoints_of(strategy.cluster_resolver.platform)

            def cut_off() -> None:
                if always:
                    failpoints.arm("checkpoint.ps.write", cut_off)
                for link in coordinator.links.ps.links:
                    for peer in peers_of(link):
                        peer.abort()

            failpoints.arm("checkpoint.ps.write", cut_off)
            if always:
                with pytest.raises(
                    CheckpointError, match=r"it was not saved: .* does not hold cut"
                ):
                    await checkpoint.save(tmp_path)
                assert list(tmp_path.iterdir()) == []
                assert coordinator.cuts.taken == TRIES
                return
            path = await checkpoint.save(tmp_path)
            assert list(tmp_path.iterdir()) == [path]
            assert coordinator.cuts.taken == 2

    async def test_an_object_that_cannot_say_its_state_ends_it(self, tmp_path: Path) -> None:
        class Broken:
            def checkpoint_state(self) -> Any:
                raise LookupError("lost")

            def restore_checkpoint_state(self, state: Any) -> None: ...

        async with training() as (strategy, _):
            with strategy.scope():
                w = psync.Variable(np.ones(4), name="w")
            with pytest.raises(LookupError, match="lost"):
                await psync.Checkpoint(w=w, broken=Broken()).save(tmp_path)
            await w.assign(np.zeros(4))  # no gate is shut
            assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("checkpoints.complete-or-absent")
@pytest.mark.parametrize("stream", ["0", "1"])
async def test_who_is_cancelled_at_any_moment_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setenv("PSYNC_CHECKPOINT_STREAM", stream)
    async with slow_training(2, 1) as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.ones((4, 30_000), np.float32), name="w")
        checkpoint = psync.Checkpoint(w=w, adam=psync.optimizers.Adam())
        first = await checkpoint.save(tmp_path)
        complete = {first}
        for turns in (*range(12), 15, 20, 30, 50, 100, 300):
            saving = asyncio.create_task(checkpoint.save(tmp_path))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            saving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                complete.add(await saving)
            found = set(tmp_path.glob("ckpt-*"))
            complete |= {path for path in found - complete if path.suffix != ".tmp"}
            assert found == complete
        for path in complete:
            assert Reader(path).manifest.snapshots
        assert (await in_step(coordinator, w.read)).all()


async def test_two_saves_at_once_are_two_checkpoints(tmp_path: Path) -> None:
    async with training(2, 1) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.ones(4), name="w")
        checkpoint = psync.Checkpoint(w=w)
        paths = await asyncio.gather(*(checkpoint.save(tmp_path) for _ in range(3)))
        assert sorted(path.name for path in paths) == [f"ckpt-0000000{n}" for n in (1, 2, 3)]


async def test_variables_of_two_strategies_are_refused(tmp_path: Path) -> None:
    async with training() as (strategy, _), training() as (other, _):
        with strategy.scope():
            v = psync.Variable(np.ones(4), name="v")
        with other.scope():
            w = psync.Variable(np.ones(4), name="w")
        with pytest.raises(UsageError, match="belongs to another program or strategy"):
            await psync.Checkpoint(v=v, w=w).save(tmp_path)


async def test_a_training_session_has_no_cuts_and_no_snapshots(tmp_path: Path) -> None:
    async with session_cluster(2, 1) as cluster:
        strategy = cluster.strategy(job="worker", partitioner=psync.FixedShardsPartitioner(2))
        with strategy.scope():
            w = psync.Variable(np.ones((4, 2), np.float32), name="w")
        sgd = psync.optimizers.SGD(1.0, momentum=0.5)
        checkpoint = psync.Checkpoint(w=w, sgd=sgd, progress=psync.SavedState(epoch=1))
        async with psync.MonitoredTrainingSession(strategy):
            await sgd.apply_gradients([(np.ones((4, 2), np.float32), w)])
            path = await checkpoint.save(tmp_path)
            await w.assign(np.ones((4, 2), np.float32))
            await checkpoint.restore(path)
            assert not (await w.read()).any()
            assert await sgd.iterations.read() == 1
        with pytest.raises(CheckpointNotFound, match="saved without a ClusterCoordinator"):
            stored_snapshots(path)


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
                    patched.setattr(ps_snapshots, "has_text", lambda path, text: False)
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
    states = [snapshot.state for snapshot in stored_snapshots(path)]
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
    monkeypatch.setattr("psync.store.snapshot.BLOCK_BYTES", 16)  # so that there are several parts
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
    states = [each.state for each in stored]
    assert "without a checksum of its header" in inspection(path)[-1]
    assert [spec.shape for state in states for spec in state.shards] == [(4, 2), (3, 2)]
    assert [len(state.senders) > 0 for state in states] == [True, True]
    async with training(3, 1, psync.FixedShardsPartitioner(3)) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros((7, 2), np.float32), name="w")
        adam = psync.optimizers.Adam(0.1)
        restored = await psync.Checkpoint(w=w, adam=adam).restore(path)
        assert (restored.missing, restored.extra) == ((), ())
        started = np.arange(14, dtype=np.float32).reshape(7, 2)
        np.testing.assert_allclose(await w.read(), started - 0.2, atol=1e-5)
        assert await adam.iterations.read() == 2


async def test_a_checkpoint_of_a_synchronous_run_of_an_earlier_version_is_read() -> None:
    """Four steps with momentum, and an accumulator of which somebody had taken."""
    path = Path(__file__).parent / "golden" / "checkpoints" / "with-groups"
    states = [each.state for each in stored_snapshots(path)]
    assert [(len(state.groups), len(state.accumulators)) for state in states] == [(1, 1), (1, 0)]
    async with training(3, 1, psync.FixedShardsPartitioner(3)) as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros((7, 2), np.float32), name="w")
            taken = psync.Variable(np.zeros(3, np.float32), name="taken")
            step = psync.get_or_create_global_step()
            optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(0.5, momentum=0.9), 2, 2)
        checkpoint = psync.Checkpoint(w=w, opt=optimizer, taken=taken, gs=step)
        restored = await checkpoint.restore(path)
        assert (restored.missing, restored.extra) == ((), ())
        started = np.arange(14, dtype=np.float32).reshape(7, 2)
        moved = -0.5 * (1 + 1.9 + 2.71 + 3.439)
        np.testing.assert_allclose(await w.read(), started + moved, atol=1e-5)
        assert (await taken.read()).tolist() == [2.0] * 3

        async def push() -> None:
            await optimizer.apply_gradients([(np.ones((7, 2), np.float32), w)], global_step=step)

        coordinator.schedule(push)
        await coordinator.join()
        np.testing.assert_allclose(await w.read(), started + moved - 0.5 * 4.0951, atol=1e-5)
        assert await step.read() == 5
