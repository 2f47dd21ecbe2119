"""What was saved is restored into other numbers of ps tasks and shards; training goes on alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import psync
from local_training import in_step, training
from psync import optimizers, schedules
from psync.checkpoints.manifest import commit_line
from psync.errors import CheckpointMismatch
from psync.training.trainer import FitState, History

pytestmark = pytest.mark.virtual_time

TABLE = np.linspace(-1, 1, 26, dtype=np.float32).reshape(13, 2)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.1, amsgrad=True),
    "adamw on a schedule": lambda: optimizers.AdamW(schedules.ExponentialDecay(0.1, 2, 0.5)),
    "adagrad": lambda: optimizers.Adagrad(0.1, initial_accumulator_value=0.3),
    "nadam, whose momentum depends on its step": lambda: optimizers.Nadam(0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "lamb, which needs norms": lambda: optimizers.Lamb(0.1),
    "clipped": lambda: optimizers.RMSprop(0.1, global_clipnorm=0.5),
    "synchronous": lambda: psync.SyncReplicasOptimizer(optimizers.Adam(0.1), 1),
}


class Program:
    """Variables of several kinds, and what they are trained with."""

    def __init__(self, strategy: psync.ParameterServerStrategy, make: Callable[[], Any]) -> None:
        with strategy.scope():
            self.table = psync.Variable(TABLE, name="table")
            self.half = psync.Variable(np.full((4, 3), 0.5, ml_dtypes.bfloat16), name="half")
            self.step = psync.get_or_create_global_step()
            self.ema = psync.ExponentialMovingAverage(0.5)
            self.ema.apply([self.table])
        self.optimizer = make()
        self.progress = psync.SavedState(epoch=0)
        self.checkpoint = psync.Checkpoint(
            model=[self.table, self.half], step=self.step, optimizer=self.optimizer, ema=self.ema,
            progress=self.progress,
        )  # fmt: skip

    async def train(self, coordinator: psync.ClusterCoordinator, count: int) -> None:
        table, half, step, ema, optimizer = (
            self.table, self.half, self.step, self.ema, self.optimizer,
        )  # fmt: skip

        async def one(scale: float) -> None:
            values = await psync.pull([table, half])
            gradients = [value * value.dtype.type(scale) for value in values]
            pairs = list(zip(gradients, (table, half), strict=True))
            await optimizer.apply_gradients(pairs, global_step=step)
            await ema.update()

        for scale in range(count):
            coordinator.schedule(one, (scale + 1.5,))
            await coordinator.join()

    async def contents(self) -> dict[str, Any]:
        """Values, slots, step."""
        slots = {
            f"{slot.name} of {slot.variable.name}": await slot.read()
            for slot in self.optimizer.variables()
        }
        average = self.ema.averages(self.table)
        values = await psync.pull([self.table, self.half, self.step, average])
        steps = await self.optimizer.iterations.read()
        return dict(enumerate(values)) | slots | {"steps": steps, "epoch": self.progress.epoch}


@pytest.fixture
async def saved(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Any, Any]:
    """A checkpoint of 2 ps and 3 shards; what was in it, and what followed two steps later."""
    async with training(2, 1, psync.FixedShardsPartitioner(3)) as (strategy, coordinator):
        program = Program(strategy, OPTIMIZERS[request.param])
        await program.train(coordinator, 3)
        program.progress.epoch = 3
        before = await program.contents()
        path = await program.checkpoint.save(tmp_path)
        await program.train(coordinator, 2)
        return path, before, await program.contents()


def assert_same(got: dict[Any, Any], expected: dict[Any, Any], *, exactly: bool = True) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if exactly:
            np.testing.assert_array_equal(got[name], value, err_msg=str(name))
        else:  # norms are summed in another order
            np.testing.assert_allclose(
                np.asarray(got[name], np.float64), np.asarray(value, np.float64), rtol=1e-6
            )


@pytest.mark.promise("checkpoints.any-cluster-size")
@pytest.mark.parametrize(("num_ps", "num_shards"), [(3, 5), (1, 1)])
@pytest.mark.parametrize("saved", OPTIMIZERS, indirect=True)
async def test_training_goes_on_with_the_same_next_value_of_everything(
    saved: tuple[Path, Any, Any],
    num_ps: int,
    num_shards: int,
    request: pytest.FixtureRequest,
) -> None:
    path, before, after = saved
    name = request.node.callspec.params["saved"]
    async with training(num_ps, 1, psync.FixedShardsPartitioner(num_shards)) as (
        strategy,
        coordinator,
    ):
        program = Program(strategy, OPTIMIZERS[name])
        restored = await program.checkpoint.restore(path)
        assert (restored.missing, restored.extra) == ((), ())
        assert_same(await program.contents(), before)
        await program.train(coordinator, 2)
        assert_same(await program.contents(), after, exactly="norms" not in name)


async def test_where_a_learning_rate_is_not_known_nothing_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.ones(2, np.float32), name="w")
        sgd = optimizers.SGD(0.1)
        await sgd.set_learning_rate(schedules.PolynomialDecay(0.5, 10))
        path = await psync.Checkpoint(w=w, sgd=sgd).save(tmp_path)
    monkeypatch.delitem(schedules._SCHEDULES, "PolynomialDecay")
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
        with pytest.raises(CheckpointMismatch, match="unknown schedule 'PolynomialDecay'"):
            await psync.Checkpoint(w=w, sgd=optimizers.SGD(0.1)).restore(path)
        assert not (await w.read()).any()


@pytest.mark.parametrize(
    ("saved_rate", "declared", "set_meanwhile", "restored"),
    [
        (0.25, 0.1, None, 0.25),
        (schedules.PolynomialDecay(0.5, 10), 0.1, None, schedules.PolynomialDecay(0.5, 10)),
        (None, 0.5, 0.125, 0.5),  # the program was changed
    ],
)
async def test_a_learning_rate_that_was_set_is_restored_and_else_the_program_says_it(
    tmp_path: Path, saved_rate: Any, declared: float, set_meanwhile: float | None, restored: Any
) -> None:
    async with training() as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
        sgd = optimizers.SGD(0.1)
        if saved_rate is not None:
            await sgd.set_learning_rate(saved_rate)
        path = await psync.Checkpoint(w=w, sgd=sgd).save(tmp_path)
    async with training() as (strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
        sgd = optimizers.SGD(declared)
        if set_meanwhile is not None:
            await sgd.set_learning_rate(set_meanwhile)
        await psync.Checkpoint(w=w, sgd=sgd).restore(path)
        assert sgd.learning_rate == restored

        async def step() -> None:
            await sgd.apply_gradients([(np.ones(2, np.float32), w)])

        await in_step(coordinator, step)
        first = restored if isinstance(restored, float) else restored(0)
        np.testing.assert_allclose(await w.read(), -first)


class Own:
    """An object of a user's, which takes a number."""

    def __init__(self) -> None:
        self.number = 1

    def checkpoint_state(self) -> int:
        return self.number

    def restore_checkpoint_state(self, state: int) -> None:
        self.number = 1000
        self.number = state + 1


def deep(depth: int) -> Any:
    state: Any = []
    for _ in range(depth):
        state = [state]
    return state


@pytest.mark.promise("checkpoints.bad-state-named")
@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        *(("progress", each, "expected values by name, got") for each in ([1], 5, None, "abc", [])),
        ("progress", {"checkpoint_state": 5}, "expected names of values, got 'checkpoint_state'"),
        ("progress", {"__class__": "x"}, "expected names of values, got '__class__'"),
        ("progress", {"x": deep(100)}, "would be restored differently"),
        ("fit", {"epoch": 3, "history": {}}, "epoch: expected `array`, got 3"),
        ("fit", {"epoch": [0], "history": {"a": ["x"]}}, r"'a'\]\[0\]: expected `float`, got 'x'"),
        ("fit", {"epoch": [0], "history": {}, "repeated": [1, 2]}, "expected one for each epoch"),
        ("fit", {"epoch": [0], "history": {}, "owed": -1}, "owed: expected `int` >= 0, got -1"),
        ("own", "text", r"'own' is no state of Own: TypeError\('can only concatenate"),
        ("optimizer/step", 1 << 40, "expected a whole number from 0 to"),
        ("optimizer/step", True, "'optimizer' cannot go on .*: expected a whole number"),
    ],
)  # fmt: skip
async def test_a_state_that_is_none_is_named_before_anything_changes(
    tmp_path: Path, name: str, state: Any, message: str
) -> None:
    async with training() as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.ones(3), name="w")
        sgd, own, other = psync.optimizers.SGD(0.1), Own(), Own()
        progress, fit = psync.SavedState(epoch=1), FitState(History([0], {"loss": [1.0]}, [0]))
        checkpoint = psync.Checkpoint(
            w=w, optimizer=sgd, other=other, own=own, progress=progress, fit=fit
        )
        path = await checkpoint.save(tmp_path)
        changed = json.loads((path / "manifest.json").read_text())
        changed["states"][name] = state
        manifest = json.dumps(changed).encode()
        (path / "manifest.json").write_bytes(manifest)
        (path / "COMMIT").write_bytes(commit_line(manifest))

        await w.assign(np.zeros(3))
        progress.epoch, own.number, other.number = 5, 6, 7
        fit.clear()
        with pytest.raises(CheckpointMismatch, match=message) as caught:
            await checkpoint.restore(path)
        assert str(path) in caught.value.message
        assert (await w.read()).tolist() == [0, 0, 0]
        assert (vars(progress), fit.history.epoch) == ({"epoch": 5}, [])
        assert own.number == (7 if name == "own" else 6)  # its own state, given to it again
        assert other.number in (7, 8)
        await checkpoint.save(tmp_path)
