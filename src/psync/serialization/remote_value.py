"""RemoteValue: the handle to the result of a closure.

    NOT_READY --value--> READY        --error--> READY (with an error)
    NOT_READY --cancelled, or its worker's failure for good--> ABORTED

A result arrives pickled and stays so until it is fetched: one that goes on to another
closure is never unpickled on the coordinator. What the user gets is a copy: a program that
changes it changes nothing for later closures, to which the value goes as it came.

``AwaitFirst`` is the base of handles to values that are elsewhere: an operator, a conversion or an
iteration over one is a UsageError that names what to await.
"""

from __future__ import annotations

import asyncio
import enum
import numbers
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import numpy as np

from psync.closures.closure import Closure
from psync.errors import ClosureCancelled, UsageError, other_loop
from psync.serialization.payloads import Payload, unpack

T_co = TypeVar("T_co", covariant=True)

_PACKED = object()  # a value that nobody has fetched yet


class RemoteValueStatus(enum.Enum):
    """The status of a RemoteValue."""

    NOT_READY = "not ready"
    READY = "ready"
    ABORTED = "aborted"


class RemoteValue(Generic[T_co]):
    """The result of a closure: await it, or pass it to a later closure.

    ``await value`` waits for the result; ``get_nowait`` returns it without waiting. ``fetch`` and
    ``get`` are TensorFlow's names for ``await value``. To type checkers, the result of a step that
    returns a ``T`` is a ``RemoteValue[T]``.

    Args:
        closure: The closure whose result it is.
        cancel: Cancels the closure.

    Attributes:
        status: The state of the closure.

    Source: ``tf.distribute.experimental.coordinator.RemoteValue``; there, ``fetch`` blocks.
    """

    __psync_remote_value__ = True
    __slots__ = (
        "__weakref__", "_cancel", "_closure", "_ended", "_error", "_payload", "_value", "status",
    )  # fmt: skip

    def __init__(self, closure: Closure, cancel: Callable[[int], None]) -> None:
        self._closure = closure
        self.status = RemoteValueStatus.NOT_READY
        self._cancel = cancel
        self._payload: Payload | None = None  # the pickled result, until it is wanted
        self._value: Any = _PACKED
        self._error: BaseException | None = None
        self._ended: asyncio.Event | None = None  # made for the first who waits

    def __repr__(self) -> str:
        return f"<RemoteValue of {self._closure}, {self.status.value}>"

    def __await__(self) -> Generator[Any, None, T_co]:
        return RemoteValue.fetch(self).__await__()  # a handle of psync.blocking has another

    @property
    def closure_id(self) -> int:
        """Number of the closure whose result it is, as a ``RollbackEvent`` calls it."""
        return self._closure.id

    @property
    def _owner(self) -> object:
        """The coordinator that it belongs to."""
        return getattr(self._cancel, "__self__", None)

    def done(self) -> bool:
        """Return whether the closure has ended, with or without a value."""
        return self.status is not RemoteValueStatus.NOT_READY

    def cancel(self) -> None:
        """Cancel the closure: it does not begin, or its running step is stopped.

        A plain step cannot be stopped, but its pushes are refused from now on.
        """
        if not self.done():
            self._cancel(self._closure.id)

    async def fetch(self) -> T_co:
        """Wait for the closure to end and return its value; the same object every time.

        Raises:
            Exception: The exception of the step, with its own type if that can be imported here.
            ClosureCancelled: The closure was cancelled, perhaps because another one failed.
            ClosureInputError: An input of the closure failed.
            EndOfData: The closure reached the end of its worker's data.
            UsageError: The call runs on another event loop than the coordinator's, which is open.

        Cancellation: Safe; the closure continues.
        """
        loop = getattr(self._owner, "loop", None)
        if loop is not None and asyncio._get_running_loop() is not loop and not loop.is_closed():
            raise other_loop("fetch of a RemoteValue")
        if self.status is RemoteValueStatus.NOT_READY:
            if self._ended is None:
                self._ended = asyncio.Event()
            await self._ended.wait()
        return self.get_nowait()

    get = fetch

    def get_nowait(self) -> T_co:
        """Return the value of a closure that has ended, without waiting.

        Raises:
            UsageError: The closure has not ended.
            Exception: The errors of ``fetch``.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)  # each time it is raised adds to it
        if self._payload is None:
            raise UsageError(
                f"{self._closure} has not ended", hint="await the RemoteValue, or join() first"
            )
        if self._value is _PACKED:
            # Read-only memory is copied: the payload itself may go on to other closures.
            buffers = [
                buffer.toreadonly() if isinstance(buffer, memoryview) else buffer
                for buffer in self._payload.buffers
            ]
            self._value = unpack(self._payload.data, buffers)
        return cast(T_co, self._value)

    result = get_nowait  # its name until 0.2

    def _set_payload(self, payload: Payload) -> None:
        """The closure ended with a value."""
        self._payload = payload
        self.status = RemoteValueStatus.READY
        self._wake()

    def _set_error(self, error: BaseException) -> None:
        """The closure ended without one."""
        self._error = error
        cancelled = isinstance(error, ClosureCancelled)
        self.status = RemoteValueStatus.ABORTED if cancelled else RemoteValueStatus.READY
        self._wake()

    def _wake(self) -> None:
        if self._ended is not None:
            self._ended.set()


class AwaitFirst:
    """A value that must be awaited before it is used: base of variables and of parts of them."""

    __slots__ = ("__weakref__",)

    def _what_it_is(self) -> tuple[str, str]:
        """Return how messages call it, and what is to be awaited instead."""
        raise NotImplementedError

    def _refuse(self, used: str) -> NoReturn:
        name, instead = self._what_it_is()
        raise UsageError(
            f"{used}: {name} is not an array: its value is stored on ps tasks",
            hint=f"await its value first: {instead}",
        )

    if not TYPE_CHECKING:  # to a type checker, too, it is nothing that numpy takes

        def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
            self._refuse("conversion to an array")

        def __array_ufunc__(self, ufunc: np.ufunc, *inputs: Any, **options: Any) -> NoReturn:
            self._refuse(f"numpy.{ufunc.__name__}")

        def __array_function__(self, function: Any, *arguments: Any) -> NoReturn:
            self._refuse(f"numpy.{function.__name__}")

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


def _refusal(used: str) -> Any:
    def refuse(self: AwaitFirst, *_: object) -> NoReturn:
        self._refuse(used)

    return refuse


_REFUSED = {
    "operator +": "add radd iadd pos", "operator -": "sub rsub isub neg",
    "operator *": "mul rmul imul", "operator /": "truediv rtruediv itruediv",
    "operator //": "floordiv rfloordiv ifloordiv", "operator %": "mod rmod imod",
    "operator divmod": "divmod rdivmod", "operator **": "pow rpow ipow",
    "operator @": "matmul rmatmul imatmul", "operator &": "and rand iand",
    "operator |": "or ror ior", "operator ^": "xor rxor ixor", "operator ~": "invert",
    "operator <<": "lshift rlshift ilshift", "operator >>": "rshift rrshift irshift",
    "operator <": "lt", "operator <=": "le", "operator >": "gt", "operator >=": "ge",
    "operator abs": "abs", "operator round": "round", "truth": "bool", "int()": "int",
    "float()": "float", "complex()": "complex", "iteration": "iter", "`in`": "contains",
}  # fmt: skip
for _used, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(AwaitFirst, f"__{_name}__", _refusal(_used))


async def fetch_all(structure: Any) -> Any:
    """Return a nesting of dicts, lists and tuples with each RemoteValue replaced by its value."""
    if isinstance(structure, RemoteValue):
        if structure._payload is not None:
            return structure.get_nowait()
        return await RemoteValue.fetch(structure)
    if isinstance(structure, dict):
        return {key: await fetch_all(item) for key, item in structure.items()}
    if isinstance(structure, list | tuple):
        items = [await fetch_all(item) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    return structure
