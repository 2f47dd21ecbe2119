"""Per-worker iterators: loaded ahead in a thread, handed out in order, ended for good."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from psync import InputContext, get_worker_index
from psync.client.context import ClosureContext, Runtime, forbid_in_dataset, inside
from psync.errors import ClosedError, ClosureInputError, EndOfData, UsageError
from psync.worker.iterators import IteratorHandle, WorkerIterator, arriving

ONE = InputContext()


def has_ended(iterator: WorkerIterator, timeout_s: float) -> bool:
    """Whether the thread in which a dataset's code runs has ended, or ends in time."""
    if iterator.thread is not None:
        iterator.thread.join(timeout_s)
    return iterator.thread is None or not iterator.thread.is_alive()


@pytest.fixture
def made() -> Iterator[list[WorkerIterator]]:
    """Iterators of the test; their threads end with it."""
    iterators: list[WorkerIterator] = []
    yield iterators
    for iterator in iterators:
        iterator.close()
        assert has_ended(iterator, 20)


@pytest.fixture(params=[2, 0], ids=["threaded", "inline"])
def make(
    request: pytest.FixtureRequest, made: list[WorkerIterator]
) -> Callable[..., WorkerIterator]:
    """Makes iterators that behave alike, with a loader thread and without one."""

    def make(dataset_fn: Any, context: InputContext = ONE, **options: Any) -> WorkerIterator:
        made.append(WorkerIterator(dataset_fn, context, ahead=request.param, **options))
        return made[-1]

    return make


