"""The evaluator beside training: which checkpoints it takes, what it does with them, its end.

Real files; the rules in virtual time, in which the program that saves sleeps between its saves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from local_training import strategy_of, training
from loops import for_each
from psync.checkpoints.files import Reader, is_last, remove
from psync.errors import CheckpointError, CheckpointMismatch, ConfigurationError, UsageError
from psync.net.chief_presence import TrainingPresence
from psync.net.environment import run_over, training_presence
from psync.training.sidecar_evaluator import Evaluation


def declared(shape: tuple[int, ...] = ()) -> psync.Checkpoint:
    """What an evaluator makes, without a cluster."""
    with strategy_of(1).scope():
        return psync.Checkpoint(w=psync.Variable(np.zeros(shape), name="w"))


async def value_of(values: dict[str, Any]) -> dict[str, float]:
    return {"w": values["w"]}


@contextlib.asynccontextmanager
async def saving(directory: Path, max_to_keep: int | None = None) -> AsyncIterator[Any]:
    """A program that has one variable: ``await save(7.0)``; also its manager, as an attribute."""
    async with training(1, 1) as (strategy, _):
        with strategy.scope():
            w = psync.Variable(np.float64(0), name="w")
        manager = psync.CheckpointManager(psync.Checkpoint(w=w), directory, max_to_keep)

        async def save(value: float, number: int | None = None, *, last: bool = False) -> Path:
            await w.assign(value)
            return await manager.save(number, last=last)

        save.manager = manager  # type: ignore[attr-defined]
        yield save


def brief(found: list[Evaluation]) -> list[tuple[int, float]]:
    return [(evaluation.number, evaluation.logs["w"]) for evaluation in found]


@pytest.mark.virtual_time
class TestRules:
    """Which checkpoint is next, and when it ends."""

    async def test_each_new_checkpoint_is_evaluated_once(self, tmp_path: Path) -> None:
        evaluator = psync.SidecarEvaluator(declared(), value_of, tmp_path / "not there yet")
        running = asyncio.create_task(evaluator.run())
        async with saving(tmp_path / "not there yet") as save:
            for value in (1.5, 2.5, 3.5):
                await asyncio.sleep(10)
                await save(value, last=value == 3.5)
            assert brief(await running) == [(1, 1.5), (2, 2.5), (3, 3.5)]

    async def test_the_newest_wins_and_those_before_are_skipped(self, tmp_path: Path) -> None:
        async def slow(values: dict[str, Any]) -> dict[str, float]:
            await asyncio.sleep(25)
            return await value_of(values)

        async with saving(tmp_path) as save:
            await save(1)
            await save(2)
            running = asyncio.create_task(psync.SidecarEvaluator(declared(), slow, tmp_path).run())
            for value in (3, 4, 5, 6):
                await asyncio.sleep(10)
                await save(value, last=value == 6)
            assert brief(await running) == [(2, 2.0), (4, 4.0), (6, 6.0)]

    async def test_it_looks_as_often_as_it_is_told(self, tmp_path: Path) -> None:
        loop = asyncio.get_running_loop()
        async with saving(tmp_path) as save:
            began = loop.time()
            evaluator = psync.SidecarEvaluator(declared(), value_of, tmp_path, poll_interval=60)
            running = asyncio.create_task(evaluator.run())
            await asyncio.sleep(70)
            await save(1, last=True)
            await running
            assert loop.time() - began == pytest.approx(120, abs=1)

    @pytest.mark.parametrize("last", [4, 7])
    async def test_it_ends_after_the_number_that_it_was_given(
        self, tmp_path: Path, last: int
    ) -> None:
        running = asyncio.create_task(
            psync.SidecarEvaluator(declared(), value_of, tmp_path, max_evaluations=4).run()
        )
        async with saving(tmp_path) as save:
            await save(1, 3)
            await asyncio.sleep(10)
            await save(2, last)
            await asyncio.sleep(10)
            assert running.done()
            assert brief(await running) == [(3, 1.0), (last, 2.0)]

    async def test_the_program_may_say_afterwards_that_it_was_the_last(
        self, tmp_path: Path
    ) -> None:
        running = asyncio.create_task(psync.SidecarEvaluator(declared(), value_of, tmp_path).run())
        async with saving(tmp_path) as save:
            assert await save.manager.finish() is None
            path = await save(1)
            await asyncio.sleep(100)
            assert not running.done()
            assert await save.manager.finish() == path
            assert brief(await running) == [(1, 1.0)]

    async def test_one_that_follows_the_last_after_all_is_evaluated(self, tmp_path: Path) -> None:
        async with saving(tmp_path) as save:

            async def meanwhile(values: dict[str, Any]) -> dict[str, float]:
                if values["w"] == 1:
                    await save(2)
                else:
                    await save.manager.finish()
                return await value_of(values)

            await save(1, last=True)
            found = await psync.SidecarEvaluator(declared(), meanwhile, tmp_path).run()
            assert brief(found) == [(1, 1.0), (2, 2.0)]

    async def test_a_program_that_goes_on_takes_the_mark_back(self, tmp_path: Path) -> None:
        async with saving(tmp_path) as save:
            path = await save(1, last=True)
            assert is_last(path)
            await save.manager.restore_or_initialize()
            assert not is_last(path)

    @pytest.mark.parametrize("saves", [False, True])
    async def test_a_run_that_a_launcher_ends_has_its_newest_checkpoint_evaluated_if_there_is_one(
        self, tmp_path: Path, saves: bool
    ) -> None:
        over = asyncio.Event()
        run_over.set(over)
        evaluator = psync.SidecarEvaluator(declared(), value_of, tmp_path, poll_interval=1000)
        async with saving(tmp_path) as save:
            if saves:
                await save(1, last=True)  # of an earlier run
            else:
                over.set()
            running = asyncio.create_task(evaluator.run())
            await asyncio.sleep(10)
            if saves:
                await save(2)
                await save(3)
            over.set()
            began = asyncio.get_running_loop().time()
            assert brief(await running) == ([(1, 1.0), (3, 3.0)] if saves else [])
            assert asyncio.get_running_loop().time() - began < 10

    async def test_it_ends_when_training_has_and_says_what_it_waits_for(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "psync.training.sidecar_evaluator")
        network = psync.testing.MemoryNetwork()
        tasks = {"/job:ps/task:0": "ps:1"}
        training_presence.set(TrainingPresence(network, tasks, (3600.0, 600.0)))
        evaluator = psync.SidecarEvaluator(declared(), value_of, tmp_path)
        async with saving(tmp_path) as save:
            listener = await network.listen("ps:1", asyncio.BufferedProtocol)
            running = asyncio.create_task(evaluator.run())
            await asyncio.sleep(15)
            assert f"waiting for a checkpoint in {tmp_path}; training goes on" in caplog.text
            await save(1)
            await asyncio.sleep(5000)
            assert f"after ckpt-00000001 in {tmp_path}; training goes on" in caplog.text
            assert len(caplog.records) < 20, "less and less often"
            await save(2)
            listener.close()
            await asyncio.sleep(100)
            assert running.done()
            assert brief(await running) == [(1, 1.0), (2, 2.0)]
        assert "the evaluator ends: nobody trains any more (/job:ps/task:0 at ps:1)" in caplog.text


@pytest.mark.virtual_time
class TestTrouble:
    """Checkpoints that cannot be read, and programs that do not fit."""

    async def test_a_damaged_checkpoint_is_said_and_passed_over(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with saving(tmp_path) as save:
            path = await save(1)
            (path / "manifest.json").write_text("{}")
            running = asyncio.create_task(
                psync.SidecarEvaluator(declared(), value_of, tmp_path).run()
            )
            await asyncio.sleep(100)
            await save(2, last=True)
            assert brief(await running) == [(2, 2.0)]
        (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warning.startswith("ckpt-00000001 is skipped: ")
        assert "manifest.json: not the one that was committed" in warning

    async def test_damage_to_the_last_one_is_no_reason_to_wait(self, tmp_path: Path) -> None:
        async with saving(tmp_path) as save:
            path = await save(1, last=True)
            for data in path.glob("*.safetensors"):
                data.write_bytes(b"short")
            assert await psync.SidecarEvaluator(declared(), value_of, tmp_path).run() == []
            (path / "LAST").unlink()
            evaluator = psync.SidecarEvaluator(declared(), value_of, tmp_path, 1)
            assert await evaluator.run() == []

    async def test_one_that_is_removed_while_it_is_read_is_left_for_its_successor(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        read = Reader.read

        def overtaken(reader: Reader, *rows: Any) -> np.ndarray:
            if reader.path == doomed:
                remove(doomed)
            return read(reader, *rows)

        monkeypatch.setattr(Reader, "read", overtaken)
        async with saving(tmp_path) as save:
            doomed = await save(1)
            running = asyncio.create_task(
                psync.SidecarEvaluator(declared(), value_of, tmp_path).run()
            )
            await asyncio.sleep(10)
            assert not doomed.exists()
            await save(2, 2, last=True)
            assert brief(await running) == [(2, 2.0)]
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    async def test_a_program_that_declares_something_else_is_told(self, tmp_path: Path) -> None:
        async with saving(tmp_path) as save:
            await save(1)
            with pytest.raises(CheckpointMismatch, match=r"w: saved as \(\) float64, declared as"):
                await psync.SidecarEvaluator(declared((3,)), value_of, tmp_path).run()

    async def test_a_directory_that_is_none_is_an_error(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.touch()
        with pytest.raises(CheckpointError, match=r"checkpoints in .*: Not a directory"):
            await psync.SidecarEvaluator(declared(), value_of, file).run()

    @pytest.mark.parametrize(
        ("made", "text"),
        [
            (0.5, "expected a dict of numbers, got float"),
            ({"loss": "low"}, "expected a dict of numbers, got str as 'loss'"),
            ({"loss": np.zeros(3)}, "got ndarray as 'loss'"),
            ({"loss": None}, "got NoneType as 'loss'"),
            ({3: 0.5}, "got float as 3"),
        ],
    )
    async def test_what_is_no_dict_of_numbers_is_refused(
        self, tmp_path: Path, made: Any, text: str
    ) -> None:
        async def wrong(values: dict[str, Any]) -> Any:
            return made

        async with saving(tmp_path) as save:
            await save(1, last=True)
            with pytest.raises(UsageError, match=text):
                await psync.SidecarEvaluator(declared(), wrong, tmp_path).run()


class Told(psync.callbacks.Callback):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_begin(self) -> None:
        self.calls.append("begin")

    async def on_epoch_begin(self, epoch: int) -> None:
        self.calls.append(f"begin {epoch}")

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.calls.append(f"{epoch}: {logs}")

    async def on_train_end(self, logs: Any) -> None:
        self.calls.append(f"end {logs}")


# --- on real loops -------------------------------------------------------------------------------


async def test_results_come_one_by_one_and_a_second_loop_goes_on(tmp_path: Path) -> None:
    async with saving(tmp_path) as save:
        evaluator = psync.SidecarEvaluator(declared(), value_of, tmp_path, poll_interval=0.01)
        path = await save(1)
        async with contextlib.aclosing(evaluator.__aiter__()) as found:
            async for result in found:
                assert result == Evaluation(1, path, {"w": 1.0})
                break
        await save(2, last=True)
        assert [result.number async for result in evaluator] == [2]


async def test_a_plain_function_runs_in_a_thread_and_the_loop_goes_on(tmp_path: Path) -> None:
    turned = threading.Event()

    def plain(values: dict[str, Any]) -> dict[str, float]:
        turned.wait()
        return {"w": float(values["w"])}

    async with saving(tmp_path) as save:
        await save(1, last=True)
        running = asyncio.create_task(psync.SidecarEvaluator(declared(), plain, tmp_path).run())
        asyncio.get_running_loop().call_later(0.01, turned.set)
        assert brief(await running) == [(1, 1.0)]


@pytest.mark.parametrize("plain", [False, True])
async def test_an_error_of_the_function_is_raised_and_the_callbacks_hear_of_the_end(
    tmp_path: Path, plain: bool
) -> None:
    def failing(values: dict[str, Any]) -> Any:
        raise KeyError("mine")

    async def failing_coroutine(values: dict[str, Any]) -> Any:
        failing(values)

    told = Told()
    async with saving(tmp_path) as save:
        await save(1)
        with pytest.raises(KeyError, match="mine"):
            await psync.SidecarEvaluator(
                declared(), failing if plain else failing_coroutine, tmp_path, callbacks=[told]
            ).run()
    assert told.calls == ["begin", "begin 1", "end {}"]


class Evaluate:
    """An object whose call is a coroutine."""

    async def __call__(self, values: dict[str, Any]) -> dict[str, float]:
        return await value_of(values)


async def numbers(values: dict[str, Any]) -> Any:
    return {"a": 1, "b": np.float32(0.5), "c": np.array(2.0), "d": True}


@pytest.mark.parametrize(
    ("evaluate", "logs"),
    [(Evaluate(), {"w": 1.0}), (numbers, {"a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0})],
)
async def test_what_is_called_and_awaited_gives_numbers_of_every_kind(
    tmp_path: Path, evaluate: Any, logs: dict[str, float]
) -> None:
    async with saving(tmp_path) as save:
        await save(1, last=True)
        (found,) = await psync.SidecarEvaluator(declared(), evaluate, tmp_path).run()
        assert found.logs == logs


async def test_cancelling_ends_it_though_the_function_goes_on(tmp_path: Path) -> None:
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def endless(values: dict[str, Any]) -> dict[str, float]:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait()
        return {}

    told = Told()
    async with saving(tmp_path) as save:
        await save(1)
        running = asyncio.create_task(
            psync.SidecarEvaluator(declared(), endless, tmp_path, callbacks=[told]).run()
        )
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    may_end.set()
    assert told.calls == ["begin", "begin 1", "end {}"]


async def test_the_loggers_of_training_write_its_values(tmp_path: Path) -> None:
    told, directory = Told(), tmp_path / "run"
    log = psync.callbacks.CSVLogger(tmp_path / "log.csv")
    async with saving(directory) as save:
        evaluator = psync.SidecarEvaluator(
            declared(), value_of, directory, poll_interval=0.01, callbacks=[told, log]
        )
        await save(0.5, 10)
        async for result in evaluator:
            if result.number == 10:
                await save(0.25, 20, last=True)
    assert (tmp_path / "log.csv").read_text().split() == ["epoch,w", "10,0.5", "20,0.25"]
    assert told.calls == [
        "begin", "begin 10", "10: {'w': 0.5}", "begin 20", "20: {'w': 0.25}", "end {'w': 0.25}",
    ]  # fmt: skip


async def test_a_callback_may_end_it(tmp_path: Path) -> None:
    class GoodEnough(psync.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.trainer.stop_training = logs["w"] < 0.5

    async with saving(tmp_path) as save:
        evaluator = psync.SidecarEvaluator(
            declared(), value_of, tmp_path, poll_interval=0.01, callbacks=[GoodEnough()]
        )
        await save(0.7)
        async for result in evaluator:
            if result.number == 1:
                await save(0.3)
    assert result.number == 2


# --- arguments -----------------------------------------------------------------------------------


@for_each(
    "arguments, options, text",
    [
        (({}, value_of, "d"), {}, "expected a Checkpoint, got dict"),
        ((None, 3, "d"), {}, r"expected a function \(values\) -> dict of numbers, got 3"),
        ((None, value_of, "d", 0), {}, "expected max_evaluations above 0, or None, got 0"),
        ((None, value_of, "d", 1.5), {}, "expected max_evaluations above 0, or None, got 1.5"),
        ((None, value_of, "d"), {"poll_interval": 0}, "poll_interval in seconds above 0, got 0"),
        ((None, value_of, "d"), {"poll_interval": "1"}, "seconds above 0, got '1'"),
        (
            (None, value_of, "d"),
            {"callbacks": [psync.callbacks.EarlyStopping()]},
            "EarlyStopping needs a trainer, which an evaluator does not have",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    first, *others = arguments
    with pytest.raises(ConfigurationError, match=text):
        psync.SidecarEvaluator(declared() if first is None else first, *others, **options)
