"""Arguments and results: by value, arrays beside the pickle, refusals that name the culprit."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from psync.errors import SerializationError
from psync.serialization.payloads import (
    EMPTY,
    INLINE_BYTES,
    MAX_BUFFERS,
    MAX_HANDLES,
    Packing,
    Payload,
    pack,
    unpack,
)
from psync.wire.limits import DEFAULT_LIMITS

pack_arguments = Packing(DEFAULT_LIMITS, main_by_name=True).arguments


class RemoteValue:
    """Stands for psync's, which is recognised by this mark."""

    __psync_remote_value__ = True


class Coordinator:
    __psync_capture_error__ = "it lives in the program, not on workers"
    __psync_capture_hint__ = "create it inside the step, or pass the data to create it from"


class Handle:
    """Stands for a variable or an optimizer, which are recognised by this method."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.num_pickled = 0

    def __psync_handle__(self) -> int:
        return len(self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        self.num_pickled += 1
        return Handle, self.parts


class Itself:
    """A handle that is one object in a process."""

    known: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.known[id(self)] = self

    def __psync_handle__(self) -> None:
        pass

    def __reduce__(self) -> tuple[Any, ...]:
        return _known_as, (id(self),)


def _known_as(number: int) -> Any:
    return Itself.known[number]


def received(payload: Payload) -> Payload:
    """The payload as it lies in the receive buffers of another task."""
    return Payload.from_segments([bytearray(segment) for segment in payload.segments])


def there(obj: Any) -> Any:
    """What another task gets."""
    payload = received(pack(obj))
    return unpack(payload.data, payload.buffers)


# --- by value ---------------------------------------------------------------------------------


def test_values_arrive_as_they_are() -> None:
    for value in [
        0,
        1.5,
        True,
        "text",
        b"bytes",
        2 + 1j,
        (),
        [1, (2,)],
        {"a": {1}},
        np.float32(1.5),
    ]:
        assert there(value) == value
        assert type(there(value)) is type(value)


def test_nothing_takes_no_bytes() -> None:
    assert pack(None) is EMPTY
    assert pack_arguments("train", (), {}) is EMPTY
    assert EMPTY.segments == ()
    assert EMPTY.nbytes == 0
    assert Payload.from_segments([]) is EMPTY
    assert unpack(EMPTY.data) is None


def test_later_changes_do_not_reach_what_was_packed() -> None:
    large, small, plain = np.zeros(INLINE_BYTES), np.zeros(2), [1]
    payload = pack([large, small, plain])
    large[:], small[:], plain[:] = 1, 1, [2]
    a, b, c = unpack(payload.data, payload.buffers)
    assert not a.any()
    assert not b.any()
    assert c == [1]


def test_a_payload_can_be_unpacked_again_after_its_first_value_was_changed() -> None:
    """A closure may be sent to a second worker; in one process nothing is copied in between."""
    payload = pack(np.zeros(INLINE_BYTES))
    unpack(payload.data, payload.buffers)[:] = 1
    assert not unpack(payload.data, payload.buffers).any()


def test_functions_and_classes_of_a_test_travel_by_value() -> None:
    factor = 3

    class Local:
        def times(self, x: int) -> int:
            return factor * x

    assert there(lambda x: factor * x)(2) == 6
    assert there(Local()).times(2) == 6


# --- arrays -----------------------------------------------------------------------------------

LARGE = np.arange(3 * 40 * 50, dtype=np.float32).reshape(3, 40, 50)


def test_arrays_arrive_writable_with_shape_dtype_and_order() -> None:
    for array in [
        LARGE,
        np.asfortranarray(LARGE),
        LARGE.transpose(1, 0, 2),
        LARGE[:, ::2],
        LARGE.astype(">f8"),
        LARGE.astype(ml_dtypes.bfloat16),
        LARGE.astype("M8[s]"),
        LARGE.astype("S8"),
        np.zeros(2000, [("a", "i4"), ("b", "f8")]),
        np.array(5.0),
        np.zeros((0, 7), np.int16),
        np.arange(6).reshape(2, 3).T,
        np.array(["a", None, 3], dtype=object),
        np.zeros(3, "S0"),
        np.zeros(2000, bool),
    ]:
        for writable in [True, False]:
            array = array.view()
            array.flags.writeable = array.flags.writeable and writable
            copy = there(array)
            assert copy.dtype == array.dtype
            assert copy.shape == array.shape
            assert copy.flags.fnc == array.flags.fnc
            assert copy.flags.writeable
            np.testing.assert_array_equal(copy, array)


def test_an_array_is_built_on_its_receive_buffer() -> None:
    array = np.arange(INLINE_BYTES, dtype=np.uint8)
    payload = pack(array)
    (buffer,) = payload.buffers
    assert len(buffer) == INLINE_BYTES
    assert len(payload.data) < 300
    assert payload.nbytes == INLINE_BYTES + len(payload.data)
    memory = np.array(buffer)
    copy = unpack(payload.data, [memory])
    memory[0] = 77
    assert copy[0] == 77


def test_an_array_is_aligned_wherever_its_buffer_lies() -> None:
    payload = pack(LARGE)
    memory = bytearray(b"x") + bytearray(payload.buffers[0])
    copy = unpack(payload.data, [memoryview(memory)[1:]])
    assert copy.flags.aligned
    assert copy.flags.writeable
    np.testing.assert_array_equal(copy, LARGE)


def test_the_number_of_buffers_is_limited() -> None:
    arrays = [np.full(INLINE_BYTES, i % 256, np.uint8) for i in range(MAX_BUFFERS + 2)]
    payload = pack(arrays)
    assert len(payload.buffers) == MAX_BUFFERS
    for array, copy in zip(arrays, unpack(payload.data, payload.buffers), strict=True):
        np.testing.assert_array_equal(copy, array)


def test_an_array_that_occurs_twice_stays_one_array() -> None:
    payload = pack([LARGE, LARGE])
    assert len(payload.buffers) == 1
    first, second = unpack(payload.data, payload.buffers)
    assert first is second


# --- RemoteValues -----------------------------------------------------------------------------


def test_remote_values_are_replaced_by_what_they_stand_for() -> None:
    first, second = RemoteValue(), RemoteValue()
    payload = pack_arguments("train", (second, [first]), {"again": second})
    assert payload.remote_values == (second, first)
    results = [received(pack([1])), "done"]
    (a, b), kwargs = unpack(payload.data, payload.buffers, results)
    assert (a, b, kwargs) == ([1], ["done"], {"again": [1]})
    assert a is kwargs["again"]
    assert isinstance(results[0], Payload)  # the caller's list is not changed


# --- refusals ---------------------------------------------------------------------------------

HINT = "\nhint: create it inside the step, or pass the data to create it from"


def test_an_argument_that_cannot_be_sent_is_named() -> None:
    for args, kwargs, message in [
        (
            (1, threading.Lock()),
            {},
            'argument 1 of step "train" (_thread.lock) cannot be sent to a worker',
        ),
        (
            (1,),
            {"model": {"lock": threading.Lock()}},
            'argument "model" of step "train" holds [\'lock\'] (_thread.lock), which cannot be '
            "sent to a worker",
        ),
        (
            (1,),
            {"c": [Coordinator()]},
            f'argument "c" of step "train" holds [0] ({__name__}.Coordinator), which cannot be '
            "sent to a worker: it lives in the program, not on workers",
        ),
        (
            (asyncio.Lock(),),
            {},
            'argument 0 of step "train" (asyncio.locks.Lock) cannot be sent to a worker: it '
            "belongs to the event loop of this process",
        ),
    ]:
        with pytest.raises(SerializationError) as caught:
            pack_arguments("train", args, kwargs)
        assert str(caught.value) == message + HINT


async def number() -> int:
    return 1


def test_what_was_not_awaited_or_not_listed_has_a_remedy_of_its_own() -> None:
    for make, text in [
        (number, "(coroutine) cannot be sent to the coordinator\nhint: await it first"),
        (
            lambda: (n for n in ()),
            "(generator) cannot be sent to the coordinator\nhint: convert it to a list: list(…)",
        ),
    ]:
        value = make()
        with pytest.raises(SerializationError) as caught:
            pack(value, subject="the result", receiver="the coordinator")
        value.close()
        assert str(caught.value) == f"the result {text}"
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(SerializationError) as caught:
        pack({"a": threading.Lock()}, subject='the result of step "f"', receiver="the coordinator")
    assert str(caught.value).startswith(
        "the result of step \"f\" holds ['a'] (_thread.lock), which cannot be sent to the "
        "coordinator\n"
    )


def test_an_error_of_the_objects_own_pickling_is_told() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise RuntimeError("not today")

    with pytest.raises(
        SerializationError, match=r"Stubborn\), .* to a worker: not today"
    ) as caught:
        pack([Stubborn()])
    assert isinstance(caught.value.__cause__, RuntimeError)
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert [frame.name for frame in frames] == ["__reduce__"]


async def elements() -> AsyncIterator[int]:
    yield 1


class Local:
    """Holds what cannot be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


