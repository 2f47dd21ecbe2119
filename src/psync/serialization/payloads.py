"""Pickling of functions, arguments, results and exceptions; the only module that unpickles.

A pickle is a program: a peer that may send one may run anything. So `unpack` and `load` are called
with segments of messages only, and a connection delivers no message before the peer has proved
that it knows the cluster's secret (`wire.handshake`). Nothing here may be used on data that came
another way.

Arrays travel beside the pickle, one buffer each, copied once: what is scheduled is captured by
value, and the copy is immutable here, where a retry may need it again. On the other side the
array is built on the receive buffer without a copy, and is writable.

A *handle*, a variable or an optimizer, is one object in each process, however often it arrives, and
nearly each closure brings some. So it travels as a pickle of its own that is made once, and who has
had the same bytes before takes the object that they gave then.

cloudpickle is imported when something is first packed, which a ps never does.

An exception of user code travels as a pickle, too: ``join`` raises the user's own exception, with
its type and attributes, so that ``except MyError`` works; the remote traceback comes along as text
in a `RemoteError`, its cause. An exception that cannot be pickled, or cannot be built again, is
represented by that `RemoteError` alone: reporting a failure must not fail.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from traceback import format_exception
from types import BuiltinFunctionType, FunctionType, TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from psync.errors import (
    ClosureInputError,
    RemoteError,
    SerializationError,
    TaskLost,
    TransportError,
)
from psync.net.platform import PerProcess
from psync.serialization.captures import (
    ATOMS,
    Refusal,
    blame,
    importable_from,
    resolves_by_name,
    type_name,
)
from psync.wire.limits import DEFAULT_LIMITS, Limits
from psync.wire.remote_errors import text_of as text_of

Segment = bytes | bytearray | memoryview
"""What holds bytes: the pickle itself, or the memory of one array."""

INLINE_BYTES = 4096  # smaller arrays stay in the pickle: a segment of its own costs more
MAX_HANDLES = 4096  # that are kept although nobody uses them now; those that came last
MAX_BUFFERS = 1024  # further arrays stay in the pickle: frames have a limit (65,536 segments)

_PLAIN = ATOMS | {
    tuple, list, dict, set, bytearray, pickle.PickleBuffer, type, FunctionType,
    BuiltinFunctionType, np.ndarray, *(type(np.dtype(code)) for code in np.typecodes["All"]),
}  # fmt: skip
"""Types whose objects are neither replaced nor refused: most of what is met in a pickle."""

_BOUND_TO_A_LOOP = (
    asyncio.AbstractEventLoop, asyncio.Future, asyncio.Lock, asyncio.Event, asyncio.Condition,
    asyncio.Semaphore, asyncio.Barrier, asyncio.Queue, asyncio.TaskGroup,
)  # fmt: skip
"""Some of these would pickle, although they mean nothing on another event loop."""

_PICKLING = sys.stdlib_module_names | {"psync", "cloudpickle"}
"""Packages whose frames tell nothing about what cannot be pickled."""

_BY_NAME_PACKAGES = frozenset({"numpy", "psync"})
"""What every task can import. cloudpickle finds that out anew each time, at 5 µs a name."""


@dataclass(slots=True, eq=False)
class Payload:
    """One pickled value.

    ``data`` is empty for nothing at all: None as a result, no arguments as arguments. So what
    needs no bytes takes none.
    """

    data: Segment
    buffers: tuple[Segment, ...] = ()  # memory of its arrays, in the order of the pickle
    remote_values: tuple[Any, ...] = ()  # RemoteValues inside, by position; empty once received
    kept: tuple[Any, ...] = ()  # handles inside that must live as long as this does

    @classmethod
    def from_segments(cls, segments: Sequence[Segment]) -> Payload:
        """Return the payload whose `segments` these are."""
        return cls(segments[0], tuple(segments[1:])) if segments else EMPTY

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What travels: nothing for an empty payload, else the pickle and its buffers."""
        return (self.data, *self.buffers) if len(self.data) else ()

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return len(self.data) + sum(map(len, self.buffers))


EMPTY = Payload(b"")


