"""Names of a trainer's variables in checkpoints, also in those of earlier versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import psync
from local_training import strategy_of, training
from psync.checkpoints.files import COMMIT, MANIFEST, Reader
from psync.checkpoints.manifest import commit_line
from psync.cli.reports import checkpoint as command
from psync.errors import CheckpointMismatch
from psync.training.trainer import History


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

    def note(values: dict[str, Any]) -> dict[str, float]:
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

    async def test_where_nothing_tells_its_names_those_of_now_are_looked_for(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = await self.save(tmp_path, "ab")
        (snapshot, *_) = Reader(path).manifest.snapshots
        (path / snapshot.state).write_bytes(bytes((path / snapshot.state).stat().st_size))
        async with training() as (strategy, _):
            checkpoint, tree, momentum, _ = self.declared(strategy, "ab")
            await checkpoint.restore(path)
            slot = momentum.get_slot(tree["b"], "momentum")
            assert slot is not None
            assert (await slot.read()).tolist() == [11, 11]
        assert f"variable names in {path} are unknown" in caplog.text


class TestCheckpointsOfEarlierVersions:
    """A trainer saved what it trained as a list, "variables"."""

    async def save(self, directory: Path, *names: str, shapes: Any = ((2,), (2,))) -> Path:
        async with training() as (strategy, _):
            variables = [
                *declared(strategy, names[0], shape=shapes[0]),
                *declared(strategy, *names[1:], shape=shapes[1]),
            ]
            momentum = psync.optimizers.Momentum(0.0)
            await momentum.apply_gradients([(np.zeros(each.shape), each) for each in variables])
            history = History([0], {"loss": [0.0]})
            checkpoint = psync.Checkpoint(variables=variables, optimizer=momentum, history=history)
            return await checkpoint.save(directory, number=1)

    def forget_names(self, path: Path) -> None:
        """Make a checkpoint one of those that do not say what each ps held."""
        manifest = replace(Reader(path).manifest, snapshots=()).to_bytes()
        (path / MANIFEST).write_bytes(manifest)
        (path / COMMIT).write_bytes(commit_line(manifest))

    async def test_names_are_told_by_what_each_ps_held(self, tmp_path: Path) -> None:
        await self.save(tmp_path, "a", "b")
        assert await resumed(lambda b, a: {"b": b, "a": a}, tmp_path, "b", "a") == VALUES

    @pytest.mark.parametrize(
        ("shapes", "forgets", "objects"),
        [
            # Told by what each ps held.
            (((2,), (2,)), False, lambda a, b: {"model": {"b": b, "a": a}}),
            # Told by the shapes, as each occurs once.
            (((2,), (3,)), True, lambda a, b: {"model": {"b": b, "a": a}}),
            # In the order in which it was saved.
            (((2,), (2,)), True, lambda a, b: {"variables": [a, b]}),
        ],
    )
    async def test_an_evaluator_is_told_them_as_well(
        self, tmp_path: Path, shapes: Any, forgets: bool, objects: Any
    ) -> None:
        path = await self.save(tmp_path, "a", "b", shapes=shapes)
        if forgets:
            self.forget_names(path)
        strategy = strategy_of(1)
        (b,) = declared(strategy, "b", shape=shapes[1])
        (a,) = declared(strategy, "a", shape=shapes[0])
        values = await psync.Checkpoint(**objects(a, b)).read(path)
        expected = (np.full(shape, VALUES[name]) for name, shape in zip("ab", shapes, strict=True))
        np.testing.assert_equal(values, objects(*expected))

    @pytest.mark.parametrize(
        ("forgets", "tree", "names", "text", "hint"),
        [
            # Nothing tells which is which.
            (
                True, lambda b, a: {"b": b, "a": a}, "ba",
                '\'variables/0\' may be the value of "b" or "a"', "psync.Checkpoint(variables=[…]",
            ),
            # One is not declared.
            (
                False, lambda c, a: {"c": c, "a": a}, "ca",
                '\'variables/1\' of "b"; declared here: "c"', "",
            ),
        ],
    )  # fmt: skip
    async def test_where_they_are_not_clear_it_is_refused_with_the_names_that_are_declared(
        self, tmp_path: Path, forgets: bool, tree: Any, names: str, text: str, hint: str
    ) -> None:
        path = await self.save(tmp_path, "a", "b")
        if forgets:
            self.forget_names(path)
        with pytest.raises(CheckpointMismatch, match=text) as caught:
            await resumed(tree, tmp_path, *names)
        assert hint in (caught.value.hint or "")