OF_THIS_MODULE = Local()
IMPORT_IT = "import it inside the step: from {} import OF_THIS_MODULE; each worker then has its own"
MAKE_IT = "create it inside the step, or pass the data to create it from"


def test_of_each_kind_one_thing_is_said_to_do() -> None:
    for make, hint in [
        (threading.Lock, MAKE_IT),
        (Local, MAKE_IT),
        (lambda: OF_THIS_MODULE, IMPORT_IT.format(__name__)),
        (lambda: [OF_THIS_MODULE], IMPORT_IT.format(__name__)),
        (asyncio.Lock, MAKE_IT),
        (asyncio.Event, MAKE_IT),
        (asyncio.new_event_loop,
         "call asyncio.get_running_loop() in an `async def` step to get its worker's loop"),
        (number, "await it first"),
        (lambda: (i for i in range(3)), "convert it to a list: list(…)"),
        (elements, "convert it to a list: [each async for each in …]"),
        (lambda: open(os.devnull, "w"), "pass its path, and open it inside the step"),
        (lambda: open(os.devnull, "rb"), "pass its path, and open it inside the step"),
    ]:  # fmt: skip
        value = make()
        try:
            with pytest.raises(SerializationError) as caught:
                pack_arguments("train", (value,), {})
            assert caught.value.hint == hint
            assert "hint" not in caught.value.message
            assert caught.value.__cause__ is None
        finally:
            if hasattr(value, "close"):
                value.close()


