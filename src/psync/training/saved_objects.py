"""The object graph of a checkpoint: names, arrays and states of what is saved.

Names are paths: ``Checkpoint(model=dense)`` saves the attribute ``w`` of ``dense`` as "model/w".
So a variable may be called otherwise in the program that restores it, and lie on other ps tasks.

Paths through a list have a position in it, which says nothing of a variable once the list has
another order. So a ``Trainer`` calls what it finds below a list or tuple by the variable's name,
and ``Checkpoint(model=[w, b])`` finds it there. Earlier trainers called all variables by their
positions, "variables/0"; their names are told by what each ps held, which lies in the same files,
or by shapes that occur once. A guess could swap the values of two variables.

Slots and moving averages are called by the names of their variables. Those that the program did not
choose say only in which order variables were declared. So what belongs to a variable is looked for
under the name of the one that had its path.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from psync.api.modules import Module
from psync.api.moving_averages import ExponentialMovingAverage
from psync.api.optimizers import Optimizer, Slot, pushes_of
from psync.api.pulls import leaves
from psync.api.variables import Handle, OnReadVariable, Variable
from psync.checkpoints.files import Reader
from psync.checkpoints.manifest import (
    Difference,
    Manifest,
    Tensor,
    Wanted,
    check_state,
    compare,
)
from psync.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigurationError,
    PsyncError,
    UsageError,
)
from psync.metrics import Metric
from psync.schedules import Schedule, from_config
from psync.specs import ShardSpec, shortened

logger = logging.getLogger(__name__)

_REMEDY = (
    "or restore it once with psync.Checkpoint(variables=[…], optimizer=optimizer), the list in the "
    "order in which the trainer had it, and save trainer.checkpoint beside it"
)

_POSITION = re.compile(r"variables/\d+")
_STATES = frozenset({"optimizer/step", "history"})
"""Beside the variables, what only a trainer has saved under these names."""


@runtime_checkable
class Stateful(Protocol):
    """An object without arrays that a checkpoint can hold."""

    def checkpoint_state(self) -> Any:
        """Return what it has to be restored from: numbers, texts, lists and dicts of them."""

    def restore_checkpoint_state(self, state: Any) -> None:
        """Become what the state says."""


CHECK = "check_checkpoint_state"
"""A method of objects that say whether they can take a state, before anything is restored."""


class SavedState:
    """The program's own values that a checkpoint should hold, as attributes.

    Args:
        values: Initial values by name: numbers, texts, None, lists and dicts of them.

    Example:
        progress = psync.SavedState(epoch=0)
        checkpoint = psync.Checkpoint(model=model, progress=progress)
        progress.epoch += 1
    """

    def __init__(self, **values: Any) -> None:
        _check_values(values)
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        _check_values({name: value})
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"SavedState({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"

    def __getattr__(self, name: str) -> Any:  # only of what is not there; types need to be told
        raise AttributeError(f"no value {name!r} was saved or set")

    def checkpoint_state(self) -> Any:
        """Return the values."""
        return dict(vars(self))

    def restore_checkpoint_state(self, state: Any) -> None:
        """Take the values of a checkpoint; values that are missing in it stay."""
        self.__dict__.update(state)

    def check_checkpoint_state(self, state: Any) -> None:
        """Raise ConfigurationError unless the state is values by name."""
        _check_values(state)


def _check_values(values: Any) -> None:
    """Refuse what would hide a method of ``SavedState``.

    Raises:
        ConfigurationError: A name is one of a method, or these are no values by name.
    """
    if not isinstance(values, dict):
        raise ConfigurationError(f"saved state: expected values by name, got {shortened(values)}")
    taken = sorted(name for name in values if hasattr(SavedState, name))
    if taken:
        raise ConfigurationError(
            f"saved state: expected names of values, got {taken[0]!r}, which is an attribute of "
            "SavedState",
            hint="give the value another name",
        )


ValueOf = Callable[[Mapping[str, np.ndarray], Mapping[str, Any]], Any]
"""Makes the value of an object of the arrays and states of a checkpoint, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Wanted):
    """One shard of an array, and how it is read and written."""

    read: Callable[[], Awaitable[Any]]  # an array, or an iterator of pieces of one
    write: Callable[[np.ndarray], Awaitable[Any]]
    fill: float = 0.0  # what a slot begins with
    compute: Callable[[np.ndarray], Awaitable[np.ndarray]] | None = None
    """Makes it of the shard's value; None: it is the value, or the slot."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array that a checkpoint holds."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Contents:
    """Everything that a checkpoint holds.

    Attributes:
        slots: Whether those of optimizers are among the arrays: which there are is known only
            while a coordinator runs.
        arrays: By name.
        states: By name.
        optimizers: By path; below it their steps and learning rates are kept as states.
        handles: The variables, by the first path of each.
        by_variable: Paths below which arrays are called by the names of their variables.
    """

    slots: bool = True
    arrays: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Stateful] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    handles: dict[str, Handle] = field(default_factory=dict)
    by_variable: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)  # of all arrays and states
    _paths: dict[Any, str] = field(default_factory=dict)  # of variables, ids of other objects
    _values: dict[str, ValueOf] = field(default_factory=dict)  # by path

    def add(self, path: str, thing: Any) -> ValueOf:
        """Take up an object, and what it holds; return how its value is read.

        Raises:
            UsageError: It is nothing that a checkpoint can hold.
        """
        key = thing if isinstance(thing, Handle) else id(thing)
        if key not in self._paths:  # the first path is its name
            adder = next((each for kind, each in self._adders() if isinstance(thing, kind)), None)
            if adder is None:
                raise UsageError(
                    f"checkpoint: {path!r} is {type(thing).__name__}, which cannot be saved",
                    hint="a checkpoint can hold variables, optimizers, metrics, moving averages, "
                    "modules, SavedState(epoch=0), dicts and lists of these, and objects with "
                    "checkpoint_state()",
                )
            self._paths[key] = path
            self._values[path] = adder(path, thing)
        known = self._paths[key]
        return lambda arrays, states: self._values[known](arrays, states)

    def _check_new(self, name: str) -> None:
        """Refuse a second thing of one name: the first would be neither saved nor restored.

        Raises:
            UsageError: There is one.
        """
        if name in self._names:
            raise UsageError(
                f"checkpoint: two objects are called {name!r}",
                hint="names are paths: use dict keys without '/' whose texts differ",
            )
        self._names.add(name)

    @property
    def parts(self) -> list[Part]:
        """The shards of all arrays."""
        return [part for array in self.arrays.values() for part in array.parts]

    def present_states(self) -> dict[str, Any]:
        """Return the states of objects without arrays, as they are now; later changes do not show.

        Raises:
            CheckpointError: One would not come back from a checkpoint as it is.
        """
        states = {}
        for name, thing in self.states.items():
            state = thing.checkpoint_state()
            check_state(name, state)
            states[name] = copy.deepcopy(state)
        return states

    def restore_states(self, states: Mapping[str, Any], where: Path) -> None:
        """Give objects without arrays their states; if one refuses, all are as they were.

        Raises:
            CheckpointMismatch: A state is not one of its object's.
            PsyncError: What an object of psync's raises.
        """
        wanted = [(name, thing) for name, thing in self.states.items() if name in states]
        before: list[tuple[Stateful, Any]] = []
        try:
            for name, thing in wanted:
                check_state(name, states[name])
                if (check := getattr(thing, CHECK, None)) is not None:
                    check(states[name])
            # Those that can refuse come first.
            for name, thing in sorted(wanted, key=lambda each: hasattr(each[1], CHECK)):
                with contextlib.suppress(Exception):  # a user's object may not be ready for it
                    before.append((thing, thing.checkpoint_state()))
                thing.restore_checkpoint_state(states[name])
        except Exception as exc:
            for each, state in reversed(before):
                if each is not thing or not isinstance(exc, PsyncError):  # ours look before they do
                    with contextlib.suppress(Exception):
                        each.restore_checkpoint_state(state)
            if isinstance(exc, UsageError) and not isinstance(exc, ConfigurationError):
                raise
            said = exc.message if isinstance(exc, PsyncError) else repr(exc)
            raise CheckpointMismatch(
                f"{where}: {name!r} is no state of {type(thing).__name__}: {said}",
                hint="nothing was restored; restore another checkpoint, or one without this object",
            ) from exc

    def compared(
        self, manifest: Manifest, where: object, hint: str, *, partial: bool = False
    ) -> Difference:
        """Return how this differs from what a checkpoint has.

        Args:
            manifest: Of the checkpoint.
            where: It is, for messages.
            hint: What to do if it does not fit.
            partial: Whether the checkpoint may lack something.

        Raises:
            CheckpointMismatch: It does not fit; all names are in the message.
        """
        wanted = {name: (array.shape, array.dtype) for name, array in self.arrays.items()}
        steps = [f"{path}/step" for path in self.optimizers]
        rates = [f"{path}/learning_rate" for path in self.optimizers]
        difference = compare(manifest, wanted, [*self.states, *steps], rates)
        if difference.misshaped or (difference.missing and not partial):
            raise CheckpointMismatch(
                f"{where} does not fit what is declared here"
                + _listed("missing in it", difference.missing)
                + _listed("of another shape or dtype", difference.misshaped)
                + _listed("not asked for", difference.extra),
                hint=hint,
            )
        return difference

    def _adders(self) -> list[tuple[type, Callable[[str, Any], ValueOf]]]:
        """Return what takes up which kind; the first that fits does."""
        return [
            (Handle, self._add_variable),
            (Optimizer, self._add_optimizer),
            (ExponentialMovingAverage, self._add_averages),
            (Metric, self._add_metric),
            (Module, self._add_module),
            (Stateful, self._add_state),
            (dict, lambda path, items: self._add_all(path, items.items())),
            (list, self._add_list),
            (tuple, self._add_list),
        ]

    def _add_variable(self, path: str, variable: Handle) -> ValueOf:
        self.handles[path] = variable
        self._add_array(path, variable)
        return lambda arrays, states: arrays[path]

    def _add_metric(self, path: str, metric: Metric) -> ValueOf:
        sums = self.add(f"{path}/sums", metric.variables[0])
        return lambda arrays, states: metric.value_of(sums(arrays, states))

    def _add_all(self, path: str, items: Iterable[tuple[Any, Any]]) -> ValueOf:
        values = {key: self.add(f"{path}/{key}", item) for key, item in items}
        return lambda *saved: {key: value(*saved) for key, value in values.items()}

    def _add_module(self, path: str, module: Module) -> ValueOf:
        items = module._checkpoint_items().items()
        return self._add_all(path, [each for each in items if _holds_something(each[1])])

    def _add_list(self, path: str, items: Sequence[Any]) -> ValueOf:
        values = self._add_all(path, enumerate(items))
        made_by = list if isinstance(items, list) else tuple
        make = getattr(items, "_make", made_by)  # of named tuples
        return lambda *saved: make(values(*saved).values())

    def _add_state(self, path: str, thing: Stateful) -> ValueOf:
        self._check_new(path)
        self.states[path] = thing
        return lambda arrays, states: states[path]

    def _add_averages(self, path: str, averages: ExponentialMovingAverage) -> ValueOf:
        self.by_variable.append(path)
        named = ((variable.name, average) for variable, average in averages.items())
        return self._add_all(path, named)

    def _add_optimizer(self, path: str, optimizer: Optimizer) -> ValueOf:
        self._check_new(f"{path}/step")
        self._check_new(f"{path}/learning_rate")
        self.optimizers[path] = optimizer._holder
        self.by_variable += [f"{path}/{slot}" for slot in optimizer.get_slot_names()]
        for slot in optimizer.variables() if self.slots else ():
            self._add_array(f"{path}/{slot.name}/{slot.variable.name}", slot)

        def values(arrays: Mapping[str, np.ndarray], states: Mapping[str, Any]) -> dict[str, Any]:
            """Return the step of the optimizer, and those of its slots that were read."""
            found: dict[str, Any] = {"step": states[f"{path}/step"]}
            for name, array in arrays.items():
                if name.startswith(f"{path}/"):
                    slot, _, variable = name.removeprefix(f"{path}/").partition("/")
                    found.setdefault(slot, {})[variable] = array
            return found

        return values

    def _add_array(self, name: str, source: Handle | Slot) -> None:
        self._check_new(name)
        variable: Any = source.variable if isinstance(source, Slot) else source
        dtype = source.dtype if isinstance(source, Slot) else variable.spec.dtype
        if isinstance(variable, OnReadVariable):  # of which only the aggregate is kept
            (shard,) = variable.spec.shards
            parts: tuple[Part, ...] = (
                Part(
                    name, variable.shape, dtype, 0, key=shard.key, read=variable.checkpoint_value,
                    write=variable.restore_value, compute=variable.checkpoint_value_of,
                ),
            )  # fmt: skip
        else:
            whole = [variable] if isinstance(variable, Variable) else variable.variables
            parts = tuple(
                _part(name, dtype, shard, part, source)
                for part, shard in zip(whole, variable.spec.shards, strict=True)
            )
        self.arrays[name] = Array(variable.shape, dtype, parts)


def _part(name: str, dtype: str, spec: ShardSpec, shard: Variable, source: Handle | Slot) -> Part:
    made = functools.partial(Part, name, spec.shape, dtype, spec.offset, key=spec.key)
    if isinstance(source, Slot):
        slot = Slot(shard, source.optimizer, source.name)
        return made(
            optimizer=source.optimizer.number, slot=source.name, fill=source.first_element,
            read=slot.read, write=slot.assign,
        )  # fmt: skip
    return made(read=shard.read, write=shard.assign)


def _holds_something(value: Any) -> bool:
    """Return whether an attribute of a module is saved: settings and functions are not."""
    if isinstance(value, dict):
        return any(map(_holds_something, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_something, value))
    return isinstance(value, Handle | Optimizer | ExponentialMovingAverage | Metric | Module) or (
        isinstance(value, Stateful) and not isinstance(value, type)
    )


def _listed(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"; {what}: {shown}" if names else ""


def numbers_of(
    optimizers: Mapping[str, Optimizer], states: Mapping[str, Any], path: Path
) -> tuple[dict[Optimizer, int], dict[Optimizer, Schedule]]:
    """Return with which steps, and with which learning rates, optimizers go on that were saved.

    Args:
        optimizers: By the names under which they were saved.
        states: Of the checkpoint; None as a rate: the one that the optimizer was made with.
        path: Of the checkpoint.

    Raises:
        CheckpointMismatch: One is none.
    """
    steps: dict[Optimizer, int] = {}
    rates: dict[Optimizer, Schedule] = {}
    for each, optimizer in optimizers.items():
        if (name := f"{each}/step") in states:
            try:
                pushes_of(optimizer, states[name])
            except ConfigurationError as exc:
                text = f"{path}: expected a step as {name!r}, got {shortened(states[name])}"
                raise CheckpointMismatch(f"{text}: {exc.message}") from None
            steps[optimizer] = states[name]
        if (name := f"{each}/learning_rate") in states:
            saved = states[name]
            try:
                made_with = optimizer._config["learning_rate"]
                rates[optimizer] = from_config(made_with if saved is None else saved)
            except ConfigurationError as exc:
                text = f"{path}: expected a learning rate as {name!r}: {exc.message}"
                raise CheckpointMismatch(text, hint=exc.hint) from None
    return steps, rates


# --- names of other programs, on restore ----------------------------------------------------------


def by_name(tree: Any) -> Any:
    """Return the variables in a nesting, as a checkpoint is to hold them: none by its position.

    Args:
        tree: As ``pull`` takes it.
    """
    if isinstance(tree, dict):
        return {key: by_name(item) for key, item in tree.items() if leaves(item)}
    if isinstance(tree, list | tuple):
        return {variable.name: variable for variable in leaves(tree)}
    return tree


def with_names_of(contents: Contents, reader: Reader) -> Manifest:
    """Return the manifest of a checkpoint, with tensors called as ``contents`` calls them.

    Raises:
        CheckpointMismatch: A trainer has saved variables by position, and nothing says which is
            which.
        CheckpointCorrupt: It is damaged.
        CheckpointError: It cannot be read.
    """
    tensors = reader.manifest.tensors
    missing = {path: each for path, each in contents.handles.items() if path not in tensors}
    found: dict[str, str] = {}  # names in the checkpoint → here
    for path, handle in missing.items():
        name = _below_list(path, handle.name)
        if name in tensors and name not in contents.arrays:
            found[name] = path
    if missing and not found and _STATES <= reader.manifest.states.keys():
        positions = [name for name in tensors if _POSITION.fullmatch(name)]
        found = _positions_of(positions, missing, reader)
    found |= _renamed(contents, {path: name for name, path in found.items()}, reader)
    if not found:
        return reader.manifest
    kept = {name: tensor for name, tensor in tensors.items() if name not in found}
    named = {name: replace(tensors[was], name=name) for was, name in found.items()}
    return replace(reader.manifest, tensors=kept | named)


def _renamed(contents: Contents, found: Mapping[str, str], reader: Reader) -> dict[str, str]:
    """Return the names here of what is called by a variable that has another name by now.

    Args:
        contents: What is declared here.
        found: Names in the checkpoint of what it calls otherwise than it is called here.
        reader: Of the checkpoint.
    """
    if not contents.by_variable:
        return {}
    try:
        names = _variable_names(reader)
    except CheckpointError as exc:  # what is asked for may be whole
        logger.warning("variable names in %s are unknown: %s", reader.path, exc.message)
        return {}
    now = {}
    for path, handle in contents.handles.items():
        was = names.get(found.get(path, path), handle.name)
        if was != handle.name:
            now[was] = handle.name
    return {
        f"{prefix}/{was}": f"{prefix}/{name}"
        for prefix in contents.by_variable
        for was, name in now.items()
        if f"{prefix}/{was}" in reader.manifest.tensors
    }


def _below_list(path: str, variable: str) -> str:
    """Return how a trainer calls a variable that is at a path through a list; else ""."""
    parts = path.split("/")
    at = next((at for at, part in enumerate(parts) if at and part.isdecimal()), None)
    return "" if at is None else "/".join((*parts[:at], variable))


def _positions_of(
    positions: Iterable[str], missing: Mapping[str, Handle], reader: Reader
) -> dict[str, str]:
    """Return the paths of the variables that a trainer has saved by position.

    Raises:
        CheckpointMismatch: Nothing says which is which.
    """
    tensors = reader.manifest.tensors
    names = _variable_names(reader)
    paths = {handle.name: path for path, handle in missing.items()}
    found = {
        position: paths[names[position]] for position in positions if names.get(position) in paths
    }
    kinds = Counter(_kind(tensors[each]) for each in positions if each not in names)
    rest = [path for path in missing if path not in found.values()]
    for position in positions:
        if position in names:
            continue
        kind = _kind(tensors[position])
        fitting = [path for path in rest if kind == (missing[path].shape, missing[path].spec.dtype)]
        if len(fitting) == kinds[kind] == 1:
            found[position] = fitting[0]
        elif fitting:
            raise CheckpointMismatch(
                f"{reader.path}: {position!r} may be the value of "
                + " or ".join(f'"{missing[path].name}"' for path in fitting)
                + ": a trainer of an earlier psync has saved it by its position alone",
                hint=_REMEDY.removeprefix("or "),
            )
    if wrong := {each: names[each] for each in positions if each in names and each not in found}:
        declared = ", ".join(f'"{missing[path].name}"' for path in rest) or "no other"
        saved = ", ".join(f'{position!r} of "{name}"' for position, name in wrong.items())
        raise CheckpointMismatch(
            f"{reader.path}: it has {saved}; declared here: {declared}",
            hint=f"give the variables the names that they had, {_REMEDY}",
        )
    return found


def _variable_names(reader: Reader) -> dict[str, str]:
    """Return of which variable each tensor is the value, as far as what each ps held says it."""
    values: dict[tuple[str, int], str] = {}  # (file, first byte) → variable
    for snapshot in reader.snapshots():
        state = snapshot.state
        for place in snapshot.places:
            item = state.items[place.item]
            if place.nbytes and not item.slot:
                values[snapshot.file.name, place.start] = state.specs[item.key].variable
    return {
        tensor.name: values[piece.file, piece.start]
        for tensor in reader.manifest.tensors.values()
        for piece in tensor.slices
        if piece.nbytes and (piece.file, piece.start) in values
    }


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape, tensor.dtype
