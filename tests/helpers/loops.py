"""Tests that are one case for many inputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def for_each(
    names: str, inputs: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, in one case; an error says for which input it was raised.

    For tests of pure functions: what a fixture has made is there for all inputs together.
    """
    known, arguments = [name.strip() for name in names.split(",")], list(inputs)
    assert arguments, names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        assert not inspect.iscoroutinefunction(test), test

        @functools.wraps(test)
        def run(*args: Any, **others: Any) -> None:
            for given in arguments:
                values = (given,) if len(known) == 1 else given
                named = dict(zip(known, values, strict=True))
                try:
                    test(*args, **others, **named)
                except BaseException as exc:
                    exc.add_note(f"with {named}")
                    raise

        signature = inspect.signature(test)
        rest = [each for name, each in signature.parameters.items() if name not in known]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate
