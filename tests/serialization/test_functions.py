"""Steps: pickled once, known by content on workers, refused with a reason."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from psync.errors import SerializationError
from psync.serialization.functions import (
    FunctionTable,
    StaleCaptureWarning,
    is_coroutine_step,
    load_function,
)


@pytest.fixture
def table() -> FunctionTable:
    return FunctionTable()


def make_step(value: Any) -> Callable[[], Any]:
    def step() -> Any:
        return value

    return step


def load(function: Any) -> Callable[..., Any]:
    buffers = [bytearray(buffer) for buffer in function.payload.buffers]
    return load_function(function.payload.data, buffers, function.name)


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def step(self, x: float) -> float:
        return self.rate * x

    async def __call__(self) -> None: ...


class RemoteValue:
    __psync_remote_value__ = True


# --- registering ------------------------------------------------------------------------------


def test_a_function_arrives_with_what_it_captured(table: FunctionTable) -> None:
    function = table.register(make_step([1, 2]))
    assert function.name == "step"
    assert len(function.key) == 16
    assert load(function)() == [1, 2]


def test_what_is_changed_after_the_first_schedule_is_not_captured(table: FunctionTable) -> None:
    state = {"a": 1}
    step = make_step(state)
    first = table.register(step)
    state["a"] = 2
    assert table.register(step) is first
    assert load(first)() == {"a": 1}


def test_functions_of_equal_content_share_an_entry(table: FunctionTable) -> None:
    assert table.register(make_step(1)) is table.register(make_step(1))
    assert table.register(make_step(1)).key != table.register(make_step(2)).key


def test_bound_methods_partials_and_objects_are_known_by_content(table: FunctionTable) -> None:
    trainer = Trainer(2.0)
    method = table.register(trainer.step)
    assert table.register(trainer.step) is method
    assert method.name == "Trainer.step"
    assert load(method)(3) == 6.0
    trainer.rate = 4.0  # no identity to be frozen under: the new state counts
    assert load(table.register(trainer.step))(3) == 12.0

    partial = table.register(functools.partial(trainer.step, 5))
    assert partial.name == "Trainer.step"
    assert load(partial)() == 20.0
    assert table.register(trainer).name == "Trainer"
    assert load(table.register(len))([1]) == 1
    assert load(table.register(dict))(a=1) == {"a": 1}


def test_a_function_leaves_the_table_with_its_callable_and_its_closures(
    table: FunctionTable,
) -> None:
    step = make_step(1)
    queued = table.register(step)
    key = queued.key
    del step
    gc.collect()
    assert table.lookup(key) is queued  # a closure that is queued refers to it
    del queued
    gc.collect()
    assert table.lookup(key) is None
    assert not table._by_key


# --- coroutine or plain -----------------------------------------------------------------------


async def coroutine_step() -> None: ...


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (coroutine_step, True),
        (functools.partial(coroutine_step), True),
        (Trainer(1.0), True),
        (Trainer(1.0).step, False),
        (make_step(1), False),
        (len, False),
        (dict, False),
        (functools.partial(functools.partial(make_step), 1), False),
    ],
)
def test_coroutine_functions_are_told_from_plain_ones(
    table: FunctionTable, fn: Any, expected: bool
) -> None:
    assert is_coroutine_step(fn) is expected
    function = table.register(fn)
    assert function.is_coroutine is expected
    assert is_coroutine_step(load(function)) is expected


# --- refusals ---------------------------------------------------------------------------------


def test_what_is_not_callable_is_refused(table: FunctionTable) -> None:
    with pytest.raises(SerializationError, match=r"^expected a function, got int$"):
        table.register(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        table.register(None)  # type: ignore[arg-type]


def test_a_coroutine_is_refused_with_the_remedy(table: FunctionTable) -> None:
    coroutine = coroutine_step()
    with pytest.raises(SerializationError) as caught:
        table.register(coroutine)  # type: ignore[arg-type]
    coroutine.close()
    assert str(caught.value) == (
        "expected a function, got the coroutine coroutine_step()\n"
        "hint: schedule the function itself: schedule(step, args=(…)) and not schedule(step(…))"
    )


def generator_step() -> Iterator[int]:
    yield 1


async def async_generator_step() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    "fn", [generator_step, async_generator_step, functools.partial(generator_step)]
)
def test_generator_functions_are_refused(table: FunctionTable, fn: Any) -> None:
    with pytest.raises(SerializationError, match=r'generator_step" is a generator function'):
        table.register(fn)


def test_a_capture_that_cannot_be_sent_is_named(table: FunctionTable) -> None:
    with pytest.raises(SerializationError) as caught:
        table.register(make_step(threading.Lock()))
    assert str(caught.value) == (
        'step "step" captures "value" (_thread.lock), which cannot be sent to a worker\n'
        "hint: create it inside the step, or pass the data to create it from"
    )
    assert not table._by_key


def test_a_captured_remote_value_is_refused_with_the_remedy(table: FunctionTable) -> None:
    with pytest.raises(SerializationError) as caught:
        table.register(make_step({"fine": 1, "loss": RemoteValue()}))
    assert str(caught.value) == (
        f'step "step" captures "value", which holds [\'loss\'] ({__name__}.RemoteValue), which '
        "cannot be sent to a worker with it, because it may have no value yet\nhint: pass it as an "
        "argument: schedule(step, args=(value,))"
    )
    assert not table._by_key


def test_a_remote_value_is_found_in_an_object_with_parts_that_do_not_travel(
    table: FunctionTable,
) -> None:
    class Holder:
        def __init__(self) -> None:
            self.lock, self.loss = threading.Lock(), RemoteValue()

        def __reduce__(self) -> Any:
            return list, ([self.loss],)

    with pytest.raises(
        SerializationError, match=r'captures "value", which has "loss" \(.*RemoteValue\)'
    ):
        table.register(make_step(Holder()))


def test_dataset_functions_may_be_generators_and_capture_anew_each_time(
    table: FunctionTable,
) -> None:
    size = 1

    def dataset_fn() -> Iterator[int]:
        yield from range(size)

    first = table.register_dataset(dataset_fn)
    assert table.register_dataset(dataset_fn) is first
    assert table.lookup(first.key) is first
    size = 2
    assert list(load(table.register_dataset(dataset_fn))()) == [0, 1]
    with pytest.raises(
        SerializationError, match=r'^dataset function "step" captures "value" \(_thread'
    ):
        table.register_dataset(make_step(threading.Lock()))


# --- captures that went stale -----------------------------------------------------------------


def test_a_rebound_capture_earns_one_warning_at_the_line_that_schedules(
    table: FunctionTable,
) -> None:
    rate = 0.1

    def step() -> float:
        return rate

    def schedule() -> Any:
        return table.register(step)

    first = schedule()
    rate = 0.2
    with pytest.warns(StaleCaptureWarning) as caught:
        assert schedule() is first
    assert [str(each.message) for each in caught] == [
        'step "step" captured "rate" when it was first scheduled; "rate" has been rebound since, '
        "but workers keep using the captured value; pass it as an argument, or define the step "
        "again"
    ]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rate = 0.3
        schedule()


# --- on the worker ----------------------------------------------------------------------------


def test_a_step_that_cannot_be_loaded_says_why(table: FunctionTable) -> None:
    module = types.ModuleType("only_on_the_coordinator")
    exec("def step(): pass", module.__dict__)
    sys.modules["only_on_the_coordinator"] = module
    try:
        function = table.register(module.step)
    finally:
        del sys.modules["only_on_the_coordinator"]
    with pytest.raises(SerializationError) as caught:
        load_function(function.payload.data, function.payload.buffers, function.name)
    assert str(caught.value) == (
        'step "step" cannot be loaded on this worker: ModuleNotFoundError: No module named '
        "'only_on_the_coordinator'\n"
        "hint: install its imports on this worker, and use the same script"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