class Gated:
    """A dataset that yields 0, 1, … each when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.loading = threading.Semaphore(0)  # released when a batch is asked for
        self.closed = threading.Event()

    def __call__(self) -> Iterator[int]:
        try:
            for index in itertools.count():
                self.loading.release()
                self.gate.acquire()
                yield index
        finally:
            self.closed.set()


# --- handing out ------------------------------------------------------------------------------


def test_batches_are_handed_out_in_order_and_counted(make: Callable[..., WorkerIterator]) -> None:
    iterator = make(lambda: range(5))
    assert iter(iterator) is iterator
    assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert iterator.position == 5


def test_an_iterator_can_go_on_where_another_one_was(make: Callable[..., WorkerIterator]) -> None:
    iterator = make(lambda: range(5), position=3)
    assert iterator.position == 3
    assert [next(iterator), iterator.position, next(iterator)] == [3, 4, 4]
    beyond = make(lambda: range(5), position=6)
    with pytest.raises(EndOfData, match="has no further batch"):
        next(beyond)
    assert beyond.position == 6


def test_dataset_code_knows_its_worker_and_must_not_call_psync(
    make: Callable[..., WorkerIterator],
) -> None:
    def dataset_fn() -> Iterator[int]:
        yield get_worker_index()
        forbid_in_dataset("pull")

    with inside(ClosureContext(worker_index=9, closure_id=1)):
        iterator = make(dataset_fn, InputContext(5, 3), worker_index=3)
        assert next(iterator) == 3
        with pytest.raises(UsageError, match=r"^pull in dataset code"):
            next(iterator)
        assert get_worker_index() == 9
    assert next(make(dataset_fn, worker_index=4)) == 4


def test_batches_are_loaded_ahead_but_not_further(made: list[WorkerIterator]) -> None:
    dataset = Gated()
    made.append(iterator := WorkerIterator(dataset, ONE, ahead=2))
    dataset.gate.release(100)
    for _ in range(2):
        assert dataset.loading.acquire(timeout=20)
    assert next(iterator) == 0  # both are loaded at last, and now there is room for a third
    assert dataset.loading.acquire(timeout=20)
    assert not dataset.loading.acquire(blocking=False)
    assert iterator.position == 1


def test_next_blocks_until_a_batch_is_loaded(made: list[WorkerIterator]) -> None:
    dataset = Gated()
    made.append(iterator := WorkerIterator(dataset, ONE))
    got: list[int] = []
    step = threading.Thread(target=lambda: got.append(next(iterator)))
    step.start()
    assert dataset.loading.acquire(timeout=20)
    assert got == []
    dataset.gate.release()
    step.join(20)
    assert got == [0]
    dataset.gate.release(5)


# --- the end ----------------------------------------------------------------------------------


def test_the_end_of_data_comes_after_the_last_batch_and_stays(
    make: Callable[..., WorkerIterator],
) -> None:
    iterator = make(lambda: iter([1]))
    assert next(iterator) == 1
    for _ in range(2):
        with pytest.raises(EndOfData, match=r"^dataset <lambda> has no further batch$"):
            next(iterator)
    assert iterator.position == 1


async def test_a_dataset_outlasts_epochs_and_begins_again_once_in_each(
    make: Callable[..., WorkerIterator],
) -> None:
    built: list[int] = []

    def dataset() -> Iterator[int]:
        built.append(len(built))
        yield from range(2)

    iterator = make(dataset)
    assert [await iterator.next_in(3) for _ in range(2)] == [0, 1]
    with pytest.raises(EndOfData):
        await iterator.next_in(3)
    assert [await iterator.next_in(epoch) for epoch in (4, 5, 5)] == [0, 1, 0]
    assert iterator.position == 1
    assert await iterator.next_in(5) == 1
    with pytest.raises(EndOfData):
        await iterator.next_in(5)
    assert built == [0, 1, 2]


async def test_a_dataset_that_begins_again_does_not_block_the_loop(
    made: list[WorkerIterator],
) -> None:
    opened, begun = threading.Event(), itertools.count()

    def dataset() -> Iterator[int]:
        if next(begun):
            opened.wait()
        yield 0

    made.append(WorkerIterator(dataset, ONE))
    assert await made[0].next_in(0) == 0
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await made[0].next_in(1)
    opened.set()
    assert await made[0].next_in(1) == 0


async def test_a_dataset_that_has_failed_does_not_begin_again(
    make: Callable[..., WorkerIterator],
) -> None:
    iterator = make(lambda: (1 // rest for rest in (1, 0)))
    assert await iterator.next_in(0) == 1
    for epoch in (1, 2):
        with pytest.raises(ZeroDivisionError):
            await iterator.next_in(epoch)


async def test_an_error_of_dataset_code_is_raised_in_its_turn_with_its_traceback(
    make: Callable[..., WorkerIterator],
) -> None:
    def dataset_fn() -> Iterator[int]:
        yield 1
        raise OSError("file is gone")

    iterator = make(dataset_fn)
    assert next(iterator) == 1
    lengths = []
    for _ in range(3):
        await iterator.ready()  # which leaves it to next
        with pytest.raises(OSError, match=r"^file is gone$") as caught:
            next(iterator)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "dataset_fn"
        lengths.append(len(frames))
    assert len(set(lengths)) == 1  # the same exception is raised again; its traceback stays short


async def test_a_dataset_that_cannot_be_built_is_a_failed_input(
    make: Callable[..., WorkerIterator],
) -> None:
    original = StopIteration("not the end of data")

    def dataset_fn() -> Any:
        raise original

    iterator = make(dataset_fn)
    for _ in range(2):
        with pytest.raises(ClosureInputError):
            await iterator.ready()
        with pytest.raises(ClosureInputError) as caught:
            next(iterator)
        assert str(caught.value) == (
            "dataset dataset_fn could not be built: StopIteration: not the end of data"
        )
        assert caught.value.__cause__ is original


async def test_ready_waits_for_a_batch_without_taking_it(
    make: Callable[..., WorkerIterator],
) -> None:
    iterator = make(lambda: iter([1]))
    await iterator.ready()
    await iterator.ready()
    assert iterator.position == 0
    assert next(iterator) == 1
    await iterator.ready()  # the end is something that next need not wait for
    with pytest.raises(EndOfData):
        next(iterator)


async def test_ready_does_not_block_the_loop(made: list[WorkerIterator]) -> None:
    dataset = Gated()
    made.append(iterator := WorkerIterator(dataset, ONE))
    waiting = [asyncio.create_task(iterator.ready()) for _ in range(2)]
    await asyncio.to_thread(dataset.loading.acquire)
    assert not any(each.done() for each in waiting)
    dataset.gate.release()
    await asyncio.gather(*waiting)
    assert next(iterator) == 0
    dataset.gate.release(5)


@pytest.mark.parametrize("with_the_batch", [False, True])
async def test_cancelling_ready_loses_no_batch(
    made: list[WorkerIterator], with_the_batch: bool
) -> None:
    dataset = Gated()
    made.append(iterator := WorkerIterator(dataset, ONE))
    waiting = asyncio.create_task(iterator.ready())
    await asyncio.to_thread(dataset.loading.acquire)
    if with_the_batch:
        dataset.gate.release(5)
        assert dataset.loading.acquire(timeout=20)  # loaded: the wake-up is on its way
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not with_the_batch:
        dataset.gate.release(5)
        await iterator.ready()
    assert next(iterator) == 0


def test_a_loop_that_is_closed_meanwhile_does_not_stop_the_loader(
    made: list[WorkerIterator],
) -> None:
    dataset = Gated()
    made.append(iterator := WorkerIterator(dataset, ONE))
    loop = asyncio.new_event_loop()
    ready = iterator.ready()

    async def start_waiting() -> None:
        ready.send(None)  # as a task that is never resumed

    loop.run_until_complete(start_waiting())
    loop.close()
    dataset.gate.release(5)
    assert next(iterator) == 0
    with pytest.raises(GeneratorExit):
        ready.throw(GeneratorExit)


# --- closing ----------------------------------------------------------------------------------


async def test_a_closed_iterator_hands_out_nothing(make: Callable[..., WorkerIterator]) -> None:
    iterator = make(itertools.count)
    await iterator.ready()
    iterator.close()
    iterator.close()
    for attempt in (iterator.__next__, lambda: asyncio.run(iterator.ready())):
        with pytest.raises(ClosedError, match=r"^the iterator over dataset count was released$"):
            await asyncio.to_thread(attempt)


def test_close_ends_the_thread_and_closes_the_generator(
    make: Callable[..., WorkerIterator],
) -> None:
    closed = threading.Event()

    def dataset_fn() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            forbidden = get_worker_index()  # still dataset code
            closed.set()
            assert forbidden == 0

    iterator = make(dataset_fn)
    assert next(iterator) == 0
    iterator.close()
    assert has_ended(iterator, 20)
    assert closed.is_set()


async def test_close_wakes_who_waits(made: list[WorkerIterator]) -> None:
    dataset = Gated()
    made.append(iterator := WorkerIterator(dataset, ONE))
    asking = asyncio.create_task(asyncio.to_thread(next, iterator))
    waiting = asyncio.create_task(iterator.ready())
    await asyncio.to_thread(dataset.loading.acquire)
    iterator.close()
    for each in (asking, waiting):
        with pytest.raises(ClosedError):
            await each
    assert not has_ended(iterator, 0)  # dataset code does not return
    dataset.gate.release()
    assert has_ended(iterator, 20)
    assert dataset.closed.is_set()


def test_an_error_while_closing_a_dataset_is_logged(
    make: Callable[..., WorkerIterator], caplog: pytest.LogCaptureFixture
) -> None:
    def dataset_fn() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            raise OSError("cannot close")

    iterator = make(dataset_fn)
    next(iterator)
    iterator.close()
    assert has_ended(iterator, 20)
    assert caplog.messages == ["dataset dataset_fn raised when it was closed"]


# --- what a step holds ------------------------------------------------------------------------


@contextlib.contextmanager
def in_step(table: dict[str, WorkerIterator] | None) -> Iterator[None]:
    """Be a step of a worker that has these iterators; None: of no worker."""
    find = None if table is None else table.get
    runtime = Runtime(None, "strategy", find_iterator=find)  # type: ignore[arg-type]
    with inside(ClosureContext(worker_index=0, closure_id=7, runtime=runtime)):
        yield


class TestIteratorHandle:
    async def test_it_stands_for_the_iterator_of_the_worker_it_is_on(
        self, make: Callable[..., WorkerIterator]
    ) -> None:
        handle = IteratorHandle("it", b"key", 2, {})
        assert iter(handle) is handle
        with in_step({"it": make(lambda: range(1, 3))}):
            assert [next(handle), await handle.next_in(0)] == [1, 2]
            with pytest.raises(EndOfData):
                next(handle)

    def test_the_program_has_no_data(self) -> None:
        with pytest.raises(UsageError) as caught:
            next(IteratorHandle("it", b"key", 2, {}))
        assert str(caught.value) == (
            "next() on a per-worker iterator outside a step: each worker has its own data\n"
            "hint: pass the iterator to a step: schedule(step, args=(iterator,))"
        )

    def test_one_that_came_by_a_hidden_way_is_an_error(self) -> None:
        with in_step({}), pytest.raises(UsageError) as caught:
            next(IteratorHandle("it", b"key", 2, {}))
        assert str(caught.value) == (
            "a per-worker iterator was passed to the step in an unsupported way\n"
            "hint: pass it as an argument of the step, or let the step capture it"
        )

    def test_those_that_arrive_are_noted(self) -> None:
        sent = pickle.dumps([IteratorHandle("it", b"key", 2, {})])
        (unnoted,) = pickle.loads(sent)
        noted: list[IteratorHandle] = []
        token = arriving.set(noted)
        (handle,) = pickle.loads(sent)
        arriving.reset(token)
        assert noted == [handle]
        assert (handle.uid, handle.key, handle.num_pipelines) == ("it", b"key", 2)
        assert unnoted is not handle
        assert handle.starts == {}
