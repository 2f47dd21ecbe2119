from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from psync.api.scopes import runtime_here
from psync.client.context import ClosureContext, inside
from psync.client.runtime import Runtime, current_runtime
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
    def test_a_step_has_that_of_its_worker_and_the_program_none(self, runtime: Runtime) -> None:
        assert current_runtime() is None
        with in_step(runtime):
            assert current_runtime() is runtime
        with in_step(None):
            assert current_runtime() is None

    def test_updates_of_a_step_are_numbered_within_its_closure(self, runtime: Runtime) -> None:
        for _ in range(2):  # a second run draws the same identities
            with in_step(runtime):
                assert [runtime.begin_update("push") for _ in range(3)] == [(7, 0), (7, 1), (7, 2)]

    def test_updates_of_the_program_are_never_repeated(self, runtime: Runtime) -> None:
        drawn = [runtime.begin_update("push") for _ in range(3)]
        assert [closure for closure, _ in drawn] == [-1] * 3
        assert len(set(drawn)) == 3

    def test_pulls_of_a_step_are_noted_for_its_closure(self, runtime: Runtime) -> None:
        runtime.pulled.note([(1, 5)])
        for _ in range(2):  # the second run has pulled nothing yet
            with in_step(runtime) as closure:
                assert runtime.pulled is closure.pulled
                assert runtime.pulled.lowest(1) is None
                runtime.pulled.note([(1, 2)])
        assert runtime.pulled.lowest(1) == 5

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
