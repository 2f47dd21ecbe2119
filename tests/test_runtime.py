from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from psync.client.context import ClosureContext, enter_closure
from psync.client.runtime import IteratorHandle, Runtime, arriving, current_runtime
from psync.errors import ClosureCancelled, EndOfData, UsageError
from psync.worker.iterators import IteratorTable


class Batches:
    """Stands for a worker's iterator: hands out what it is given."""

    def __init__(self, *batches: Any) -> None:
        self._batches = iter(batches)

    def __next__(self) -> Any:
        for batch in self._batches:
            return batch
        raise EndOfData("no further batch")

    def close(self) -> None:
        pass


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(None, "strategy", "program", None, IteratorTable())  # type: ignore[arg-type]


@contextlib.contextmanager
def in_step(runtime: Any, closure_id: int = 7) -> Iterator[ClosureContext]:
    closure = ClosureContext(worker_index=0, closure_id=closure_id, runtime=runtime)
    with enter_closure(closure):
        yield closure


class TestRuntime:
    def test_a_step_has_that_of_its_worker_and_the_program_none(self, runtime: Runtime) -> None:
        assert current_runtime() is None
        with in_step(runtime):
            assert current_runtime() is runtime
        with in_step(None):
            assert current_runtime() is None

    def test_updates_of_a_step_are_numbered_within_its_closure(self, runtime: Runtime) -> None:
        for _ in range(2):  # a second run draws the same identities
            with in_step(runtime):
                assert [runtime.begin_update("push") for _ in range(3)] == [(7, 0), (7, 1), (7, 2)]

    def test_updates_of_the_program_are_never_repeated(self, runtime: Runtime) -> None:
        drawn = [runtime.begin_update("push") for _ in range(3)]
        assert [closure for closure, _ in drawn] == [-1] * 3
        assert len(set(drawn)) == 3

    def test_pulls_of_a_step_are_noted_for_its_closure(self, runtime: Runtime) -> None:
        runtime.pulled.note([(1, 5)])
        for _ in range(2):  # the second run has pulled nothing yet
            with in_step(runtime) as closure:
                assert runtime.pulled is closure.pulled
                assert runtime.pulled.lowest(1) is None
                runtime.pulled.note([(1, 2)])
        assert runtime.pulled.lowest(1) == 5

    def test_nothing_is_begun_after_the_step(self, runtime: Runtime) -> None:
        runtime.check_open("push")
        with in_step(runtime) as closure:
            runtime.check_open("push")
            closure.close()
            for operation in (runtime.begin_update, runtime.check_open):
                with pytest.raises(UsageError) as caught:
                    operation('assign to "w"')
                assert caught.value.message == (
                    'assign to "w" after the step has returned (closure 7)'
                )

    def test_nothing_is_begun_in_a_cancelled_step(self, runtime: Runtime) -> None:
        with in_step(runtime) as closure:
            closure.cancel()
            with pytest.raises(ClosureCancelled, match="push in closure 7: it was cancelled"):
                runtime.begin_update("push")

    @pytest.mark.asyncio
    async def test_only_the_coordinator_has_something_to_create(self, runtime: Runtime) -> None:
        await runtime.ensure_created()
        created = []

        async def create() -> None:
            await asyncio.sleep(0)
            created.append(1)

        await Runtime(None, "s", ensure_created=create).ensure_created()  # type: ignore[arg-type]
        assert created == [1]


class TestIteratorHandle:
    def test_it_stands_for_the_iterator_of_the_worker_it_is_on(self, runtime: Runtime) -> None:
        handle = IteratorHandle("it", b"key", 2)
        assert iter(handle) is handle
        assert runtime.iterators is not None
        runtime.iterators.add("it", Batches(1, 2))  # type: ignore[arg-type]
        with in_step(runtime):
            assert [next(handle), next(handle)] == [1, 2]
            with pytest.raises(EndOfData):
                next(handle)

    def test_the_program_has_no_data(self) -> None:
        with pytest.raises(UsageError) as caught:
            next(IteratorHandle("it", b"key", 2))
        assert str(caught.value) == (
            "next() on a per-worker iterator outside a step: each worker has its own data\n"
            "hint: pass the iterator to a step: schedule(step, args=(iterator,))"
        )

    def test_one_that_came_by_a_hidden_way_is_an_error(self, runtime: Runtime) -> None:
        with in_step(runtime), pytest.raises(UsageError) as caught:
            next(IteratorHandle("it", b"key", 2))
        assert str(caught.value) == (
            "a per-worker iterator reached the step in a way that psync cannot see\n"
            "hint: pass it as an argument of the step, or let the step capture it"
        )

    def test_a_runtime_without_iterators_is_no_worker(self) -> None:
        with in_step(Runtime(None, "s")), pytest.raises(UsageError, match="outside a step"):  # type: ignore[arg-type]
            next(IteratorHandle("it", b"key", 2))

    def test_those_that_arrive_are_noted(self) -> None:
        sent = pickle.dumps([IteratorHandle("it", b"key", 2)])
        (unnoted,) = pickle.loads(sent)
        noted: list[IteratorHandle] = []
        token = arriving.set(noted)
        (handle,) = pickle.loads(sent)
        arriving.reset(token)
        assert noted == [handle]
        assert (handle.uid, handle.key, handle.num_pipelines) == ("it", b"key", 2)
        assert unnoted is not handle
        assert handle.starts == {}
