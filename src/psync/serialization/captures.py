"""Captured names of step functions: rebinding detection, and names that cannot be pickled.

A function that other tasks can import travels by name. Any other (of ``__main__``, nested,
lambda) travels by value, and takes along what its free variables and global names are bound
to at that moment. Users do not see that happen, so two things are reported: that a name was
rebound afterwards, and which name leads to an object that cannot travel.
"""

from __future__ import annotations

import dis
import functools
import inspect
import reprlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
"""Types whose equal values are interchangeable: rebinding a name to one changes nothing."""

_EMPTY = object()  # what a cell holds whose variable is not assigned yet

_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")

_MAX_DEPTH = 12  # how deep `blame` looks; deeper paths help nobody, and cycles end here


class Refusal(Exception):
    """An object says itself that it must not be sent, and why.

    Its class has the attribute ``__psync_capture_error__``, and may have one for what to do
    instead, ``__psync_capture_hint__``; by default it is to be called in the program.
    """

    def __init__(self, obj: object, reason: str) -> None:
        super().__init__(reason)
        self.obj = obj


class StaleCaptureWarning(UserWarning):
    """A name was rebound after a step had captured it, when the step was first scheduled."""


def name_of(fn: object) -> str:
    """Return what messages call a callable: its qualified name from the last function inwards."""
    name = getattr(behind_partials(fn), "__qualname__", None)
    return name.rpartition("<locals>.")[2] if isinstance(name, str) else type(fn).__name__


def behind_partials(fn: Any) -> Any:
    """Return the callable that partials lead to."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def type_name(obj: object) -> str:
    """Return the type's name with its module, builtins without."""
    cls = type(obj)
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def resolves_by_name(obj: Any) -> bool:
    """Return whether a class or function is what its module and qualified name lead to."""
    found: object = sys.modules.get(obj.__module__) if isinstance(obj.__module__, str) else None
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def travels_by_value(fn: FunctionType) -> bool:
    """Return whether ``fn`` is sent with its code and captures rather than as a name."""
    return fn.__module__ == "__main__" or not resolves_by_name(fn)


def captures_of(fn: FunctionType) -> dict[str, object]:
    """Return what the free and global names of ``fn``, by name, are bound to now."""
    found: dict[str, object] = {}
    for code in _with_inner(fn.__code__):
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in _OF_GLOBALS and name in fn.__globals__:
                found[name] = fn.__globals__[name]
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            found[name] = _EMPTY
    return found


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and that of the functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def refers_to(fn: object, wanted: object) -> bool:
    """Return whether the code of a callable names an object: "f", or "module.f".

    Asked are the callable behind partials, what runs when an object is called, or a class is made
    and iterated over (its special methods), functions that are defined inside, and those of the
    same module that they name. What is found at run time alone, as by ``import`` inside of a
    function, is not seen.
    """
    fn = behind_partials(fn)
    fn = fn.__func__ if isinstance(fn, MethodType) else fn
    todo = [fn] if isinstance(fn, FunctionType) else []
    if not todo:  # special methods; of an object without those that made it, which have run already
        is_class = isinstance(fn, type)
        todo = [
            method
            for name, method in vars(fn if is_class else type(fn)).items()
            if isinstance(method, FunctionType)
            and name.startswith("__")
            and (is_class or name not in ("__new__", "__init__"))
        ]
    for each in todo:  # which grows
        names = captures_of(each)
        inner = _with_inner(each.__code__)
        if any(found is wanted for code in inner for found in _loaded(code, names, wanted)):
            return True
        for value in names.values():
            if not isinstance(value, FunctionType) or value in todo:
                continue
            if value.__globals__ is each.__globals__:
                todo.append(value)
    return False


def _loaded(code: CodeType, names: Mapping[str, object], wanted: object) -> Iterator[object]:
    """Yield what ``code`` loads by a name, or of a module."""
    last: object = _EMPTY
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            last = names.get(instruction.argval, _EMPTY)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(last, ModuleType):
            name = instruction.argval
            if name not in vars(last) and name == getattr(wanted, "__name__", None):
                last = getattr(last, name, _EMPTY)  # made when it is first asked for, as in psync
            else:
                last = vars(last).get(name, _EMPTY)
        else:
            last = _EMPTY
        yield last


