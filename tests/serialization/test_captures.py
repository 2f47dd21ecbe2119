"""What functions capture: names, rebinding, and who is to blame when one cannot be sent."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from psync.serialization.captures import (
    CaptureWatch,
    Refusal,
    blame,
    captures_of,
    importable_from,
    name_of,
    refers_to,
    resolves_by_name,
    travels_by_value,
    type_name,
)


def define(source: str, **names: Any) -> dict[str, Any]:
    """Return the namespace of a script: its functions travel by value, as those of __main__."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(source, namespace)
    return namespace


def at_module_level() -> None:
    """A function that other tasks can import."""


class Trainer:
    def step(self) -> None: ...

    def __call__(self) -> None: ...


def test_code_refers_to_what_it_names_itself_or_through_functions_of_its_module() -> None:
    names = define(
        "def a(): return lib.wanted()\n"
        "def b(): return [wanted for _ in range(2)]\n"
        "def c(): return a()\n"
        "def d(): return lambda: lib.wanted(x=1)\n"
        "def e(wanted): return wanted.wanted + other.wanted\n"
        "def f(): return f() + e(1)\n"
        "class Batches:\n"
        "    def __iter__(self): return b()\n"
        "    def f(self): return f()\n"
        "class Model:\n"
        "    def __init__(self): self.value = wanted()\n"
        "    def build(self): return wanted()\n"
        "    def __call__(self): return f()\n",
        wanted=at_module_level,
        lib=types.ModuleType("lib"),
        other=Trainer,
    )
    names["lib"].wanted = at_module_level
    batches = names["Batches"]
    for fn in (*(names[name] for name in "abcd"), batches, batches(), batches.__iter__):
        assert refers_to(fn, at_module_level), fn
    assert refers_to(functools.partial(functools.partial(names["c"])), at_module_level)
    assert refers_to(types.MethodType(names["a"], 1), at_module_level)
    for fn in (names["e"], names["f"], batches().f, len, np.zeros):
        assert not refers_to(fn, at_module_level), fn
    model = names["Model"]
    assert refers_to(model, at_module_level)
    assert not refers_to(model.__new__(model), at_module_level), "neither is run by a call of it"


def test_a_name_that_a_module_makes_when_it_is_first_asked_for_it_is_seen() -> None:
    """As psync makes its own: a program may name none of them before."""
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = {at_module_level.__name__: at_module_level}.__getitem__  # type: ignore[method-assign]
    names = define(
        "def a(): return lazy.at_module_level()\ndef b(): return lazy.other\n", lazy=lazy
    )
    assert refers_to(names["a"], at_module_level)
    assert not refers_to(names["b"], at_module_level)


# --- names ------------------------------------------------------------------------------------


def test_messages_call_a_function_by_its_innermost_qualified_name() -> None:
    def step() -> None: ...

    assert name_of(step) == "step"
    assert name_of(at_module_level) == "at_module_level"
    assert name_of(Trainer().step) == "Trainer.step"
    assert name_of(functools.partial(functools.partial(step, 1), 2)) == "step"
    assert name_of(Trainer()) == "Trainer"


def test_type_names_carry_their_module_unless_built_in() -> None:
    assert type_name(1) == "int"
    assert type_name(threading.Lock()) == "_thread.lock"


def test_only_what_another_task_can_import_travels_by_name() -> None:
    def nested() -> None: ...

    script = define("def step(): pass")
    assert not travels_by_value(at_module_level)
    assert travels_by_value(nested)
    assert travels_by_value(lambda: None)
    assert travels_by_value(script["step"])
    at_module_level.__module__, was = "no.such.module", at_module_level.__module__
    try:
        assert not resolves_by_name(at_module_level)
    finally:
        at_module_level.__module__ = was


def test_captures_are_free_names_and_the_globals_of_nested_code_too() -> None:
    script = define(
        "def step():\n"
        "    def inner():\n"
        "        return [a + len(x) for x in b]\n"
        "    return inner\n",
        a=1, b=[2], unused=3,
    )  # fmt: skip
    assert captures_of(script["step"]) == {"a": 1, "b": [2]}
    free = object()
    assert captures_of(lambda: free)["free"] is free


# --- rebinding --------------------------------------------------------------------------------


def test_a_global_that_is_rebound_is_reported_once() -> None:
    script = define("def step(): return rate, other", rate=0.1, other=2)
    watch = CaptureWatch(script["step"])
    assert watch.rebound() == []
    script["rate"] = 0.2
    assert watch.rebound() == ["rate"]
    script["rate"] = 0.3
    assert watch.rebound() == []
    del script["other"]
    assert watch.rebound() == ["other"]


def test_a_free_variable_that_is_rebound_or_deleted_is_reported_once() -> None:
    batches, rate = [1], [2]

    def step() -> Any:
        return batches, rate

    watch = CaptureWatch(step)
    assert watch.rebound() == []
    batches = [1]
    assert watch.rebound() == ["batches"]
    assert watch.rebound() == []
    del step.__closure__[1].cell_contents  # type: ignore[index]  # as the statement `del rate`
    assert watch.rebound() == ["rate"]


def test_rebinding_to_an_equal_value_changes_nothing_but_the_next_change_counts() -> None:
    free = 10.0**20

    def step() -> float:
        return free

    script = define("def step(): return rate", rate=10.0**20)
    for watch in (CaptureWatch(step), CaptureWatch(script["step"])):
        free, script["rate"] = float("1e20"), float("1e20")
        assert watch.rebound() == []
        free, script["rate"] = 5.0, 5.0
        assert len(watch.rebound()) == 1


