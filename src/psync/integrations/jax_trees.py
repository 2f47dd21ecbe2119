"""Pytrees and their leaves by name, and the border between arrays of jax and of numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from psync.errors import ConfigurationError, ValueMismatchError
from psync.integrations.served import SHOWN

ALIGNMENT = 64
"""Of memory that jax's CPU backend takes over as it is, in bytes; it copies any other."""

FLOAT0 = jax.dtypes.float0
"""Dtype of the gradient of an integer, which is none."""


class NamedTree:
    """The structure of a pytree, and a name for each leaf: its path, as in "dense/kernel".

    It is pickled as the tree with numbers for leaves: structures themselves do not survive it where
    nodes carry settings, as modules of Equinox do.

    Args:
        tree: Of any nodes that jax knows. Not kept.
        what: It is, for messages.
        whole: The name of a leaf that is the tree itself.
        prefix: What stands before all names.

    Attributes:
        what: As given.
        names: Of the leaves, in their order.

    Raises:
        ConfigurationError: Two leaves have one name.
    """

    def __init__(self, tree: Any, what: str, whole: str, prefix: str = "") -> None:
        found, self._structure = tree_util.tree_flatten_with_path(tree)
        self.what = what
        self.names = [prefix + name or whole for name in _names([path for path, _ in found])]
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise ConfigurationError(
                f"{what}: two leaves have the path {twice[0]!r}",
                hint="use keys without '/', which differ as texts",
            )

    def __getstate__(self) -> dict[str, Any]:
        numbered = self._structure.unflatten(range(len(self.names)))
        return {"what": self.what, "names": self.names, "numbered": numbered}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.what, self.names = state["what"], state["names"]
        self._structure = tree_util.tree_structure(state["numbered"])

    def filled(self, values: Mapping[str, Any]) -> Any:
        """Return a tree of this structure with these leaves."""
        return self._structure.unflatten([values[name] for name in self.names])

    def taken_apart(self, tree: Any, what: str) -> dict[str, Any]:
        """Return the leaves of a tree of this structure; in the place of a leaf None may stand.

        Args:
            tree: As it was given.
            what: It is, for messages.

        Raises:
            ValueMismatchError: It has another structure.
        """
        try:
            leaves = self._structure.flatten_up_to(tree)
        except (ValueError, TypeError) as exc:
            raise ValueMismatchError(
                f"{what}: expected the same tree as {self.what}{self._difference(tree)}",
                hint="pass the result of jax.grad for the pulled values; a leaf may be None",
            ) from exc
        return dict(zip(self.names, leaves, strict=True))

    def _difference(self, tree: Any) -> str:
        """Return in which way a tree differs, for a message."""
        declared = _names_in(self._structure.unflatten(range(len(self.names))))
        given, not_none = _names_in(tree, _is_none), _names_in(tree)
        text = "".join(
            f"; {how}: {', '.join(repr(name) for name in names[:SHOWN])}"
            for how, names in (
                ("missing", [name for name in declared if name not in given]),
                ("unknown", [name for name in not_none if name not in declared]),
            )
            if names
        )
        return text or f", got other containers, such as {type(tree).__name__}"


def _names_in(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    return _names([path for path, _ in tree_util.tree_flatten_with_path(tree, is_leaf)[0]])


def _names(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return the names of leaves; a field "value" that is alone in its node is left out.

    So is what Flax NNX has below each of its variables.
    """
    siblings = Counter(path[:-1] for path in paths)
    names = []
    for path in paths:
        is_wrapped = path and _key_of(path[-1]) == "value" and siblings[path[:-1]] == 1
        is_field = is_wrapped and isinstance(path[-1], tree_util.GetAttrKey)
        names.append("/".join(map(_key_of, path[:-1] if is_field else path)))
    return names


def _key_of(key: Any) -> str:
    """Return a step of a path as text."""
    for attribute in ("key", "name", "idx"):  # of dicts and custom nodes, fields, sequences
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_none(value: object) -> bool:
    return value is None


def first_value(name: str, leaf: Any, what: str) -> np.ndarray:
    """Return the array with which a variable begins; its dtype is the one that jax has for it.

    So float64 becomes float32, unless jax was told to ``jax_enable_x64``.

    Raises:
        ConfigurationError: The leaf is no array.
    """
    try:
        return np.asarray(jax.numpy.asarray(leaf))
    except (TypeError, ValueError, OverflowError) as exc:
        raise ConfigurationError(
            f'{what}: leaf "{name}" is {type(leaf).__name__}, which jax cannot convert to an '
            f"array: {exc}",
            hint="serve only the arrays: nnx.split(model, nnx.Param, …), eqx.partition(model, "
            "eqx.is_inexact_array); for random keys use psync.integrations.jax.step_key",
        ) from exc


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array, not initialized, in memory that jax on a CPU takes over."""
    size = dtype.itemsize * int(np.prod(shape))
    memory = np.empty(size + ALIGNMENT, np.uint8)
    at = -memory.ctypes.data % ALIGNMENT
    return memory[at : at + size].view(dtype).reshape(shape)


def is_gradient(leaf: Any) -> bool:
    """Return whether a leaf of gradients is one, and not None or what jax has for integers."""
    return leaf is not None and getattr(leaf, "dtype", None) != FLOAT0


def check_present(leaves: Mapping[str, Any], what: str) -> None:
    """Check that arrays have values that can be sent.

    Raises:
        ValueMismatchError: One was donated, or is traced.
    """
    for name, leaf in leaves.items():
        problem = hint = ""
        if isinstance(leaf, jax.core.Tracer):
            problem = "is traced: it has no value yet"
            hint = "let the jitted function return it, and push outside of it"
        elif isinstance(leaf, jax.Array) and leaf.is_deleted():
            problem = "was deleted, or donated to a jitted function"
            hint = "push it before, or do not donate it"
        if problem:
            raise ValueMismatchError(f'{what} "{name}" {problem}', hint=hint)


def are_here(leaves: Sequence[Any]) -> bool:
    """Return whether values are computed, and in the memory of the CPU: nothing has to wait."""
    return jax.default_backend() == "cpu" and all(
        leaf.is_ready() for leaf in leaves if isinstance(leaf, jax.Array)
    )


def by_name(leaves: Mapping[str, Any], convert: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    """Return leaves, converted all at once, under the same names."""
    return dict(zip(leaves, convert(list(leaves.values())), strict=True))
