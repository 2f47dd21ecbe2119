"""Names and states of what a checkpoint holds, also those that other programs gave; its values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import psync
from local_training import in_step, strategy_of, training
from psync.checkpoints.files import Reader
from psync.cli.main import checkpoint as command
from psync.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigurationError,
)
from psync.training.checkpoint import Contents

pytestmark = pytest.mark.virtual_time


class Layer(psync.Module):
    def __init__(self) -> None:
        self.w = psync.Variable(np.zeros((5, 2), np.float32), name="w")
        self.size = (5, 2)
        self.activation = np.tanh


class Net(psync.Module):
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.same = self.layers[0]
        self.by_name = {"first": self.layers[0].w}


def test_names_are_paths_and_each_array_has_one() -> None:
    strategy = strategy_of(2, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        net = Net()
    contents = Contents()
    contents.add("net", net)
    assert list(contents.arrays) == ["net/by_name/first", "net/layers/1/w"]
    array = contents.arrays["net/layers/1/w"]
    assert (array.shape, array.dtype) == ((5, 2), "float32")
    assert [(part.offset, part.shape) for part in array.parts] == [(0, (3, 2)), (3, (2, 2))]


def test_an_object_with_a_state_is_asked_for_it() -> None:
    state = psync.SavedState(epoch=3)
    contents = Contents()
    contents.add("progress", {"one": state, "two": state})
    assert contents.states == {"progress/one": state}
    state.restore_checkpoint_state({"epoch": 4, "best": 0.5})
    assert state.checkpoint_state() == {"epoch": 4, "best": 0.5}


def test_a_saved_value_cannot_take_the_name_of_a_method() -> None:
    message = (
        "expected names of values, got 'checkpoint_state', which is an attribute of SavedState"
    )
    with pytest.raises(ConfigurationError, match=message):
        psync.SavedState(checkpoint_state=1)
    progress = psync.SavedState(epoch=1)
    with pytest.raises(ConfigurationError, match=message):
        progress.checkpoint_state = 5
    progress.step = 3
    assert progress.checkpoint_state() == {"epoch": 1, "step": 3}


def batches(context: psync.InputContext) -> Iterator[int]:
    while True:
        yield 0


def declared(strategy: Any, *names: str, shape: tuple[int, ...] = (2,)) -> list[psync.Variable]:
    """Variables of one shape, each full of the number of the letter that it is called."""
    with strategy.scope():
        return [psync.Variable(np.full(shape, float(ord(name))), name=name) for name in names]


def trainer_of(strategy: Any, tree: Any, directory: Path) -> psync.Trainer:
    """A trainer that makes slots, and leaves values as they are."""

    def value_and_grad(values: Any, batch: int) -> Any:
        return 0.0, values

    momentum = psync.optimizers.Momentum(0.0)
    return psync.Trainer(strategy, tree, value_and_grad, momentum, checkpoint_directory=directory)


async def saved(tree_of: Any, directory: Path, *names: str) -> None:
    """Train variables of these names for an epoch, nested by ``tree_of(variables)``."""
    async with training() as (strategy, _):
        trainer = trainer_of(strategy, tree_of(*declared(strategy, *names)), directory)
        await trainer.fit(batches, epochs=1, steps_per_epoch=1, verbose=False)


async def resumed(tree_of: Any, directory: Path, *names: str) -> dict[str, float]:
    """Return the first elements of variables, by name, as training goes on with them.

    They begin as zeros, and are declared in the order of ``names``.
    """
    async with training() as (strategy, _):
        with strategy.scope():
            variables = [psync.Variable(np.zeros(2), name=name) for name in names]
        trainer = trainer_of(strategy, tree_of(*variables), directory)
        await trainer.fit(batches, epochs=1, steps_per_epoch=1, verbose=False)
        return {variable.name: float((await variable.read())[0]) for variable in variables}


VALUES = {"a": float(ord("a")), "b": float(ord("b"))}


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (lambda a, b: {"a": a, "b": b}, lambda b, a: {"b": b, "a": a}, {"b": "b", "a": "a"}),
        (lambda a, b: [a, b], lambda b, a: [b, a], {"b": "b", "a": "a"}),
        (
            lambda a, b: [{"w": a}, {"w": b}], lambda b, a: [{"w": b}, {"w": a}],
            {"b": "b", "a": "a"},
        ),
        (
            lambda a, b: {"layers": ((a,), (b,))}, lambda b, a: {"layers": ((b,), (a,))},
            {"b": "b", "a": "a"},
        ),
        # What is no variable has no name.
        (
            lambda a, b: {"a": a, "rate": 0.5, "others": [1, {}]}, lambda a: {"a": a},
            {"a": "a"},
        ),
        # One that has got another name keeps it.
        (lambda a, b: {"weight": a}, lambda b: {"weight": b}, {"b": "a"}),
    ],
    ids=["dict", "list", "list of dicts", "dict of tuples", "with other things", "renamed"],
)  # fmt: skip
async def test_a_program_that_nests_or_names_its_variables_otherwise_gets_their_own_values(
    tmp_path: Path, before: Any, after: Any, names: dict[str, str]
) -> None:
    """``names``: those by now, and what they were called before."""
    await saved(before, tmp_path, "a", "b")
    found = await resumed(after, tmp_path, *names)
    assert found == {name: VALUES[earlier] for name, earlier in names.items()}


@pytest.mark.parametrize(
    "tree_of",
    [
        lambda a, b: {"a": a, "b": b},
        lambda a, b: [a, {"b": b}],
        lambda a, b: {"pair": (a, b)},
        lambda a, b: a,
    ],
    ids=["dict", "list", "tuple in a dict", "variable"],
)
async def test_an_evaluator_reads_what_a_trainer_saves(tmp_path: Path, tree_of: Any) -> None:
    await saved(tree_of, tmp_path, "a", "b")
    model = tree_of(*declared(strategy_of(1), "a", "b"))
    found = []

    async def note(values: dict[str, Any]) -> dict[str, float]:
        found.append(values["model"])
        return {}

    await psync.SidecarEvaluator(psync.Checkpoint(model=model), note, tmp_path).run()
    expected = tree_of(*(np.full(2, VALUES[name]) for name in "ab"))
    np.testing.assert_equal(found, [expected])


async def test_exported_tensors_carry_the_names(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    await saved(lambda a, b: {"dense": {"a": a}, "list": [b]}, tmp_path / "run", "a", "b")
    newest = psync.latest_checkpoint(tmp_path / "run")
    out = tmp_path / "out"
    made = CliRunner().invoke(command, ["export", str(newest), str(out), "--only", "model"])
    assert made.exit_code == 0, made.output
    arrays = load_file(out / "model.safetensors")
    assert {name: array[0] for name, array in arrays.items()} == {
        "dense.a": VALUES["a"], "list.b": VALUES["b"],
    }  # fmt: skip


class TestWhatBelongsToVariablesThatAreCalledOtherwiseByNow:
    """As those without names of their own, where the program declares them in another order."""

    async def save(self, directory: Path, order: str) -> Path:
        """Save variables, slots and averages that are full of numbers of the variables' keys."""
        async with training() as (strategy, _):
            checkpoint, tree, momentum, averages = self.declared(strategy, order)
            await momentum.apply_gradients([(np.zeros(2), tree[key]) for key in "ab"])
            for number, key in enumerate("ab"):
                await tree[key].assign([number, number])
                slot = momentum.get_slot(tree[key], "momentum")
                assert slot is not None
                await slot.assign([10 + number] * 2)
                await averages.average(tree[key]).assign([20 + number] * 2)
            return await checkpoint.save(directory, number=1)

    def declared(self, strategy: Any, order: str) -> Any:
        with strategy.scope():
            tree = {key: psync.Variable(np.zeros(2)) for key in order}
            averages = psync.ExponentialMovingAverage(0.5)
            averages.apply([*tree.values()])
        momentum = psync.optimizers.Momentum(0.0)
        checkpoint = psync.Checkpoint(model=tree, averages=averages, optimizer=momentum)
        return checkpoint, tree, momentum, averages

    async def test_it_is_restored_to_them(self, tmp_path: Path) -> None:
        path = await self.save(tmp_path, "ab")
        async with training() as (strategy, _):
            checkpoint, tree, momentum, averages = self.declared(strategy, "ba")
            await momentum.apply_gradients([(np.zeros(2), tree[key]) for key in "ab"])
            await checkpoint.restore(path)
            for number, key in enumerate("ab"):
                slot = momentum.get_slot(tree[key], "momentum")
                of_it = (tree[key], slot, averages.average(tree[key]))
                found = [(await each.read()).tolist() for each in of_it]
                assert found == [[number] * 2, [10 + number] * 2, [20 + number] * 2]

    async def test_it_is_read_under_their_names(self, tmp_path: Path) -> None:
        path = await self.save(tmp_path, "ab")
        checkpoint, tree, _, _ = self.declared(strategy_of(1), "ba")
        values = await checkpoint.read(path, slots=True)
        for number, key in enumerate("ab"):
            name = tree[key].name
            assert values["averages"][name].tolist() == [20 + number] * 2
            assert values["optimizer"]["momentum"][name].tolist() == [10 + number] * 2

    @pytest.mark.promise("checkpoints.damage-changes-nothing")
    async def test_where_its_names_are_damaged_nothing_is_restored(self, tmp_path: Path) -> None:
        path = await self.save(tmp_path, "ab")
        (snapshot, *_) = Reader(path).manifest.snapshots
        (path / snapshot.state).write_bytes(bytes((path / snapshot.state).stat().st_size))
        async with training() as (strategy, _):
            checkpoint, tree, _, _ = self.declared(strategy, "ab")
            with pytest.raises(CheckpointCorrupt, match=snapshot.state):
                await checkpoint.restore(path)
            assert (await tree["b"].read()).tolist() == [0, 0]


