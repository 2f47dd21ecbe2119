"""Module: an object that collects the variables in its attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from psync.api.variables import ShardedVariable, Variable
from psync.errors import UsageError

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # before one in CamelCase


class Module:
    """Base class of objects that hold variables: layers, models.

    A module's variables are those in its attributes, at any depth of lists, tuples, dicts and other
    modules. They are ordered by attribute name; those of other modules come last. Each variable is
    listed once; a sharded variable is listed as its shards. Attributes that are set later count.

    A module is pickled to workers like any object, and its variables are handles there.
    ``__init__`` of a subclass need not call this one.

    Args:
        name: A Python identifier. Default: the name of the class, as in ``my_layer``.

    Raises:
        UsageError: The name is not an identifier.

    Example:
        class Dense(psync.Module):
            def __init__(self, rows, columns):
                self.w = psync.Variable(np.zeros((rows, columns), np.float32), name="w")
                self.b = psync.Variable(np.zeros(columns, np.float32), name="b")

            async def __call__(self, x):
                w, b = await psync.pull((self.w, self.b))
                return x @ w + b

    Source: ``tf.Module``, without ``name_scope``: variable names are made unique instead.
    """

    _name: str | None = None  # None: after the class

    def __init__(self, name: str | None = None) -> None:
        if name is not None and not (isinstance(name, str) and name.isidentifier()):
            raise UsageError(f"name of a module: expected a Python identifier, got {name!r}")
        self._name = name

    @property
    def name(self) -> str:
        """The given name, or the name of the class in lower case."""
        return self._name or _WORD.sub("_", type(self).__name__).lower()

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables of the module; of sharded ones, the shards."""
        found: dict[int, Variable] = {}  # by id: variables have no other equality
        for module in (self, *self.submodules):
            for leaf in _leaves(vars(module), set()):
                if isinstance(leaf, ShardedVariable):
                    found.update((id(part), part) for part in leaf.variables)
                elif isinstance(leaf, Variable):
                    found[id(leaf)] = leaf
        return tuple(found.values())

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables that were declared trainable."""
        return tuple(variable for variable in self.variables if variable.trainable)

    def _checkpoint_items(self) -> Mapping[str, Any]:
        """Return the module's attributes by name, for a checkpoint.

        The checkpoint does not save settings and functions.
        """
        return dict(sorted(vars(self).items()))

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules in this one, at any depth; each module comes before those that it holds."""
        found: dict[int, Module] = {id(self): self}
        _add_submodules(self, found)
        return tuple(found.values())[1:]


def _add_submodules(module: Module, found: dict[int, Module]) -> None:
    for leaf in _leaves(vars(module), set()):
        if isinstance(leaf, Module) and id(leaf) not in found:
            found[id(leaf)] = leaf
            _add_submodules(leaf, found)


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what lists, tuples and mappings hold at any depth, mappings in the order of their keys.

    Keys that cannot be compared stay in the order in which they were added.
    """
    if isinstance(value, Mapping):
        try:
            inner = [value[key] for key in sorted(value)]
        except TypeError:
            inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        yield value
        return
    if id(value) not in seen:  # one that holds itself would have no end
        seen.add(id(value))
        for item in inner:
            yield from _leaves(item, seen)