@dataclass(slots=True)
class _Handles:
    """Handles that this process has sent, and those that it got."""

    pickles: dict[int, tuple[object, bytes]] = field(default_factory=dict)
    """By the id of a handle, as long as it lives, with what they depend on."""
    arrived: weakref.WeakValueDictionary[bytes, Any] = field(
        default_factory=weakref.WeakValueDictionary
    )  # by their pickles
    kept: deque[Any] = field(default_factory=lambda: deque(maxlen=MAX_HANDLES))


_handles = PerProcess(_Handles)


# Packing.


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Stands in the pickle for a buffer beside it."""

    index: int


@functools.cache
def _pickler_class() -> Any:  # made late: cloudpickle is imported when it is needed
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
        """cloudpickle with arrays beside the pickle, RemoteValues by position, and refusals."""

        def __init__(self, file: io.BytesIO, main_by_name: bool, is_handle: bool) -> None:
            super().__init__(file, protocol=5)
            self.main_by_name = main_by_name
            self._is_handle = is_handle  # then all that is in it belongs to this pickle
            self.buffers: list[Segment] = []
            self.remote_values: list[Any] = []
            self.kept: list[Any] = []
            self._positions: dict[int, int] = {}  # id of a RemoteValue → its position

        def persistent_id(self, obj: object) -> tuple[str, int] | bytes | None:
            cls = type(obj)
            if cls in _PLAIN:
                return None
            if hasattr(cls, "__psync_handle__") and not self._is_handle:
                return _pickled_handle(obj, self.main_by_name)
            if isinstance(obj, _Buffer):
                return "buffer", obj.index
            if getattr(cls, "__psync_remote_value__", False):
                position = self._positions.setdefault(id(obj), len(self.remote_values))
                if position == len(self.remote_values):
                    self.remote_values.append(obj)
                return "value", position
            if getattr(cls, "__psync_kept__", False):
                self.kept.append(obj)
            reason = getattr(cls, "__psync_capture_error__", None)
            if isinstance(reason, str):
                raise Refusal(obj, reason)
            if isinstance(obj, _BOUND_TO_A_LOOP):
                raise Refusal(obj, "it belongs to the event loop of this process")
            return None

        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is np.ndarray:
                return self._reduce_array(obj)
            if isinstance(obj, (type, FunctionType)) and self._travels_by_name(obj):
                return NotImplemented  # the default of pickle
            return super().reducer_override(obj)

        def _travels_by_name(self, obj: Any) -> bool:
            module = obj.__module__
            if module == "__main__":
                return self.main_by_name and isinstance(obj, type) and resolves_by_name(obj)
            package = module.partition(".")[0] if isinstance(module, str) else None
            return package in _BY_NAME_PACKAGES and resolves_by_name(obj)

        def _reduce_array(self, array: NDArray[Any]) -> Any:
            dtype = array.dtype
            if dtype.hasobject or not dtype.itemsize:
                return NotImplemented
            if array.nbytes < INLINE_BYTES or len(self.buffers) >= MAX_BUFFERS:
                # A read-only array would be read-only on the other side.
                return (array if array.flags.writeable else array.copy("K")).__reduce_ex__(5)
            order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
            copy = np.array(array, order=order)
            copy.flags.writeable = False
            self.buffers.append(copy.reshape(-1, order="A").view(np.uint8).data)
            buffer = _Buffer(len(self.buffers) - 1)
            return _restore_array, (buffer, dtype, array.shape, order)

    return Pickler


def _pickled_handle(handle: Any, main_by_name: bool) -> bytes | None:
    """Return the pickle of a handle; None: it has parts that travel beside a pickle."""
    depends_on = (main_by_name, handle.__psync_handle__())
    pickles, number = _handles().pickles, id(handle)
    known = pickles.get(number)
    if known is not None and known[0] == depends_on:
        return known[1]
    payload = _pickle(handle, main_by_name, is_handle=True)
    if payload.buffers or payload.remote_values or payload.kept:
        return None
    pickled = bytes(payload.data)
    if known is None:
        weakref.finalize(handle, pickles.pop, number).atexit = False
    pickles[number] = depends_on, pickled
    return pickled


def _pickle(obj: object, main_by_name: bool, *, is_handle: bool = False) -> Payload:
    file = io.BytesIO()
    pickler = _pickler_class()(file, main_by_name, is_handle)
    pickler.dump(obj)
    return Payload(
        file.getvalue(), tuple(pickler.buffers), tuple(pickler.remote_values), tuple(pickler.kept)
    )


def pack(
    obj: object,
    *,
    subject: str = "the value",
    receiver: str = "a worker",
    main_by_name: bool = True,
) -> Payload:
    """Pickle ``obj`` by value: later changes to it, or to its arrays, change nothing.

    Args:
        obj: Anything; RemoteValues in it are replaced by their position.
        subject: What messages call it: 'the result of step "train"'.
        receiver: Where messages say that it cannot be sent to.
        main_by_name: Whether classes of ``__main__`` travel by name, which is right where the
            same script runs on all tasks. Functions of ``__main__`` travel by value always.

    Returns:
        The payload; `EMPTY` for None.

    Raises:
        SerializationError: If something in it cannot be pickled, or says that it must not leave
            this process (a class attribute ``__psync_capture_error__`` that gives the reason).
    """
    if obj is None:
        return EMPTY
    cls = type(obj)
    if cls in ATOMS or isinstance(obj, np.number):
        return Payload(pickle.dumps(obj, 5))
    if cls is tuple and ATOMS.issuperset(map(type, obj)):  # type: ignore[call-overload]
        return Payload(pickle.dumps(obj, 5))
    try:
        return _pickle(obj, main_by_name)
    except MemoryError:
        raise
    except Exception as exc:  # a user's __reduce__ may raise anything
        _refuse(subject, obj, exc, receiver, main_by_name)


def check_size(payload: Payload, subject: str, limits: Limits = DEFAULT_LIMITS) -> None:
    """Refuse what the other side would refuse, where the user can still be told.

    Raises:
        SerializationError: If one array, or all of it, is larger than a message may carry.
    """
    largest = max(map(len, payload.segments), default=0)
    for size, limit, what in (
        (largest, limits.segment_bytes, "one part"),
        (payload.nbytes, limits.body_bytes, "all of it"),
    ):
        if size > limit:
            raise SerializationError(
                f"{subject}: too large: {what} takes {size} bytes, expected at most {limit}",
                hint="split it, or store it in variables or files",
            )


@dataclass(frozen=True, slots=True)
class Packing:
    """How values are sent."""

    limits: Limits = DEFAULT_LIMITS  # for what is sent
    main_by_name: bool = True  # whether classes of ``__main__`` travel by name

    def value(self, obj: object, subject: str, receiver: str = "a worker") -> Payload:
        """Return a value as it is sent; see ``pack``.

        Raises:
            SerializationError: It cannot be sent, or is too large.
        """
        payload = pack(
            obj, subject=subject, receiver=receiver, main_by_name=self.main_by_name
        )  # fmt: skip
        check_size(payload, subject, self.limits)
        return payload

    def arguments(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
        """Return args and kwargs of a step as they are sent; `EMPTY` if there are none.

        Raises:
            SerializationError: One of them cannot be sent; it names the step and the argument.
        """
        if not args and not kwargs:
            return EMPTY
        subject = f'the arguments of step "{step}"'
        try:
            payload = _pickle((args, kwargs), self.main_by_name)
        except MemoryError:
            raise
        except Exception as exc:  # a user's __reduce__ may raise anything
            named = [(str(index), value) for index, value in enumerate(args)]
            named += [(f'"{name}"', value) for name, value in kwargs.items()]
            for name, value in named:  # the one that fails is named
                self.value(value, f'argument {name} of step "{step}"')
            # Only all of them together fail, as when they are nested too deeply.
            _refuse(subject, (args, kwargs), exc, "a worker", self.main_by_name)
        check_size(payload, subject, self.limits)
        return payload


def _fails(obj: object, main_by_name: bool) -> Exception | None:
    """Return the error that pickling ``obj`` gives, or None."""
    try:
        _pickle(obj, main_by_name)
    except Exception as exc:
        return exc
    return None


def _refuse(
    subject: str, obj: object, error: Exception, receiver: str, main_by_name: bool
) -> NoReturn:
    """Raise what names the part of ``obj`` that cannot be sent."""
    sentence, cause, path = blame(subject, obj, lambda part: _fails(part, main_by_name))
    reason = str(cause or error)
    # pickle's own words only repeat what the sentence says.
    reason = "" if reason.startswith("cannot pickle '") else f": {reason}"
    # An error that user code has raised while it was pickled, with the frames of that.
    frames = outside_of(_PICKLING, error.__traceback__)
    raise SerializationError(
        f"{sentence} to {receiver}{reason}", hint=_remedy(path, receiver)
    ) from (None if frames is None else error.with_traceback(frames))


def _remedy(path: Sequence[object], receiver: str) -> str:
    """Return what to do about the last object of a path, in words: one thing, which works."""
    obj, cls = path[-1], type(path[-1])
    if hasattr(cls, "__psync_capture_error__"):
        usual = "call it in the program, outside of steps"
        return str(getattr(cls, "__psync_capture_hint__", usual))
    if inspect.iscoroutine(obj) or isinstance(obj, asyncio.Future):
        return "await it first"
    if inspect.isgenerator(obj):
        return "convert it to a list: list(…)"
    if inspect.isasyncgen(obj):
        return "convert it to a list: [each async for each in …]"
    if receiver != "a worker":
        return "return the data inside it: arrays, numbers, text, or containers of them"
    if isinstance(obj, asyncio.AbstractEventLoop):
        return "call asyncio.get_running_loop() in an `async def` step to get its worker's loop"
    if found := next(filter(None, map(importable_from, path)), ""):
        return f"import it inside the step: {found}; each worker then has its own"
    if isinstance(obj, io.IOBase):
        return "pass its path, and open it inside the step"
    return "create it inside the step, or pass the data to create it from"


def outside_of(packages: Set[str], frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame on that is of none of these packages, or None."""
    while frames is not None:
        if str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0] not in packages:
            return frames
        frames = frames.tb_next
    return None