def test_arguments_that_fail_only_together_are_told_as_a_whole() -> None:
    class Once:
        fails = iter([True, False, False, False])

        def __reduce__(self) -> Any:
            if next(Once.fails):
                raise RuntimeError("only now")
            return int, ()

    with pytest.raises(SerializationError) as caught:
        pack_arguments("train", (Once(),), {})
    assert str(caught.value).startswith(
        'the arguments of step "train" (tuple) cannot be sent to a worker: only now\n'
    )


def test_running_out_of_memory_is_no_capture_error() -> None:
    class Huge:
        def __reduce__(self) -> Any:
            raise MemoryError

    with pytest.raises(MemoryError):
        pack([Huge()])
    with pytest.raises(MemoryError):
        pack_arguments("train", (Huge(),), {})


# --- __main__ ---------------------------------------------------------------------------------

SCRIPT = """
import enum

class Config:
    version = 1

class Color(enum.Enum):
    RED = 1

def helper(x):
    return Config, x + 1

def make():
    class Local:
        pass
    return Local()
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A script that runs as ``__main__`` in this process."""
    module = types.ModuleType("__main__")
    exec(SCRIPT, module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_classes_of_main_travel_by_name_and_functions_by_value(main: types.ModuleType) -> None:
    payload = pack((main.Config, main.Config(), main.Color.RED, main.helper))
    main.Config.version = 2
    config, instance, color, helper = unpack(payload.data)
    assert config is main.Config
    assert isinstance(instance, main.Config)
    assert color is main.Color.RED
    assert helper is not main.helper
    assert helper(1) == (main.Config, 2)


def test_classes_of_main_travel_by_value_where_scripts_differ(main: types.ModuleType) -> None:
    payload = pack(main.Config, main_by_name=False)
    assert b"version" in bytes(payload.data)
    assert b"version" not in bytes(pack(main.Config).data)


def test_what_a_pickle_of_another_module_is_missing_is_an_ordinary_error() -> None:
    module = types.ModuleType("vanished")
    exec("class Model: pass", module.__dict__)
    sys.modules["vanished"] = module
    try:
        payload = pack(module.Model())
    finally:
        del sys.modules["vanished"]
    with pytest.raises(ModuleNotFoundError):
        unpack(payload.data)


def test_cloudpickle_is_not_imported_before_something_is_packed() -> None:
    """A ps imports these modules, and shall not pay for what it never uses."""
    imports = "import sys, psync.serialization.functions"
    source = f"{imports}; sys.exit('cloudpickle' in sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True, cwd=Path(__file__).parent)


# --- handles ----------------------------------------------------------------------------------


def test_a_handle_is_pickled_once_and_arrives_as_one_object() -> None:
    handle = Handle("a", Handle("inside"))
    first, again = there([handle, handle, 1]), there({"it": handle})["it"]
    assert first[0] is first[1] is again is not handle
    assert again.parts[0] == "a"
    assert handle.num_pickled == 1


def test_a_handle_is_pickled_again_when_what_it_depends_on_has_changed() -> None:
    handle = Handle("a")
    first = there([handle])[0]
    handle.parts += ("b",)
    second = there([handle])[0]
    assert (first.parts, second.parts) == (("a",), ("a", "b"))


def test_a_handle_with_parts_beside_its_pickle_arrives_with_them() -> None:
    handle = Handle(np.arange(INLINE_BYTES))
    first, second = there([handle, 1])[0], there([handle, 1])[0]
    assert first is not second
    np.testing.assert_array_equal(second.parts[0], np.arange(INLINE_BYTES))


def test_a_handle_that_nobody_uses_is_forgotten_when_many_others_have_arrived() -> None:
    arrived = weakref.ref(there([Handle(-1)])[0])
    gc.collect()
    assert arrived() is not None
    for number in range(MAX_HANDLES):
        there([Handle(number)])
    gc.collect()
    assert arrived() is None


def test_a_handle_that_was_sent_from_here_is_not_kept_alive_by_coming_back() -> None:
    handle = Itself()
    assert there([handle])[0] is handle
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None


def test_a_handle_in_the_memory_of_one_that_is_gone_is_another_one() -> None:
    for number in range(100):
        assert there([Handle(number)])[0].parts == (number,)
