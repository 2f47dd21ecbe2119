"""Step functions: pickled once on the coordinator, cached by content hash on the workers.

A function defined with ``def`` is pickled when it is first scheduled, and is known by identity
from then on: what it captured is frozen, and scheduling it again costs a look into a table.
Other callables (bound methods, partials, objects with ``__call__``) have no identity that would
last, or hold state that a call may change: they are pickled at every ``schedule`` and known by
content. To workers all are known by a hash of their pickle.

What arrives on a worker has come over an authenticated connection; see `payloads`.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

from psync.errors import SerializationError
from psync.serialization.captures import (
    CaptureWatch,
    StaleCaptureWarning,
    behind_partials,
    blame,
    name_of,
    type_name,
)
from psync.serialization.payloads import Packing, Payload, Segment, unpack

KEY_BYTES = 16  # 128 bits: no two functions share a key by accident

Step = Callable[..., Any]
T = TypeVar("T")  # how a worker keeps a function


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Function:
    """A step as it is sent to workers."""

    key: bytes  # KEY_BYTES of blake2b over what is sent
    name: str  # for messages
    is_coroutine: bool  # runs on the worker's loop; else in a thread
    payload: Payload


class FunctionTable:
    """The functions that one coordinator has sent or may be asked for.

    A function is in the table as long as its callable lives or a closure refers to its
    `Function`. Single owner: the coordinator's loop thread.
    """

    def __init__(self, packing: Packing | None = None) -> None:
        self._packing = packing or Packing()
        self._known = weakref.WeakKeyDictionary[FunctionType, tuple[Function, CaptureWatch]]()
        self._by_key: weakref.WeakValueDictionary[bytes, Function] = weakref.WeakValueDictionary()

    def register(self, fn: Step, *, stacklevel: int = 3) -> Function:
        """Return the step ``fn`` as it is sent; pickles it if it was not scheduled before.

        Args:
            fn: A function, coroutine function, or other callable.
            stacklevel: Of the warning; 3 blames the caller of the caller: of ``schedule``.

        Returns:
            The same object for the same function, and for callables of equal content.

        Raises:
            SerializationError: If it is not callable, is a generator function, or captures
                something that cannot be sent to a worker.

        Warns:
            StaleCaptureWarning: If a name that the function captured was rebound since; once
                for each name.
        """
        if type(fn) is FunctionType:
            known = self._known.get(fn)
            if known is None:
                _check_step(fn)
                known = self._known[fn] = (self._pickled(fn, "step"), CaptureWatch(fn))
            for name in known[1].rebound():
                warnings.warn(
                    f'step "{known[0].name}" captured "{name}" when it was first scheduled; '
                    f'"{name}" has been rebound since, but workers keep using the captured value; '
                    "pass it as an argument, or define the step again",
                    StaleCaptureWarning,
                    stacklevel=stacklevel,
                )
            return known[0]
        _check_step(fn)
        return self._pickled(fn, "step")

    def register_dataset(self, dataset_fn: Step) -> Function:
        """Return a dataset function as it is sent; it may be a generator function.

        It is pickled each time: every dataset that is created captures anew.

        Raises:
            SerializationError: If it captures something that cannot be sent to a worker.
        """
        return self._pickled(dataset_fn, "dataset function")

    def lookup(self, key: bytes) -> Function | None:
        """Return the function of that key, or None if nobody can be waiting for it any more."""
        return self._by_key.get(key)

    def _pickled(self, fn: Step, role: str) -> Function:
        name = name_of(fn)
        subject = f'{role} "{name}"'
        payload = self._packing.value(fn, subject)
        if payload.remote_values:
            raise self._captured_remote_value(subject, fn)
        digest = hashlib.blake2b(digest_size=KEY_BYTES)
        for segment in payload.segments:
            digest.update(segment)
        key = digest.digest()
        function = self._by_key.get(key)
        if function is None:
            function = Function(key, name, is_coroutine_step(fn), payload)
            self._by_key[key] = function
        return function

    def _captured_remote_value(self, subject: str, fn: Step) -> SerializationError:
        def fails(part: object) -> Exception | None:
            try:
                found = self._packing.value(part, subject).remote_values
            except SerializationError:
                return None
            return SerializationError() if found else None

        sentence, _, _ = blame(subject, fn, fails)
        return SerializationError(
            f"{sentence} to a worker with it, because it may have no value yet",
            hint="pass it as an argument: schedule(step, args=(value,))",
        )


def _check_step(fn: object) -> None:
    """Refuse what cannot be a step."""
    if inspect.iscoroutine(fn):
        raise SerializationError(
            f"expected a function, got the coroutine {fn.__qualname__}()",
            hint="schedule the function itself: schedule(step, args=(…)) and not schedule(step(…))",
        )
    if not callable(fn):
        raise SerializationError(f"expected a function, got {type_name(fn)}")
    code = _code_of(fn)
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise SerializationError(
            f'step "{name_of(fn)}" is a generator function, but a step returns one value',
            hint="return a list",
        )


def _code_of(fn: Any) -> Any:
    """Return the function behind partials and ``__call__``."""
    fn = behind_partials(fn)
    return fn if inspect.isroutine(fn) or isinstance(fn, type) else type(fn).__call__


def is_coroutine_step(fn: Step) -> bool:
    """Return whether calling ``fn`` gives a coroutine, which runs on the worker's loop."""
    return inspect.iscoroutinefunction(_code_of(fn))


# On the worker.


def load_function(data: Segment, buffers: Sequence[Segment], name: str) -> Step:
    """Return the callable that a coordinator pickled.

    Raises:
        SerializationError: If it cannot be built here; ``__cause__`` says why.
    """
    try:
        fn = unpack(data, buffers)
    except Exception as exc:  # it runs the constructors of whatever was captured
        raise SerializationError(
            f'step "{name}" cannot be loaded on this worker: {type(exc).__name__}: {exc}',
            hint="install its imports on this worker, and use the same script",
        ) from exc
    if not callable(fn):
        raise SerializationError(f'step "{name}": expected a callable, got {type_name(fn)}')
    return fn  # type: ignore[no-any-return]
