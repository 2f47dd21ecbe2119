from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from psync.api.scopes import runtime_here
from psync.client.context import ClosureContext, inside
from psync.client.runtime import Runtime
from psync.errors import ClosureCancelled, UsageError
from psync.worker.iterators import IteratorTable


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(None, "strategy", "program", None, IteratorTable().get)  # type: ignore[arg-type]


@contextlib.contextmanager
def in_step(runtime: Any, closure_id: int = 7) -> Iterator[ClosureContext]:
    closure = ClosureContext(worker_index=0, closure_id=closure_id, runtime=runtime)
    with inside(closure):
        yield closure


class TestRuntime:
    def test_nothing_is_begun_after_the_step(self, runtime: Runtime) -> None:
        for operation in (runtime.begin_update, lambda what: runtime_here(what, None)):
            with in_step(runtime) as closure:
                operation("push")
                closure.closed = True
                with pytest.raises(UsageError) as caught:
                    operation('assign to "w"')
                assert caught.value.message == (
                    'assign to "w" after the step has returned (closure 7)'
                )

    def test_nothing_is_begun_in_a_cancelled_step(self, runtime: Runtime) -> None:
        with in_step(runtime) as closure:
            closure.cancel()
            with pytest.raises(ClosureCancelled, match="push in closure 7: it was cancelled"):
                runtime.begin_update("push")