TABLE = np.arange(26, dtype=np.float32).reshape(13, 2)


class Pair(NamedTuple):
    w: Any
    b: Any


class Model(psync.Module):
    """Variables of several kinds, and settings that are none."""

    def __init__(self) -> None:
        self.table = psync.Variable(TABLE, name="table")
        self.layers = [
            psync.Variable(np.full(3, 2, ml_dtypes.bfloat16), name="layer"),
            {"bias": psync.Variable(np.float64(7), name="bias")},
        ]
        count = psync.Variable(np.int32(4), name="count", trainable=False)
        self.tied = Pair(self.table, count)
        self.rate = 0.5


class Objects:
    """What both the program and the evaluator declare."""

    def __init__(self, strategy: psync.ParameterServerStrategy) -> None:
        with strategy.scope():
            self.model = Model()
            self.loss = psync.metrics.Mean("loss")
            self.ema = psync.ExponentialMovingAverage(0.5)
            self.ema.apply([self.model.table])
        self.adam = psync.optimizers.Adam(0.1)
        self.progress = psync.SavedState(epoch=3)
        self.checkpoint = psync.Checkpoint(
            model=self.model,
            loss=self.loss,
            ema=self.ema,
            averaged={"t": self.ema.averages(self.model.table)},
            optimizer=self.adam,
            progress=self.progress,
        )