# Unpacking.


class _Unpickler(pickle.Unpickler):
    """Puts buffers and values back where `_pickler_class` took them out."""

    def __init__(
        self, data: Segment, buffers: Sequence[Segment], remote_values: Sequence[Any]
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._buffers = buffers
        self._remote_values = list(remote_values)

    def persistent_load(self, pid: tuple[str, int] | bytes) -> Any:
        if isinstance(pid, bytes):
            return _handle_of(pid)
        kind, index = pid
        if kind == "buffer":
            return self._buffers[index]
        value = self._remote_values[index]
        if isinstance(value, Payload):  # unpacked where it is first met; its next place shares it
            value = self._remote_values[index] = unpack(value.data, value.buffers)
        return value


def unpack(
    data: Segment, buffers: Sequence[Segment] = (), remote_values: Sequence[Any] = ()
) -> Any:
    """Return the value that `pack` pickled.

    Args:
        data: The pickle.
        buffers: Memory of its arrays. They belong to the value from now on: arrays are built on
            them without a copy, and are writable; a read-only or unaligned buffer is copied.
        remote_values: By position, what stands for each RemoteValue: its value, or the Payload
            of it, which is unpacked.

    Returns:
        The value; None for empty ``data``.

    Raises:
        Exception: Whatever the objects inside raise when they are built, such as ImportError.
    """
    if not len(data):
        return None
    return _Unpickler(data, buffers, remote_values).load()


def _handle_of(pickled: bytes) -> Any:
    """Return this process's handle of that pickle."""
    handles = _handles()
    handle = handles.arrived.get(pickled)
    if handle is None:
        handle = handles.arrived[pickled] = unpack(pickled)
        if id(handle) not in handles.pickles:  # else it is of this process, and not kept
            handles.kept.append(handle)
    return handle


def _restore_array(
    buffer: Segment, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> NDArray[Any]:
    """Build an array on ``buffer``; part of the pickle format."""
    array: NDArray[Any] = np.ndarray(shape, dtype, buffer=buffer, order=order)
    # Small segments may lie one behind the other in one buffer, at any address.
    return array if array.flags.writeable and array.flags.aligned else array.copy(order="K")


# Exceptions of user code.

MAX_MESSAGE_CHARS = 4096  # these texts travel in message headers, which are limited to 1 MiB
MAX_TRACEBACK_CHARS = 16_384
MAX_EXCEPTION_BYTES = 1 << 20  # an exception is a report, not a way to return data

_RUNNERS = frozenset({"psync", "asyncio", "concurrent", "contextvars", "threading"})
"""Packages whose frames lead to user code and tell its author nothing."""


class Described(NamedTuple):
    """An exception as it travels."""

    payload: Payload  # the exception itself, or EMPTY if it cannot be sent
    texts: tuple[str, str, str]  # qualified name of its type, its text, its traceback


def describe_exception(exc: BaseException, *, main_by_name: bool = True) -> Described:
    """Return what is told to another task about an exception of user code. Never raises."""
    frames = outside_of(_RUNNERS, exc.__traceback__)
    if frames is None and not isinstance(exc, SerializationError):
        frames = exc.__traceback__
    # How psync found that a task is lost or the network failed is no news to the user.
    chain = not isinstance(exc, (TaskLost, TransportError))
    lines = format_exception(type(exc), exc, frames, chain=chain)
    name = type_name(exc).removeprefix("__main__.")
    texts = (
        _clip(name, 256),
        _clip(text_of(exc), MAX_MESSAGE_CHARS),
        _clip("".join(lines), MAX_TRACEBACK_CHARS),
    )
    return Described(_pickled(exc, main_by_name), texts)


def rebuild_exception(
    task: str, type_name: str, message: str, traceback_text: str, payload: Payload
) -> Exception:
    """Return the exception that a task described. Never raises.

    Args:
        task: Name of the task that raised it.
        type_name: The first of the texts of `Described`.
        message: The second.
        traceback_text: The third.
        payload: See there.

    Returns:
        The user's own exception with a RemoteError as its ``__cause__``. A ClosureInputError
        keeps its own cause, and that one gets the RemoteError. Where the exception cannot be
        built, the RemoteError itself.
    """
    remote = RemoteError(task, type_name, message, traceback_text)
    if not payload.segments:
        return remote
    try:
        exc, cause = unpack(payload.data, payload.buffers)
        if not _may_be_raised(exc) or not (cause is None or _may_be_raised(cause)):
            return remote
        if cause is not None:
            cause.__cause__ = remote
        exc.__cause__ = remote if cause is None else cause
    except (Exception, SystemExit) as broken:  # constructors of user code may do anything
        remote.add_note(
            f"not raised as {type_name}, which cannot be unpickled here: "
            f"{type(broken).__name__}: {_clip(text_of(broken), 256)}"
        )
        return remote
    return exc


def _may_be_raised(exc: object) -> TypeGuard[Exception]:
    """Return whether raising it in a coroutine of the coordinator means what it says."""
    return isinstance(exc, Exception) and not isinstance(exc, (StopIteration, StopAsyncIteration))


def _pickled(exc: BaseException, main_by_name: bool) -> Payload:
    # An exception pickles without its cause. That of a ClosureInputError is what it is about.
    cause = exc.__cause__ if isinstance(exc, ClosureInputError) else None
    for pair in ((exc, cause), (exc, None)):
        try:
            payload = pack(pair, main_by_name=main_by_name)
        except (SerializationError, MemoryError):
            continue
        if payload.nbytes <= MAX_EXCEPTION_BYTES and not payload.remote_values:
            return payload
    return EMPTY


def _clip(text: str, max_chars: int) -> str:
    """Return ``text`` so that it can travel: valid Unicode, the middle left out if too long."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= max_chars:
        return text
    head, tail = max_chars // 4, max_chars - max_chars // 4
    return f"{text[:head]}\n… {len(text) - max_chars} characters left out …\n{text[-tail:]}"
