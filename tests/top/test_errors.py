from __future__ import annotations

import pickle

import pytest

from psync import errors
from psync.errors import (
    ClosureInputError,
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    ParameterServerLost,
    PsyncError,
    RemoteError,
    RuleError,
    TaskLost,
    WorkerLost,
)
from psync.wire.remote_errors import exception_of, failure_of

TREE = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type)
    and (cls.__module__, cls.__name__) == (errors.__name__, name)  # not an earlier name
}
MADE = {
    TaskLost: lambda cls: cls("/job:ps/task:0", "is gone", hint="start it"),
    RemoteError: lambda cls: cls("/job:worker/task:1", "ValueError", "bad", "Traceback …\n"),
}


def make(cls: type[PsyncError]) -> PsyncError:
    for base, factory in MADE.items():
        if issubclass(cls, base):
            return factory(cls)
    return cls("what happened", hint="what to do")


class TestEveryError:
    def test_is_in_one_tree_and_says_what_it_means(self) -> None:
        assert len(TREE) > 40
        assert [cls for cls in TREE.values() if not issubclass(cls, PsyncError)] == []
        assert [cls for cls in TREE.values() if not cls.__doc__] == []

    def test_travels_by_pickle_as_it_is(self) -> None:
        for error in map(make, TREE.values()):
            error.add_note("while testing")
            for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
                copy = pickle.loads(pickle.dumps(error, protocol))
                assert type(copy) is type(error)
                assert str(copy) == str(error)
                assert copy.args == error.args
                assert vars(copy) == vars(error)
                assert str(pickle.loads(pickle.dumps(copy))) == str(error)


def test_what_the_operating_system_says_is_told_of_what_was_tried() -> None:
    with pytest.raises(ConfigurationError, match="run log x: No space left"):
        with errors.os_errors("run log x", "free some"):
            raise OSError(28, "No space left")


def test_those_that_python_has_a_name_for_are_these_too() -> None:
    for name, base in [
        ("ConfigurationError", ValueError),
        ("DuplicateTaskError", KeyError),
        ("DuplicateTaskError", ConfigurationError),
        ("ContextError", RuntimeError),
        ("ContextError", ValueError),
        ("UnsupportedError", NotImplementedError),
        ("PartitionError", ValueError),
        ("ValueMismatchError", ValueError),
        ("ReplicaValueError", ValueError),
        ("UnknownVariableError", LookupError),
        ("VariableIndexError", IndexError),
        ("IndexTypeError", TypeError),
        ("IndexValueError", ValueError),
        ("SerializationError", TypeError),
        ("ConnectFailed", OSError),
        ("ConnectionLost", OSError),
        ("DeadlineExceeded", TimeoutError),
    ]:
        assert issubclass(TREE[name], base)


def test_a_hint_stands_on_a_line_of_its_own_whatever_the_error_is_besides() -> None:
    assert str(ConfigurationError("no ps task", hint="add one")) == "no ps task\nhint: add one"
    assert str(ConfigurationError("no ps task")) == "no ps task"
    assert str(PsyncError()) == ""
    assert str(ConnectFailed("nobody", hint="start it")) == "nobody\nhint: start it"  # OSError
    assert ConnectionLost("gone").errno is None
    assert str(errors.DuplicateTaskError("two of worker 1")) == "two of worker 1"  # KeyError


def test_a_lost_task_is_named() -> None:
    lost = WorkerLost("/job:worker/task:3")
    assert (lost.task, str(lost)) == ("/job:worker/task:3", "/job:worker/task:3 was lost")
    lost = ParameterServerLost("/job:ps/task:0", "was restarted", hint="start again")
    assert str(lost) == "/job:ps/task:0 was restarted\nhint: start again"


def test_an_error_of_a_rule_names_what_raised_and_travels() -> None:
    error = RuleError("/job:ps/task:1", 'update rule "x" for "w/part_0"', "ValueError", "bad", "T")
    assert (
        error.message == 'update rule "x" for "w/part_0" raised ValueError on /job:ps/task:1: bad'
    )
    for again in (pickle.loads(pickle.dumps(error)), exception_of(failure_of(error), "elsewhere")):
        assert type(again) is RuleError
        assert (again.message, again.task) == (error.message, "/job:ps/task:1")
        assert (again.type_name, again.traceback_text) == ("ValueError", "T")


def test_the_cause_of_an_error_is_not_part_of_its_pickle() -> None:
    error = ClosureInputError("its dataset had failed")
    error.__cause__ = ValueError("bad")
    assert pickle.loads(pickle.dumps(error)).__cause__ is None


def test_the_error_of_another_loop_names_both_ways_out() -> None:
    error = errors.other_loop('read of "w"')
    assert isinstance(error, errors.UsageError)
    assert "psync.wait(…)" in str(error)
    assert "run_coroutine_threadsafe" in str(error)