@pytest.fixture
async def saved_table(tmp_path: Path) -> Path:
    async with training(2, 1, psync.FixedShardsPartitioner(3)) as (strategy, coordinator):
        objects = Objects(strategy)
        loss, table, adam, ema = objects.loss, objects.model.table, objects.adam, objects.ema

        async def step() -> None:
            await loss.update_state([1.0, 4.0])
            await adam.apply_gradients([(np.ones((13, 2), np.float32), table)])
            await ema.update()

        await in_step(coordinator, step)
        return await objects.checkpoint.save(tmp_path)


async def test_values_are_nested_as_the_objects_are(saved_table: Path) -> None:
    checkpoint = Objects(strategy_of(1)).checkpoint
    values = await checkpoint.read(saved_table)
    model = values["model"]
    assert list(values) == ["model", "loss", "ema", "averaged", "optimizer", "progress"]
    assert list(model) == ["layers", "table", "tied"]
    np.testing.assert_allclose(model["table"], TABLE - 0.1, atol=1e-5)
    assert model["tied"].w is model["table"]
    assert model["tied"].b == 4
    assert model["layers"][0].dtype == ml_dtypes.bfloat16
    assert model["layers"][0].tolist() == [2, 2, 2]
    assert model["layers"][1]["bias"] == 7.0
    assert values["loss"] == 2.5
    assert values["progress"] == {"epoch": 3}
    assert values["optimizer"] == {"step": 1}
    # Moving averages are there by name, and where the variables are.
    np.testing.assert_allclose(values["ema"]["table"], TABLE - 0.05, atol=1e-5)
    assert values["averaged"]["t"] is values["ema"]["table"]
    # The values are the caller's own.
    model["table"][:] = 0
    assert (await checkpoint.read(saved_table))["model"]["table"].any()


async def test_slots_are_read_only_if_somebody_asks(saved_table: Path) -> None:
    values = await Objects(strategy_of(1)).checkpoint.read(saved_table, slots=True)
    slots = values["optimizer"]
    assert slots["step"] == 1
    assert slots["m"]["table"].shape == (13, 2)
    np.testing.assert_allclose(slots["m"]["table"], 0.1, atol=1e-6)
    assert set(slots) == {"step", "m", "v"}


async def test_only_what_is_asked_for_is_read_and_what_does_not_fit_is_named(
    saved_table: Path,
) -> None:
    with strategy_of(1).scope():
        other = psync.Variable(np.zeros((13, 2), np.float32), name="other")
        table = psync.Variable(np.zeros((13, 3), np.float32), name="table")
        more = psync.Variable(np.zeros(3), name="more")
    values = await psync.Checkpoint(model={"table": other}).read(saved_table)
    assert list(values) == ["model"]
    assert values["model"]["table"].shape == (13, 2)
    with pytest.raises(CheckpointMismatch) as caught:
        await psync.Checkpoint(model={"table": table, "more": more}).read(saved_table)
    text = str(caught.value)
    assert "missing in it: model/more" in text
    assert "model/table: saved as (13, 2) float32, declared as (13, 3) float32" in text
    assert "hint: declare what the program declares" in text


async def test_damage_is_found_where_it_is_read(saved_table: Path) -> None:
    data = saved_table / "data-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    checkpoint = Objects(strategy_of(1)).checkpoint
    with pytest.raises(CheckpointCorrupt, match="expected checksum"):
        await checkpoint.read(saved_table, slots=True)
    with pytest.raises(CheckpointNotFound):
        await checkpoint.read(saved_table.parent / "ckpt-00000009")
