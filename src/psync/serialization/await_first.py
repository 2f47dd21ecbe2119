"""What stands for a value that is elsewhere, and says so when it is used as if it were here.

Without this, numpy and Python would take a variable for a list without an end, or say that an
operand is of a wrong type. ``hash`` stays that of objects, and so does ``==`` with everything that
is no number and no array: variables are keys of dicts, and are found in lists of variables.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from psync.errors import UsageError


class AwaitFirst:
    """A value that must be awaited before it is used: base of variables and of parts of them."""

    __slots__ = ("__weakref__",)

    def what_it_is(self) -> tuple[str, str]:
        """Return how messages call it, and what is to be awaited instead."""
        raise NotImplementedError

    def _refuse(self, used: str) -> NoReturn:
        name, instead = self.what_it_is()
        raise UsageError(
            f"{used}: {name} is not an array here: its value lives on ps tasks",
            hint=f"await its value first: {instead}",
        )

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        self._refuse("conversion to an array")

    def __array_ufunc__(self, ufunc: np.ufunc, *inputs: Any, **options: Any) -> NoReturn:
        self._refuse(f"numpy.{ufunc.__name__}")

    def __array_function__(self, function: Any, *arguments: Any) -> NoReturn:
        self._refuse(f"numpy.{function.__name__}")

    def __bool__(self) -> bool:
        self._refuse("truth")

    def __int__(self) -> int:
        self._refuse("int()")

    def __float__(self) -> float:
        self._refuse("float()")

    def __complex__(self) -> complex:
        self._refuse("complex()")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    def __contains__(self, item: object) -> bool:
        self._refuse("`in`")

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self._compared(other, "==", object.__eq__)

    def __ne__(self, other: object) -> bool:
        return self._compared(other, "!=", object.__ne__)

    def _compared(self, other: object, sign: str, compare: Callable[[Any, object], bool]) -> bool:
        """Compare as objects; a number or an array would silently be unequal."""
        if not isinstance(other, AwaitFirst) and (
            isinstance(other, numbers.Number) or hasattr(other, "__array__")
        ):
            self._refuse(f"operator {sign}")
        return compare(self, other)


def _operator(sign: str) -> Any:
    def refuse(self: AwaitFirst, *_: object) -> NoReturn:
        self._refuse(f"operator {sign}")

    return refuse


_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%",
    "divmod": "divmod", "pow": "**", "matmul": "@", "and": "&", "or": "|", "xor": "^",
    "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_OTHERS = {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "pos": "+", "invert": "~",
    "abs": "abs", "round": "round",
}  # fmt: skip
for _name, _sign in _BINARY.items():
    for _prefix in ("", "r", "i"):
        setattr(AwaitFirst, f"__{_prefix}{_name}__", _operator(_sign))
for _name, _sign in _OTHERS.items():
    setattr(AwaitFirst, f"__{_name}__", _operator(_sign))
