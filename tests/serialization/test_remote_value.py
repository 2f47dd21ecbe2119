"""States, and what a fetch gives."""

from __future__ import annotations

import asyncio
import operator
from typing import Any

import numpy as np
import pytest

from psync import RemoteValue, RemoteValueStatus
from psync.closures.closure import Closure
from psync.errors import ClosureCancelled, UsageError
from psync.serialization.payloads import Payload, pack
from psync.serialization.remote_value import AwaitFirst


class Owner:
    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, closure_id: int) -> None:
        self.cancelled.append(closure_id)


def value_of(owner: Owner | None = None) -> RemoteValue:
    return RemoteValue(Closure(7, name="train"), (owner or Owner()).cancel)


def received(obj: object) -> Payload:
    """A payload whose arrays lie in writable memory, as when it came from a connection."""
    packed = pack(obj)
    return Payload(packed.data, tuple(memoryview(bytearray(b)) for b in packed.buffers))


def test_it_says_what_it_is_and_where_it_stands():
    owner = Owner()
    value = value_of(owner)
    assert repr(value) == "<RemoteValue of closure 7 (train), not ready>"
    assert value.status is RemoteValueStatus.NOT_READY
    assert not value.done()
    assert value._payload is None
    assert value._owner is owner
    value._set_payload(pack(3))
    assert value.status is RemoteValueStatus.READY
    assert value.done()


async def test_fetch_waits_and_everybody_gets_the_same_object():
    value = value_of()
    fetches = [asyncio.create_task(value.fetch()) for _ in range(3)]
    fetches.append(asyncio.create_task(value.get()))
    await asyncio.sleep(0)
    value._set_payload(pack([1, 2]))
    found = await asyncio.gather(*fetches)
    assert found[0] == [1, 2]
    assert all(each is found[0] for each in found)
    assert await value is found[0]
    assert value.get_nowait() is found[0]


async def test_an_error_is_raised_each_time_without_growing():
    value = value_of()
    value._set_error(ValueError("no"))
    assert value.status is RemoteValueStatus.READY
    lengths = []
    for _ in range(3):
        with pytest.raises(ValueError, match="no") as info:
            await value
        frames, traceback = 0, info.value.__traceback__
        while traceback is not None:
            frames, traceback = frames + 1, traceback.tb_next
        lengths.append(frames)
    assert len(set(lengths)) == 1


async def test_a_cancelled_closure_is_aborted():
    value = value_of()
    waiting = asyncio.create_task(value.fetch())
    await asyncio.sleep(0)
    value._set_error(ClosureCancelled("closure 7 was cancelled"))
    assert value.status is RemoteValueStatus.ABORTED
    with pytest.raises(ClosureCancelled):
        await waiting


def test_cancel_asks_the_coordinator_until_it_has_ended():
    owner = Owner()
    value = value_of(owner)
    value.cancel()
    assert owner.cancelled == [7]
    value._set_payload(pack(1))
    value.cancel()
    assert owner.cancelled == [7]


def test_a_result_before_its_time_is_an_error():
    with pytest.raises(UsageError, match=r"closure 7 \(train\) has not ended"):
        value_of().get_nowait()


async def test_a_cancelled_fetch_disturbs_no_other():
    value = value_of()
    fetch = asyncio.create_task(value.fetch())
    other = asyncio.create_task(value.fetch())
    await asyncio.sleep(0)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    value._set_payload(pack(5))
    assert await other == 5
    assert await value == 5


async def test_what_is_fetched_can_be_changed_and_the_payload_stays():
    value = value_of()
    value._set_payload(received(np.zeros(10_000)))
    array = await value
    array += 1
    assert value._payload is not None
    assert not any(value._payload.buffers[0])
    assert (await value == 1).all()


class Part(AwaitFirst):
    def _what_it_is(self) -> tuple[str, str]:
        return "a part", "`await part`"


PART: Any = Part()
ONES = np.ones(2)


def test_its_use_as_an_array_says_to_await_it() -> None:
    for use, used in [
        (lambda: PART * 2, "operator *"),
        (lambda: 1 + PART, "operator +"),
        (lambda: PART @ ONES, "operator @"),
        (lambda: ONES @ PART, "numpy.matmul"),
        (lambda: ONES * PART, "numpy.multiply"),
        (lambda: PART < 1, "operator <"),
        (lambda: PART >= ONES, "operator >="),
        (lambda: PART == 0.0, "operator =="),
        (lambda: 0 == PART, "operator =="),
        (lambda: PART == ONES, "operator =="),
        (lambda: ONES == PART, "numpy.equal"),
        (lambda: PART == np.float32(0), "operator =="),
        (lambda: PART != 0.0, "operator !="),
        (lambda: PART != ONES, "operator !="),
        (lambda: PART in [0.0, PART], "operator =="),
        (lambda: -PART, "operator -"),
        (lambda: abs(PART), "operator abs"),
        (lambda: divmod(PART, 2), "operator divmod"),
        (lambda: 2**PART, "operator **"),
        (lambda: operator.iadd(PART, 1), "operator +"),
        (lambda: round(PART), "operator round"),
        (lambda: bool(PART), "truth"),
        (lambda: int(PART), "int()"),
        (lambda: float(PART), "float()"),
        (lambda: complex(PART), "complex()"),
        (lambda: list(PART), "iteration"),
        (lambda: 1 in PART, "`in`"),
        (lambda: np.asarray(PART), "conversion to an array"),
        (lambda: np.mean(PART), "numpy.mean"),
        (lambda: np.concatenate([PART, ONES]), "numpy.concatenate"),
    ]:
        with pytest.raises(UsageError) as caught:
            use()
        assert str(caught.value) == (
            f"{used}: a part is not an array: its value is stored on ps tasks\n"
            "hint: await its value first: `await part`"
        )


def test_it_is_itself_and_no_other_and_a_key_of_dicts() -> None:
    assert PART == PART
    assert Part() != PART
    assert {PART: 1}[PART] == 1
    assert PART in [Part(), PART]
    assert Part() not in [None, PART, "a part"]
    assert [Part(), PART].index(PART) == 1
    assert not PART != PART
    assert PART != None  # noqa: E711  # a comparison, as in what compares fields
    assert hash(PART) == object.__hash__(PART)