def test_a_helper_that_was_replaced_is_reported_by_its_name() -> None:
    script = define("def helper(): return rate\ndef step(): return helper(), rate", rate=0.1)
    watch = CaptureWatch(script["step"])
    script["helper"] = None
    script["rate"] = 0.2
    assert watch.rebound() == ["helper", "rate"]


def test_modules_and_functions_that_travel_by_name_are_not_watched() -> None:
    script = define("def step(): return np.mean, types", np=np, types=types)
    watch = CaptureWatch(script["step"])
    script["np"] = script["types"] = None
    assert watch.rebound() == []
    assert CaptureWatch(at_module_level).rebound() == []


def test_watching_keeps_neither_the_function_nor_its_captures_alive() -> None:
    class Model: ...

    def make() -> tuple[CaptureWatch, Any, Any]:
        model = Model()

        def step() -> Any:
            return model, step

        model.step = step  # type: ignore[attr-defined]
        return CaptureWatch(step), weakref.ref(step), weakref.ref(model)

    watch, step, model = make()
    gc.collect()
    assert step() is None
    assert model() is None
    assert watch.rebound() == []


# --- blame ------------------------------------------------------------------------------------


def fails(obj: object) -> Exception | None:
    """A lock cannot be sent, nor can anything that leads to one."""
    import cloudpickle

    try:
        cloudpickle.dumps(obj)
    except Exception as exc:
        return exc
    return None


LOCK = threading.Lock()


class Holder:
    def __init__(self) -> None:
        self.fine, self.lock = 1, LOCK

    def step(self) -> None: ...


class BadRepr:
    def __repr__(self) -> str:
        raise ValueError("no repr")


def with_default(x: Any) -> Callable[..., Any]:
    def step(first: int, fine: int = 1, lock: Any = x) -> None: ...

    return step


def test_blame_leads_to_the_object_that_cannot_be_sent() -> None:
    for obj, sentence in [
        (LOCK, "it (_thread.lock) cannot be sent"),
        ([1, LOCK], "it holds [1] (_thread.lock), which cannot be sent"),
        ((1, {"a": LOCK}), "it holds [1], which holds ['a'] (_thread.lock), which cannot be sent"),
        ({LOCK}, "it holds an element (_thread.lock), which cannot be sent"),
        (Holder(), 'it has "lock" (_thread.lock), which cannot be sent'),
        (
            Holder().step,
            'it captures "self", which has "lock" (_thread.lock), which cannot be sent',
        ),
        (
            functools.partial(at_module_level, 1, LOCK),
            "it binds argument 1 (_thread.lock), which cannot be sent",
        ),
        (
            functools.partial(at_module_level, lock=LOCK),
            'it binds "lock" (_thread.lock), which cannot be sent',
        ),
        (
            functools.partial(with_default(LOCK)),
            'it calls "step", which has the default "lock" (_thread.lock), which cannot be sent',
        ),
        (
            define("def h(): return lock\ndef step(): return h()", lock=LOCK)["step"],
            'it captures "h", which captures "lock" (_thread.lock), which cannot be sent',
        ),
        (
            type("Local", (), {"__module__": "__main__", "lock": LOCK}),
            'it has "lock" (_thread.lock), which cannot be sent',
        ),
    ]:
        found, error, path = blame("it", obj, fails)
        assert found == sentence
        assert (path[0], path[-1]) == (obj, LOCK)
        assert "cannot pickle '_thread.lock' object" in str(error)


def only(culprit: object, error: Exception, obj: object) -> Exception | None:
    return error if obj is culprit else None


def test_blame_says_no_more_than_it_knows() -> None:
    def step() -> None: ...

    for obj, sentence in [
        (step, "it cannot be sent"),
        (at_module_level, "it cannot be sent"),
        ([1], "it (list) cannot be sent"),
        ({1}, "it (set) cannot be sent"),
        ({1: 1}, "it (dict) cannot be sent"),
        (Holder(), f"it ({__name__}.Holder) cannot be sent"),
        (functools.partial(len, b=1), "it (functools.partial) cannot be sent"),
        (Holder().step, "it (method) cannot be sent"),
    ]:
        error = ValueError("no")
        found = blame("it", obj, functools.partial(only, obj, error))
        assert found == (sentence, error, [obj])


def test_blame_survives_a_key_whose_repr_raises() -> None:
    assert " holds [<BadRepr instance at " in blame("it", {BadRepr(): LOCK}, fails)[0]


def test_blame_stops_at_an_object_that_refuses_by_itself() -> None:
    holder = Holder()
    refusal = Refusal(holder, "it stays here")
    found = blame("it", [holder], lambda obj: fails(obj) and refusal)
    assert found[:2] == (f"it holds [0] ({__name__}.Holder), which cannot be sent", refusal)
    assert found[2][-1] is holder


def test_blame_of_endless_nesting_ends() -> None:
    endless: list[Any] = [LOCK]
    endless.insert(0, endless)
    sentence, error, _ = blame("it", endless, fails)
    assert sentence == "it holds [0], which is nested too deeply or cannot be sent"
    assert isinstance(error, (TypeError, pickle.PicklingError))


def test_what_a_module_has_can_be_imported_from_it() -> None:
    assert importable_from(LOCK) == f"from {__name__} import LOCK"
    assert importable_from(threading.Lock()) == ""
    assert importable_from(sys.modules["__main__"].__dict__) == ""