class CaptureWatch:
    """Tells which names of one by-value function, and of those it uses, were rebound.

    Holds ids, not the captured objects: they may refer to the function, whose death must not
    depend on this. An id that has been taken over by a new object hides a rebinding; that takes
    two rebindings between two looks.
    """

    __slots__ = ("_functions",)

    def __init__(self, fn: FunctionType) -> None:
        # Of each function: itself; its names with their ids and the indices of their cells, or -1;
        # and the values of those where equal will do.
        self._functions: list[
            tuple[weakref.ref[FunctionType], dict[str, tuple[int, int]], dict[str, object]]
        ] = []
        for each in _by_value_functions(fn):
            free, was, atoms = each.__code__.co_freevars, {}, {}
            for name, value in captures_of(each).items():
                if isinstance(value, ModuleType):
                    continue  # nobody rebinds np, and it is in every step
                was[name] = id(value), free.index(name) if name in free else -1
                if type(value) in ATOMS:
                    atoms[name] = value
            self._functions.append((weakref.ref(each), was, atoms))

    def rebound(self) -> list[str]:
        """Return names that are bound to something else now, each only once.

        Costs about 0.1 µs a name.
        """
        found: list[str] = []
        for reference, was, atoms in self._functions:
            fn = reference()
            if fn is None:  # then the name that led to it was rebound, and that is reported
                continue
            names, cells = fn.__globals__, fn.__closure__ or ()
            rebound = []
            for name, (before, cell) in was.items():
                try:
                    now = names.get(name, _EMPTY) if cell < 0 else cells[cell].cell_contents
                except ValueError:  # not assigned
                    now = _EMPTY
                if id(now) == before:
                    continue
                atom = atoms.get(name, _EMPTY)
                if atom is not _EMPTY and type(now) is type(atom) and now == atom:
                    was[name] = id(now), cell  # does as well: workers' results do not change
                else:
                    rebound.append(name)
            for name in rebound:
                del was[name]
            found += rebound
        return list(dict.fromkeys(found)) if found else found


def _by_value_functions(fn: FunctionType) -> list[FunctionType]:
    """Return ``fn`` and every function that travels by value with it, if ``fn`` does so."""
    found = [fn] if travels_by_value(fn) else []
    for each in found:  # which grows
        for value in captures_of(each).values():
            if isinstance(value, FunctionType) and value not in found and travels_by_value(value):
                found.append(value)
    return found


# Finding the object that cannot be sent.


def blame(
    subject: str, obj: object, fails: Callable[[object], Exception | None]
) -> tuple[str, Exception | None, list[object]]:
    """Find the innermost object that cannot be sent, and how ``obj`` leads to it.

    Args:
        subject: What ``obj`` is: 'step "train"'.
        obj: Something for which ``fails`` returns an error.
        fails: Tries to pickle; returns the error or None.

    Returns:
        A sentence as in 'step "train" captures "lock" (_thread.lock), which cannot be sent', the
        error of the innermost object, and the objects on the way there, ``obj`` first.
    """
    links: list[str] = []
    path = [obj]
    error = fails(obj)
    while not (isinstance(error, Refusal) and error.obj is obj):  # its inside is its own business
        failed = ((link, child, fails(child)) for link, child in _parts_of(obj))
        worst = next((each for each in failed if each[2] is not None), None)
        if worst is None:
            break
        links.append(worst[0])
        _, obj, error = worst
        path.append(obj)
        if len(links) > _MAX_DEPTH:
            said = f"{subject} {links[0]}, which is nested too deeply or cannot be sent"
            return said, error, path
    if links:
        said = f"{subject} {', which '.join(links)} ({type_name(obj)}), which cannot be sent"
        return said, error, path
    what = "" if isinstance(obj, FunctionType) else f" ({type_name(obj)})"
    return f"{subject}{what} cannot be sent", error, path


def importable_from(obj: object) -> str:
    """Return "from module import name", if a module that every task can import has the object."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("_") and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if value is obj and not attribute.startswith("_"):
                    return f"from {name} import {attribute}"
    return ""


def _parts_of(obj: object) -> Iterator[tuple[str, object]]:
    """Yield what pickling ``obj`` pickles, as far as a reader knows it by a name."""
    if isinstance(obj, FunctionType):
        if travels_by_value(obj):
            for name, value in captures_of(obj).items():
                if value is not obj:
                    yield f'captures "{name}"', value
            for parameter in inspect.signature(obj, follow_wrapped=False).parameters.values():
                if parameter.default is not parameter.empty:
                    yield f'has the default "{parameter.name}"', parameter.default
    elif isinstance(obj, MethodType):
        yield 'captures "self"', obj.__self__
    elif isinstance(obj, functools.partial):
        yield f'calls "{name_of(obj.func)}"', obj.func
        for index, value in enumerate(obj.args):
            yield f"binds argument {index}", value
        for name, value in obj.keywords.items():
            yield f'binds "{name}"', value
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield f"holds [{reprlib.repr(key)}]", value
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj):
            yield f"holds [{index}]", value
    elif isinstance(obj, (set, frozenset)):
        for value in obj:
            yield "holds an element", value
    else:
        for name, value in getattr(obj, "__dict__", {}).items():
            if not (isinstance(obj, type) and name.startswith("__")):
                yield f'has "{name}"', value
