"""What stands for a value elsewhere: each use as an array says what to do instead."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from psync.errors import UsageError
from psync.serialization.remote_value import AwaitFirst


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


def test_a_class_of_such_things_says_what_they_are() -> None:
    with pytest.raises(NotImplementedError):
        AwaitFirst()._what_it_is()
